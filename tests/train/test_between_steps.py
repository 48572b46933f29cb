"""A signal to one rank: all ranks save after the same step, and the run goes on from there."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.launch.stop import Stop
from penstock.pipeline.pipeline import Pipeline
from penstock.train import loop
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from penstock.train.run import run
from penstock.train.state import read_state
from support.covering import some
from support.pool import Pool
from support.tiny import QWEN3, assert_same_tensors, checkpoint, config, metrics


def struck(tree: dict[str, Any], rank: int, at: int, number: int) -> dict[str, Any]:
    """A run in which a process sends itself a signal as a step begins."""
    torch.set_num_threads(1)
    said, seed_step = io.StringIO(), loop.seed_step

    def strike(pipe: Any, seed: int, step: int) -> None:
        seed_step(pipe, seed, step)
        if step == at and dist.get_rank() == rank:
            os.kill(os.getpid(), number)
            while not stop.number:  # its thread has read it
                os.sched_yield()

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), Stop() as stop:
        close = dist.destroy_process_group  # the world itself is the pool's to close
        patch.setattr(dist, "destroy_process_group", lambda group=None: group and close(group))
        patch.setattr(loop, "seed_step", strike)
        last = run(preflight(TrainConfig.model_validate(tree), NEWEST), stop)
    return {"step": last.number, "stopped": last.stopped, "ended": last.ended, "said": said.getvalue()}


def made(folder: Path, **keys: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return config(folder, {**QWEN3, "num_key_value_heads": 2}, keys).model_dump(mode="json")


@pytest.mark.parametrize(
    "number", some([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], signal.SIGTERM, signal.SIGINT)
)
@pytest.mark.fault("the whole job is ended", "SIGTERM, SIGUSR1, Ctrl-C of a rank: a checkpoint first")
def test_all_ranks_save_after_the_step_in_which_one_was_asked_to_stop(
    tmp_path: Path, pool: Pool, number: signal.Signals
) -> None:
    """The run that goes on ends as one that got its signal in the last step, which changes nothing."""
    tree = made(tmp_path)
    results = pool.run(2, struck, tree, 1, 2, int(number))
    assert [(each["step"], each["stopped"]) for each in results] == [(2, True)] * 2
    assert results[0]["ended"].startswith("after step 2 of 4: rank 1 on ")
    assert results[0]["ended"].endswith(f" got {number.name}")
    assert f"checkpoint  {checkpoint(tmp_path, 2)}: --resume goes on from it" in results[0]["said"]
    if number != signal.SIGTERM:
        return
    (ending,) = pool.run(2, struck, tree, 0, -1, 0)[:1]
    assert (ending["step"], ending["stopped"]) == (4, False)
    whole = pool.run(2, struck, made(tmp_path / "whole"), 0, 4, int(number))
    assert [(each["step"], each["stopped"]) for each in whole] == [(4, False)] * 2
    assert_same_tensors(checkpoint(tmp_path / "whole", 4), checkpoint(tmp_path, 4))
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2, 3, 4]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "axes", [{"parallel.tp": 2}, pytest.param({"parallel.dp_shard": 2}, marks=pytest.mark.sweep)]
)
def test_ranks_of_a_mesh_that_exchange_no_loss_learn_of_it_too(
    tmp_path: Path, pool: Pool, axes: dict[str, int]
) -> None:
    results = pool.run(4, struck, made(tmp_path, **axes), 3, 3, int(signal.SIGTERM))
    assert [(each["step"], each["stopped"]) for each in results] == [(3, True)] * 4
    assert "rank 3 on " in results[0]["ended"]


def test_a_run_in_one_process_is_asked_to_stop_as_well(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(1, struck, made(tmp_path, **{"pipeline.ranks": 1}), 0, 1, int(signal.SIGTERM))
    assert [(each["step"], each["stopped"]) for each in results] == [(1, True)]


@pytest.mark.sweep
@pytest.mark.parametrize(("before", "now"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.sweep)])
@pytest.mark.fault("a machine is lost", "the run goes on with fewer processes, or more")
def test_a_run_goes_on_with_another_number_of_processes_and_says_so(
    tmp_path: Path, pool: Pool, before: int, now: int
) -> None:
    """An axis of -1 takes the machines that are left."""
    tree = made(tmp_path, **{"parallel.dp_shard": -1})
    assert pool.run(before, struck, tree, 0, 2, int(signal.SIGTERM))[0]["step"] == 2
    ended = pool.run(now, struck, tree, 0, -1, 0)[0]
    meshes = {2: "pp=2", 4: "pp=2 x dp_shard=2"}
    assert f"was {before} processes, now {now}: {meshes[now]} (was {meshes[before]})" in ended["said"]
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2, 3, 4]


def cut_short(tree: dict[str, Any], rank: int, nth: int) -> dict[str, Any]:
    """A run in which a process gets SIGTERM as it begins to evaluate its `nth` batch; 0 for never."""
    torch.set_num_threads(1)
    said, evaluate, calls = io.StringIO(), Pipeline.evaluate, 0

    def strike(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.number:
                os.sched_yield()
        return evaluate(pipe, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), Stop() as stop:
        close = dist.destroy_process_group  # the world itself is the pool's to close
        patch.setattr(dist, "destroy_process_group", lambda group=None: group and close(group))
        patch.setattr(Pipeline, "evaluate", strike)
        last = run(preflight(TrainConfig.model_validate(tree), NEWEST), stop)
    ended = {"step": last.number, "stopped": last.stopped, "ended": last.ended}
    return {**ended, "calls": calls, "said": said.getvalue()}


def held_out(folder: Path) -> dict[int, float]:
    evaluated = [(row["step"], row["held_out_loss"]) for row in metrics(folder) if "held_out_loss" in row]
    assert len(evaluated) == len(dict(evaluated)), f"a step has two rows: {evaluated}"
    return dict(evaluated)


@pytest.mark.fault("the whole job is ended", "SIGTERM of a rank in an evaluation, which is cut short")
def test_a_signal_cuts_an_evaluation_short_and_the_run_that_goes_on_begins_with_it(
    tmp_path: Path, pool: Pool
) -> None:
    """0.5.0: the run evaluated to the end first, beyond any grace period."""
    keys = {"data.held_out": 0.5, "train.batch_size": 2, "train.early_stop": {"patience": 9}}
    tree, whole = made(tmp_path, **keys), made(tmp_path / "whole", **keys)
    undisturbed = pool.run(2, cut_short, whole, 0, 0)[0]
    batches = undisturbed["calls"] // 3  # of the evaluations after steps 0, 2 and 4
    assert batches > 3
    results = pool.run(2, cut_short, tree, 1, batches + 2)
    assert [(each["step"], each["stopped"]) for each in results] == [(2, True)] * 2
    assert [each["calls"] for each in results] == [batches + 2] * 2
    assert results[0]["ended"].startswith("after step 2 of 4: rank 1 on ")
    assert held_out(tmp_path).keys() == {0}
    again = pool.run(2, cut_short, tree, 0, 0)[0]
    assert (again["step"], again["stopped"]) == (4, False)
    assert held_out(tmp_path) == held_out(tmp_path / "whole")
    assert_same_tensors(checkpoint(tmp_path / "whole", 4), checkpoint(tmp_path, 4))
    states = [read_state(checkpoint(folder, 4)) for folder in (tmp_path, tmp_path / "whole")]
    assert states[0].best == states[1].best
    assert not any(state.unevaluated for state in states)


def test_a_signal_in_the_first_evaluation_ends_the_run_after_a_step(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(2, cut_short, made(tmp_path), 0, 1)
    assert [(each["step"], each["stopped"]) for each in results] == [(1, True)] * 2
    assert not read_state(checkpoint(tmp_path, 1)).unevaluated
