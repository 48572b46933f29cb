"""Pipelines between whose stages all sorts of values go: every gradient is that of a plain process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from penstock.batch.payload import TensorSpec
from penstock.batch.shapes import Microbatch
from penstock.errors import InputError, ModelError, ShapeError
from support import jobs_edges as edges
from support.covering import Row, pairs
from support.jobs_edges import CASES, MODES, Part, Single, build, ragged
from support.pool import Pool
from support.refusals import refuses

SCHEDULES = (("1f1b", 3), ("zb_v", 2), ("dualpipe", 2))
FACTORS = {"case": CASES, "mode": MODES, "schedule": SCHEDULES}


def exists(row: Row) -> bool:
    return row.get("case") not in edges.ONLY_EXCHANGED or row.get("mode", "exchanged") == "exchanged"


def row_name(row: Row) -> str:
    return f"{row['case'].__name__}-{row['mode']}-{row['schedule'][0]}"


@pytest.mark.parametrize("row", pairs(FACTORS, exists), ids=row_name)
def test_in_one_process(row: Row) -> None:
    edges.assert_exact(row["case"], row["mode"], *row["schedule"])


@pytest.mark.parametrize(("mode", "schedule", "ranks"), [
    # in every run each mode and each schedule once
    pytest.param(mode, schedule, ranks, marks=() if turn == list(MODES).index(mode) else pytest.mark.sweep)
    for turn, (schedule, ranks) in enumerate((("zb_v", 2), ("1f1b", 2), ("dualpipe", 2), ("1f1b", 4)))
    for mode in MODES
])  # fmt: skip
def test_over_gloo(mode: str, schedule: str, ranks: int, pool: Pool) -> None:
    pool.run(ranks, edges.all_cases, mode, schedule, ranks)


@pytest.mark.parametrize("mode", MODES)
def test_in_another_order_than_sent(mode: str, pool: Pool) -> None:
    edges.another_order(mode)
    pool.run(2, edges.another_order, mode)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_what_was_received_as_the_factor_of_a_product(schedule: str) -> None:
    """0.2.0: it was taken for a weight, its gradient deferred to W, and zeros sent in its place."""
    edges.assert_exact(edges.SentFactor, "declared", schedule, 2)


class Counting(Part):
    """A number that a tensor's values decide."""

    def forward(self, x: Tensor, hidden: Tensor | None = None, count: int = 0) -> Any:
        hidden = self.turn(x if hidden is None else hidden)
        count = 0 if hidden.is_meta else int((hidden > 0).sum())
        return hidden if self.info.is_last else {"hidden": hidden, "count": count}


def test_numbers_that_values_decide() -> None:
    edges.assert_exact(Counting, "exchanged", "1f1b", 2)
    with refuses(ShapeError, "0F0 gave", "expects", "made of a tensor's values"):
        build(Counting, "learnt", "1f1b", 2).step(ragged())


# ---- stages that contradict themselves or each other


def test_what_is_declared_must_agree_on_all_ranks(pool: Pool) -> None:
    """Also on those whose own edges agree, and before any stage has run."""
    shape, gradient, names = errors = edges.disagreements(3)
    assert shape.startswith("ShapeError: stage 0 declares the output float64[4, 3, 3]: stage 1 declares the")
    assert "input float64[4, 6, 3]. Make infer_outputs of the first agree" in shape
    assert gradient.startswith("ShapeError: stage 0 declares the output")
    assert ", tensor 1 without a gradient: stage 1 declares the input" in gradient
    assert names.startswith(
        "ModelError: the shapes that stages 0 and 1 declare for the edge between them: a declaration"
    )
    assert "OtherNames.forward(x): the previous stage returns hiden, and it has no parameter hiden" in names
    assert pool.run(3, edges.disagreements, 3) == [errors] * 3


class OtherKeys(Part):
    def forward(self, x: Tensor, hidden: Tensor | None = None, more: Tensor | None = None) -> Any:
        hidden = self.turn(x if hidden is None else hidden)
        return hidden if self.info.is_last else {"hidden": hidden, "more": hidden}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"hidden": edges.like_x(microbatch)}


class NotDetached(Single):
    """Says that no gradient is to come back for what has one."""

    def edge(self, microbatch: Microbatch) -> Any:
        return TensorSpec(tuple(microbatch["x"].shape), edges.TYPE, differentiable=False)


class Strange(Part):
    def forward(self, x: Tensor) -> Any:
        return self.turn(x) if self.info.is_last else {"x": self.turn(x), "info": self.info}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"x": edges.like_x(microbatch), "info": self.info}


class Asking(Part):
    """Wants what nobody gives."""

    def forward(self, hidden: Tensor | None = None, *, x: Tensor, needed: Tensor) -> Any:
        return self.turn(x)


class Spreading(Part):
    """Gives more than the next stage has room for."""

    def forward(self, x: Tensor) -> Any:
        return self.turn(x), x


@pytest.mark.parametrize(
    ("case", "mode", "error", "value", "rule"),
    [
        (OtherKeys, "declared", ShapeError, "'more': tensor}", "the next rank expects"),
        (NotDetached, "declared", ShapeError, "0F0 gave float64[3, 2, 3]", "the next stage sends none"),
        (Strange, "learnt", ShapeError, "a StageInfo in a stage's output", "cross an edge"),
        (Strange, "declared", ModelError, "stages 0 and 1 declare", "a StageInfo in a stage's output"),
        (Strange, "exchanged", ShapeError, "a StageInfo in a stage's output", "cross an edge"),
        (Asking, "learnt", ModelError, "Asking.forward(hidden, x, needed)", "has needed"),
        (Asking, "exchanged", ModelError, "Asking.forward(hidden, x, needed)", "has needed"),
        (Spreading, "learnt", ModelError, "Spreading.forward(x)", "the previous stage returns 2 values"),
        (Spreading, "exchanged", ModelError, "Spreading.forward(x)", "the previous stage returns 2 values"),
    ],
)  # fmt: skip
def test_refusals(case: type[Part], mode: str, error: type[InputError], value: str, rule: str) -> None:
    pipe = build(case, mode, "1f1b", 3)
    for _ in range(2):  # nothing of the first is left
        with refuses(error, value, rule):
            pipe.step(ragged())


def test_the_next_step_after_a_refused_output() -> None:
    class Moody(Single):
        strange = True

        def forward(self, x: Tensor) -> Any:
            done = super().forward(x)
            odd = Moody.strange and self.info.stage == 1 and len(x) == edges.SIZES[2][0]
            return (done, done) if odd and not x.is_meta else done

    pipe = build(Moody, "learnt", "1f1b", 3)
    with refuses(ShapeError, "1F2 gave"):
        pipe.step(ragged())
    Moody.strange = False
    pipe.zero_grad()
    pipe.step(ragged())
    parts = [Moody(module.info) for module in pipe.modules.values() if isinstance(module, Moody)]
    edges.plain(parts, ragged(), edges.squares)
    edges.assert_gradients_of(pipe, parts)


# ---- entries in addition to the batch


@pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES[:2])
@pytest.mark.parametrize("mode", MODES)
def test_entries(mode: str, schedule: str, ranks: int) -> None:
    edges.assert_entries(edges.with_entries(ranks, mode, schedule))


def test_wrong_entries() -> None:
    edges.refusals(3)


def test_wrong_entries_over_gloo(pool: Pool) -> None:
    pool.run(2, edges.refusals, 2)
