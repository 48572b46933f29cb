"""The trainer on eight processes: the losses of one process, on one host and on two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.parallel
CONFIGS = Path(__file__).parents[2] / "configs"
MESHES = sorted(file for file in CONFIGS.glob("*.yaml") if "parallel" in yaml.safe_load(file.read_text()))
# in double precision, or two experts of nearly equal weight might change places
COMMON = ["train.steps=6", "train.evaluate_every=3", "train.check=off", "model.dtype=float64"]
ALONE = ["pipeline.ranks=1", "pipeline.schedule=1f1b", "parallel.reshard_after_forward=false",
         *(f"parallel.{axis}=1" for axis in ("dp_replicate", "dp_shard", "cp", "ep", "tp"))]  # fmt: skip
LIMIT = 300.0  # seconds


def text(folder: Path) -> str:
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.py").write_text(f"# {number}\n" + Path(__file__).read_text())
    return f"data.path={folder}"


def losses(output: Path) -> list[float]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows for name in ("loss", "held_out_loss") if row.get(name) is not None]


def train(config: Path, output: Path, *overrides: str) -> list[float]:
    command = [sys.executable, "-m", "penstock", "train", str(config), *COMMON, *overrides]
    ended = subprocess.run(
        [*command, f"output.folder={output}"], capture_output=True, text=True, timeout=LIMIT, env=quiet()
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return losses(output)


def quiet() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("config", MESHES, ids=[file.stem for file in MESHES])
def test_as_one_process(config: Path, tmp_path: Path) -> None:
    data = text(tmp_path / "text")
    # the grouped product of experts takes no double precision
    how = [data, "model.config.experts_implementation=eager"] if "moe" in config.stem else [data]
    expected = train(config, tmp_path / "alone", *ALONE, *how)
    found = train(config, tmp_path / "mesh", *how)
    assert len(expected) >= 8
    assert found == pytest.approx(expected, rel=1e-8)


def test_two_hosts(tmp_path: Path) -> None:
    """Two agents of torchrun on one machine, four processes each, as two hosts would run them."""
    config, data = CONFIGS / "qwen3_pp2_fsdp4.yaml", text(tmp_path / "text")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = tmp_path / "hosts"
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
             "--nproc-per-node=4", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "penstock",
             "train", str(config), *COMMON, data, f"output.folder={output}", "parallel.dp_shard=-1"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet(),
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=LIMIT)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs[0][-3000:]
    expected = train(config, tmp_path / "alone", data, *ALONE)
    assert losses(output) == pytest.approx(expected, rel=1e-8)
