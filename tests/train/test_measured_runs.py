"""A plan is run by `penstock train` for a few steps, and what it took and held is read; no process stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.candidate import Candidate
from penstock.planner.corrections import MeasuredRun
from penstock.planner.estimate import Trial, estimate
from penstock.planner.hardware import read_cluster
from penstock.planner.workload import Workload
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.measured_runs import between_ops, few_steps, measured_run
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.planning import small_config

pytestmark = pytest.mark.timeout(400)  # 15 s where nothing else runs: commands start, and import torch
CLUSTER = read_cluster({"host": "CPU host", "devices": 2})
RUN = Candidate(2, rows=2, length=32, microbatches=4, schedule="zb_h1", split=(3, 3), precision="float32")


@pytest.fixture(scope="module")
def model() -> Workload:
    return Workload(small_config(), "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small_config().save_pretrained(path)
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that a measurement starts."""
    children: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def recorded(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        children.append(start(*arguments, **options))
        return children[-1]

    monkeypatch.setattr("penstock.train.measured_runs.subprocess.Popen", recorded)
    return children


def check_measured(measured: MeasuredRun) -> None:
    assert measured.error == ""
    # of 4, without the first two; or of 8 or more, as the run goes on until its timeline is seen
    assert (len(measured.steps) + 2) % 4 == 0
    assert 0 < measured.computing < 1
    assert measured.slowdown > 0
    assert measured.predicted_kept == pytest.approx(measured.kept, rel=0.05)


# _until_recorded: the run in this process, in place of a command's
def test_a_run_of_few_steps_is_measured(
    model: Workload, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(config: Path, folder: Path, steps: int, limit: float) -> str:
        overrides = [f"train.steps={steps}", "pipeline.transport=auto"]
        run(preflight(load_config(config, overrides)))
        return ""

    monkeypatch.setattr("penstock.train.measured_runs._until_recorded", trained)
    estimated = estimate(model, RUN, CLUSTER)
    check_measured(measured_run(model, estimated, CLUSTER, {"path": str(folder)}, on_cpu=True, steps=4))


@pytest.mark.sweep
def test_two_ranks_run_and_are_measured(
    model: Workload, folder: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun, whose variables are not the run's."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    estimated = estimate(model, RUN, CLUSTER)
    named = {"path": str(folder)}
    check_measured(measured_run(model, estimated, CLUSTER, named, on_cpu=True, steps=4, transport="gloo"))
    assert started[0].poll() is not None


def test_a_run_that_fails_is_told_by_its_error(model: Workload) -> None:
    estimated = estimate(model, RUN, CLUSTER)
    measured = measured_run(model, estimated, CLUSTER, {"path": "m", "pat": "n"}, on_cpu=True)
    assert "section model has no such key" in measured.error
    assert measured.steps == ()


def test_a_run_that_takes_too_long_is_ended(
    model: Workload, folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    estimated = estimate(model, RUN, CLUSTER)
    measured = measured_run(model, estimated, CLUSTER, {"path": str(folder)}, on_cpu=True, limit=0.2)
    assert measured.error == "it took more than 0.2 s"
    assert started[0].poll() is not None


def test_an_interruption_ends_the_run(
    model: Workload, folder: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.train.measured_runs.time.sleep", interrupted)
    estimated = estimate(model, RUN, CLUSTER)
    with pytest.raises(KeyboardInterrupt):
        measured_run(model, estimated, CLUSTER, {"path": str(folder)}, on_cpu=True)
    assert started[0].poll() is not None


_WRITES = """
import json, sys, time
from pathlib import Path
import yaml
folder = Path(yaml.safe_load(open(sys.argv[1]))["output"]["folder"])
folder.mkdir()
timeline = {"name": "1f1b", "ranks": 2, "peak_live": [1, 1], "waits": [], "reductions": [], "overlaps": [],
            "critical_path": [], "spans": [[0, "0F0", 0.0, 1.0], [1, "1F0", 1.0, 4.0]]}
rows = [{"step": step, "loss": 1.0, "seconds": seconds, "peak_allocated": [7 * step, 5]}
        for step, seconds in enumerate((9.0, 8.0, 5.0, 3.0, 4.0), 1)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
(folder / "timeline.json").write_text(json.dumps({"step": 5, "measured": timeline, "held": [1, 2]}))
time.sleep(60)
"""


def test_on_gpus_the_peak_of_all_tensors_counts(model: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that writes what a run on two GPUs does. The first two steps do not count.

    As under torchrun, whose variables are not the run's.
    """
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    start = subprocess.Popen

    def pretended(command: list[str], **options: Any) -> subprocess.Popen[str]:
        assert not {"RANK", "WORLD_SIZE"} & {*options["env"]}
        return start([sys.executable, "-c", _WRITES, command[-1]], **options)

    monkeypatch.setattr("penstock.train.measured_runs.subprocess.Popen", pretended)
    estimated = estimate(model, RUN, CLUSTER)
    measured = measured_run(model, estimated, CLUSTER, {}, on_cpu=False, steps=5)
    assert measured.error == ""
    assert measured.steps == (5.0, 3.0, 4.0)
    assert measured.seconds == 4.0
    assert measured.computing == pytest.approx((1.0 + 3.0) / 2 / 4.0)  # of the step whose timeline it is
    assert (measured.kept, measured.predicted_kept) == (35, estimated.nbytes)


def test_no_checkpoint_is_due_while_it_is_measured(tmp_path: Path) -> None:
    tree = few_steps(RUN, {"path": "models/some"}, tmp_path, on_cpu=False, steps=6)
    config = TrainConfig.model_validate(tree)
    assert config.train.checkpoint_every is None  # only at the end
    assert config.train.last > 2 * config.train.evaluate_every == 12
    assert (config.model.weights, config.train.device, config.train.check) == ("random", "cuda", "off")


def test_what_an_op_needs_while_it_runs_is_left_out(model: Workload) -> None:
    trial = Trial.of(model, RUN, CLUSTER)
    whole = max(trial.estimate().timeline.peak_memory)
    hidden = 2 * 32 * 64 * torch.float32.itemsize
    assert hidden < between_ops(trial) < whole
