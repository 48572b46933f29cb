"""Runs that are killed anywhere, any number of times, and resumed on another world, train on the same rows.

A kill is an exception at a strike point that nothing catches. What the output folder holds at that moment is
copied, and put back once the run has unwound: what a process that is gone would have left.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim import AdamW

from penstock import Pipeline
from penstock.errors import ConfigError
from penstock.models.weights import folder as weights_folder
from penstock.train import skips
from penstock.train.between_steps import Checkpoints, HeldOutEvaluation
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.data.rows import HeldRows
from penstock.train.data.streaming import Position, RowStream
from penstock.train.preflight import preflight
from penstock.train.records.metrics import Metrics, without_replaced_rows
from penstock.train.run import run
from penstock.train.settings import is_first
from penstock.train.state import read_state
from support.pool import Pool
from support.tiny import assert_same_tensors, checkpoint, config, metrics

STEPS, EVERY = 12, 3
Rows = list[Any]  # of a step: numbers, or the tokens of a stream's


class Killed(BaseException):
    pass


class Strike(NamedTuple):
    """Where a kill may strike: before a function is called, or after it has returned."""

    owner: Any
    name: str
    after: bool = False


# some of the places are private: a kill comes within a public call
STRIKES = {
    "data": Strike(Data, "batch"),
    "step": Strike(Pipeline, "step"),
    "gradients": Strike(Pipeline, "step", after=True),
    "optimizer": Strike(AdamW, "step", after=True),
    "row": Strike(Metrics, "write"),
    "after row": Strike(Metrics, "write", after=True),
    "evaluation": Strike(HeldOutEvaluation, "evaluation"),
    "checkpoint": Strike(Checkpoints, "save"),
    "file": Strike(weights_folder, "_flush"),
    "publish": Strike(weights_folder, "_publish"),
    "published": Strike(weights_folder, "_publish", after=True),
    "prune": Strike(Checkpoints, "_prune", after=True),
    "spike": Strike(skips, "load_checkpoint"),
    "rewind": Strike(skips, "load_checkpoint", after=True),
}


class World(NamedTuple):
    ranks: int
    microbatches: int
    schedule: str = "1f1b"


WORLDS = (World(1, 2), World(2, 2), World(2, 4, "gpipe"), World(2, 2, "zb_h1"))


class Kill(NamedTuple):
    """At the `nth` call of a strike point; the next attempt runs on `world`."""

    at: str
    nth: int
    world: World


# ---- The data of the runs


def write_text(folder: Path, rows: int = 30) -> None:
    draw = random.Random(7)
    (folder / "text").write_bytes(bytes(draw.randrange(33, 120) for _ in range(16 * rows)))


def write_documents(folder: Path, name: str, count: int) -> str:
    draw = random.Random(name)
    texts = [
        "".join(chr(draw.randrange(40, 110)) for _ in range(draw.randrange(4, 30))) for _ in range(count)
    ]
    (folder / name).write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(folder / name)


def documents(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"data.path": write_documents(folder, "a.jsonl", 40), "data.held_out": 0.2, **keys}


def mixture(folder: Path) -> dict[str, Any]:
    sources = [
        {"path": write_documents(folder, "a.jsonl", 60), "weight": 3},
        {"path": write_documents(folder, "b.jsonl", 40), "weight": 1, "epochs": 1},
    ]
    return {"data.path": None, "data.mixture": sources, "data.packing": "none", "data.held_out": 0.2}


def streaming(folder: Path) -> dict[str, Any]:
    validation = {"path": write_documents(folder, "held.jsonl", 40)}
    return documents(folder, **{"data.streaming": {"buffer": 5}, "data.validation": validation})


def spiky(folder: Path, then: str) -> dict[str, Any]:
    """Rows of one letter, and a few others, whose losses are spikes once the letter is learned."""
    rows = [bytes(range(128, 144)) if number % 13 == 6 else b"a" * 16 for number in range(90)]
    (folder / "text").write_bytes(b"".join(rows))
    spike = {"factor": 1.5, "window": 3, "then": then}
    return {"train.steps": 18, "train.spike": spike, "optimizer.learning_rate": 3e-2, "data.held_out": 0.1}


RAMP = [{"until": 2, "batch_size": 4, "sequence_length": 8}, {"until": 5, "batch_size": 6}]
MODES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "epochs": lambda folder: {},
    "none": lambda folder: documents(folder, **{"data.packing": "none"}),
    "sequential": lambda folder: documents(folder, **{"data.packing": "sequential"}),
    "best_fit": lambda folder: documents(folder, **{"data.packing": "best_fit"}),
    "mixture": mixture,
    "streaming": streaming,
    "streamed documents": lambda folder: streaming(folder) | {"data.packing": "sequential"},
    "ramp": lambda folder: {"train.ramp": RAMP, "train.batch_size": 12, "train.accumulate": 2},
    "skip": lambda folder: spiky(folder, "skip"),
    "rewind": lambda folder: spiky(folder, "rewind"),
}


def made_of(folder: Path, mode: str, world: World) -> TrainConfig:
    options: dict[str, Any] = {"steps": STEPS, "checkpoint_every": EVERY, "checkpoint_background": False}
    options |= {"evaluate_every": 4, "log_every": 100}
    config(folder)  # it writes a text
    write_text(folder)
    keys = MODES[mode](folder)
    keys |= {"output.keep": {"last": 2}, "pipeline.ranks": world.ranks, "pipeline.schedule": world.schedule}
    keys |= {"pipeline.microbatches": world.microbatches}
    text = (folder / "text").read_bytes()
    found = config(folder, keys={"data.held_out": 0.2, **keys}, **options)
    (folder / "text").write_bytes(text)
    return found


# ---- Attempts


def attempt(folder: Path, made: TrainConfig, history: dict[int, Rows], kill: Kill | None = None) -> bool:
    """Run to the end, or to the kill; whether it struck. After its last checkpoint a run has nothing to do.

    history: gets the rows of each step as they are taken
    """
    gone = folder / "gone"
    with pytest.MonkeyPatch.context() as patch:
        record(patch, history)
        if kill is not None:
            strike(patch, kill, folder / "out", gone)
        try:
            run(preflight(made, NEWEST))
        except BaseException as error:
            done = isinstance(error, ConfigError) and "nothing is left to do" in error.rule
            if not gone.exists() and not (done and history):  # killed after its last checkpoint
                raise
    return put_back(folder)


def put_back(folder: Path) -> bool:
    """Let the output folder be as it was at the kill; whether there was one."""
    gone = folder / "gone"
    if not gone.exists():
        return False
    shutil.rmtree(folder / "out")
    gone.rename(folder / "out")
    owner = folder / "out" / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"ended": True}))  # its process is this one
    return True


# _chosen: the rows of a step by their numbers, which a batch does not have
def record(patch: pytest.MonkeyPatch, history: dict[int, Rows]) -> None:
    batch, take, streamed = Data.batch, RowStream.take, list[Rows]()

    def taking(stream: RowStream, first: int, count: int) -> tuple[HeldRows, Position]:
        rows, position = take(stream, first, count)
        streamed[:] = [[[piece.ids.tolist() for piece in row] for row in rows]]
        return rows, position

    def recording(data: Data, step: int) -> LoadedBatch:
        found = batch(data, step)
        history[step] = streamed[0] if data.stream is not None else [*data._chosen(step)]
        return found

    patch.setattr(RowStream, "take", taking)
    patch.setattr(Data, "batch", recording)


def strike(patch: pytest.MonkeyPatch, kill: Kill, output: Path, gone: Path) -> None:
    owner, name, after = STRIKES[kill.at]
    original, left, dead = getattr(owner, name), [kill.nth], list[bool]()

    @wraps(original)  # torch marks an optimizer's step
    def struck(*arguments: Any, **options: Any) -> Any:
        if dead:
            raise Killed  # nothing follows
        left[0] -= 1
        if left[0] == 0 and not after:
            die()
        result = original(*arguments, **options)
        if left[0] == 0:
            die()
        return result

    def die() -> None:
        dead.append(True)
        if is_first():
            shutil.copytree(output, gone, symlinks=True)
        raise Killed

    patch.setattr(owner, name, struck)


class Undisturbed(NamedTuple):
    folder: Path
    history: dict[int, Rows]


_undisturbed: dict[tuple[str, World], Undisturbed] = {}


def undisturbed(base: Path, mode: str, world: World) -> Undisturbed:
    """The run that nobody kills; each is run once."""
    if (mode, world) not in _undisturbed:
        folder = base / f"whole {mode} {len(_undisturbed)}"
        folder.mkdir()
        history: dict[int, Rows] = {}
        assert not attempt(folder, made_of(folder, mode, world), history)
        _undisturbed[mode, world] = Undisturbed(folder, history)
    return _undisturbed[mode, world]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row, _ in without_replaced_rows((row, None) for row in metrics(folder)) if "loss" in row]


def check(base: Path, mode: str, world: World, kills: list[Kill]) -> int:
    """Run with these kills, and compare with the run that nobody kills; how many kills struck."""
    folder = Path(tempfile.mkdtemp(prefix="killed-", dir=base))  # hypothesis seeds what is random
    history: dict[int, Rows] = {}
    first, worlds, struck = world, {world}, 0
    for kill in kills:
        if not attempt(folder, made_of(folder, mode, world), history, kill):
            break
        struck += 1
        world = kill.world
        worlds.add(world)
    else:
        assert not attempt(folder, made_of(folder, mode, world), history)
    whole = undisturbed(base, mode, first)
    last = max(whole.history)
    assert {step: sorted(rows) for step, rows in history.items()} == {
        step: sorted(rows) for step, rows in whole.history.items()
    }
    states = [read_state(checkpoint(each, last)) for each in (folder, whole.folder)]
    places = [((state.data or {})["rows"], state.skipped, state.seen.left_out) for state in states]
    assert places[0] == places[1]
    found, expected = rows_of(folder), rows_of(whole.folder)
    assert [row["step"] for row in found] == list(range(1, last + 1))
    for key in ("rows", "tokens", "learning_rate", "skipped_steps", "rows_left_out"):
        assert [row.get(key) for row in found] == [row.get(key) for row in expected], key
    if worlds == {first}:
        assert_same_tensors(checkpoint(folder, last), checkpoint(whole.folder, last))
        assert [row["loss"] for row in found] == [row["loss"] for row in expected]
    shutil.rmtree(folder)
    return struck


# ---- The tests


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("epochs", [("publish", 2, 0), ("optimizer", 5, 0), ("after row", 2, 0)]),
        ("streamed documents", [("gradients", 5, 2), ("data", 4, 1)]),
        pytest.param("mixture", [("row", 7, 1), ("file", 1, 2)], marks=pytest.mark.sweep),
        pytest.param("ramp", [("step", 9, 3), ("checkpoint", 2, 2)], marks=pytest.mark.sweep),
        pytest.param(
            "rewind", [("spike", 1, 0), ("rewind", 1, 0), ("optimizer", 2, 0)], marks=pytest.mark.sweep
        ),
    ],
)
def test_a_run_that_is_killed_trains_on_each_row_as_one_that_is_not(
    tmp_path: Path, mode: str, kills: list[tuple[str, int, int]]
) -> None:
    """Where all attempts are on one world the weights are equal, bit for bit."""
    sequence = [Kill(at, nth, WORLDS[world]) for at, nth, world in kills]
    _undisturbed.clear()
    assert check(tmp_path, mode, WORLDS[0], sequence) == len(kills)
    _undisturbed.clear()


KILLS = st.builds(Kill, st.sampled_from(sorted(STRIKES)), st.integers(1, 14), st.sampled_from(WORLDS))


@pytest.mark.sweep
@settings(max_examples=50, deadline=None, derandomize=True, database=None,
          suppress_health_check=[*HealthCheck])  # fmt: skip
@given(
    mode=st.sampled_from(sorted(MODES)),
    world=st.sampled_from(WORLDS),
    kills=st.lists(KILLS, min_size=1, max_size=5),
    same=st.booleans(),
)
def test_fifty_sequences_of_kills(
    tmp_path_factory: pytest.TempPathFactory, mode: str, world: World, kills: list[Kill], same: bool
) -> None:
    """same: whether all attempts are on one world."""
    torch.set_num_threads(1)
    if same:
        kills = [kill._replace(world=world) for kill in kills]
    check(tmp_path_factory.getbasetemp(), mode, world, kills)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["epochs", "best_fit", "streaming", "rewind"])
def test_a_killed_run_goes_on_over_other_meshes(pool: Pool, tmp_path: Path, mode: str) -> None:
    """One process; then two pipelines of two ranks; then two of one rank; then one process."""
    history: dict[int, Rows] = {}
    made = made_of(tmp_path, mode, WORLDS[0])
    whole = undisturbed(tmp_path, mode, WORLDS[0])
    assert attempt(tmp_path, made, history, Kill("step", 5, WORLDS[0]))
    meshes: list[tuple[int, dict[str, int], Kill]] = [
        (2, {"dp_shard": -1}, Kill("step", 4, WORLDS[0])),
        (1, {"dp_replicate": -1}, Kill("evaluation", 1, WORLDS[0])),
    ]
    for ranks, axes, kill in meshes:
        tree = made.model_dump(mode="json") | {"parallel": axes}
        tree["pipeline"] |= {"ranks": ranks, "microbatches": 1}
        for each in pool.run(2 * ranks, killed_on_a_mesh, tree, str(tmp_path), kill):
            history |= each
        pool.close()  # what a killed run holds is not freed
        assert put_back(tmp_path)
    assert not attempt(tmp_path, made, history)
    assert {step: sorted(rows) for step, rows in history.items()} == {
        step: sorted(rows) for step, rows in whole.history.items()
    }
    last = max(history)
    states = [read_state(checkpoint(each, last)) for each in (tmp_path, whole.folder)]
    assert (states[0].data or {})["rows"] == (states[1].data or {})["rows"]
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, last + 1))
    for row, other in zip(rows_of(tmp_path), rows_of(whole.folder), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=0.02)  # Adam takes signs at first
    _undisturbed.clear()


def killed_on_a_mesh(tree: dict[str, Any], folder: str, kill: Kill) -> dict[int, Rows]:
    """The rows of the steps of this rank's attempt, which all ranks end at the same point."""
    torch.set_num_threads(1)
    history: dict[int, Rows] = {}
    with pytest.MonkeyPatch.context() as patch:
        record(patch, history)
        strike(patch, kill, Path(folder) / "out", Path(folder) / "gone")
        with pytest.raises(Killed):
            run(preflight(TrainConfig.model_validate(tree), NEWEST))
    return history
