"""`penstock train` starts its ranks, and starts them again after a failure."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.train.report.lost_time import lost_time
from penstock.train.report.recorded import read_run
from support.pool import alive
from support.started import finish, ranks_of, start, wait_for_rows
from support.tiny import assert_same_tensors, checkpoint, config_file, metrics


@pytest.mark.sweep
def test_one_command_ends_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """0.5.0: `--resume` was refused until there was a checkpoint."""
    (tmp_path / "whole").mkdir()
    assert finish(start("train", config_file(tmp_path / "whole", train={"steps": 9})))[0] == 0
    file = config_file(tmp_path, train={"steps": 9, "checkpoint_every": 1})
    checkpoints, said = tmp_path / "out" / "checkpoints", ""
    for step in range(4):
        process = start("train", file, "--resume")
        awaited = checkpoints / f"step-{step:08d}" if step else tmp_path / "out"
        while not awaited.exists():
            assert process.poll() is None
            time.sleep(0.01)
        ranks = ranks_of(process.pid)
        for pid in (process.pid, *ranks.values()):
            os.kill(pid, signal.SIGKILL)
        said += finish(process)[1]
    code, out, err = finish(start("train", file, "--resume"))
    assert code == 0, err
    assert "taken over from run" in out
    assert said.count("starting from the beginning") + out.count("starting from the beginning") >= 1
    assert_same_tensors(checkpoint(tmp_path / "whole", 9), checkpoint(tmp_path, 9))
    assert len({row["run"] for row in metrics(tmp_path)}) == 1
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == list(range(1, 10))


@pytest.mark.sweep
def test_a_run_that_fails_starts_again_by_itself(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    section = "optimizer={learning_rate: 1e-2, warmup_steps: 2}"  # which a restart once took for a path
    assert finish(start("train", config_file(tmp_path / "whole", train={"steps": 30}), section))[0] == 0
    file = config_file(tmp_path, train={"steps": 30, "checkpoint_every": 1})
    process = start("train", file, section, "--restarts", "2")
    for step in (2, 9):
        while not checkpoint(tmp_path, step).exists():
            assert process.poll() is None
            time.sleep(0.01)
        ranks = ranks_of(process.pid)
        os.kill(ranks["1"], signal.SIGKILL)
        while alive(ranks["1"]):
            time.sleep(0.01)
    code, _, err = finish(process)
    assert code == 0, err
    failures = [json.loads(line) for line in (tmp_path / "out" / "restarts.jsonl").read_text().splitlines()]
    assert [each["exit_code"] for each in failures] == [137, 137]
    assert all("was killed by signal 9" in each["cause"] for each in failures)
    assert 2 <= failures[0]["checkpoint"] < 9 <= failures[1]["checkpoint"]
    assert "restarted 2 times" in err
    assert_same_tensors(checkpoint(tmp_path / "whole", 30), checkpoint(tmp_path, 30))
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == list(range(1, 31))


@pytest.mark.sweep
@pytest.mark.parametrize("who", ["the launcher", "the server"])
def test_nobody_outlives_what_started_it(tmp_path: Path, who: str) -> None:
    """A stopped rank neither, which no signal but SIGKILL ends."""
    config_file(tmp_path)
    process = start("train", tmp_path / "config.yaml", "train.steps=2000")
    wait_for_rows(tmp_path, 3)
    ranks = ranks_of(process.pid)
    os.kill(ranks["1"], signal.SIGSTOP)
    server = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    os.kill(process.pid if who == "the launcher" else server, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == (-9 if who == "the launcher" else 137)
    assert who == "the launcher" or f"process {server}, which started the ranks, was killed" in err
    while any(alive(pid) for pid in (server, *ranks.values())):
        time.sleep(0.01)


@pytest.mark.sweep
def test_a_run_whose_rank_is_killed_ends_at_once(tmp_path: Path) -> None:
    """Not when the other rank has waited for as long as it may, which is past the end of this test."""
    more = ("train.steps=2000", "train.evaluate_every=2000", "pipeline.timeout_seconds=600")
    process = start("train", config_file(tmp_path), *more)
    wait_for_rows(tmp_path, 5)
    ranks = ranks_of(process.pid)
    assert sorted(ranks) == ["0", "1"]
    os.kill(ranks["1"], signal.SIGKILL)
    ended_with, _, err = finish(process)
    assert ended_with == 137
    assert err.startswith(
        f"penstock: error: rank 1 on {socket.gethostname()} was killed by signal 9 (SIGKILL)"
    )
    assert err.count("penstock: ") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.sweep
def test_a_killed_rank_costs_no_more_than_a_step_where_steps_are_kept_in_memory(tmp_path: Path) -> None:
    """Before the first checkpoint, and from then on: nothing is on the disk until the last step."""
    (tmp_path / "whole").mkdir()
    assert finish(start("train", config_file(tmp_path / "whole", train={"steps": 30})))[0] == 0
    memory = tmp_path / "memory"
    memory.mkdir()
    file = config_file(tmp_path, train={"steps": 30, "memory_checkpoint_every": 1})
    began = time.time()
    process = start("train", file, "--restarts", "2", PENSTOCK_MEMORY=str(memory))
    lost = []
    for step, rank in ((3, "1"), (9, "0")):
        while not any(row.get("loss") and row["step"] >= step for row in rows_so_far(tmp_path)):
            assert process.poll() is None
            time.sleep(0.01)
        killed = ranks_of(process.pid)[rank]
        os.kill(killed, signal.SIGKILL)
        while alive(killed):
            time.sleep(0.01)
        lost.append(max(row["step"] for row in rows_so_far(tmp_path)))
    code, out, err = finish(process)
    assert code == 0, err
    recorded = read_run(tmp_path / "out")
    assert [begin["end"]["how"] for begin in recorded.starts] == ["failed", "killed", "finished"]
    account = lost_time(recorded)
    assert account is not None
    assert f"time        {account}" in out
    ended = datetime.fromisoformat(recorded.starts[-1]["end"]["at"]).timestamp()
    assert account.seconds == pytest.approx(ended - began, abs=1)
    assert min(account.lost[cause] for cause in ("start-up", "waiting", "checkpoints", "evaluation")) > 0
    assert account.lost["steps again"] < 1
    failures = [json.loads(line) for line in (tmp_path / "out" / "restarts.jsonl").read_text().splitlines()]
    assert [each["exit_code"] for each in failures] == [137, 137]
    for failure, step in zip(failures, lost, strict=True):
        assert step - 1 <= failure["checkpoint"] <= step + 1
        assert f"going on from step {failure['checkpoint']}, which was in memory" in out
    assert_same_tensors(checkpoint(tmp_path / "whole", 30), checkpoint(tmp_path, 30))
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == list(range(1, 31))
    assert list(memory.iterdir()) == []


def rows_so_far(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, but for a line that is being written."""
    file = folder / "out" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]
