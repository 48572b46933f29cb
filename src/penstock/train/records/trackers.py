"""Sends the rows of metrics.jsonl to TensorBoard, Weights & Biases or MLflow too.

Each tracker is a process of its own (tracker_process.py) that reads metrics.jsonl while it grows. So a
library's threads, prompts, retries and failures do not reach the run, and a killed run leaves no process:

    first process of the run                        process of a tracker
    appends rows to metrics.jsonl          ----->   reads new rows and logs them
    writes how the run ended to stdin      ----->   logs the last rows, and ends; also if the run is gone
    shows it, also in the summary          <-----   writes where the metrics are, or why they are missing

To add one, write the class of its keys, its line in TRACKERS, and its class in tracker_process.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from os import environ
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Annotated, Literal

from penstock.errors import ConfigError
from penstock.train.config.values import OneOf, PathText, Section

PATIENCE = 60  # seconds, after which a tracker that does not finish is ended
_AFTER_FAILURE = 1  # seconds that a failed run waits; the tracker then finishes without it


class TensorBoardSection(Section):
    """Event files for TensorBoard."""

    name: Literal["tensorboard"] = "tensorboard"  # the name alone means all defaults
    folder: PathText | None = None  # of several runs, for --logdir; null: tensorboard in output.folder
    run: str | None = None  # the run's folder in it; null: the id that the run gives itself


class WandbSection(Section):
    """A run of Weights & Biases. Its environment variables count where a key is left out."""

    name: Literal["wandb"] = "wandb"  # likewise
    project: str | None = None  # null: WANDB_PROJECT, else penstock
    run: str | None = None  # its name; null: WANDB_NAME, else the id that the run gives itself
    entity: str | None = None  # null: WANDB_ENTITY, else that of the login
    mode: Literal["online", "offline"] | None = None  # null: WANDB_MODE, else online


class MlflowSection(Section):
    """A run of MLflow. Its environment variables count where a key is left out."""

    name: Literal["mlflow"] = "mlflow"  # likewise
    # of a server or a store; null: MLFLOW_TRACKING_URI, else sqlite, mlflow.db in output.folder
    uri: str | None = None
    experiment: str | None = None  # null: MLFLOW_EXPERIMENT_NAME, else penstock
    run: str | None = None  # its name; null: the id that the run gives itself


AnyTracker = TensorBoardSection | WandbSection | MlflowSection
TRACKERS: dict[str, type[AnyTracker]] = {  # by its name, which is that of its package too
    "tensorboard": TensorBoardSection,
    "wandb": WandbSection,
    "mlflow": MlflowSection,
}


_IS_NONE = f"is no tracker; write {', '.join(TRACKERS)}, or a mapping such as {{name: wandb, project: mine}}"
TrackerSection = Annotated[AnyTracker, OneOf("name", TRACKERS, _IS_NONE)]


def without_password(uri: str) -> str:
    """An address to show: without the user's name and password, if it has them."""
    scheme, slashes, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def check_trackers(sections: Sequence[AnyTracker]) -> None:
    """Raise ConfigError if the package of a tracker is not installed, or its section has a password.

    Imports none of them.
    """
    for section in sections:
        value, name = f"output.trackers: {section.name}", section.name
        if find_spec(name) is None:
            remedy = f'Run pip install {name}, or pip install "penstock[trackers]"'
            raise ConfigError(value, f"the package {name} is not installed", remedy)
        if isinstance(section, MlflowSection):
            if section.uri is not None and without_password(section.uri) != section.uri:
                rule = "uri has a user or a password, and the config is written into run.json and checkpoints"
                remedy = "Leave uri out, and set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_PASSWORD"
                raise ConfigError(value, rule, remedy)
            uri = section.uri or environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
            if uri.startswith("sqlite:") and find_spec("sqlalchemy") is None:
                rule = "a sqlite store needs SQLAlchemy, which mlflow-skinny leaves out"
                remedy = "Run pip install mlflow, or set uri to a server's, or to file: and a folder"
                raise ConfigError(value, rule, remedy)


class Trackers:
    """The trackers of a run, on its first process.

    Args:
        run_file: run.json, which has the run's id and its config; metrics.jsonl lies next to it
        offset: the bytes of metrics.jsonl that an earlier process of the run has logged
        say: shows a line
    """

    def __init__(
        self, sections: Sequence[AnyTracker], run_file: Path, offset: int, say: Callable[[str], None]
    ) -> None:
        self._trackers, self._not_started = list[_Tracker](), list[str]()
        for section in sections:
            try:
                self._trackers.append(_Tracker(section.name, run_file, offset, say))
            except OSError as error:  # no memory for a process
                self._not_started.append(f"{section.name:<11} dropped: {error}")
                say(_warning(section.name, str(error)))

    def finish(self, how: str) -> None:
        """Wait until every tracker has logged its last rows and ended. Never raises.

        how: "finished", "failed" or "interrupted"
        """
        for tracker in self._trackers:
            tracker.end(how)
        until = monotonic() + (PATIENCE if how == "finished" else _AFTER_FAILURE)
        for tracker in self._trackers:
            tracker.wait(max(0.0, until - monotonic()), kill=how == "finished")

    @property
    def lines(self) -> list[str]:
        """A line of the summary for each tracker."""
        started = [f"{tracker.name:<11} {tracker.failed or tracker.shown_at}" for tracker in self._trackers]
        return started + self._not_started


class _Tracker:
    """The process of one tracker, and a thread that reads its output."""

    def __init__(self, name: str, run_file: Path, offset: int, say: Callable[[str], None]) -> None:
        self.name, self.shown_at, self.failed = name, "", ""
        self._say = say
        command = [sys.executable, "-P", "-m", "penstock.train.records.tracker_process", str(run_file), name]
        # a session of its own: Ctrl-C goes to the run alone, which then writes how it ended
        self._process = subprocess.Popen(
            [*command, str(offset)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        self._listener = Thread(target=self._listen, name=f"penstock-{name}", daemon=True)
        self._listener.start()

    def end(self, how: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has failed
            self._process.stdin.write(how)
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, seconds: float, kill: bool) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            if not kill:
                return
            self._fail(f"it did not finish within {PATIENCE} seconds, and was ended")
            self._process.kill()
            self._process.wait()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                word, _, text = line.strip().partition(" ")
                if word == "at":
                    self.shown_at = text
                    self._say(f"{self.name}: {text}")
                else:
                    self._fail(text)
        if code := self._process.wait():
            self._fail(f"its process ended with code {code}")

    def _fail(self, why: str) -> None:
        """Only the first reason counts."""
        if not self.failed:
            self.failed = f"dropped: {why}"
            self._say(_warning(self.name, why))


def _warning(name: str, why: str) -> str:
    return f"penstock: warning: {name} gets no more numbers, and the run goes on: {why}"
