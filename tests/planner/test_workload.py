"""A workload measures once, and grows with the rows."""

from __future__ import annotations

import pytest

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.tracing import measured_work
from penstock.planner.workload import Workload
from support.planning import LENGTH, small_config, workload


def test_any_number_of_rows_follows_from_two() -> None:
    model = workload()
    for rows in (1, 5):
        run = Candidate(rows=rows, length=LENGTH)
        grown, measured = model.work(run), measured_work(model.plan(run.built(), (6,)), run).work
        for one, other in zip(
            (*grown.kinds, grown.embedding, grown.head), (*measured.kinds, measured.embedding, measured.head),
            strict=True,
        ):  # fmt: skip
            for name in ("forward", "input_grad", "weight_grad"):
                sums = [
                    tuple(
                        sum(getattr(op, key) * op.calls for op in getattr(part, name))
                        for key in ("flops", "nbytes")
                    )
                    for part in (one, other)
                ]
                assert sums[0] == pytest.approx(sums[1], rel=0.02)
            assert one.nbytes == pytest.approx(other.nbytes, rel=0.02)


def test_a_model_says_which_axes_it_takes() -> None:
    model = Workload(small_config())
    assert model.takes(Candidate(axes=Axes(tp=2, dp_shard=4))) == ""
    assert "tp=3" in model.takes(Candidate(axes=Axes(tp=3)))
    assert "cp=8" in model.takes(Candidate(axes=Axes(cp=8)))
    assert model.shards_sequence
    assert (model.layers, model.kinds, model.computed) == (6, (0,) * 6, "bfloat16")


def test_the_flops_of_a_row_are_three_forwards() -> None:
    model = workload()
    products = 6 * (model.parameters - 512 * 64 - 64 * 13) * LENGTH  # without the embedding and the norms
    attention = 3 * 6 * 4 * LENGTH * LENGTH * 64 // 2
    assert model.flops(LENGTH) == pytest.approx(products + attention)
