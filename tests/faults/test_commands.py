"""Whole commands that are struck: `penstock train --restarts`, and two machines under torchrun.

Their ranks are struck at set places too: see `support.strikes.environment`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from support.faults import Row, assert_as_if_nothing_had_happened, named_cause, tree
from support.strikes import Strike, environment

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(240)]
NOTICED = 20.0  # seconds in which the other machine ends


def file_of(folder: Path) -> str:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree(folder)))
    return str(file)


def started(folder: Path, attempts: Sequence[Sequence[Strike]], *command: str) -> subprocess.Popen[str]:
    more = {**environment(attempts, folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *command], env={**os.environ, **more}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = started(folder, [], "penstock", "train", file_of(folder))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return folder


@pytest.mark.fault("a run starts again by itself", "--restarts: killed in a step, then in a commit")
def test_a_run_that_is_struck_in_each_attempt_ends_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: Path, row: Row
) -> None:
    """0.5.0: no one command survived restarts from the first minute."""
    attempts = [[Strike(1, "the optimizer", 5)], [Strike(0, "the rename of a commit")]]
    began = time.monotonic()
    process = started(tmp_path, attempts, "penstock", "train", file_of(tmp_path), "--restarts", "2")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    found = [json.loads(line) for line in (tmp_path / "out" / "restarts.jsonl").read_text().splitlines()]
    assert [each["exit_code"] for each in found] == [137, 137]
    assert [each["cause"].split(",")[0] for each in found] == [
        f"rank {rank} on {socket.gethostname()} was killed by signal 9 (SIGKILL)" for rank in (1, 0)
    ]
    assert "restarted 2 times" in err
    row.note(seconds=time.monotonic() - began, cause=named_cause(found[0]["cause"]), lost=4)


@pytest.mark.parametrize(("strike", "lost_steps"), [
    pytest.param(
        Strike(1, "the optimizer", 5, "machine"), 4,
        marks=pytest.mark.fault("a machine is lost", "two agents of torchrun: one is killed with its rank"),
    ),
    pytest.param(
        Strike(1, "the build", 1, "machine"), 0,
        marks=pytest.mark.fault("a machine is lost", "the same, while its stages are built"),
    ),
], ids=["in a step", "in the build"])  # fmt: skip
def test_a_machine_that_is_lost_ends_the_other_and_both_go_on_when_started_again(
    tmp_path: Path, undisturbed: Path, row: Row, strike: Strike, lost_steps: int
) -> None:
    """0.5.0: on two nodes the other node blamed a healthy rank."""
    file = file_of(tmp_path)
    first, second = agents(tmp_path, file, [[strike]])
    lost, other = (first, second) if _first_to_end(first, second) is first else (second, first)
    began = time.monotonic()
    lost.communicate(timeout=10)
    assert lost.returncode == -signal.SIGKILL
    _, err = other.communicate(timeout=60)
    seconds = time.monotonic() - began
    assert other.returncode == 1
    assert seconds < NOTICED
    words = next(line for line in err.splitlines() if line.startswith("penstock: error: "))
    named = f"rank 1 on {socket.gethostname()} "
    assert named + "died or closed its connection" in words or "ended without closing" in words
    for agent in agents(tmp_path, file, []):
        _, err = agent.communicate(timeout=100)
        assert agent.returncode == 0, err
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(seconds=seconds, cause=named_cause(words.removeprefix("penstock: error: ")), lost=lost_steps)


def agents(folder: Path, file: str, attempts: Sequence[Sequence[Strike]]) -> list[subprocess.Popen[str]]:
    """Two agents of torchrun, as on two machines, with a rank each; the first has the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--monitor-interval=0.1", "-m", "penstock", "train", file, "--resume",
    ]  # fmt: skip
    first = started(folder, attempts, *command)
    end = time.monotonic() + 60
    while time.monotonic() < end:  # so that the first has the store, and rank 0
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    return [first, started(folder, attempts, *command)]


def _first_to_end(*processes: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Waits for a minute and a half at most."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if found := [process for process in processes if process.poll() is not None]:
            return found[0]
        time.sleep(0.05)
    raise TimeoutError("no process has ended")
