"""What a run writes about itself next to metrics.jsonl, for its trackers and for `penstock report`.

run.json        its id, config and environment; when it was started, from which step, and how it ended
timeline.json   when each op of one step ran: of the last step before an evaluation, then of the last one
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.models.weights.folder import UNREADABLE
from penstock.reading import read_json
from penstock.runtime.health.agreement import version_of_penstock
from penstock.schedule import Timeline
from penstock.train.config.sections import TrainConfig
from penstock.train.owner import Owner, new_run
from penstock.train.records.metrics import writable
from penstock.train.records.trackers import Trackers

RUN, TIMELINE = "run.json", "timeline.json"


@contextmanager
def recorded(
    config: TrainConfig,
    owner: Owner | None,
    done: int,
    ranks: int,
    device: torch.device,
    say: Callable[[str], None],
) -> Iterator[Trackers]:
    """Around a run: write run.json, and feed the trackers. Only the first process does anything.

    Args:
        owner: on the first process
        done: the steps before, of a run that goes on: it keeps its id
        ranks: of the pipeline
        say: shows a line
    """
    file = config.output.path / RUN
    if owner is None:
        yield Trackers((), file, 0, say)
        return
    run = _started(file, config, owner.run, done, ranks, device)
    write_json(file, run)
    rows = file.with_name("metrics.jsonl")  # what it holds by now was logged when it was written
    trackers = Trackers(config.output.trackers, file, rows.stat().st_size, say)
    how, why = "finished", ""
    try:
        yield trackers
        if trackers.stopped:
            how, why = "interrupted", trackers.stopped
    except BaseException as error:
        how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        why = str(error)
        raise
    finally:
        run["starts"][-1]["end"] = {"at": _now(), "how": how, "why": why}
        with suppress(RunError):  # the run has its own error, or all that it is for
            write_json(file, run)
        trackers.finish(how)


def _started(
    file: Path, config: TrainConfig, run: str, done: int, ranks: int, device: torch.device
) -> dict[str, Any]:
    """The contents of run.json with one more start.

    A run keeps its id, under which trackers know it. One that goes on in another folder gets a new one.
    """
    before: dict[str, Any] = {}
    if done:
        with suppress(*UNREADABLE):
            contents = read_json(file)
            before = contents if isinstance(contents, dict) and contents.get("run", run) == run else {}
    start = {"at": _now(), "step": done, "ranks": ranks, "processes": _processes()}
    return {
        "id": before.get("id") or (new_run() if done else run),
        "run": run,
        "config": config.model_dump(mode="json"),
        "environment": _environment(device),
        "starts": [*before.get("starts", []), start],
    }


def _environment(device: torch.device) -> dict[str, str]:
    cuda = device.type == "cuda"
    facts = {
        "penstock": version_of_penstock(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    facts |= {"python": platform.python_version(), "system": platform.platform()}
    facts |= {"processes": str(_processes()), "CPUs": str(os.cpu_count())}
    return facts | ({"GPU": torch.cuda.get_device_name(device)} if cuda else {})


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def write_timeline(output: Path, step: int, measured: Timeline, predicted: Timeline | None = None) -> None:
    """Write timeline.json. Raises RunError."""
    entries = {"step": step, "measured": measured.to_data()}
    write_json(output / TIMELINE, entries | ({} if predicted is None else {"predicted": predicted.to_data()}))


def write_json(path: Path, data: object) -> None:
    """Write a file whole: a reader finds the old one or the new one. Raises RunError."""
    fresh = path.with_name(f".{path.name}.new")
    with writable(path):
        fresh.write_text(json.dumps(data), encoding="utf-8")
        os.replace(fresh, path)
