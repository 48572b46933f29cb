"""What TensorBoard, W&B and MLflow really hold after a run that was resumed; and a tracker that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.train.preflight import preflight
from penstock.train.records import trackers as module
from penstock.train.records.metrics import MetricsRow
from penstock.train.records.trackers import (
    AnyTracker,
    MlflowSection,
    TensorBoardSection,
    Trackers,
    WandbSection,
    check_trackers,
)
from penstock.train.run import run
from support.pool import alive
from support.refusals import refuses
from support.tiny import config, metrics

ID = "20260102-030405-abcd"
ROW = {
    "loss": 2.5, "grad_norm": None, "learning_rates": {"adamw": 1e-3, "head|norm": 1e-4},
    "peak_resident": [7, 9], "skipped": "loss=nan", "tokens": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_leaves_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


class FakeRun:
    """The files of a run, and its trackers."""

    def __init__(self, folder: Path, *sections: AnyTracker) -> None:
        self.folder, self.sections, self.said = folder, sections, list[str]()
        self.rows = folder / "metrics.jsonl"
        self.rows.touch()
        dumped = [section.model_dump(mode="json") for section in sections]
        self.about: dict[str, Any] = {
            "id": ID,
            "config": {"output": {"trackers": dumped}, "train": {"steps": 5}},
            "starts": [],
        }

    def begin(self, done: int = 0) -> None:
        self.about["starts"].append({"step": done})
        (self.folder / "run.json").write_text(json.dumps(self.about))

    def start(self, done: int = 0) -> Trackers:
        self.begin(done)
        size = self.rows.stat().st_size
        return Trackers(self.sections, self.folder / "run.json", size, self.said.append)

    def write(self, *rows: MetricsRow) -> None:
        with self.rows.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def step(number: int, **more: Any) -> MetricsRow:
    return {"step": number, **ROW, "loss": 3 - number / 4, **more}


SECTIONS: dict[str, AnyTracker] = {
    "tensorboard": TensorBoardSection(),
    "wandb": WandbSection(project="mine", run="first"),
    "mlflow": MlflowSection(uri="file:mlruns", experiment="mine"),
}


# _trackers, _process: a tracker's process is waited for
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tensorboard", marks=pytest.mark.long),
        pytest.param("wandb", marks=pytest.mark.sweep),  # 8 s on two busy cores
        pytest.param("mlflow", marks=pytest.mark.sweep),
    ],
)
def test_the_library_holds_the_rows_and_a_resumed_run_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = FakeRun(tmp_path, SECTIONS[name])
    trackers = run.start()
    (tracker,) = trackers._trackers
    run.write({"step": 0, "held_out_loss": 5.5, "seconds": 0.5}, *map(step, (1, 2, 3)))
    trackers.finish("finished")
    assert trackers.lines == [f"{name:<11} {tracker.shown_at}"]
    assert run.said == [f"{name}: {tracker.shown_at}"]  # and no warning
    time.sleep(1.1)  # TensorBoard orders files by the second in which they were made
    again = run.start(done=2)  # step 3 is repeated
    run.write(step(3, loss=1.0), step(4, loss=float("nan")), step(5))
    again.finish("failed")
    again._trackers[0]._process.wait(30)
    assert run.said[1:] == [f"{name}: {again._trackers[0].shown_at}"]
    {"tensorboard": check_tensorboard, "wandb": check_wandb, "mlflow": check_mlflow}[name](tmp_path)


def check_tensorboard(output: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = output / "tensorboard"
    assert [each.name for each in folder.iterdir()] == [ID]
    found = EventAccumulator(str(folder / ID)).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(1, 2.75), (2, 2.5), (3, 1.0), (5, 1.75)]
    assert [event.value for event in found.Scalars("eval/loss")] == [5.5]
    assert found.Scalars("train/learning_rates/head_norm")[0].value == pytest.approx(1e-4)


def check_wandb(output: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(output.glob("wandb/offline-run-*/*.wandb")):
        records = [Record.FromString(data) for data in log_records(file)]
        (started,) = {(each.run.run_id, each.run.project, each.run.display_name)
                      for each in records if each.WhichOneof("record_type") == "run"}  # fmt: skip
        assert started == (ID, "mine", "first")
        (ended,) = (each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit")
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in each.history.item}
            for each in records
            if each.WhichOneof("record_type") == "history"
        ]
        found.append((ended, [(row["train/global_step"], row.get("train/loss")) for row in rows]))
        assert rows[-1]["train/learning_rates/head_norm"] == 1e-4
    first, second = found
    assert first == (0, [(0, None), (1, 2.75), (2, 2.5), (3, 2.25)])
    assert second == (1, [(3, 1.0), (4, None), (5, 1.75)])


def log_records(file: Path) -> Iterator[bytes]:
    """The records of a W&B file: a LevelDB log (blocks of 32 KiB, records in pieces) behind 7 bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield record
            record = b""


def check_mlflow(output: Path) -> None:
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(f"file:{output / 'mlruns'}")
    experiment = client.get_experiment_by_name("mine")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FAILED"
    assert found.data.params["train.steps"] == "5"
    assert found.data.tags["penstock.run"] == ID
    history = sorted(
        (each.step, each.value) for each in client.get_metric_history(found.info.run_id, "train/loss")
    )
    assert history == [(1, 2.75), (2, 2.5), (3, 1.0), (3, 2.25), (5, 1.75)]


# _trackers, _process: a tracker's process is waited for
@pytest.mark.long
def test_a_tracker_that_cannot_write_is_warned_of_once_and_named_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = FakeRun(tmp_path, TensorBoardSection(folder=str(tmp_path / "file")))
    trackers = run.start()
    run.write(step(1))
    trackers._trackers[0]._process.wait(30)
    run.write(step(2))
    trackers.finish("finished")
    (warning,) = run.said
    assert warning.startswith("penstock: warning: tensorboard gets no more numbers, and the run goes on: ")
    assert str(tmp_path / "file") in warning
    assert trackers.lines[0].startswith("tensorboard dropped: ")


# _trackers, _process: that it has ended is seen there alone
@pytest.mark.long
@pytest.mark.fault("a tracker hangs", "it is stopped, as one that waits for a network")
def test_a_tracker_that_does_not_finish_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, as a library is that waits for a network."""
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    run = FakeRun(tmp_path, TensorBoardSection())
    trackers = run.start()
    process = trackers._trackers[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    trackers.finish("finished")
    assert time.monotonic() - started < 10
    assert process.returncode == -signal.SIGKILL
    assert "dropped: it did not finish within 0.5 seconds, and was ended" in trackers.lines[0]
    assert len(run.said) == 1


_KILLED = """
import sys, time
from pathlib import Path
from penstock.train.records.trackers import TensorBoardSection, Trackers
folder = Path(sys.argv[1])
Trackers([TensorBoardSection()], folder / "run.json", 0, lambda text: print(text, flush=True))
time.sleep(60)
"""


@pytest.mark.long
def test_the_tracker_of_a_killed_run_logs_what_is_left_and_ends(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, TensorBoardSection())
    run.begin()
    run.write(step(1))
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline().startswith("tensorboard: ")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        tracker = int(children[0])
        # unreleased: 1.2 s and 180 MB of each tracker, for nothing
        assert "libtorch" not in Path(f"/proc/{tracker}/maps").read_text()
        run.write(step(2))
        process.kill()
        process.wait()
    until = time.monotonic() + 30
    while alive(tracker) and time.monotonic() < until:
        time.sleep(0.05)
    if alive(tracker):
        os.kill(tracker, signal.SIGKILL)
        pytest.fail("an orphan is left")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard" / ID)).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2]


@pytest.mark.long
def test_a_run_of_the_trainer_feeds_its_tracker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = {"output.trackers": [{"name": "tensorboard", "run": "mine"}]}
    run(preflight(config(tmp_path, keys=keys)))
    place = tmp_path / "out" / "tensorboard" / "mine"
    assert f"tensorboard {place}" in capsys.readouterr().out
    found = EventAccumulator(str(place)).Reload()
    losses = {row["step"]: row["loss"] for row in metrics(tmp_path) if "loss" in row}
    assert {event.step: event.value for event in found.Scalars("train/loss")} == pytest.approx(losses)
    assert {"train/grad_norm", "train/seconds_by_part/optimizer", "eval/loss", "checkpoint/seconds"} <= set(
        found.Tags()["scalars"]
    )


# ---- The section


def test_a_missing_library_is_one_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "wandb"
    original = importlib.util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else original(name))
    check_trackers([TensorBoardSection()])
    with refuses(ConfigError, "output.trackers: wandb", "not installed", "pip install wandb"):
        check_trackers([WandbSection()])
    missing = "sqlalchemy"
    with refuses(ConfigError, "output.trackers: mlflow", "store needs SQLAlchemy", "pip install mlflow"):
        check_trackers([MlflowSection()])
    check_trackers([MlflowSection(uri="http://server:5000")])


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://user:secret@host:5000/path@2", "https://host:5000/path@2"),
        ("postgresql://user@host/runs", "postgresql://host/runs"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:///runs/a@b/mlflow.db", "sqlite:///runs/a@b/mlflow.db"),
        ("file:/runs/a@b", "file:/runs/a@b"),
    ],
)
def test_a_password_is_neither_shown_nor_taken_from_a_config(uri: str, shown: str) -> None:
    """Unreleased: run.json and each checkpoint had it, as a part of the config, and the log showed it."""
    assert module.without_password(uri) == shown
    if uri.startswith("sqlite:"):
        return  # it needs a package
    if shown == uri:
        check_trackers([MlflowSection(uri=uri)])
    else:
        with refuses(ConfigError, "output.trackers: mlflow", "written into run.json", "MLFLOW_TRACKING_URI"):
            check_trackers([MlflowSection(uri=uri)])


@pytest.mark.parametrize(
    ("section", "value", "rule", "remedy"),
    [
        (
            "[tensorbord]",
            "output.trackers.0",
            "'tensorbord' is no tracker",
            "Write tensorboard, wandb, mlflow",
        ),
        ("[{project: x}]", "output.trackers.0", "is no tracker", ""),
        ("[wandb, {name: wandb, project: x}]", "output.trackers", "wandb is listed twice", ""),
        (
            "[{name: wandb, proyect: x}]",
            "output.trackers.0.proyect='x'",
            "no such key",
            "output.trackers.0.project",
        ),
        ("tensorboard", "output.trackers='tensorboard'", "valid tuple", "Write a list"),
    ],
)
def test_a_wrong_section_is_refused(tmp_path: Path, section: str, value: str, rule: str, remedy: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {config: {model_type: qwen3}}\ndata: {path: text.txt, tokenizer: bytes}\n")
    with refuses(ConfigError, value, rule, remedy):
        load_config(file, [f"output.trackers={section}"])
