"""The recovery protocol: who may write a run's folder, when a checkpoint is whole, what a restart reads.

Two jobs of three ranks each share a folder. Both resume the newest checkpoint, the second one may come at any
moment, and up to two ranks are killed at any moments. In no interleaving does a restart read half a
checkpoint, or an older one than was whole before, and no two jobs write.

The first part explores every interleaving of a model, whose steps are those of the file system. The second
part runs the real functions on a real folder in threads that take turns there, in drawn orders, and the model
is held to their steps. Each finds the bugs that are put in on purpose.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import CheckpointError, PenstockError, RunError
from penstock.models.weights import folder as folders
from penstock.models.weights.folder import check_contents, check_lengths, write_folder
from penstock.reading import read_json
from penstock.runtime.health import notes
from penstock.runtime.ranks import Ranks
from penstock.train import checkpoints, owner
from penstock.train.checkpoints import (
    Start,
    check_unchanged,
    checkpoint_folder,
    checkpoints_in,
    newest_checkpoint,
    prune,
    remove_unfinished,
)
from penstock.train.config.output import KeepSection
from penstock.train.owner import OWNER, owned
from penstock.train.state import RunState
from support.covering import every
from support.protocol import BEGINNINGS, BUGS, BrokenError, explore, program
from support.ranks import GatheringRanks

RANKS = 3
SEEDS = 10


# ---- The model


@pytest.mark.parametrize("beginning", every(2, BEGINNINGS))
@pytest.mark.fault("two jobs and one output folder", "every interleaving of a model, two killed")
def test_no_interleaving_loses_a_whole_checkpoint_or_reads_a_half_one(beginning: str) -> None:
    """0.5.0: nobody owned the folder: two jobs wrote it, and removed each other's checkpoints."""
    assert explore(BEGINNINGS[beginning], crashes=2) > 10_000


@pytest.mark.parametrize("bug", BUGS)
def test_the_model_finds_a_bug(bug: str) -> None:
    beginning, found = BUGS[bug]
    with pytest.raises(BrokenError, match=found):
        explore(BEGINNINGS[beginning], crashes=2, bug=bug)


# ---- The real functions


class Killed(BaseException):
    """The process is gone: it does nothing more to any file."""


class Process(threading.Thread):
    """A rank: it stands still before each of its steps until the scheduler lets it go on."""

    def __init__(self, scheduler: Scheduler, job: str, rank: int, work: Callable[[], None]) -> None:
        super().__init__(name=f"{job}{rank}", daemon=True)
        self.job, self.rank, self.killed, self.ended = job, rank, False, False
        self.step = "start"
        self.ready: Callable[[], bool] = lambda: True
        self._turn, self.scheduler, self._work = threading.Semaphore(0), scheduler, work
        self.error: BaseException | None = None

    def run(self) -> None:
        self._turn.acquire()
        try:
            if not self.killed:
                self._work()
        except Killed:
            pass
        except (PenstockError, OSError) as error:
            self.error = error
        finally:
            self.ended = True
            self.scheduler.back.release()

    def pause(self, step: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Called in the thread, before a step."""
        if self.killed:
            raise Killed
        self.step, self.ready = step, ready
        self.scheduler.back.release()
        self._turn.acquire()
        if self.killed:
            raise Killed

    def go(self) -> None:
        """Called by the scheduler: until the next step."""
        self._turn.release()
        self.scheduler.back.acquire()


class Scheduler:
    """Lets one process at a time take a step. steps: the names of what was done, by process"""

    def __init__(self, output: Path, draw: random.Random, crashes: int) -> None:
        self.back = threading.Semaphore(0)
        self.output, self._draw, self._crashes = output, draw, crashes
        self.processes: list[Process] = []
        self.owners: set[str] = set()
        self.steps: list[tuple[str, str]] = []

    def run(self, check: Callable[[], None]) -> None:
        for process in self.processes:
            process.start()
        last = self.processes[0]
        try:
            while ready := [p for p in self.processes if not p.ended and p.ready()]:
                stays = last in ready and self._draw.random() < 0.8  # long runs of one process, as in life
                last = last if stays else self._draw.choice(ready)
                if self._crashes and self._draw.random() < 0.02:
                    self._crashes -= 1
                    last.killed = True
                else:
                    self.steps.append((last.name, last.step))
                step = last.step
                last.go()
                if step in ("own", "settle", "rename", "unlink"):
                    check()
        finally:
            for process in self.processes:
                process.killed = True
                while not process.ended:
                    process.go()
                process.join()

    def job(self, name: str) -> list[Process]:
        return [process for process in self.processes if process.job == name]


class Meeting(GatheringRanks):
    """The ranks of a job, which gather values, or raise where one of them is gone."""

    def __init__(self, scheduler: Scheduler, job: str, rank: int, table: dict[tuple[int, int], Any]) -> None:
        self.index, self.count = rank, RANKS
        self._scheduler, self._job, self._table, self._round = scheduler, job, table, 0

    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        self._table[self._round, self.index] = value
        keys = [(self._round, rank) for rank in range(RANKS)]
        peers = self._scheduler.job(self._job)

        def ready() -> bool:
            missing = [rank for rank in range(RANKS) if keys[rank] not in self._table]
            return not missing or any(peers[rank].ended for rank in missing)

        _me().pause("gather", ready)
        if any(key not in self._table for key in keys):
            raise RunError("a rank", "it is gone", "See why")
        return [self._table[key] for key in keys]


def _me() -> Process:
    process = threading.current_thread()
    assert isinstance(process, Process)
    return process


def _paused(patch: pytest.MonkeyPatch, module: Any, name: str, step: str) -> None:
    """Calls of a process's thread are a step."""
    called = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(threading.current_thread(), Process):
            _me().pause(step)
        return called(*args, **kwargs)

    patch.setattr(module, name, call)


def _removed(path: Path, ignore_errors: bool = False) -> None:
    """shutil.rmtree, of which each file is a step."""
    with suppress(OSError) if ignore_errors else nullcontext():
        for name in sorted(os.listdir(path)):
            if isinstance(threading.current_thread(), Process):
                _me().pause("unlink")
            os.unlink(path / name)
        os.rmdir(path)


# the points at which processes take turns, and a machine for each
@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes files pauses before it does so; an owner lives as long as its process here."""

    def here() -> dict[str, Any]:
        return {"host": "here", "pid": ord(_me().job), "began": 1, "machine": "one"}

    def began(pid: int) -> int | None:
        return None if _me().scheduler.job(chr(pid))[0].killed else 1

    def settle(seconds: float) -> None:  # no other stands between its look and its write for so long
        others = _me().scheduler.processes
        _me().pause("settle", lambda: all(p.step != "own" or p.ended for p in others))

    monkeypatch.setattr(owner, "_here", here)
    monkeypatch.setattr(notes, "machine", lambda: "one")
    monkeypatch.setattr(notes, "began", began)
    monkeypatch.setattr(notes, "is_visible", lambda pid: True)
    monkeypatch.setattr(owner, "time", SimpleNamespace(sleep=settle, monotonic=time.monotonic))
    monkeypatch.setattr(owner.Owner, "_beat", lambda self: None)
    monkeypatch.setattr(folders, "_flush", lambda path: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(shutil, "rmtree", _removed)
    for module, name, step in (
        (owner, "_create", "own"), (owner, "_replace", "own"),
        (Path, "mkdir", "mkdir"), (Path, "rename", "rename"), (Path, "write_text", "write"),
    ):  # fmt: skip
        _paused(monkeypatch, module, name, step)


def _work(scheduler: Scheduler, job: str, rank: int, table: dict[tuple[int, int], Any], again: bool) -> None:
    """What a rank of `penstock train --resume` does with the folder, by the functions that it calls there."""
    output, meeting = scheduler.output, Meeting(scheduler, job, rank, table)
    _me().pause("look")
    seen: frozenset[Path] | None = frozenset(path for _, path in checkpoints_in(output))
    path = newest_checkpoint(output).path
    if again and job == "A":  # it is told to go on from the first one, though there is a second
        seen, path = None, checkpoint_folder(output, 1)
    assert path is not None
    start = Start(path, True, RunState(_step(path)), checkpoints=seen)

    def train(mine: owner.Owner | None) -> None:
        if mine is not None:
            check_unchanged(output, start)
            with suppress(OSError):
                remove_unfinished(output)
        if len(set(meeting.gather(start.done))) > 1:
            raise RunError("ranks", "they start elsewhere", "Start again")
        assert_whole(start.checkpoint)
        step = start.done + 1
        write_folder(checkpoint_folder(output, step), lambda to: _part(to, job, rank, step), meeting)
        if mine is not None:
            mine.check()
            with suppress(OSError):
                prune(checkpoint_folder(output, step), "run", KeepSection(last=1))

    if rank == 0:
        with owned(output, "run", lambda _: None) as mine:
            mine.settle()
            scheduler.owners.add(job)
            train(mine)
            scheduler.owners.remove(job)
    else:
        train(None)


def _step(path: Path) -> int:
    return int(read_json(path / "state.json")["step"])


def _part(to: Path, job: str, rank: int, step: int) -> None:
    (to / f"part-{rank}").write_text(job)
    if rank == 0:
        state = f'{{"step": {step}, "run": "run", "config": {{}}, "versions": {{}}}}'
        (to / "state.json").write_text(state)


def _parts(to: Path, step: int) -> None:
    for rank in range(RANKS):
        _part(to, "0", rank, step)


def assert_whole(path: Path | None) -> None:
    """A checkpoint whose parts are what was written, all by one job."""
    assert path is not None
    check_lengths(path)
    for rank in range(RANKS):
        check_contents(path, f"part-{rank}")
    assert len({(path / f"part-{rank}").read_text() for rank in range(RANKS)}) == 1


Play = Callable[..., Scheduler]


@pytest.fixture
def play(tmp_path: Path, in_turns: None) -> Play:
    """Jobs in a drawn order; the invariants hold after each of their steps."""

    def play(seed: int, *, jobs: str = "AB", crashes: int = 2, again: bool = False) -> Scheduler:
        output = tmp_path / f"{seed}-{again}"
        for step in (1, 2)[: 1 + again]:
            write_folder(checkpoint_folder(output, step), partial(_parts, step=step), Ranks())
        (output / OWNER).write_text('{"run": "run", "ended": true}')
        scheduler = Scheduler(output, random.Random(seed), crashes)
        for job in jobs:
            table: dict[tuple[int, int], Any] = {}
            for rank in range(RANKS):
                work = partial(_work, scheduler, job, rank, table, again)
                scheduler.processes.append(Process(scheduler, job, rank, work))
        scheduler.run(Invariants(scheduler).check)
        return scheduler

    return play


class Invariants:
    """One job writes; a restart finds a whole checkpoint at any time, and never an older one than before."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._output, self._best = scheduler, scheduler.output, 0

    def check(self) -> None:
        firsts = [self._scheduler.job(job)[0] for job in self._scheduler.owners]
        assert sum(not (first.killed or first.ended) for first in firsts) <= 1, "two jobs write"
        path = newest_checkpoint(self._output).path
        assert_whole(path)
        assert path is not None
        assert _step(path) >= self._best, f"a restart would read step {_step(path)}, older than {self._best}"
        self._best = _step(path)


@pytest.mark.parametrize("again", [False, True], ids=BEGINNINGS)
def test_the_real_functions_keep_to_the_protocol(play: Play, again: bool) -> None:
    for seed in range(SEEDS):
        play(seed, again=again)


@pytest.mark.sweep
@pytest.mark.parametrize("again", [False, True], ids=BEGINNINGS)
@pytest.mark.fault("two jobs and one output folder", "280 orders of the real functions, two killed")
def test_the_real_functions_keep_to_the_protocol_in_many_orders(play: Play, again: bool) -> None:
    for seed in range(SEEDS, 15 * SEEDS):
        play(seed, again=again)


def broken_protocol(play: Play) -> str:
    """What the drawn orders find."""
    for seed in range(10 * SEEDS):
        try:
            play(seed, again=bool(seed % 2))
        except (AssertionError, CheckpointError) as error:
            return f"{error}"
    return "nothing"


# _alive is broken on purpose
def test_the_drawn_orders_find_a_takeover_of_a_live_owner(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_alive", lambda *_: "")
    assert "two jobs write" in broken_protocol(play)


def test_the_drawn_orders_find_that_hidden_older_folders_do_not_count(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: killed between two renames, a run started from the beginning, and its next checkpoint of that
    step removed the only whole one."""
    monkeypatch.setattr(checkpoints, "displaced", lambda *_: [])
    assert "older than 2" in broken_protocol(play)


def test_the_model_has_the_steps_of_the_real_functions(play: Play) -> None:
    """Of one job alone, on its first rank: what it does to files, in order."""
    steps = [step for name, step in play(0, jobs="A", crashes=0).steps if name == "A0"]
    real = [step for step in steps if step in ("own", "mkdir", "rename", "write")]
    assert real == [each for step in program() for each in step.real]
