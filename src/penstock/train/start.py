"""Where a run begins: afresh, or at a checkpoint, and what has changed since that was written."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.errors import CheckpointError, ConfigError
from penstock.models.weights.files import tied_names
from penstock.models.weights.folder import check_folder
from penstock.pipeline.build_plan import BuildPlan
from penstock.train.checkpoints import check_fits, newest, read_state
from penstock.train.config.sections import TrainConfig

NEWEST = "newest"  # in place of a checkpoint's path


@dataclass(frozen=True)
class Start:
    """checkpoint: None for a fresh start; done: steps that lie behind, of which so many were `skipped`

    notes: lines to show
    """

    checkpoint: Path | None = None
    done: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()


def find_start(
    config: TrainConfig, outline: BuildPlan, resume: str | None, muons: Collection[str] = ()
) -> Start:
    """resume: a checkpoint's path, NEWEST for the newest whole one of the output folder, or None
    muons: names of the parameters that Muon trains

    Raises CheckpointError; ConfigError where nothing is left to do.
    """
    if resume is None:
        return Start()
    notes: tuple[str, ...] = ()
    if resume == NEWEST:
        output = Path(config.output.folder).expanduser()
        found = newest(output)
        notes = tuple(f"penstock: warning: passed over {torn}" for torn in found.torn)
        if found.path is None:
            passed = "".join(f"\n  passed over {torn}" for torn in found.torn)
            raise CheckpointError(
                f"--resume with output.folder={output}",
                f"it holds no whole checkpoint{passed}",
                "Start without --resume, or give the path of a checkpoint",
            )
        path = found.path
    else:
        path = Path(resume).expanduser()
        check_folder(path)
    state = read_state(path)
    check_fits(path, outline.source.model, tied_names(outline.source.model), muons)
    if state["step"] >= config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}",
            f"the checkpoint {path} is of step {state['step']}, so nothing is left to do",
            f"Set train.steps above {state['step']}, or start without --resume",
        )
    changed = _changes(_with_defaults(state["config"]), config.model_dump(mode="json"))
    notes += (f"going on from {path}", *(f"changed since then: {change}" for change in changed))
    return Start(path, state["step"], state["skipped"], notes)


def _with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config. Keys that are younger than it have their defaults: that is how it ran."""
    with suppress(ValidationError):
        return TrainConfig.model_validate(written).model_dump(mode="json")
    return written


def _changes(before: object, now: object, name: str = "") -> list[str]:
    """Keys whose values differ, with both."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in before if key not in now)]
        parts = (_changes(before.get(key), now.get(key), f"{name}.{key}".lstrip(".")) for key in keys)
        return [change for part in parts for change in part]
    return [] if before == now else [f"{name}={now} (was {before})"]
