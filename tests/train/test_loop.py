"""A step whose loss or gradients are not finite stops the run, or is skipped as if it had no batch."""

from __future__ import annotations

import math
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import Pipeline
from penstock.errors import DataError, RunError
from penstock.pipeline.split_model import SplitModel
from penstock.runtime.device import stream
from penstock.train.checkpoints import NEWEST
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.loop import seed_step
from penstock.train.preflight import preflight
from penstock.train.records.metrics import Metrics
from penstock.train.run import run
from penstock.train.state import read_state
from support.jobs_train import poison
from support.refusals import refuses
from support.texts import fail_at
from support.tiny import checkpoint, config, metrics

EXACT = ("loss", "grad_norm", "learning_rate", "tokens")


def no_thread_is_left() -> bool:
    return not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("penstock-data", "penstock-log"))
    ]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(folder) if "loss" in row]


def test_a_skipped_step_is_as_if_its_batch_were_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit: weights, moments and the rate go on from where they stood."""
    for name in ("skips", "never"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {"steps": 6, "nonfinite": "skip"}
    with monkeypatch.context() as patch:
        poison(patch, [3])
        run(preflight(config(tmp_path / "skips", **options)))
    said = capsys.readouterr().out
    assert "step 3/6  skipped: loss=nan, grad_norm=nan" in said
    assert "  skipped 1  lr" in said
    assert "skipped     1 steps, whose loss or gradients were not finite" in said
    found = steps(tmp_path / "skips")
    assert [row.get("skipped_steps") for row in found] == [None, None, 1, 1, 1, 1]
    assert (found[2]["loss"], found[2]["skipped"]) == (None, "loss=nan, grad_norm=nan")

    original = Data.batch

    def never_three(data: Data, step: int) -> LoadedBatch:
        return original(data, step if step < 3 else step + 1)

    monkeypatch.setattr(Data, "batch", never_three)
    run(preflight(config(tmp_path / "never", **options)))
    expected = steps(tmp_path / "never")
    for row, other in zip([*found[:2], *found[3:]], expected[:5], strict=True):
        assert [row[key] for key in EXACT] == [other[key] for key in EXACT]


def test_a_resumed_run_remembers_how_many_steps_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"steps": 5, "nonfinite": "skip", "checkpoint_every": 3}
    poison(monkeypatch, [2])
    run(preflight(config(tmp_path, **options)))
    whole = steps(tmp_path)
    half = checkpoint(tmp_path, 3)
    assert read_state(half).skipped == 1
    resumed = preflight(config(tmp_path, **options), str(half))
    assert (resumed.start.done, resumed.start.state.skipped) == (3, 1)
    run(resumed)
    for row, other in zip(steps(tmp_path), whole, strict=True):
        assert [row[key] for key in EXACT] == [other[key] for key in EXACT]
    assert steps(tmp_path)[-1]["skipped_steps"] == 1
    assert preflight(config(tmp_path, **{**options, "steps": 9}), NEWEST).start.state.skipped == 1


def test_broken_weights_end_a_run_that_skips_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(2, 100))
    with refuses(RunError, "steps 2 to 11: loss=nan, grad_norm=nan at the last", "10 steps", "--resume"):
        run(preflight(config(tmp_path, steps=20, nonfinite="skip", evaluate_every=100)))
    assert [row["step"] for row in steps(tmp_path)] == list(range(1, 12))


# _squared_norm: a gradient is spoilt after the backward, before the norm
@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """0.5.0: of ranks in one process the first was named, wherever it was: norms were those of processes."""
    original = SplitModel._squared_norm

    def spoiled(model: SplitModel) -> Tensor:
        name, parameter = list(model._stages[stage].module.named_parameters())[-1]
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = math.inf
        names.append(name)
        return original(model)

    names: list[str] = []
    monkeypatch.setattr(SplitModel, "_squared_norm", spoiled)
    with pytest.raises(RunError) as found:
        run(preflight(config(tmp_path)))
    assert f"not those of rank {stage} on {socket.gethostname()} ({names[0]}). Lower" in str(found.value)
    assert found.value.names_rank


def test_the_step_that_stops_a_run_has_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, [3])
    with refuses(RunError, "step 3: loss=nan"):
        run(preflight(config(tmp_path)))
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert (rows[2]["loss"], rows[2]["skipped"]) == (None, "loss=nan, grad_norm=nan")
    assert no_thread_is_left()


def test_an_error_in_the_data_is_raised_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its batch is made one step earlier: that step has its row, its evaluation and its checkpoint."""
    fail_at(3, monkeypatch)
    with refuses(DataError, "row 7"):
        run(preflight(config(tmp_path, checkpoint_every=2)))
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 2, 2]
    assert read_state(checkpoint(tmp_path, 2)).step == 2
    assert no_thread_is_left()


def test_a_row_is_written_while_the_next_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, step, second = Metrics.write, Pipeline.step, threading.Event()
    calls: list[int] = []
    met: list[bool] = []

    def late(metrics: Metrics, row: dict[str, Any]) -> None:
        if row["step"] == 1:
            met.append(second.wait(30))
        write(metrics, row)

    def counted(pipe: Pipeline, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            second.set()
        return step(pipe, batch)

    monkeypatch.setattr(Metrics, "write", late)
    monkeypatch.setattr(Pipeline, "step", counted)
    run(preflight(config(tmp_path)))
    assert met == [True]
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 2, 3, 4, 4, 4]
    assert no_thread_is_left()


def test_rows_of_finished_steps_outlive_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, write, interrupted = Pipeline.step, Metrics.write, threading.Event()
    calls: list[int] = []

    def interrupt(pipe: Pipeline, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            interrupted.set()
            raise KeyboardInterrupt
        return step(pipe, batch)

    def late(metrics: Metrics, row: dict[str, Any]) -> None:
        if row["step"] == 3:
            assert interrupted.wait(30)
            time.sleep(0.3)  # a run that does not wait is over by then
        write(metrics, row)

    monkeypatch.setattr(Pipeline, "step", interrupt)
    monkeypatch.setattr(Metrics, "write", late)
    with pytest.raises(KeyboardInterrupt):
        run(preflight(config(tmp_path)))
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3]
    assert no_thread_is_left()


def test_a_seed_is_the_same_as_torch_manual_seed(tmp_path: Path) -> None:
    """Up to 0.5.0 torch.manual_seed seeded a step; runs that go on draw the same numbers."""
    rank = SimpleNamespace(draws=True, device=torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        seed_step(cast(Pipeline, rank), 3, 5)
        found = torch.rand(4)
        torch.manual_seed(int(np.random.SeedSequence((3, 5)).generate_state(1)[0]))
        assert torch.equal(torch.rand(4), found)


class BehindStream:
    """A GPU that computes at once what its host queues, and so waits for its host all the time."""

    runs_behind = True

    def __init__(self, steps: list[int]) -> None:
        self._steps, self._until, self.now = steps, 0.0, self.mark

    def mark(self) -> Any:
        queued = time.perf_counter()
        at = max(queued, self._until)
        return SimpleNamespace(
            queued=queued, at=at, query=lambda: True, elapsed_time=lambda end: (end.at - at) * 1e3
        )

    def begin_step(self) -> None:
        self._steps.append(0)
        self._until = 0.0  # it has caught up

    def anchor(self) -> tuple[float, Any]:
        mark = self.mark()
        return mark.at, mark

    def hold(self, seconds: float) -> None:
        self._until = max(self._until, time.perf_counter()) + 60.0
        self._steps[-1] += 1


def test_the_third_step_of_a_start_finds_out_how_far_the_host_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[int] = []
    monkeypatch.setattr(stream, "stream_of", lambda device: BehindStream(held))
    run(preflight(config(tmp_path, steps=5, evaluate_every=9)))
    rows = steps(tmp_path)
    assert ["host_share" in row for row in rows] == [False, False, True, True, True]
    assert rows[4]["host_share"] == pytest.approx(1 - rows[4]["bubble"])
    assert sum(map(bool, held)) == 2, "both ranks, in one step"
    said = capsys.readouterr().out
    assert f"the host is the limit: {rows[4]['host_share']:.1%}" in said
    assert f"bubble {rows[4]['bubble']:.1%} host {rows[4]['host_share']:.1%}" in said.replace("  ", " ")
