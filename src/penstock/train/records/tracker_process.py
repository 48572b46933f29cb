"""The process of one tracker: ``python -m penstock.train.records.tracker_process run.json wandb 0``.

It reads metrics.jsonl from a byte on and logs each row under its step. It ends when it reads from stdin how
the run ended, or when the run is gone. On its stdout it writes, in a line each, where the metrics are
("at ...") or why they are missing ("failed ..."); a library's own output goes to stderr.
"""

from __future__ import annotations

import math
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.reading import parse_json, read_json
from penstock.train.records.metrics import MetricsRow, kind_of, leaves
from penstock.train.records.trackers import PATIENCE, without_password

_EVERY = 1.0  # seconds between two reads of the file
_STEP = "train/global_step"  # the step's name in W&B
_DEFAULT = "penstock"  # project and experiment
_TAG = "penstock.run"  # the tag by which a resumed run finds its MLflow run
_LONGEST = 500  # characters of a value of the config


class Tracker(Protocol):
    """One library. Its constructor takes its section of the config, the contents of run.json, and its folder.

    shown_at: where people see the metrics
    """

    shown_at: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, how: str) -> None:
        """how: "finished", "failed", "interrupted", or "killed" for a run that is gone"""


class TensorBoard:
    """An event file in a folder of the run. Rows that a resumed run repeats are hidden."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any], folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        runs = Path(options["folder"]).expanduser() if options["folder"] else folder / "tensorboard"
        self.shown_at = str(runs / (options["run"] or run["id"]))
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(self.shown_at, flush_secs=5)
        if done := run["starts"][-1]["step"]:  # a resumed run: later rows of the earlier start are hidden
            begins = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=done + 1, session_log=begins))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )

    def finish(self, how: str) -> None:
        self._writer.flush()
        self._writer.close()


class Wandb:
    """A W&B run under the run's own id, so that a resumed run goes on in it."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any], folder: Path) -> None:
        os.environ.setdefault("WANDB_CONSOLE", "off")  # the output of this process is of no use
        import wandb

        self._run = wandb.init(
            project=options["project"] or os.environ.get("WANDB_PROJECT") or _DEFAULT,
            name=options["run"] or os.environ.get("WANDB_NAME") or run["id"],
            entity=options["entity"],
            mode=options["mode"],
            dir=os.environ.get("WANDB_DIR") or str(folder),
            id=os.environ.get("WANDB_RUN_ID") or run["id"],
            resume="allow",
            config=run["config"],
            settings=wandb.Settings(x_stats_pid=os.getppid()),  # the run's CPU and memory, not ours
        )
        # a step of W&B cannot come twice, and a resumed run repeats some
        self._run.define_metric("*", step_metric=_STEP)
        self.shown_at = self._run.url or str(Path(self._run.dir).parent)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, _STEP: step})

    def finish(self, how: str) -> None:
        self._run.finish(exit_code=0 if how == "finished" else 1)


class Mlflow:
    """An MLflow run with the run's id as a tag, by which a resumed run finds it."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any], folder: Path) -> None:
        if (options["uri"] or "").startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the config names a file store
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        database = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        uri = options["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or database
        self._client, self._metric = MlflowClient(uri), Metric
        experiment = self._experiment(options["experiment"])
        runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run['id']}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            created = self._client.create_run(
                experiment, tags={_TAG: run["id"]}, run_name=options["run"] or run["id"]
            )
            self._id = created.info.run_id
            params = [Param(key, str(value)[:_LONGEST]) for key, value in leaves(run["config"])]
            for at in range(0, len(params), 100):  # the most that one call takes
                self._client.log_batch(self._id, params=params[at : at + 100])
        self.shown_at = f"{without_password(uri)}, run {self._id}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        entries = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=entries)

    def finish(self, how: str) -> None:
        self._client.set_terminated(self._id, {"finished": "FINISHED", "failed": "FAILED"}.get(how, "KILLED"))

    def _experiment(self, name: str | None) -> str:
        if name is None and (given_id := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given_id
        name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage == "active":
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name))  # its error says how to restore a deleted one


_CLASSES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}


# ---- Rows


def numbers(row: MetricsRow) -> dict[str, float]:
    """The numbers of a row by the names that transformers' Trainer gives them: ``train/loss``, ``eval/loss``.

    Those in lists and mappings have flat names, as ``train/peak_resident/0``. A value that is null, as a loss
    that is not finite, is left out.
    """
    kind = {"step": "train/", "evaluation": "eval/"}.get(kind_of(row), f"{kind_of(row)}/")
    metrics = {}
    for name, value in leaves({key: value for key, value in row.items() if key != "step"}, "/"):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            name = re.sub(r"[^\w./ -]", "_", name)  # a pattern of the config may be in it
            metrics[kind + name.removeprefix("held_out_")] = float(value)
    return metrics


class RunEnd:
    """How the run ended: from stdin, or "killed" if it is gone. PATIENCE later this process ends itself."""

    def __init__(self) -> None:
        self.how, self.known = "", threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        parent = os.getppid()
        while not self.how:
            if select.select([0], [], [], _EVERY)[0]:
                self.how = os.read(0, 64).decode() or "killed"
            elif os.getppid() != parent:  # a process that the run forked may keep stdin open
                self.how = "killed"
        self.known.set()
        time.sleep(PATIENCE)
        os._exit(1)


def follow(path: Path, offset: int, tracker: Tracker, end: RunEnd) -> None:
    """Log the rows from a byte on, until the run has ended."""
    rest = b""
    with path.open("rb") as file:
        file.seek(offset)
        while True:
            last = end.known.wait(_EVERY)
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                if (row := _row(line)) is not None:
                    tracker.log(row["step"], numbers(row))
            if last:
                return


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None for a damaged line: it costs one row, and not the tracker."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def main() -> None:
    file, name, offset = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end = RunEnd()
    try:
        run = read_json(file)
        options = next(section for section in run["config"]["output"]["trackers"] if section["name"] == name)
        tracker = _CLASSES[name](options, run, file.parent)
        print(f"at {tracker.shown_at}", file=said, flush=True)
        follow(file.with_name("metrics.jsonl"), offset, tracker, end)
        tracker.finish(end.how)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"failed {why[:500]}", file=said, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
