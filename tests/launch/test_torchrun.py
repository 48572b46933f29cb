"""Two agents of torchrun, as on two machines: a run survives a rank, and nobody outlives an agent."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.pool import alive
from support.tiny import assert_same_tensors, checkpoint, config_file, metrics

pytestmark = pytest.mark.sweep
STEPS = 30


@contextmanager
def agents(folder: Path, *options: str, steps: int = STEPS) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two of them, with a rank each, that train in `folder`; what they say lies there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    file = config_file(
        folder, train={"steps": steps, "checkpoint_every": 2, "evaluate_every": steps},
        pipeline={"timeout_seconds": 20},
    )  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1",
        *options, "-m", "penstock", "train", str(file), "--resume",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "2"  # the torchrun of torch 2.11 has no option for it
    started = []
    for number in range(2):
        with (folder / f"said-{number}").open("wb") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
    try:
        yield started
    finally:
        for agent in started:
            for pid in ranks(agent).values():
                os.kill(pid, signal.SIGKILL)
            agent.kill()
            agent.wait()


def ranks(agent: subprocess.Popen[bytes]) -> dict[str, int]:
    """The process ids of the ranks that an agent has started, by rank."""
    found: dict[str, int] = {}
    if agent.poll() is None:
        for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
            with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                found |= {
                    each.removeprefix("RANK="): int(pid) for each in environment if each.startswith("RANK=")
                }
    return found


def wait_for_rows(folder: Path, count: int) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if (folder / "out" / "metrics.jsonl").exists() and len(metrics(folder)) >= count:
            return
        time.sleep(0.05)
    raise TimeoutError((folder / "said-0").read_text() + (folder / "said-1").read_text())


@pytest.mark.fault("a machine is lost", "two agents of torchrun: a rank is killed, and both start again")
def test_a_run_survives_a_rank_whose_failure_one_agent_alone_counts(tmp_path: Path) -> None:
    """0.5.0: the agents counted restarts differently, and the ranks of the next attempt never met.

    The other rank stands still, so that its agent restarts because the first one does.
    """
    with agents(tmp_path, "--max-restarts=2") as started:
        wait_for_rows(tmp_path, 6)
        by_rank = {rank: pid for agent in started for rank, pid in ranks(agent).items()}
        os.kill(by_rank["0"], signal.SIGSTOP)
        os.kill(by_rank["1"], signal.SIGKILL)
        assert [agent.wait(100) for agent in started] == [0, 0]
    (tmp_path / "whole").mkdir()
    with agents(tmp_path / "whole") as started:
        assert [agent.wait(100) for agent in started] == [0, 0]
    assert_same_tensors(checkpoint(tmp_path / "whole", STEPS), checkpoint(tmp_path, STEPS))
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.fault("a machine is lost", "two agents of torchrun: one of them alone is killed")
def test_all_ranks_end_with_an_agent(tmp_path: Path, number: int) -> None:
    """0.5.0: its rank trained on, and nobody would have ended it.

    Ranks end; the other agent waits for the lost one, for minutes perhaps. It does so by itself.
    """
    with agents(tmp_path, "--max-restarts=0", steps=3000) as started:  # more than in the time of a look
        wait_for_rows(tmp_path, 2)
        pids = [pid for agent in started for pid in ranks(agent).values()]
        os.kill(started[number].pid, signal.SIGKILL)
        end = time.monotonic() + 40
        while time.monotonic() < end and any(map(alive, pids)):
            time.sleep(0.1)
        assert [pid for pid in pids if alive(pid)] == []
    said = "".join((tmp_path / f"said-{at}").read_text() for at in range(2))
    how = "the launcher of this rank: it has ended|died or closed its|ended without closing its"
    assert re.search(f"penstock: error: .*({how})", said)
