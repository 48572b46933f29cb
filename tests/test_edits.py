"""Models as users hand them in, with batches as users write them: exact, or refused with a typed error.

Each case edits a model, builds a pipeline of it and runs a step; a plain process runs the same. Version 0.5.0
trained the caller's model through closures, dropped gradient hooks, and used half of what a batch said of the
loss.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.covering import every
from support.edited import AFTER, BATCHES, FAMILIES, MESHES, RAGGED, SCHEDULES, SHAPES, Case, outcome
from support.edits import EDITS
from support.pool import Pool


def made(
    family: str,
    edits: list[str],
    batch: str,
    place: tuple[str, str | None],
    how: bool | str,
    seed: int,
    shapes: str,
    after: str | None,
) -> Case:
    """A case; a layer that runs again counts twice in a buffer, here as in a plain process.

    Eager attention of transformers rounds scores of float64 to float32, where a row that may look at nothing
    is NaN: padding after a mask, beyond a window.
    """
    schedule, mesh = place
    family = "mixtral" if mesh is not None and MESHES[mesh][0].ep > 1 else family
    batch = "ragged" if (family, batch) == ("gemma2", "ragged and masked") else batch
    how = False if "updated_buffer" in edits else how
    return Case(family, tuple(edits), batch, schedule, how, seed, mesh, shapes, after)


def cases(places: list[tuple[str, str | None]]) -> st.SearchStrategy[Case]:
    """places: schedules and meshes"""
    return st.builds(
        made,
        st.sampled_from(sorted(FAMILIES)),
        st.lists(st.sampled_from(sorted(EDITS)), max_size=2, unique=True),
        st.one_of(st.sampled_from(["plain", "masked", "packed", *RAGGED]), st.sampled_from(sorted(BATCHES))),
        st.sampled_from(places),
        st.sampled_from([False, "full", "selective"]),
        st.integers(0, 999),
        st.sampled_from(SHAPES),
        st.one_of(st.none(), st.sampled_from(sorted(AFTER))),
    )


def on_meshes(processes: int) -> st.SearchStrategy[Case]:
    return cases([
        (schedule, mesh) for schedule, (ranks, _) in sorted(SCHEDULES.items())
        for mesh, (axes, _) in MESHES.items() if ranks * axes.ranks_per_stage == processes
    ])  # fmt: skip


IN_ONE_PROCESS = cases([(schedule, None) for schedule in sorted(SCHEDULES)])
ON_TWO, ON_FOUR = on_meshes(2), on_meshes(4)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of hooks and compiled functions
        yield


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@pytest.mark.long
@given(IN_ONE_PROCESS)
@settings(max_examples=2, deadline=None, suppress_health_check=CHECKS, derandomize=True)
def test_an_edited_model_is_exact_or_refused(case: Case) -> None:
    outcome(case)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
@settings(max_examples=500, deadline=None, suppress_health_check=CHECKS, database=None)
@given(case=IN_ONE_PROCESS)
def test_many_edited_models_are_exact_or_refused(part: int, case: Case) -> None:
    outcome(case)


def test_a_shared_weight_that_was_replaced_within_a_stage_is_refused() -> None:
    """0.5.0: with both uses in one stage the norm and what is saved left the new one out."""
    case = Case("qwen3", (), "plain", "1f1b of one", False, 5, after="a new head")
    assert outcome(case).startswith("ModelError: lm_head.weight of stage 0, another parameter than when")


@pytest.mark.parametrize("after", [None, "all trained"])
def test_a_gradient_hook_of_a_weight_that_was_frozen_later_is_kept(after: str | None) -> None:
    """0.5.0 dropped it. Then torch's RuntimeError: it registers no hook on a frozen weight."""
    edits = ("gradient_hook", "frozen")
    assert outcome(Case("gpt_neox", edits, "plain", "1f1b", False, 830, after=after)) == "exact"


@pytest.mark.parametrize("edit", ["rolls", "takes_the_mean", "sums_along"])
def test_an_edit_that_would_take_padding_for_tokens_is_refused(edit: str) -> None:
    """0.5.0: losses and gradients were those of rows with padding in them."""
    case = Case("llama", (edit,), "ragged", "1f1b", False, 5, shapes="padded")
    expected = r"ModelError: (roll|mean|cumsum), in or after model\.layers\.2.*, with shapes='padded'"
    assert re.match(expected, outcome(case))
    assert outcome(case._replace(shapes="inferred")) == "exact"


# ---- each rank in a process of its own, and other axes of the mesh


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.timeout(400)  # 8 s where nothing else runs
@given(case=ON_TWO)
@settings(max_examples=2, deadline=None, suppress_health_check=CHECKS, derandomize=True)
def test_an_edited_model_on_a_mesh_is_exact_or_refused(pool: Pool, case: Case) -> None:
    outcome(case, pool)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
@settings(max_examples=200, deadline=None, suppress_health_check=CHECKS, database=None)
@given(case=ON_TWO | ON_FOUR)
def test_many_edited_models_on_meshes_are_exact_or_refused(pool: Pool, part: int, case: Case) -> None:
    outcome(case, pool)


# edits, batch, schedule and mesh; what happens now
FOUND: list[tuple[tuple[str, ...], str, str, str, str]] = [
    # one rank refused its stage, and the others waited until their timeout
    (("scaled_by_a_closure",), "plain", "1f1b", "processes", "ModelError: .*, on process [01]: "),
    # of buffers, each rank named its own, and one without any went on
    (("updated_buffer",), "plain", "dualpipe", "processes", "ModelError: .* buffer .*, on process [01]: "),
    # the last stage found it within the step
    ((), "logits_to_keep", "1f1b", "processes", "BatchError: 'logits_to_keep' in a batch with labels"),
    # with all other axes of 1 the hook was lost, as if they sharded the weight
    (("trains_new_rows",), "plain", "1f1b", "processes", "exact"),
    # each part of the batch counted by itself
    (("updated_buffer",), "plain", "1f1b of one", "dp_replicate", "ModelError: .* a buffer that the forward"),
    # the hook got a part of the sequence, and the weights that it uses a part of their gradients
    (("object_hook",), "plain", "1f1b of one", "tp with sequence_parallel", "ModelError: a hook of model"),
    # the gradients that ranks exchange were taken for constants
    (
        ("inner_gradient_of_a_product",),
        "plain",
        "1f1b of one",
        "tp",
        "ModelError: .* a module that tp distri",
    ),
    # errors of torch
    (
        ("inner_gradient_of_a_product",),
        "plain",
        "1f1b of one",
        "ep",
        "ModelError: .* a module that ep distri",
    ),
    (("shares_a_weight",), "plain", "1f1b of one", "dp_shard", "ModelError: .*, which are one weight"),
    (("method_of_another_layer",), "plain", "1f1b of one", "dp_shard", "ModelError: .*, which uses model.la"),
    (("partial_hook_with_the_head",), "plain", "1f1b of one", "tp", "ModelError: .*, which uses lm_head, on"),
    (("in_place_pre_hook",), "plain", "1f1b of one", "dp_shard", "exact"),
]


@pytest.mark.parametrize(("edits", "batch", "schedule", "mesh", "expected"), every(4, FOUND))
def test_cases_on_meshes_that_once_went_wrong(
    pool: Pool, edits: tuple[str, ...], batch: str, schedule: str, mesh: str, expected: str
) -> None:
    """0.5.0: wrong gradients, other errors on each rank, or a wait for the timeout; see FOUND for each."""
    family = "mixtral" if mesh == "ep" else "llama"
    found = outcome(Case(family, edits, batch, schedule, False, 5, mesh), pool)
    assert re.match(expected, found), found


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("a new weight of a layer", r"ModelError: model.layers.3.* of stage 1, another parameter than when"),
        ("load_state_dict(assign=True)", "exact"),
    ],
)
def test_a_parameter_in_place_of_a_sharded_one_is_used_or_refused(
    pool: Pool, after: str, expected: str
) -> None:
    """0.5.0: FSDP2 put the old one back at the next gather, and steps went on with its values."""
    found = outcome(Case("llama", (), "plain", "1f1b", False, 5, "dp_shard", after=after), pool)
    assert re.match(expected, found), found


# ---- what is exact, and what is refused: each edit once

EXACT = {
    "partial_forward", "method_forward", "hook_with_adapter_of_the_layer", "object_hook", "scaling_hook",
    "scaling_pre_hook", "backward_hook", "in_place_pre_hook", "weight_norm", "parametrization", "rolls",
    "sums_along", "takes_the_mean", "frozen", "gradient_hook", "trains_new_rows", "adapter",
    "shares_a_weight", "inner_gradient", "inner_gradient_of_a_product", "updated_buffer",
}  # fmt: skip


@pytest.mark.parametrize("edit", every(4, sorted(EDITS)))
def test_each_edit(edit: str) -> None:
    found = outcome(Case("qwen3", (edit,), "plain", "zb_v", False, 5))
    assert (found == "exact") is (edit in EXACT), found


def test_a_layer_that_runs_again_within_a_gradient_of_its_forward_is_recorded_again() -> None:
    """A CheckpointError in 0.6.0: torch takes the recording mode off the stack for torch.autograd.grad."""
    assert outcome(Case("llama", ("inner_gradient_of_a_product",), "plain", "zb_h1", "full", 0)) == "exact"
