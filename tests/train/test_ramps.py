"""Runs whose steps change in size, gradients over several calls, and runs that end early."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from penstock.batch.loss import IGNORED, NextToken
from penstock.errors import ConfigError, DataError
from penstock.schedule import Timeline
from penstock.train.between_steps import HeldOutEvaluation
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.config.training import EarlyStopSection
from penstock.train.data.rows import has_labels
from penstock.train.preflight import preflight
from penstock.train.run import run
from penstock.train.state import BestEvaluation, read_state
from support import jobs_train
from support.pool import Pool
from support.refusals import refuses
from support.tiny import (
    GPT2_WITH_DROPOUT,
    assert_same_tensors,
    checkpoint,
    config,
    metrics,
    tree,
    write_documents,
)

EXACT = ("step", "loss", "grad_norm", "learning_rate", "held_out_loss", "rows", "tokens")
RAMP = [{"until": 2, "batch_size": 2, "sequence_length": 6}, {"until": 3, "batch_size": 6}]


def folder_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def trained(made: TrainConfig, resume: str | None = None) -> None:
    run(preflight(made, resume))


def exact(folder: Path) -> list[list[Any]]:
    return [[row.get(key) for key in EXACT] for row in metrics(folder)]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(folder) if "loss" in row]


# ---- Accumulation


@pytest.mark.parametrize("packing", ["stream", "none"])
def test_accumulated_calls_train_as_one_call_with_all_rows(tmp_path: Path, packing: str) -> None:
    found = []
    for calls in (1, 3):
        folder = folder_of(tmp_path, str(calls))
        keys: dict[str, Any] = (
            write_documents(folder) | {"data.packing": packing} if packing == "none" else {}
        )
        keys |= {"model.dtype": "float64", "pipeline.shapes": "padded"}
        made = config(folder, keys=keys, batch_size=13, accumulate=calls, clip_norm=0.1)
        prepared = preflight(made)
        run(prepared)
        found.append(steps(folder))
        padding = [row["padding"] for row in found[-1]]
        assert padding == [prepared.data.batch(step).fill.padding for step in range(1, 5)]
    for one, several in zip(*found, strict=True):
        assert several["tokens"] == one["tokens"]
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-9)


def test_a_loss_that_is_not_finite_in_one_of_the_calls_skips_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that of the last one is finite."""
    jobs_train.poison(monkeypatch, [3])  # of two calls a step
    trained(config(tmp_path, accumulate=2, nonfinite="skip"))
    assert [row.get("skipped", "")[:8] for row in steps(tmp_path)] == ["", "loss=nan", "", ""]


# ---- Ramps


def test_a_ramp_trains_on_the_same_rows_cut_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Every step against plain transformers on the rows that the data says; then resumed in each phase."""
    made = config(
        tmp_path, GPT2_WITH_DROPOUT, batch_size=8, accumulate=2, steps=5, checkpoint_every=1, ramp=RAMP,
        evaluate_every=5, keys={"optimizer.learning_rate": 1e-3},
    )  # fmt: skip
    prepared = preflight(made)
    run(prepared)
    found = steps(tmp_path)
    assert [row["rows"] for row in found] == [2, 2, 6, 8, 8]
    assert [row["tokens"] for row in found] == [10, 10, 6 * 15, 8 * 15, 8 * 15]
    rates = [row["learning_rate"] for row in found]
    seen: list[torch.Tensor] = []
    for step, row in enumerate(found, start=1):
        content = prepared.data.batch(step).content
        assert isinstance(content, dict)
        assert content["input_ids"].shape == (row["rows"], 6 if step < 3 else 16)
        seen += [*content["input_ids"][:, :6]]
    epoch = len(prepared.data.rows)
    first = {tuple(each.tolist()) for each in seen[:epoch]}
    assert len(first) == min(epoch, 26)  # no row twice in an epoch, whatever the phases
    before, rows = tmp_path / "before", exact(tmp_path)
    shutil.copytree(checkpoint(tmp_path, 5), before)
    for step in (1, 2, 3):
        trained(made, str(checkpoint(tmp_path, step)))
        assert exact(tmp_path) == rows
        assert_same_tensors(before, checkpoint(tmp_path, 5))
    plain = config(
        folder_of(tmp_path, "plain"),
        GPT2_WITH_DROPOUT,
        {"optimizer.learning_rate": 1e-3},
        steps=5,
        evaluate_every=5,
    )
    trained(plain)
    assert rates == [row["learning_rate"] for row in steps(tmp_path / "plain")]


def test_a_first_call_without_a_token_that_counts_is_neither_checked_nor_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next call is, where the cut rows of the first have none. Measuring ended in a BatchError."""
    late, early = ([IGNORED] * 14 + [5, 6], [IGNORED] * 2 + [7] * 14)
    rows = [{"input_ids": list(range(33, 49)), "labels": early if n % 4 else late} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys: dict[str, Any] = {
        "data.path": str(tmp_path / "rows.jsonl"), "data.kind": "tokens", "data.packing": "none",
        "pipeline.microbatches": 1, "pipeline.balance": "measured", "pipeline.head_weight": None,
    }  # fmt: skip
    options: dict[str, Any] = {"batch_size": 2, "accumulate": 2, "steps": 1, "check": "always"}
    options["ramp"] = [{"until": 1, "batch_size": 2, "sequence_length": 6}]
    for seed in range(40):
        made = config(tmp_path, keys=keys, seed=seed, **options)
        with suppress(DataError):  # of a seed by which no row of the step has one
            prepared = preflight(made)
            content = prepared.data.batch(1).content
            assert isinstance(content, list)
            if [has_labels([part], NextToken()) for part in content] == [False, True]:
                break
    else:
        pytest.fail("no seed puts such a row first")
    run(prepared)
    assert "the split model's loss and" in capsys.readouterr().out


def test_a_run_that_ends_within_a_ramp_draws_the_schedule_of_its_last_step(tmp_path: Path) -> None:
    made = config(tmp_path, batch_size=8, steps=2, ramp=[{"until": 3, "batch_size": 4}])
    trained(made)
    data = json.loads((made.output.path / "timeline.json").read_text())
    assert data["step"] == 2
    counts = [Timeline.from_data(data[label]).microbatches for label in ("predicted", "measured")]
    assert counts == [1, 1]


def test_a_step_of_a_ramp_is_a_plain_step_on_its_rows(tmp_path: Path) -> None:
    keys = write_documents(tmp_path) | {"optimizer.learning_rate": 1e-12}
    made = config(tmp_path, keys=keys, batch_size=8, steps=4, ramp=RAMP)
    prepared = preflight(made)
    run(prepared)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path, 4))
    for step, row in enumerate(steps(tmp_path), start=1):
        batch = prepared.data.batch(step)
        assert isinstance(batch.content, list)
        longest = 6 if step < 3 else 16
        total, tokens, filled = 0.0, 0, 0
        for part in batch.content:
            assert part["input_ids"].shape[1] <= longest
            labels, positions = part["labels"], part["position_ids"]
            ids = part["input_ids"]
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1]
            counted = labels[:, 1:] != -100
            losses = torch.nn.functional.cross_entropy(
                logits[counted], labels[:, 1:][counted], reduction="sum"
            )
            total, tokens = total + float(losses.detach()), tokens + int(counted.sum())
            filled += part["input_ids"].numel()
        assert (row["tokens"], batch.fill.slots) == (tokens, filled)
        assert batch.fill.tokens >= tokens
        assert row["loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, {"cp": 2}])
def test_a_mesh_ramps_and_accumulates_as_one_process(
    pool: Pool, tmp_path: Path, parallel: dict[str, int]
) -> None:
    made = tree(tmp_path)
    made["model"]["config"] |= {"num_key_value_heads": 2}
    ramp = [{"until": 2, "batch_size": 4, "sequence_length": 8}]
    made["train"] |= {"batch_size": 8, "accumulate": 2, "ramp": ramp, "evaluate_every": 4}
    made["train"]["early_stop"] = {"patience": 9}
    said = pool.run(4, jobs_train.trained, {**made, "parallel": parallel})
    assert [each["error"] for each in said] == [""] * 4
    found = steps(tmp_path)
    alone = folder_of(tmp_path, "alone")
    trained(TrainConfig.model_validate({**made, "output": {"folder": str(alone / "out")}}))
    for row, other in zip(found, steps(alone), strict=True):
        for key in EXACT:
            assert row.get(key) == pytest.approx(other.get(key), rel=1e-5), (key, row["step"])


# ---- The end


def test_the_best_evaluation_and_how_long_ago_it_was() -> None:
    section = EarlyStopSection(patience=2, min_delta=0.1)
    best = BestEvaluation()
    for step, loss in enumerate((3.0, 2.5, 2.45, 2.6)):
        assert not best.ends(section)
        best = best.after(step, loss, section)
    assert best == BestEvaluation(2.5, 1, 2)
    assert best.ends(section) == (
        "2 evaluations in a row did not lower the held-out loss by more than 0.1 from 2.5000, of step 1"
    )
    assert not best.ends(None)
    assert not best.ends(EarlyStopSection(patience=3))
    assert best.after(9, 2.44, None) == BestEvaluation(2.44, 9, 0)  # any fall counts without the section


def with_losses(patch: pytest.MonkeyPatch, *losses: float) -> None:
    """Let the run's evaluations find these in turn."""
    left = list(losses)
    patch.setattr(HeldOutEvaluation, "evaluation", lambda *_: {"held_out_loss": left.pop(0)})


def test_a_run_ends_early_says_so_and_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = {"early_stop": {"patience": 2}}
    made = config(tmp_path, steps=9, evaluate_every=1, checkpoint_every=2, **stop)
    with_losses(monkeypatch, 3.0, 2.0, 1.9, 1.9, 1.95)
    trained(made)
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    reason = "2 evaluations in a row did not lower the held-out loss by more than 0 from 1.9000, of step 2"
    assert f"ended       early, after step 4 of 9: {reason}\n" in said
    assert read_state(checkpoint(tmp_path, 4)).best == BestEvaluation(1.9, 2, 2)
    with refuses(ConfigError, "patience=2", f"ended early, after step 4: {reason}"):
        preflight(made, NEWEST)
    assert preflight(config(tmp_path, steps=9), NEWEST).start.done == 4

    with_losses(monkeypatch, 1.91, 1.92, 1.93)  # it counts on where the run was
    trained(
        config(tmp_path, steps=9, evaluate_every=1, early_stop={"patience": 3}), str(checkpoint(tmp_path, 2))
    )
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3, 4, 5]
    with_losses(monkeypatch, *[1.0] * 9)
    trained(
        config(tmp_path, steps=6, evaluate_every=1, early_stop={"patience": 5}), str(checkpoint(tmp_path, 5))
    )
    assert "ended       after step 6, the last\n" in capsys.readouterr().out


def test_early_stopping_leaves_the_best_checkpoint_and_says_which_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: the only checkpoint was that of the evaluation that ended the run, which is worse."""
    with_losses(monkeypatch, 3.0, 2.0, 1.9, 1.95)
    trained(config(tmp_path, steps=9, evaluate_every=1, early_stop={"patience": 1}))
    best, last = checkpoint(tmp_path, 2), checkpoint(tmp_path, 3)
    link = best.with_name("best")
    assert sorted(path.name for path in best.parent.iterdir()) == ["best", best.name, last.name]
    assert link.resolve() == best.resolve()
    said = capsys.readouterr().out
    assert f"checkpoint  {last}\n" in said
    assert f"best        {link}: {best.name}, held-out loss 1.9000 nats a token\n" in said
    alone = folder_of(tmp_path, "alone")
    with_losses(monkeypatch, 3.0, 2.0, 1.9, 1.95)
    trained(config(alone, steps=9, evaluate_every=1, checkpoint_every=2, early_stop={"patience": 1}))
    assert_same_tensors(checkpoint(alone, 2), best)


def test_as_many_of_the_best_stay_as_the_config_says_through_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(steps: int) -> TrainConfig:
        return config(tmp_path, keys={"output.keep": {"best": 2, "last": 1}}, steps=steps, evaluate_every=1)

    def kept() -> list[int]:
        return sorted(int(path.name[5:]) for path in (tmp_path / "out" / "checkpoints").glob("step-*"))

    with_losses(monkeypatch, 1.0, 3.0, 2.0, 2.5, 2.7)  # before the first step there is nothing to save
    trained(made(4))
    assert kept() == [2, 3, 4]
    assert read_state(checkpoint(tmp_path, 4)).ranking == ((2.0, 2), (2.5, 3))
    with_losses(monkeypatch, 2.6, 2.1, 2.0)
    trained(made(7), NEWEST)
    assert kept() == [2, 7]  # of two equal ones the earlier is better
    assert (tmp_path / "out" / "checkpoints" / "best").resolve().name == checkpoint(tmp_path, 2).name


@pytest.mark.sweep
def test_all_ranks_of_a_mesh_end_where_one_does(pool: Pool, tmp_path: Path) -> None:
    """Each finds another loss, as rounding may differ."""
    made = tree(tmp_path)
    made["train"] |= {"steps": 6, "batch_size": 8, "early_stop": {"patience": 1}, "evaluate_every": 1}
    said = pool.run(4, ended_early, {**made, "parallel": {"dp_replicate": 2}})
    assert [each["error"] for each in said] == [""] * 4
    assert [each["updates"] for each in said] == [2] * 4
    assert "ended       early, after step 2 of 6: another rank finds no improvement" in said[0]["said"]


def ended_early(made: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    worse = dist.get_rank() == 3
    with pytest.MonkeyPatch.context() as patch:
        with_losses(patch, 3.0, 2.0, 1.9 + worse, 1.0, 1.0, 1.0, 1.0)
        return jobs_train.trained(made)


def with_accuracies(patch: pytest.MonkeyPatch, *accuracies: float) -> None:
    """Let the run's evaluations find these in turn, while the loss falls each time."""
    left = [(float(10 - at), accuracy) for at, accuracy in enumerate(accuracies)]
    names = "held_out_loss", "held_out_token_accuracy"
    patch.setattr(HeldOutEvaluation, "evaluation", lambda *_: dict(zip(names, left.pop(0), strict=True)))


def test_the_best_may_be_those_of_another_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(steps: int, metric: str) -> TrainConfig:
        keep = {"best": 1, "last": 1, "metric": metric}
        return config(tmp_path, keys={"output.keep": keep}, steps=steps, evaluate_every=1)

    link = tmp_path / "out" / "checkpoints" / "best"
    with_accuracies(monkeypatch, 0.9, 0.2, 0.4, 0.3, 0.4)
    trained(made(4, "held_out_token_accuracy"))
    assert link.resolve().name == checkpoint(tmp_path, 2).name
    assert f"best        {link}: {link.resolve().name}, token accuracy 0.4000\n" in capsys.readouterr().out
    assert read_state(checkpoint(tmp_path, 4)).ranking == ((-0.4, 2),)
    with_accuracies(monkeypatch, 0.35)
    trained(made(5, "held_out_token_accuracy"), NEWEST)
    assert link.resolve().name == checkpoint(tmp_path, 2).name
    with_accuracies(monkeypatch, 0.1)  # scores of another metric are not compared
    trained(made(6, "held_out_loss"), NEWEST)
    assert link.resolve().name == checkpoint(tmp_path, 6).name
    assert read_state(checkpoint(tmp_path, 6)).ranking == ((10.0, 6),)


@pytest.mark.parametrize(
    ("metric", "best", "rule"),
    [
        ("held_out_rewards/margins", 1, "is of another loss: the loss of next tokens has held_out_token_acc"),
        ("held_out_token_accuracy", 0, "without output.keep.best; set best to 1 or more"),
        ("bleu", 1, "Input should be 'held_out_loss', 'held_out_token_accuracy'"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused(
    tmp_path: Path, metric: str, best: int, rule: str
) -> None:
    with pytest.raises(ValidationError, match=rule):
        config(tmp_path, keys={"output.keep": {"best": best, "metric": metric}})
