"""Losses that rise far, or are not finite: the step is skipped, or the run goes back or ends."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.errors import CheckpointError, ConfigError, RunError
from penstock.pipeline.steps.step import StepResult
from penstock.train.config.sections import TrainConfig
from penstock.train.config.training import SpikeSection
from penstock.train.data.batches import LoadedBatch
from penstock.train.data.rows import Fill
from penstock.train.loop import seed_step
from penstock.train.optimizers.optimizer import make_optimizers, set_learning_rates
from penstock.train.part import Run, TrainStep
from penstock.train.preflight import preflight
from penstock.train.records.metrics import without_replaced_rows
from penstock.train.report.page import report
from penstock.train.run import run
from penstock.train.sizes import Size
from penstock.train.skips import IN_A_ROW, REWINDS, Skips, Spikes
from penstock.train.state import RunState, Seen, read_state
from support.folders import relist
from support.jobs_train import trained
from support.pool import Pool
from support.refusals import refuses
from support.tiny import GPT2_WITH_DROPOUT, checkpoint, config, metrics, tensors, tree

NAN, INF = float("nan"), float("inf")
STEPS, EVERY, ROWS, WINDOW, FACTOR = 16, 4, 4, 3, 1.4
EXACT = ("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "rows_left_out", "held_out_loss")


def folder_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def spiky(folder: Path, then: str, **more: Any) -> TrainConfig:
    """A run on one letter, with some rows of other bytes: once it is learned, their losses are spikes."""
    keys = {"data.held_out": 0.1, "optimizer.learning_rate": 3e-2, **more.pop("keys", {})}
    spike = {"factor": FACTOR, "window": WINDOW, "then": then}
    options = {"steps": STEPS, "checkpoint_every": EVERY, "evaluate_every": EVERY, "spike": spike}
    made = config(folder, GPT2_WITH_DROPOUT, keys, **{**options, **more})
    write_odd_rows(folder)
    return made


def write_odd_rows(folder: Path) -> None:
    letters, odd = b"a" * 16, bytes(128 + 37 * place % 128 for place in range(16))
    rows = [odd if number % 13 == 6 else letters for number in range(90)]
    (folder / "text").write_bytes(b"".join(rows))


def steps(folder: Path) -> list[dict[str, Any]]:
    """The rows of the steps that stand."""
    return [row for row, _ in without_replaced_rows((row, None) for row in metrics(folder)) if "loss" in row]


def exact(folder: Path) -> list[list[Any]]:
    rows = [row for row, _ in without_replaced_rows((row, None) for row in metrics(folder))]
    return [[row.get(key) for key in EXACT] for row in rows]


def by_hand(made: TrainConfig) -> tuple[list[list[Any]], dict[str, torch.Tensor], list[int]]:
    """The same run written out: loss and norm of the steps that stand, the weights, the rows left out."""
    prepared = preflight(made)
    assert prepared.data.sampler is not None
    order = prepared.data.sampler.rows(0, 4 * STEPS * ROWS)
    pipe = prepared.auto.build(prepared.model)
    (optimizer,) = optimizers = make_optimizers(made.optimizer, pipe.named_parameters(), prepared.kinds)
    spike = made.train.spike
    assert spike is not None
    losses: list[float] = []
    kept: list[list[Any]] = []
    saved: Any = None
    skipped, at, step, left_out = 0, 0, 1, list[int]()
    while step <= made.train.last:
        seed_step(pipe, made.train.seed, step)
        set_learning_rates(made.optimizer, optimizers, made.train.last, step - skipped)
        rows = order[at : at + ROWS]
        at += ROWS
        pipe.zero_grad()
        result = pipe.step(prepared.data.layout.content(prepared.data.rows, rows))
        norm = pipe.clip_grad_norm_(1.0)
        kept.append([step, result.loss, norm])
        if len(losses) < spike.window or result.loss <= spike.factor * median(losses[-spike.window :]):
            losses.append(result.loss)
            optimizer.step()
        elif spike.then == "skip" or saved is None:
            skipped += 1
        else:
            weights, state, step, losses, skipped, began = copy.deepcopy(saved)
            for parameter, value in zip(pipe.parameters(), weights, strict=True):
                parameter.data.copy_(value)
            optimizer.load_state_dict(state)
            left_out += order[began:at]
            kept = [row for row in kept if row[0] <= step]
            saved = (*saved[:-1], at)
            step += 1
            continue
        if step % EVERY == 0:
            values = [parameter.detach().clone() for parameter in pipe.parameters()]
            saved = copy.deepcopy((values, optimizer.state_dict(), step, losses, skipped, at))
        step += 1
    return kept, {name: value.detach().clone() for name, value in pipe.named_parameters()}, left_out


@pytest.mark.parametrize("then", [pytest.param("skip", marks=pytest.mark.sweep), "rewind"])
def test_a_run_with_spikes_is_the_loop_by_hand(
    tmp_path: Path, then: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, with dropout; then resumed from a checkpoint."""
    made = spiky(tmp_path, then)
    kept, weights, left_out = by_hand(made)
    run(preflight(made))
    found = steps(tmp_path)
    assert [[row["step"], row["loss"], row["grad_norm"]] for row in found] == kept
    written = {name.partition(" ")[2]: value for name, value in tensors(checkpoint(tmp_path, STEPS)).items()}
    assert all(torch.equal(written[name], value) for name, value in weights.items())
    said = capsys.readouterr().out
    if then == "skip":
        assert sum("skipped" in row for row in found) == found[-1]["skipped_steps"] >= 2
        assert "finite, or whose loss rose too far" in said
        assert left_out == []
    else:
        went = [row for row in metrics(tmp_path) if "back_to" in row]
        assert len(went) >= 2
        assert went[0]["skipped"].startswith(f"loss={went[0]['loss']:.4g} is ")
        assert found[-1]["rows_left_out"] == len(left_out)
        assert f"left out    {len(left_out)} rows: after a spike of the loss the run went back" in said
        assert f"rows left out, as the run went back after spikes of the loss: {len(left_out)}" in (
            report([tmp_path / "out"]).read_text()
        )
        check_recorded(tmp_path)
    rows, last = exact(tmp_path), tensors(checkpoint(tmp_path, STEPS))
    run(preflight(made, str(checkpoint(tmp_path, 3 * EVERY))))
    assert exact(tmp_path) == rows
    again = tensors(checkpoint(tmp_path, STEPS))
    assert all(torch.equal(again[name], value) for name, value in last.items())
    if then == "rewind":
        check_refused(tmp_path)


def check_recorded(folder: Path) -> None:
    """A checkpoint has the losses, and the rows that were left out."""
    state = read_state(checkpoint(folder, STEPS))
    losses = [row["loss"] for row in steps(folder)]
    assert state.seen.losses == tuple(losses[-WINDOW:])
    assert state.seen.rows == steps(folder)[-1]["rows_left_out"] > 0
    assert state.data is not None
    assert state.data["rows"] == STEPS * ROWS + state.seen.rows


def check_refused(folder: Path) -> None:
    """Values that no run has seen. The checkpoint is spoilt."""
    for wrong in ([["a"], []], [[math.nan], []], [[1.0], [[4, 0]]], [[], [[0, 4], [2, 6]]], [[], [[0.5, 4]]]):
        alter_state(checkpoint(folder, STEPS), seen=wrong)
        with refuses(CheckpointError, "state.json: seen=", "no run has such a value"):
            read_state(checkpoint(folder, STEPS))


def alter_state(path: Path, **keys: Any) -> None:
    file = path / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    relist(path)


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}])
@pytest.mark.parametrize("then", ["skip", "rewind"])
def test_all_ranks_of_a_mesh_do_the_same(
    tmp_path: Path, pool: Pool, parallel: dict[str, int], then: str
) -> None:
    made = tree(tmp_path)
    made["model"]["config"] |= {"num_key_value_heads": 2}
    write_odd_rows(tmp_path)
    spike = {"factor": FACTOR, "window": WINDOW, "then": then}
    made["train"] |= {"steps": STEPS, "checkpoint_every": EVERY, "evaluate_every": STEPS, "spike": spike}
    made["data"]["held_out"] = 0.1
    made["optimizer"]["learning_rate"] = 3e-2
    said = pool.run(4, trained, {**made, "parallel": parallel})
    assert [each["error"] for each in said] == [""] * 4
    found = exact(tmp_path)
    alone = folder_of(tmp_path, "alone")
    run(preflight(TrainConfig.model_validate({**made, "output": {"folder": str(alone / "out")}})))
    assert any("skipped" in row for row in metrics(alone))
    for row, other in zip(found, exact(alone), strict=True):
        assert [row[0], *row[3:6]] == [other[0], *other[3:6]]
        if "tp" not in parallel:  # it rounds otherwise, and Adam's first steps are signs
            assert row == pytest.approx(other, rel=5e-3)


def test_accumulated_calls_are_judged_by_the_loss_of_all(tmp_path: Path) -> None:
    run(preflight(spiky(tmp_path, "skip", accumulate=2, keys={"pipeline.microbatches": 1})))
    assert steps(tmp_path)[-1]["skipped_steps"] >= 2


@pytest.mark.parametrize("packing", ["stream", pytest.param("sequential", marks=pytest.mark.sweep)])
def test_a_stream_goes_on_after_the_rows_that_are_left_out(tmp_path: Path, packing: str) -> None:
    """The rows are numbered as those of the same run without spikes: row k of the stream is row k."""
    keys = {
        "data.streaming": {"buffer": 3},
        "data.packing": packing,
        "data.kind": "jsonl",
        "data.validation": {"path": str(tmp_path / "text.jsonl"), "kind": "jsonl"},
        "data.path": str(tmp_path / "text.jsonl"),
    }
    made = spiky(tmp_path, "rewind", keys=keys)
    texts = ["a" * 16] * 40 + ["zyxwvutsrqponmlk"] + ["a" * 16] * 30
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run(preflight(made))
    assert [row for row in metrics(tmp_path) if "back_to" in row]
    state = read_state(checkpoint(tmp_path, STEPS))
    stream = preflight(made).data.stream
    assert stream is not None
    assert state.data is not None
    whole, _ = stream.take(0, state.data["rows"] + ROWS)
    next_rows, _ = stream.at(state.data["position"]).take(state.data["rows"], ROWS)
    assert [[piece.ids.tolist() for piece in row] for row in whole[-ROWS:]] == [
        [piece.ids.tolist() for piece in row] for row in next_rows
    ]
    rows = exact(tmp_path)
    run(preflight(made, str(checkpoint(tmp_path, EVERY))))
    assert exact(tmp_path) == rows


# ---- What is a spike, and what too many are


def spikes_of(section: SpikeSection | None, losses: tuple[float, ...] = (), checkpoint: Any = None) -> Spikes:
    """The part, in a run that has seen these losses and has this checkpoint."""
    config, state = SimpleNamespace(train=SimpleNamespace(spike=section)), RunState(seen=Seen(losses))
    return Spikes(cast(Run, SimpleNamespace(config=config, state=state, checkpoint=checkpoint)))


def judged(spikes: Spikes, loss: float) -> tuple[str, Path | None]:
    """Why the step is skipped, and the checkpoint that it takes the run back to."""
    step = cast(TrainStep, SimpleNamespace(result=SimpleNamespace(loss=loss), back_to=None))
    return spikes.judge(step), step.back_to


def test_a_loss_is_compared_with_the_median_of_a_full_window(tmp_path: Path) -> None:
    spikes = spikes_of(SpikeSection(factor=2.0, window=3), checkpoint=tmp_path)
    for loss in (1.0, 9.0, 2.0):
        assert spikes.limit == math.inf
        assert judged(spikes, loss) == ("", None)
    assert spikes.limit == 4.0
    assert judged(spikes, 4.5) == ("loss=4.5 is 2.25 times the median of the last 3, 2", None)
    assert spikes.limit == 4.0  # a spike counts for no later step
    assert judged(spikes, 4.0) == ("", None)
    assert spikes.run.state.seen.losses == (9.0, 2.0, 4.0)
    spikes = spikes_of(SpikeSection(window=2), (0.0, 0.0))
    assert spikes.limit == math.inf  # a model that knows all by heart has no scale
    spikes = spikes_of(None)
    assert judged(spikes, 1.0) == ("", None)
    assert spikes.run.state.seen == Seen()


def test_a_run_without_a_checkpoint_skips(tmp_path: Path) -> None:
    section = SpikeSection(window=2, then="rewind")
    assert judged(spikes_of(section, (1.0, 1.0)), 5.0)[1] is None
    reason, back_to = judged(spikes_of(section, (1.0, 1.0), tmp_path), 5.0)
    assert reason
    assert back_to == tmp_path


# _count: a run that comes back, without the steps
def test_a_run_that_comes_back_too_often_ends_with_a_remedy(tmp_path: Path) -> None:
    spikes = spikes_of(SpikeSection(window=2, then="rewind"))
    for _ in range(REWINDS):
        spikes._count(6, tmp_path / "4", 4)
    with refuses(RunError, "step 6: the loss rose again", "4 3 times", "--resume PATH"):
        spikes._count(6, tmp_path / "4", 4)
    spikes._count(9, tmp_path / "8", 8)  # the run has come so far since


# ---- Values that are not finite, and too many skipped steps


class Judged:
    """The part that skips steps, in a run of nothing but losses and norms."""

    def __init__(self, nonfinite: str, skipped: int = 0) -> None:
        section = SimpleNamespace(nonfinite=nonfinite, spike=None)
        pipe = SimpleNamespace(find_not_finite=lambda: "", not_finite="")
        config, state = SimpleNamespace(train=section), RunState(skipped=skipped)
        self.run = SimpleNamespace(config=config, pipe=pipe, state=state)
        self.part = Skips(cast(Run, self.run))

    def step(self, number: int, loss: float, norm: float = 1.0, spike: str = "") -> str:
        """Why the step is skipped, once the part has let it pass. spike: what another part says of it"""
        step = TrainStep(number, Size(8, 16, (2,)), LoadedBatch([], Fill()), StepResult(loss, 1, 0.0), norm)
        step.skipped = self.part.judge(step) or spike
        self.run.state = RunState(skipped=self.run.state.skipped + bool(step.skipped))
        self.part.check(step)
        return step.skipped


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (1.0, INF), (-INF, NAN)])
def test_loss_and_norm_are_both_judged(loss: float, norm: float) -> None:
    with refuses(RunError, f"step 3: loss={loss}, grad_norm={norm}", "finite numbers"):
        Judged("stop").step(3, loss, norm)
    skips = Judged("skip", skipped=2)
    assert skips.step(3, loss, norm) == f"loss={loss}, grad_norm={norm}"
    assert not skips.step(4, 1.0)
    assert skips.run.state.skipped == 3


def test_too_many_in_a_row_end_the_run_and_too_many_in_all_do_not() -> None:
    skips = Judged("skip")
    for step in range(3 * IN_A_ROW):
        skips.step(step, NAN if step % 2 else 1.0)
    assert skips.run.state.skipped == 1.5 * IN_A_ROW
    skips.step(30, 1.0)
    for step in range(31, 30 + IN_A_ROW):
        skips.step(step, NAN)
    with refuses(RunError, "steps 31 to 40: loss=nan, grad_norm=1.0 at the last", "10 steps"):
        skips.step(40, NAN)


def test_spikes_in_a_row_end_the_run_as_other_skipped_steps() -> None:
    skips = Judged("stop")
    for step in range(1, IN_A_ROW):
        skips.step(step, 9.0, spike="loss=9")
    with refuses(RunError, "steps 1 to 10: loss=9 at the last", "10 steps"):
        skips.step(10, 9.0, spike="loss=9")


def test_a_rewind_needs_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"goes back to the last checkpoint.*give checkpoint_every"):
        config(tmp_path, spike={"then": "rewind"})


def test_a_largest_loss_is_for_a_step_with_an_optimizer(tmp_path: Path) -> None:
    prepared = preflight(config(tmp_path))
    pipe = prepared.auto.build(prepared.model)
    with refuses(ConfigError, "max_loss=2.0 without an optimizer"):
        pipe.step(prepared.data.batch(1).content, max_loss=2.0)
