"""Checkpoints of `penstock train`: their folders, resuming from one, and pruning old ones.

<output>/checkpoints/step-00000100/     written by penstock.checkpoint.save_load, with the tokenizer next to
                                        the weights, and a RunState (state.py)
<output>/checkpoints/best               a link to the best one by output.keep.metric, with output.keep.best

A run resumes from its own checkpoints and removes only those. It ignores folders of other names.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from transformers import PreTrainedModel

from penstock.checkpoint.optimizer_state import StoredState, unfit
from penstock.checkpoint.save_load import check_config
from penstock.errors import CheckpointError, ConfigError, RunError, UnfitError
from penstock.models.weights.files import Ties, tied_names
from penstock.models.weights.folder import (
    check_lengths,
    check_replaceable,
    displaced,
    leftovers,
    looks_whole,
    not_finite,
    remove_folder,
    remove_hidden,
    target_of,
    unfinished,
)
from penstock.train.config.model import ModelSection
from penstock.train.config.output import KeepSection
from penstock.train.config.sections import TrainConfig
from penstock.train.optimizers.optimizer import SHAPED
from penstock.train.owner import last_run
from penstock.train.settings import mesh_of
from penstock.train.state import FRESH, RunState, read_state

NEWEST = "newest"  # in place of a checkpoint's path


def checkpoint_folder(output: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return output / "checkpoints" / f"step-{step:08d}"


def checkpoints_in(output: Path) -> Iterator[tuple[int, Path]]:
    """Step and path of each folder that has exactly the name of a checkpoint, in no order."""
    for path in (output / "checkpoints").glob("step-*"):
        if (step := _step_of(path)) is not None and path.is_dir():
            yield step, path


def _candidates(output: Path) -> list[tuple[int, Path]]:
    """Step and path of each folder that a run may go on from, the highest step first.

    If a replacement was killed between its two renames, the older folder is whole under its hidden name.
    """
    hidden = [(_step_of(path), path) for path in displaced(output / "checkpoints", "step-*") if path.is_dir()]
    candidates = [*checkpoints_in(output), *((step, path) for step, path in hidden if step is not None)]
    return sorted(candidates, reverse=True)


def _step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder, by its name or by its name before it was hidden; None for others."""
    name = target_of(path).name if path.name.startswith(".") else path.name
    named = re.fullmatch(r"step-([0-9]{8,})", name)
    return int(named[1]) if named and name == f"step-{int(named[1]):08d}" else None


def check_unchanged(output: Path, start: Start) -> None:
    """Raise RunError if checkpoints were written since `find_start` chose an older one.

    The owner calls it: another run may have ended between `find_start` and the start of the ownership.
    """
    if start.checkpoints is None:
        return
    come = sorted(path for _, path in checkpoints_in(output) if path not in start.checkpoints)
    if come:
        rule = "another run wrote it while this one started, which would go on from an older one"
        raise RunError(f"checkpoint {come[-1]}", rule, "Start this run again with --resume")


# ---- Resuming


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        checkpoint: None for a fresh start; a run that goes on from memory may be past it
        is_newest: whether an older one may replace it
        state: of the checkpoint
        notes: lines to show
        remembered: the run whose newest checkpoint may be in memory; None if it is not to be recalled
        checkpoints: those that existed; None unless the newest was to be loaded
    """

    checkpoint: Path | None = None
    is_newest: bool = False
    state: RunState = FRESH
    notes: tuple[str, ...] = ()
    remembered: str | None = None
    checkpoints: frozenset[Path] | None = None

    @property
    def done(self) -> int:
        """The number of steps before the start."""
        return self.state.step


def find_start(
    config: TrainConfig,
    model: PreTrainedModel,
    resume: str | None,
    kinds: Mapping[str, str],
    before: Path | None = None,
) -> Start:
    """Find the checkpoint to resume from, and check that it fits. Reads headers, and no tensor.

    Args:
        model: the whole model, on the meta device
        resume: a checkpoint's path; NEWEST for the newest complete one of the folder's last run, or a fresh
            start if that has written none; None for a fresh start
        kinds: the class of optimizer that trains each parameter
        before: only checkpoints older than this one

    Raises: CheckpointError; ConfigError if no step is left to do.
    """
    if resume is None:
        return Start()
    output, ties = config.output.path, tied_names(model)

    def check(path: Path) -> None:
        check_fits(path, model, ties, kinds)

    if resume != NEWEST:
        path = Path(resume).expanduser()
        check_lengths(path)
        check(path)
        spoilt = not_finite(path)
        return _start_from(config, path, [f"penstock: warning: {spoilt}"] if spoilt else [])
    existing = frozenset(path for _, path in checkpoints_in(output))
    remembered = None if config.train.memory_checkpoint_every is None else last_run(output)
    newest, passed, damaged = newest_checkpoint(output, before, check)
    notes = [f"penstock: warning: passed over {reason}" for reason in passed]
    if newest is not None:
        start = _start_from(config, newest, notes)
        return replace(start, is_newest=True, remembered=remembered, checkpoints=existing)
    if damaged or before is not None:
        rule = "it holds no complete checkpoint" + "".join(f"\n  passed over {reason}" for reason in passed)
        remedy = "Start without --resume, or give the path of a checkpoint"
        raise CheckpointError(f"--resume with output.folder={output}", rule, remedy)
    fresh = f"{output} holds no checkpoint of its last run: starting from the beginning"
    return Start(notes=(*notes, fresh), remembered=remembered, checkpoints=existing)


def _start_from(config: TrainConfig, path: Path, notes: list[str]) -> Start:
    start = start_after(config, read_state(path), f"the checkpoint {path}")
    return replace(start, checkpoint=path, notes=(*notes, f"going on from {path}", *start.notes))


def recorded_state(output: Path, resume: str | None) -> RunState | None:
    """The state of the checkpoint to go on from; None for a fresh start. Raises CheckpointError."""
    if resume is None:
        return None
    path = newest_checkpoint(output).path if resume == NEWEST else Path(resume).expanduser()
    return None if path is None else read_state(path)


def recorded_model(output: Path, resume: str | None) -> ModelSection | None:
    """The model section in the checkpoint to go on from; None for a fresh start. Raises CheckpointError."""
    state = recorded_state(output, resume)
    return None if state is None else ModelSection.model_construct(**state.config.get("model", {}))


def start_after(config: TrainConfig, state: RunState, name: str) -> Start:
    """The start from the state of a checkpoint, with notes of what has changed since. name: for an error

    Raises ConfigError if no step is left to do.
    """
    if config.train.epochs is None:  # else `counted` checks it, once it knows the steps
        check_left(config.train.last, state.step, name, f"train.steps={config.train.last}")
    stop = config.train.early_stop
    if stop is not None and (early := state.best.ends(stop)):
        rule = f"the run of {name} ended early, after step {state.step}: {early}"
        remedy = f"Set it above {state.best.since}, or leave early_stop out, to go on"
        raise ConfigError(f"train.early_stop.patience={stop.patience}", rule, remedy)
    before, now = _with_defaults(state.config), config.model_dump(mode="json")
    changed = changes(before, now)
    if before.get("output", {}).get("keep", {}).get("metric") != now["output"]["keep"]["metric"]:
        state = state._replace(ranking=())  # scores of another metric
    notes = [f"changed since then: {change}" for change in changed]
    if mesh_change := _mesh_change(state.mesh, mesh_of(config)):
        notes.append(mesh_change)
    return Start(state=state, notes=tuple(notes))


def check_left(steps: int, done: int, name: str, value: str) -> None:
    """Raise ConfigError if a run of `steps` steps has none left after `done`.

    name: of the checkpoint; value: the key that sets the steps
    """
    if done >= steps:
        key = value.partition("=")[0]
        rule = f"{name} is of step {done}, so nothing is left to do"
        above = f"above {done}" if key == "train.steps" else "higher"
        raise ConfigError(value, rule, f"Set {key} {above}, or start without --resume")


def _mesh_change(before: dict[str, int] | None, now: dict[str, int]) -> str:
    """A line if the run goes on with another mesh, as with axes of -1; else empty."""
    if before in (None, now):
        return ""
    assert before is not None
    counts = [math.prod(size for name, size in mesh.items() if name != "ep") for mesh in (before, now)]
    words = [
        " x ".join(f"{name}={size}" for name, size in mesh.items() if name == "pp" or size > 1)
        for mesh in (before, now)
    ]
    return f"was {counts[0]} processes, now {counts[1]}: {words[1]} (was {words[0]})"


class Newest(NamedTuple):
    """The newest checkpoint of a folder that can be resumed from, and a line for each one passed over.

    damaged: whether one of those was complete once: a fresh start would lose its steps
    """

    path: Path | None
    passed: list[str]
    damaged: bool = False


def _torn(folder: Path) -> list[str]:
    """A line for each checkpoint of which the write, or the replacement, was cut short."""
    torn = [f"{path} was never finished" for path in reversed(unfinished(folder, "step-*"))]
    return torn + [
        f"{target_of(path)} was being replaced: {path} holds the older one"
        for path in reversed(displaced(folder, "step-*"))
    ]


def newest_checkpoint(
    output: Path, before: Path | None = None, check: Callable[[Path], None] | None = None
) -> Newest:
    """The complete checkpoint of the highest step that the last run in `output` wrote.

    It is judged by its state and the lengths of its files. If the last run is unknown, any run will do.

    Args:
        before: only steps before this one's
        check: raises CheckpointError for a checkpoint that cannot be read

    Raises UnfitError, of `check`: an older checkpoint would be of another model too.
    """
    torn = _torn(output / "checkpoints")
    wanted, damaged = last_run(output), False
    limit = None if before is None else _step_of(before)
    for step, path in _candidates(output):
        if limit is not None and step >= limit:
            continue
        try:
            check_lengths(path)
            state = read_state(path)
            if state.step != step:
                raise CheckpointError(f"checkpoint {path}", f"its state is of step {state.step}", "Rename it")
            if wanted not in (None, state.run):
                torn.append(f"{path}: it is of run {state.run}, and the last one here was {wanted}")
                continue
            if spoilt := not_finite(path):
                rule = f"{spoilt}, and it would train on nothing else"
                raise CheckpointError(f"checkpoint {path}", rule, "To go on from it, give its path")
            if check is not None:
                check(path)
        except UnfitError:
            raise
        except CheckpointError as error:
            torn.append(str(error))
            damaged = True
        else:
            return Newest(path, torn, damaged)
    return Newest(None, torn, damaged)


def check_fits(path: Path, model: PreTrainedModel, ties: Ties, kinds: Mapping[str, str]) -> None:
    """Check that the checkpoint has the model's config and parameters, and state of the same optimizers.

    Raises: CheckpointError.
    """
    check_config(path, model.config)
    stored = StoredState(path, ties)
    for name, parameter in model.named_parameters():
        kind, entry = kinds[name], stored.find(name)
        if parameter.requires_grad and entry is None:
            raise unfit(path, f"no state of {name}", "the model trains this parameter")
        if entry is not None and entry.optimizer not in (None, kind):
            raise unfit(path, f"{name} was trained by {entry.optimizer}", f"here {kind} trains it")
        for shape in filter(None, (stored.shape(name, part) for part in SHAPED)):
            if shape != list(parameter.shape):
                raise unfit(path, f"{name} of shape {shape}", f"the model's is {list(parameter.shape)}")


def _with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config; keys newer than it have their defaults, which is how it ran."""
    with suppress(ValidationError):
        return TrainConfig.model_validate(written).model_dump(mode="json")
    return written


def changes(before: object, now: object, name: str = "") -> list[str]:
    """The keys whose values differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in before if key not in now)]
        nested = (changes(before.get(key), now.get(key), f"{name}.{key}".lstrip(".")) for key in keys)
        return [change for of_key in nested for change in of_key]
    return [] if before == now else [f"{name}={now} (was {before})"]


# ---- Keeping


def prune(
    written: Path, run: str, keep: KeepSection, best: Sequence[int] = (), saved_every: int | None = None
) -> None:
    """Remove the checkpoints of `run` before `written`, which was just published, that no rule keeps.

    best: the steps of the best evaluations, which stay
    saved_every: steps between checkpoints that are saved for no evaluation

    Checkpoints of later steps and of other runs, and incomplete folders, are neither removed nor counted. A
    checkpoint with files that are not its own stays. Call it on one process, while nothing is written to the
    folder. A removal that is cut short leaves hidden folders, which the next call removes, together with
    those of runs killed in a write. A hidden older checkpoint whose replacement never came stays.
    """
    if keep.last is None and not best:
        return
    remove_unfinished(written.parent.parent)
    last = int(written.name.removeprefix("step-"))
    older = sorted(
        ((step, path) for step, path in _complete(written.parent.parent, run) if step < last), reverse=True
    )
    for age, (step, path) in enumerate(older, start=1):
        regular = age < keep.last if keep.last else saved_every and step % saved_every == 0
        if not regular and step not in best and (keep.every is None or step % keep.every):
            with suppress(CheckpointError):
                remove_folder(path)


def best_link(output: Path) -> Path:
    """The link to the best checkpoint."""
    return output / "checkpoints" / "best"


def link_best(output: Path, step: int) -> None:
    """Point the link at the checkpoint of `step`, if that is there. Raises OSError."""
    link, path = best_link(output), checkpoint_folder(output, step)
    if not path.is_dir() or (link.exists() and not link.is_symlink()):  # a folder of that name is not ours
        return
    fresh = link.with_name(f".best.{secrets.token_hex(4)}")
    fresh.symlink_to(path.name)
    os.replace(fresh, link)


def remove_unfinished(output: Path) -> None:
    """Remove the folders of runs killed in a write or in a removal. Only the output folder's owner may.

    Raises OSError.
    """
    folder = output / "checkpoints"
    for path in (*leftovers(folder, "step-*"), *unfinished(folder, "step-*")):
        remove_hidden(path)


def set_aside(output: Path, done: int, say: Callable[[str], None]) -> None:
    """Rename folders that a run that goes on from step `done` would have to replace and may not.

    Only the output folder's owner may. Raises OSError.

    Args:
        say: shows a line for each folder
    """
    for step, path in sorted(checkpoints_in(output)):
        try:
            if step > done:
                check_replaceable(path)
        except CheckpointError as error:
            aside = path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}")
            path.rename(aside)
            say(f"penstock: warning: {aside.name} was {path.name}, which this run will write: {error.rule}")


def _complete(output: Path, run: str) -> Iterator[tuple[int, Path]]:
    """Step and path of each checkpoint of `run` that looks complete, judged without reading its tensors."""
    for step, path in checkpoints_in(output):
        with suppress(CheckpointError):
            if not path.is_symlink() and looks_whole(path) and read_state(path).run == run:
                yield step, path
