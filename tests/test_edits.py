"""Models as users hand them in, with batches as users write them: exact, or refused with a typed error.

Each case edits a model, builds a pipeline of it and runs a step; a plain process runs the same. Version 0.5.0
trained the caller's model through closures, dropped gradient hooks, and used half of what a batch said of the
loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.edited import BATCHES, FAMILIES, SCHEDULES, Case, outcome
from support.edits import EDITS


def made(family: str, edits: list[str], batch: str, schedule: str, how: bool | str, seed: int) -> Case:
    """A case; a layer that runs again counts twice in a buffer, here as in a plain process."""
    return Case(family, tuple(edits), batch, schedule, False if "updated_buffer" in edits else how, seed)


CASES = st.builds(
    made,
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.sampled_from(sorted(EDITS)), max_size=2, unique=True),
    st.one_of(st.sampled_from(["plain", "masked", "packed"]), st.sampled_from(sorted(BATCHES))),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from([False, "full", "selective"]),
    st.integers(0, 999),
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of hooks and compiled functions
        yield


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@pytest.mark.long
@given(CASES)
@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS, derandomize=True)
def test_an_edited_model_is_exact_or_refused(case: Case) -> None:
    outcome(case)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
@settings(max_examples=500, deadline=None, suppress_health_check=CHECKS, database=None)
@given(case=CASES)
def test_many_edited_models_are_exact_or_refused(part: int, case: Case) -> None:
    outcome(case)


# ---- what is exact, and what is refused: each edit once

EXACT = {
    "partial_forward", "method_forward", "hook_with_adapter_of_the_layer", "object_hook", "scaling_hook",
    "scaling_pre_hook", "backward_hook", "in_place_pre_hook", "weight_norm", "parametrization", "rolls",
    "sums_along", "takes_the_mean", "frozen", "gradient_hook", "trains_new_rows", "adapter",
    "shares_a_weight", "inner_gradient", "inner_gradient_of_a_product", "updated_buffer",
}  # fmt: skip


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_each_edit(edit: str) -> None:
    found = outcome(Case("qwen3", (edit,), "plain", "zb_v", False, 5))
    assert (found == "exact") is (edit in EXACT), found
