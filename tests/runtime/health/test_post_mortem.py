"""Ranks that die, sleep or raise: what the others say, that all stop in time, and what is left of the step.

The steps are of 1F1B with 6 microbatches. On rank 2 of 4 that is

    warm-up 2F0 2F1 | steady 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 | drain 2B4 2B5
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule import Schedule, build
from support import jobs_stalls
from support.covering import some
from support.faults import Row, named_cause
from support.jobs_stalls import MICROBATCHES, Case
from support.pool import alive

pytestmark = pytest.mark.xdist_group("stalls")  # one fixture for all

# name: deed, op, ranks, the phase that the op is in
CASES = {
    "killed in warm-up": ("kill", "2F1", 4, "warm-up"),
    "killed in the steady phase": ("kill", "1F3", 3, "steady phase"),
    "killed in the drain": ("kill", "2B4", 4, "drain"),
    "asleep": ("stop", "1F3", 3, "steady phase"),
    "raises in forward": ("raise", "2F3", 4, "steady phase"),
    "raises in backward": ("raise", "2B1", 4, "steady phase"),
    "raises in the loss": ("loss", "2F2", 3, "steady phase"),
}
# in the default run: each deed, and a death before the first gradient
DEFAULT = ("killed in warm-up", "asleep", "raises in backward", "raises in the loss")
KILLED = [name for name in CASES if name.startswith("killed")]
RAISING = [name for name in CASES if name.startswith("raises")]
# those that hung, or named no rank: what happens to a rank, where, and ranks
WORSE = {
    "cut off": ("cut", "1F3", 3),
    "on another node": ("node", "0F3", 3),
    "exits": ("exit", "between steps", 2),
    "does not come": ("stop", "away", 2),
    "joins": ("stop", "joining", 2),
    "shakes hands": ("stop", "handshake", 2),
    "makes groups": ("stop", "groups", 2),
    "makes the writer's group": ("stop", "writer", 2),
}
HOST = socket.gethostname()
# by name, in the table of faults
WHERE = {
    "cut off": "it is cut off from the store (a proxy) and from its channels: a partition",
    "on another node": "it is killed on another machine, which held the store",
    "exits": "its process exits between steps",
    "does not come": "it does not come to the start",
    "joins": "it stops as it joins",
    "shakes hands": "it stops in the handshake",
    "makes groups": "it stops as groups are made",
    "makes the writer's group": "it stops as the writer's group is made",
}
TIMEOUT = 4.0
LATER = 8.0  # in start-up ranks are further apart
SPARE = 6.0  # seconds, beyond the deadline, for ranks to write what they know and end


def faults(kind: str, names: Iterable[str]) -> list[Any]:
    """The names as parameters, each with its row in the table of faults."""
    rows = {name: pytest.mark.fault(kind, WHERE.get(name, name)) for name in names}
    return [pytest.param(name, marks=[row, *_sweep(name)]) for name, row in rows.items()]


def _sweep(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in DEFAULT else [pytest.mark.sweep]


@dataclass(frozen=True)
class Outcome:
    """errors: by rank"""

    case: Case
    culprit: int
    phase: str
    errors: Mapping[int, dict[str, Any]]

    @property
    def survivors(self) -> dict[int, dict[str, Any]]:
        return {rank: words for rank, words in self.errors.items() if rank != self.culprit}

    def trace(self, rank: int) -> list[dict[str, Any]]:
        """The ops in the file that the rank wrote, in the order in which they ran."""
        text = (Path(self.case.folder) / "stalled" / f"rank-{rank}.json").read_text()
        slices = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
        return sorted(slices, key=lambda event: float(event["ts"]))


def schedule(ranks: int) -> Schedule:
    return build("1f1b", ranks=ranks, microbatches=MICROBATCHES)


class Outcomes(dict[str, Outcome]):
    """Of `CASES`. The first that is asked for runs: all of `DEFAULT` at once, or all others."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, name: str) -> Outcome:
        together = [other for other in CASES if (other in DEFAULT) is (name in DEFAULT)]
        ran = run_all({each: CASES[each][:3] for each in together}, self._folders)
        self.update({each: replace(outcome, phase=CASES[each][-1]) for each, outcome in ran.items()})
        return self[name]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory)


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All of `WORSE`, at once."""
    return run_all(WORSE, tmp_path_factory, LATER)


def run_all(
    given: Mapping[str, tuple[str, str, int]], folders: pytest.TempPathFactory, timeout: float = TIMEOUT
) -> dict[str, Outcome]:
    cases = {name: Case(str(folders.mktemp("case")), *case, timeout) for name, case in given.items()}
    command = [sys.executable, jobs_stalls.__file__, *map(str, cases.values())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # torch asks the name server for the name behind each address, 5 s long where the answer is lost
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"
    subprocess.run(command, env=environment, check=True, timeout=100)
    return {name: outcome(case) for name, case in cases.items()}


def outcome(case: Case) -> Outcome:
    files = {rank: Path(case.folder) / f"rank-{rank}.json" for rank in range(case.ranks)}
    errors = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    return Outcome(case, int(case.op[0]) if case.op[0].isdecimal() else 1, "", errors)


@pytest.mark.parametrize("name", faults("one of three or four ranks, in an op", CASES))
def test_all_ranks_stop_in_time(outcomes: Outcomes, row: Row, name: str) -> None:
    found = outcomes[name]
    pids = [int(file.read_text()) for file in Path(found.case.folder).glob("rank-*.pid")]
    assert len(pids) == found.case.ranks
    assert not [pid for pid in pids if alive(pid)]
    struck = Path(found.case.folder) / "struck"
    began = float(struck.read_text()) if struck.exists() else found.errors[found.culprit]["time"]
    assert len(found.survivors) == found.case.ranks - 1
    waited = TIMEOUT if found.case.deed == "stop" else 0  # else their connections tell them
    seconds = max(words["time"] for words in found.survivors.values()) - began
    assert seconds < waited + SPARE
    row.note(seconds=seconds, cause=named_cause(found.survivors[min(found.survivors)]["text"]))


@pytest.mark.parametrize("name", some(CASES, *DEFAULT))
def test_every_other_rank_names_itself_its_op_its_peer_and_the_culprit(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    for rank, words in found.survivors.items():
        assert words["kind"] in ("PeerLostError", "StalledPeerError")
        text, last = words["text"], " ".join(words["last_ops"])
        assert words["rank"] == rank
        peer = "the other ranks" if words["peer"] is None else f"rank {words['peer']}"
        waiting = f"rank {rank} waiting for {words['op']} from {peer}"
        assert text.startswith(f"{waiting}: rank {found.culprit} on {HOST} ")
        assert last
        assert re.search(
            rf"\n  rank {rank} waiting for .*; \d+ of 12 ops done, the last {last}; timeline", text
        )
        assert words["peer_report"] in text
        assert words["peer_report"].startswith(f"rank {found.culprit} last reported ")
        assert f"in {found.case.op}, {found.phase}; " in words["peer_report"]


@pytest.mark.parametrize("name", some(KILLED, *DEFAULT))
def test_a_killed_rank_is_named_by_all(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    for words in found.survivors.values():
        assert re.search(
            rf"rank {found.culprit} on {HOST} "
            "(failed first: it )?(died or closed its connection|ended without closing its pipeline)",
            words["text"],
        )


def test_a_sleeping_rank_is_named_when_the_deadline_is_over(outcomes: Outcomes) -> None:
    found = outcomes["asleep"]
    stalled = [words for words in found.survivors.values() if words["kind"] == "StalledPeerError"]
    assert stalled
    for words in stalled:
        assert f"rank {found.culprit} on {HOST} has been silent for" in words["text"]
        assert "longer than the timeout of 4 s" in words["text"]
        assert TIMEOUT - 0.5 < words["waited"] < TIMEOUT + 2
        silent = re.search(r"last reported (\d+\.\d) s ago", words["peer_report"])
        assert silent is not None
        assert float(silent[1]) > TIMEOUT - jobs_stalls.REPORTED - 1


@pytest.mark.parametrize("name", some(RAISING, *DEFAULT))
def test_a_rank_that_raises_names_its_op_and_all_others_the_reason(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    op, own = found.case.op, found.errors[found.culprit]
    program = [str(op) for op in schedule(found.case.ranks).programs[found.culprit]]
    assert own["account"].startswith(f"in {op}, {found.phase}; {program.index(op)} of 12 ops done, the last ")
    reason = f"rank {found.culprit} on {HOST} failed first: {op}: ValueError: this op gave up"
    assert all(reason in words["text"] for words in found.survivors.values())


@pytest.mark.parametrize("name", some(CASES, *DEFAULT))
def test_the_timeline_so_far_is_left_by_all_that_could(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    programs = schedule(found.case.ranks).programs
    for rank, words in found.errors.items():
        program = [str(op) for op in programs[rank]]
        ran = [event["name"] for event in found.trace(rank)]
        assert ran
        assert ran == program[: len(ran)]
        if rank != found.culprit:
            assert words["ops"] == ran
            assert words["last_ops"] == ran[-3:]
            assert f"timeline so far in {found.case.folder}/stalled/rank-{rank}.json" in words["text"]


def test_the_timelines_fit_together(outcomes: Outcomes) -> None:
    """They share one clock: no op began before what it needs from another rank was there."""
    found = outcomes["raises in backward"]
    ends, starts = {}, {}
    for rank in range(4):
        for event in found.trace(rank):
            starts[event["name"]] = event["ts"]
            ends[event["name"]] = event["ts"] + event["dur"]
    for name, began in starts.items():
        if "F" in name and name[0] != "0":
            before = f"{int(name[0]) - 1}{name[1:]}"
            assert ends[before] <= began


@pytest.mark.sweep
@pytest.mark.parametrize("name", faults("a rank is away, timeout 8 s", WORSE))
def test_every_rank_ends_within_the_timeout_and_five_seconds(
    worse: dict[str, Outcome], row: Row, name: str
) -> None:
    """0.5.0: hangs of minutes. A rank that was cut off sat in a call to the store, which has no time limit;
    and the group of a checkpoint's writer was made with a time limit of an hour."""
    found, (deed, _, ranks) = worse[name], WORSE[name]
    # a rank that begins to wait after the strike waits from then on
    waits = [file.stat().st_mtime for file in Path(found.case.folder).glob("rank-*.began")]
    began = max(float((Path(found.case.folder) / "struck").read_text()), *waits)
    ending = found.errors if deed == "cut" else found.survivors
    assert len(ending) == ranks - (deed != "cut")
    waited = 0 if deed in ("exit", "node") else LATER
    seconds = max(words["time"] for words in ending.values()) - began
    assert seconds < waited + 5
    row.note(seconds=seconds, cause=named_cause(ending[min(ending)]["text"]))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [name for name, (deed, *_) in WORSE.items() if deed in ("cut", "stop") and name != "does not come"],
)
def test_a_rank_that_stops_or_is_cut_off_is_named_by_the_others(worse: dict[str, Outcome], name: str) -> None:
    """0.5.0: in start-up raw errors of torch, which name no rank."""
    for words in worse[name].survivors.values():
        named = rf"rank 1 on {HOST} (failed first: it )?has been silent for"
        assert re.search(named, words["text"]), words["text"]


@pytest.mark.sweep
def test_a_rank_that_is_cut_off_says_so_and_python_ends(worse: dict[str, Outcome]) -> None:
    """0.5.0: the thread that sat in the store would also have aborted the process at its end."""
    folder, words = Path(worse["cut off"].case.folder), worse["cut off"].errors[1]
    assert words["kind"] == "StalledPeerError"
    assert "the store of the ranks' notes does not answer: this rank may be cut off" in words["text"]
    pids = [(folder / f"rank-{rank}.pid").read_text() for rank in range(3)]
    assert [(folder / f"exit-{pid}").read_text() for pid in pids] == ["3"] * 3


@pytest.mark.sweep
def test_a_rank_that_exits_between_steps_is_named(worse: dict[str, Outcome]) -> None:
    """0.5.0: "the other ranks died or closed their connections"."""
    reason = f"rank 1 on {HOST} failed first: its process ended before it closed its pipeline"
    for words in worse["exits"].survivors.values():
        assert words["kind"] == "PeerLostError"
        assert reason in words["text"]


@pytest.mark.sweep
def test_a_rank_that_dies_on_another_node_is_named(worse: dict[str, Outcome]) -> None:
    """0.5.0 named rank 1, a healthy one: its launcher ended it, and the store, before it could say why."""
    died = rf"rank 0 on {HOST} failed first: it .*, as rank 1 on {HOST} noticed"
    assert re.search(died, worse["on another node"].survivors[2]["text"])


@pytest.mark.sweep
def test_a_rank_that_does_not_come_is_named(worse: dict[str, Outcome]) -> None:
    """0.5.0: a traceback of torch, with a key of the store."""
    (words,) = worse["does not come"].survivors.values()
    assert words["text"].startswith(
        "rank 0 waiting for all 2 processes of the job: rank 1 did not come within 8 s. "
    )
