"""Commands that run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from support.tiny import metrics


def start(*arguments: str | Path, launcher: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *launcher, "penstock", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def wait_for_rows(folder: Path, count: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (folder / "out" / "metrics.jsonl").exists() and len(metrics(folder)) >= count:
            return
        time.sleep(0.05)
    raise TimeoutError(folder)


def ranks_of(parent: int) -> dict[str, int]:
    """The process ids of the ranks that `parent` started, by rank: those that its server forked."""
    found: dict[str, int] = {}
    for server in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name.startswith("rank-"):
                found[name.removeprefix("rank-")] = int(pid)
    return found
