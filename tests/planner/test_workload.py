"""A workload measures once, and grows with the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoConfig

from penstock.parallel.axes import Axes
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.planner import workload as measuring
from penstock.planner.candidate import Candidate
from penstock.planner.tracing import Measurement, measured_work
from penstock.planner.weights import PartMemory
from penstock.planner.workload import Workload
from support.families import tiny_config
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


def measured_before(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Counts what is measured from here on, and gives what the tests have measured of `workload()`."""
    known = {rows: workload().measured(Candidate(rows=rows, length=LENGTH)) for rows in (2, 3)}
    counted = mock.Mock(side_effect=lambda _, run: known[run.rows])
    monkeypatch.setattr(measuring, "measured_work", counted)
    return counted


# _runs: empty, as in a new process
def test_a_model_is_measured_once_a_process_wherever_its_config_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted, run = measured_before(monkeypatch), Candidate(length=LENGTH)
    monkeypatch.setattr(measuring, "_runs", {})
    measured = Workload(small_config()).work(run)
    small_config().save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert counted.call_count == 2  # of two and of three rows
    assert Workload(read).work(run) == measured
    assert counted.call_count == 2
    Workload(read, "float32").work(replace(run, precision="float32"))
    assert counted.call_count == 4
    Workload(small_config(intermediate_size=96)).work(run)
    assert counted.call_count == 6


def test_a_model_of_a_users_class_is_measured_by_each_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key says what its forward does."""
    measured = measured_before(monkeypatch)
    monkeypatch.setattr(measuring, "built_alike", lambda _: None)
    for _ in range(2):
        one = Workload(small_config())
        assert one.work(Candidate(length=LENGTH)) == one.work(Candidate(length=LENGTH))
    assert measured.call_count == 2 * 2  # of two and of three rows


def test_runs_that_differ_in_their_loss_alone_share_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run is measured whole; of the second, whose logits are not chunked, the head alone."""
    runs = [Candidate(rows=2, length=LENGTH, axes=Axes(dp_shard=shards)) for shards in (1, 2)]
    config = small_config(vocab_size=2**20)  # whose logits are large enough for chunks
    first = Workload(config).measured(runs[0])

    def fresh() -> Workload:
        monkeypatch.setattr(measuring, "_runs", {})  # as in a process that has measured nothing
        return Workload(config)

    alone = [first, fresh().measured(runs[1])]
    assert alone[0].work.head != alone[1].work.head
    measured = list[Axes]()

    def counted(plan: BuildPlan, run: Candidate) -> Measurement:
        measured.append(run.axes)
        return measured_work(plan, run)

    monkeypatch.setattr(measuring, "measured_work", counted)
    model = fresh()
    model.measure(runs, 1)
    assert [model.measured(run) for run in runs] == alone
    assert measured == [Axes()] * 2  # of two and of three rows


@pytest.mark.parametrize(
    "axes",
    [
        Axes(dp_replicate=4),
        Axes(dp_replicate=4, dp_shard=2),
        Axes(dp_shard=2, cp=2),
        Axes(dp_replicate=3, dp_shard=4, ep=2),
        Axes(dp_replicate=3, dp_shard=2, ep=2),
        Axes(dp_shard=2, cp=2, ep=4, tp=2),
    ],
)
def test_memory_is_that_of_the_axes_themselves(axes: Axes) -> None:
    """Meshes share it where their shards are as large, however many copies there are."""
    model, run = Workload(tiny_config("mixtral")), Candidate(axes=axes)
    options = run.parallel_options()
    itself = PartMemory.of(model.source, model.chain, model.kinds, axes, options)
    shared = model.memory(run)
    assert (shared.embedding, shared.kinds, shared.head) == (itself.embedding, itself.kinds, itself.head)
    assert shared.whole == itself.whole
