"""The command: what it prints, and with which code it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock import AutoPipeline
from penstock.cli.main import main
from support.tiny import QWEN3, config_file


def penstock(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def start(*arguments: str | Path, torchrun: int | None = None, **environment: str) -> subprocess.Popen[str]:
    """The command as a process of its own, under `torchrun` ranks where given."""
    launcher = [f"--nproc-per-node={torchrun}", "--standalone", "-m"] if torchrun else []
    module = ["torch.distributed.run", *launcher] if torchrun else []
    return subprocess.Popen(
        [sys.executable, "-m", *module, "penstock", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def test_version_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert penstock(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("penstock 0.")
    assert penstock(monkeypatch, "train", "--help") == 0
    assert penstock(monkeypatch, "train") == 2
    assert penstock(monkeypatch, "trian", "x.yaml") == 2


def test_a_dry_run_shows_what_is_known_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path)
    assert penstock(monkeypatch, "train", file, "--dry-run", "pipeline.microbatches=4") == 0
    shown = capsys.readouterr().out
    for part in ("microbatches: 4", "final_fraction: 0.1", "rank 1 |", "predicted bubble", "AdamW", "0 to 0"):
        assert part in shown
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.yaml", "text"]


def test_memory_that_cannot_be_known_is_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of experts that look at how many tokens they get."""
    monkeypatch.setattr(AutoPipeline, "memory_costs", lambda *_: None)
    file = config_file(tmp_path)
    assert penstock(monkeypatch, "train", file, "--dry-run") == 0
    assert "unknown" in capsys.readouterr().out


def write_model(folder: Path, damage: str) -> str:
    """A local checkpoint with a file that is missing, cut short or altered."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {key: value for key, value in QWEN3.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **keys)).save_pretrained(
        folder, max_shard_size="20KB"
    )
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.unlink() if damage == "missing" else shard.write_bytes(shard.read_bytes()[:-100])
    return str(folder)


BAD = {
    "an unknown key": ({}, ["train.stps=3"], "train.stps=3: section train has no such key. Did you mean"),
    "a wrong type": ({}, ["train.steps=many"], "train.steps='many': it should be a valid integer. Write"),
    "more stages than layers": ({}, ["pipeline.ranks=5"], "layers"),
    "a batch that cannot be split": ({}, ["train.batch_size=1"], "train.batch_size=1: its rows cannot be"),
    "no data": ({}, ["data.path=/nowhere"], "data.path=/nowhere: there is no such file or folder. Give"),
    "empty data": ({}, ["data.path=/dev/null"], "data.path=/dev/null: it holds no text. Give"),
    "data of another field": ({}, ["data.kind=jsonl"], "line 1: it is not JSON"),
    "no chain of layers": ({"model": {"config": {"model_type": "t5"}}}, [], "model_type='t5'"),
    "no such checkpoint": ({}, ["--resume", "/nowhere"], "checkpoint /nowhere: there is no such folder"),
    "nothing to resume from": ({}, ["--resume"], "it holds no complete checkpoint"),
    "two paths": ({}, ["--resume", "/a", "/b"], "'/a': what follows the config file is section.key=value"),
    "a stray argument": ({}, ["steps=3"], "'steps=3': what follows the config file is section.key=value"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_code_2_and_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    sections, arguments, message = BAD[case]
    file = config_file(tmp_path, **sections)
    assert penstock(monkeypatch, "train", file, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("penstock: error: ")
    assert message in captured.err
    assert captured.err.count("penstock: error") == 1
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_to_start_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    path = write_model(tmp_path / "model", damage)
    file = config_file(tmp_path, model={"config": None, "path": path})
    assert penstock(monkeypatch, "train", file) == 2
    assert "model-00001-of-" in capsys.readouterr().err


def test_a_world_that_does_not_fit_is_said_by_one_rank_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(tmp_path)
    processes = [start("train", file, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="3") for rank in "01"]
    (code, _, err), (other_code, _, other_err) = map(finish, processes)
    assert (code, other_code) == (2, 2)
    assert err == (
        "penstock: error: rank 0: pipeline.ranks=2: each rank is one process and torchrun started 3. "
        "Start it with 2 processes, or set pipeline.ranks=3\n"
    )
    assert other_err == ""


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {f"{file.name} {key}": value for file in sorted(checkpoint.glob("*.safetensors"))
            for key, value in load_file(file).items()}  # fmt: skip


def test_two_ranks_train_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """Started plainly, then under torchrun: the same run either way, and the same after going on."""
    sampled = {"sample_prompt": "AB", "sample_tokens": 2}
    file = config_file(tmp_path, train={"checkpoint_every": 2}, output=sampled)
    code, out, err = finish(start("train", file))
    assert (code, err) == (0, "")
    for part in ("step 4/4  loss", "held-out loss", "metrics.jsonl", "timeline.svg", "predicted", "\nAB"):
        assert part in out
    whole = tmp_path / "out" / "checkpoints" / "step-00000004"
    names = {path.name for path in whole.iterdir()}
    assert {"optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"} <= names

    half = tmp_path / "out" / "checkpoints" / "step-00000002"
    again = f"output.folder={tmp_path / 'again'}"
    process = start("train", file, "--resume", half, again, torchrun=2, OMP_NUM_THREADS="1")
    code, out, err = finish(process)
    assert code == 0, err
    assert f"going on from {half}" in out
    expected, resumed = tensors(whole), tensors(tmp_path / "again" / "checkpoints" / "step-00000004")
    assert expected.keys() == resumed.keys()
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []


def wait_for_rows(path: Path, count: int) -> list[dict[str, Any]]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        time.sleep(0.05)
    raise TimeoutError(path)


def ranks_of(parent: int) -> dict[str, int]:
    """The process ids of the ranks that `parent` started, by rank."""
    found: dict[str, int] = {}
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        found |= {entry.removeprefix("RANK="): int(pid) for entry in environment if entry.startswith("RANK=")}
    return found


@pytest.mark.parametrize(
    ("target", "number", "code", "said"),
    [
        ("1", signal.SIGKILL, 137, "penstock: error: rank 1 was killed by signal 9 (SIGKILL)"),
        ("parent", signal.SIGINT, 130, "penstock: interrupted\n"),
    ],
)
def test_a_run_that_is_cut_short_ends_at_once(
    tmp_path: Path, target: str, number: signal.Signals, code: int, said: str
) -> None:
    """Not when the other rank has waited for as long as it may, which is past the end of this test."""
    more = ("train.steps=100000", "train.evaluate_every=100000", "pipeline.timeout_seconds=600")
    process = start("train", config_file(tmp_path), *more)
    wait_for_rows(tmp_path / "out" / "metrics.jsonl", 5)
    ranks = ranks_of(process.pid)
    assert sorted(ranks) == ["0", "1"]
    os.kill({**ranks, "parent": process.pid}[target], number)
    ended_with, _, err = finish(process)
    assert ended_with == code
    assert err.startswith(said)
    assert err.count("penstock: ") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
