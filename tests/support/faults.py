"""Runs of the trainer whose ranks are struck, each rank a process that has imported torch already.

    attempt   one start of a tiny run, over two ranks: how each rank ended, what it said, how long it took
    struck    an attempt with strikes, and one that goes on with --resume

A test of a fault has the marker `fault(kind, where)`, and says with `Row.note` what its row of docs/faults.md
shows. `pytest -m fault --faults FILE` runs them all and writes their rows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from support import tiny
from support.pool import start
from support.strikes import Strike, arm

HOST = socket.gethostname()
STEPS = 6
TIMEOUT = 20.0  # of a wait in a run whose ranks do not stop; a busy machine may take a while
LIMIT = 100.0  # seconds after which an attempt hangs

Tree = dict[str, Any]


def tree(folder: Path, *, ranks: int = 2, timeout: float = TIMEOUT, **sections: Mapping[str, Any]) -> Tree:
    """The config of a run of six steps, with a checkpoint after every second one."""
    made = tiny.tree(folder)
    made["train"] |= {"steps": STEPS, "checkpoint_every": 2}
    made["pipeline"] |= {"ranks": ranks, "timeout_seconds": timeout}
    made["output"] |= {"keep": {"last": 1}}
    for name, keys in sections.items():
        made.setdefault(name, {}).update(keys)
    return made


@dataclass(frozen=True)
class Attempt:
    """How ranks ended.

    codes: exit codes by rank; said: what each printed; errors: kind and text by rank, of those that raised
    seconds: from the first strike, or the start, to the end of the last rank that was not struck
    hung: ranks that had not ended after `LIMIT`
    """

    codes: Mapping[int, int | None]
    said: Mapping[int, str]
    errors: Mapping[int, Mapping[str, str]]
    seconds: float
    hung: tuple[int, ...]

    @property
    def cause(self) -> str:
        """The first rank's words on the first failure, without numbers that differ from run to run."""
        texts = [error["text"] for _, error in sorted(self.errors.items())]
        return named_cause(texts[0]) if texts else ""


def named_cause(text: str) -> str:
    """What an error says of the cause: no remedy, no reports, no host and no folder."""
    text = text.splitlines()[0]
    text = re.sub(r"^rank \d waiting for [^:]*: ", "", text)
    text = re.sub(r"\. (Fix|See|Let|Go|Give|Make|Lower|End|Take|Start|Move|Set|Write) .*$", "", text)
    text = text.replace(f" on {HOST}", "").replace(HOST, "host")
    text = re.sub(r"/\S*/(?=[\w.-]+)", "", text)
    text = re.sub(r"process \d{3,}", "process N", text)
    return re.sub(r"for \d+ s", "for N s", text)


def attempt(made: Tree, strikes: Sequence[Strike] = (), resume: str | None = None) -> Attempt:
    """Start all ranks of a run, and return when all have ended.

    As a launcher would, it ends a rank that stands still once the others have gone.
    """
    folder, ranks = Path(made["output"]["folder"]).parent, world(made)
    for old in [*folder.glob("struck-*"), *folder.glob("rank-*")]:
        old.unlink()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    began = time.time()
    running = {rank: start(_rank, made, rank, ranks, store.port, [*strikes], resume) for rank in range(ranks)}
    processes, ended = dict(running), dict[int, float]()
    stopped = {strike.rank for strike in strikes if strike.deed == "stop"}
    while running and time.time() - began < LIMIT:
        wait([each.sentinel for each in running.values()], 0.5)
        for rank in [rank for rank, each in running.items() if not each.is_alive()]:
            ended[rank] = time.time()
            running.pop(rank).join()
        if running and set(running) <= stopped:
            break
    hung = tuple(sorted(set(running) - stopped))
    for process in running.values():
        process.kill()
        process.join()
    del store
    times = [json.loads(each.read_text())["time"] for each in folder.glob("struck-*")]
    whole = [at for rank, at in ended.items() if rank not in {each.rank for each in strikes}] or [began]
    return Attempt(
        {rank: each.exitcode for rank, each in processes.items()},
        {rank: _text(folder / f"rank-{rank}.out") for rank in range(ranks)},
        {rank: json.loads(text) for rank in range(ranks) if (text := _text(folder / f"rank-{rank}.json"))},
        max(0.0, max(whole) - min(times, default=began)),
        hung,
    )


def world(made: Tree) -> int:
    return int(math.prod([made["pipeline"]["ranks"], *made.get("parallel", {}).values()]))


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


# _START_SECONDS: a start as short as the run's timeout
def _rank(made: Tree, rank: int, ranks: int, port: int, strikes: list[Strike], resume: str | None) -> None:
    """One rank of a run; ends the process."""
    import torch
    import transformers

    from penstock.launch import stop as launch
    from penstock.launch.failures import ERROR_FILE
    from penstock.parallel import mesh
    from penstock.shortages import shortage
    from penstock.train.config.sections import TrainConfig
    from penstock.train.preflight import preflight
    from penstock.train.run import run

    folder = Path(made["output"]["folder"]).parent
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    os.environ[launch.LAUNCHER] = "0"  # nothing is printed by the rank itself
    os.environ[ERROR_FILE] = str(folder / f"rank-{rank}.error")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh._START_SECONDS = made["pipeline"]["timeout_seconds"]
    out = os.open(folder / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    arm(strikes, rank, folder)
    try:
        run(preflight(TrainConfig.model_validate(made), resume))
    except Exception as error:
        words = {"kind": type(error).__name__, "text": str(shortage(error) or error)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)  # a strike may have set it
        (folder / f"rank-{rank}.json").write_text(json.dumps(words))
        launch.fail(error)
    launch.leave(0)


# ---- What a run left


def rows(folder: Path) -> dict[int, float]:
    """The loss of each step that metrics.jsonl has, by step. Asserts that it has each once."""
    found = [(row["step"], row["loss"]) for row in tiny.metrics(folder) if "loss" in row]
    assert len(found) == len(dict(found)), f"a step has two rows: {found}"
    return dict(found)


def steps_done(folder: Path) -> int:
    """The last step whose row was written; 0 without any. The last line may be cut short."""
    file, last = folder / "out" / "metrics.jsonl", 0
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            last = max(last, row["step"] if "loss" in row else 0)
    return last


def went_on_from(said: str) -> int:
    """The step of the checkpoint that a resumed run went on from, by what it printed; 0 for none."""
    return int(([0, *re.findall(r"going on from .*step-(\d+)", said)])[-1])


def assert_as_if_nothing_had_happened(folder: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """The same weights and moments bit for bit, and each step's row once, with the same loss."""
    tiny.assert_same_tensors(tiny.checkpoint(folder, steps), tiny.checkpoint(undisturbed, steps))
    assert rows(folder) == rows(undisturbed)


# ---- The table


class Row:
    """What a test says of its fault, for its row of the table."""

    def __init__(self, note: Callable[[str, object], None]) -> None:
        self._note = note

    def note(self, *, seconds: float = math.nan, cause: str = "", lost: int | str = "") -> None:
        """seconds: until the last rank had ended; cause: as an error named it; lost: steps done again"""
        self._note("seconds", seconds)
        self._note("cause", cause)
        self._note("lost", lost)


def results(found: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """What docs/faults.py reads: the rows, and of what they are."""
    return {
        "penstock": version("penstock"), "torch": version("torch"), "machine": f"{os.cpu_count()} CPU cores",
        "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds), "rows": summed(found),
    }  # fmt: skip


def summed(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row of the table for each fault, in the order in which they came, of the tests' notes."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for each in sorted(found, key=lambda each: int(each["place"])):
        empty = {"tried": 0, "survived": 0, "seconds": None, "cause": "", "lost": ""}
        row = table.setdefault((each["kind"], each["where"]), empty)
        row["tried"] += 1
        row["survived"] += each["passed"]
        seconds = [s for s in (row["seconds"], each["seconds"]) if s is not None and math.isfinite(s)]
        row["seconds"] = round(max(seconds), 1) if seconds else None
        row["cause"] = row["cause"] or each["cause"]
        row["lost"] = max(row["lost"], each["lost"], key=lambda lost: -1 if lost == "" else lost)
    return [{"kind": kind, "where": where, **row} for (kind, where), row in table.items()]
