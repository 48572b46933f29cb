"""Save and load checkpoints of a training run: complete or absent, and readable by `from_pretrained`.

A checkpoint is loaded at any number of ranks and under any schedule, placement or split. Its files are
listed in penstock.checkpoint.contents.

    writer = CheckpointWriter(pipe)                      # or save_checkpoint(), which waits for the disk
    with writer:
        for step in range(start, steps):
            ...
            if step % 100 == 0:
                writer.save(f"checkpoints/{step}", optimizer, {"step": step})
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig

from penstock.checkpoint.background import BackgroundWrite, Publish, Then, follow
from penstock.checkpoint.contents import (
    Extra,
    bytes_of,
    collector,
    read_random_state,
    read_state,
    set_random_state,
)
from penstock.checkpoint.optimizer_state import Optimizers, StoredState, optimizers_of, unfit
from penstock.errors import AlteredError, CheckpointError, RunError
from penstock.models.model_folder import config_from
from penstock.models.weights.folder import FAILING_DISK, check_lengths, readable
from penstock.models.weights.hashes import hashed_meanwhile
from penstock.models.weights.saved import SavedModel
from penstock.models.weights.saved_adapter import BASE
from penstock.pipeline.pipeline import Pipeline
from penstock.reading import read_json, size
from penstock.runtime.device.copies import BackgroundCopies
from penstock.runtime.device.free_memory import room_in_memory
from penstock.runtime.health.notes import boot_id
from penstock.runtime.sharded_weights import local_shard

# keys of a model's config that may differ between a checkpoint and the model that loads it
_INCIDENTAL = {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"}

_NOTICE = 2.0  # seconds that an abandoned write may take to notice it
_GRACE = 30.0  # seconds for a write to end after an error elsewhere

_log = logging.getLogger(__name__)


def save_checkpoint(
    path: str | Path, pipe: Pipeline, optimizer: Optimizers, state: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint, complete or not at all, and return when it is on the disk. Collective.

    Args:
        path: on a file system that all processes share; a checkpoint of that name is replaced
        optimizer: one of torch's, or several over disjoint parameters of the pipeline; their state is
            tensors and numbers
        state: what the loop needs to go on, such as its step, its position in the data and a scheduler's
            state_dict(): text, numbers, lists, and dicts with text as keys. Process 0's is kept.

    Raises CheckpointError for state that a checkpoint cannot hold and weights sharded over another mesh;
    ModelError for weights that are not under the model's names and a pipeline made by from_provider: on all
    processes. If one process fails in another way, as on a full disk, it raises its own error, and the
    others a RunError that names that process.
    """
    CheckpointWriter(pipe, background=False).save(path, optimizer, state)


def load_checkpoint(
    path: str | Path, pipe: Pipeline, optimizer: Optimizers, *, learning_rates: bool = True
) -> dict[str, Any]:
    """Restore weights, optimizer state and random state in place, and return the loop's `state`. Collective.

    The number of ranks, schedule, placement and split may differ from those at the save. The random state
    is restored if the number of processes is the same.

    Args:
        path: of the checkpoint
        optimizer: of the same classes as at the save. Its options do not change, except learning rates.
        learning_rates: give each group the rate that its parameters had. Make a scheduler before this call,
            and give it its part of the returned state.

    Raises CheckpointError if a file is missing or of another length, or cannot be read; UnfitError, a
    CheckpointError, if it is of another model or optimizer: before anything is changed on any process.
    AlteredError, on all processes, if a file's contents are not what was written. Files are hashed while
    they are read, so weights have changed by then, as they have if the disk fails meanwhile. The weights are
    NaN until another checkpoint is loaded.
    """
    folder, saved = Path(path).expanduser(), pipe.files.saved

    def check() -> None:
        if pipe.processes.index == 0:
            check_lengths(folder)

    with pipe.processes.calling("load_checkpoint()"):
        pipe.ranks.attempt(f"check checkpoint {folder}", check)
        try:
            with hashed_meanwhile(folder, pipe.ranks):
                return _load(folder, pipe, saved, optimizer, learning_rates)
        except AlteredError:
            _spoil(pipe)
            raise


def _spoil(pipe: Pipeline) -> None:
    """Make all weights NaN, or a caller that goes on would train on a mixture of two checkpoints."""
    for parameter in pipe.parameters():
        if parameter.is_floating_point():
            local_shard(parameter.detach()).fill_(math.nan)


def _load(
    folder: Path, pipe: Pipeline, saved: SavedModel, optimizer: Optimizers, learning_rates: bool
) -> dict[str, Any]:
    """Check that all fits, then restore it. Fails on all processes or on none. Collective."""
    named = list(pipe.named_parameters(remove_duplicate=False))
    known = {name for names in pipe.processes.gather([name for name, _ in named]) for name in names}

    def check() -> Callable[[], dict[str, Any]]:
        state = read_state(folder)
        check_config(folder, saved.config)
        stored = StoredState(folder, saved.ties)
        if foreign := sorted(stored.names - known - saved.copies.union(*saved.ties)):
            raise unfit(folder, f"it holds {foreign[0]}", "the model has no such parameter")
        saved.check(folder, {stage.index: stage for stage in pipe.stages})
        restore = stored.restorer(optimizer, named, learning_rates=learning_rates)
        random = read_random_state(folder, pipe)

        def apply() -> dict[str, Any]:
            with readable(folder, "its tensors", FAILING_DISK):
                pipe.load_weights(folder)
                restore()
            set_random_state(random, pipe)
            return state

        return apply

    apply = pipe.ranks.attempt(f"go on from checkpoint {folder}", check)
    try:
        return pipe.ranks.attempt(f"read checkpoint {folder}", apply)
    except Exception:  # on all processes, some of which have read theirs
        _spoil(pipe)
        raise


def check_config(path: Path, config: PretrainedConfig) -> None:
    """Raise CheckpointError unless the checkpoint `path` is of a model with this config.

    Both are compared as files return them; writer, name, dtype and cache do not count.
    """
    try:
        if (path / BASE).is_file():  # of an adapter
            content = read_json(path / BASE)["config"]
        else:
            content = read_json(path / "config.json")
        theirs, kind = facts_of(type(config), json.dumps(content)), content.get("model_type")
    except Exception as error:  # whatever a model's own code raises for a damaged config
        raise CheckpointError(
            f"checkpoint {path}: config.json", f"it cannot be read: {error!r}", "Take another one"
        ) from error
    if kind != config.model_type:
        raise unfit(path, f"model config model_type={kind}", f"the model has {config.model_type}")
    ours = facts_of(type(config), config.to_json_string())
    for key in sorted(ours.keys() | theirs.keys()):
        if theirs.get(key) != ours.get(key):
            raise unfit(path, f"model config {key}={theirs.get(key)}", f"the model has {ours.get(key)}")


def facts_of(kind: type[PretrainedConfig], text: str) -> Any:
    """What the text of a config.json says of a model, as transformers reads it, without incidental keys."""
    return _comparable(json.loads(config_from(kind, text).to_json_string(use_diff=False)))


def _comparable(config: Any) -> Any:
    """Without incidental keys, in nested configs too."""
    if not isinstance(config, dict):
        return config
    return {key: _comparable(value) for key, value in config.items() if key not in _INCIDENTAL}


class CheckpointWriter:
    """Writes checkpoints while training goes on: threads copy to host memory, and write the copies.

    On a GPU the copies are made while the next step computes. `optimizer.step()` and `pipe.load_weights()`
    wait for them. Before anything else changes weights or the optimizer's state, call `settle`.
    A host that lacks memory for the copies of its processes is no error: training then waits while that
    checkpoint is written, and a log line says so.

    Every process of the job makes one, together, once for a pipeline. As a context manager it waits for the
    last write at its end. After an error it gives that write 30 s, after Ctrl-C none; if the write made no
    checkpoint, a note on the error says which and why. Otherwise call `wait` at the end, before
    `pipe.close()`. If a job has several pipelines, one of them saves, or each to its own path.

    Args:
        background: False writes within `save`, without copies
    """

    def __init__(self, pipe: Pipeline, *, background: bool = True) -> None:
        self._pipe, self._background = pipe, background
        self._processes = pipe.processes.in_background() if background else pipe.processes.patient
        self._target: Path | None = None  # of the write under way
        self._write: BackgroundWrite | None = None  # on the pipeline of a mesh that writes
        self._copies: BackgroundCopies | None = None
        self._waits: list[RemovableHandle] = []  # of optimizers, for the copies
        self._abandoned = False

    def save(
        self,
        path: str | Path,
        optimizer: Optimizers,
        state: Mapping[str, Any] | None = None,
        *,
        extra: Extra | None = None,
        then: Then | None = None,
    ) -> None:
        """Save as save_checkpoint does, but in the background. Collective.

        Waits for the previous write first, and raises what `wait` raises: then nothing was saved, and the
        next call starts afresh.

        Args:
            path, optimizer, state: as for save_checkpoint
            extra: function of the folder being written, to add files; process 0 calls it
            then: process 0 calls it when the checkpoint has its name. If it fails the checkpoint stays, and
                the RunError says so. The writer's thread calls `extra` and `then`.

        Raises what save_checkpoint raises, and RunError after `drop` among several processes.
        """
        pipe, target = self._pipe, Path(os.path.abspath(Path(path).expanduser()))
        self._check_usable()
        self.wait()
        pipe.files.saved  # noqa: B018  raises for a pipeline without files
        with pipe.processes.calling("save_checkpoint()"):
            publish, copies = self._collect(target, optimizer, state, extra)
        if copies is None:
            self._publish(target, publish, then)
            return
        pipe.files.settle()  # the copies of another writer: loading weights waits for the newest alone
        self._target, self._copies = target, copies
        pipe.files.under_way = copies
        self._waits = [one.register_step_pre_hook(copies.before_step) for one in optimizers_of(optimizer)]
        if pipe.files.written_here:
            self._write = BackgroundWrite(target, publish, then, self._processes)

    def _collect(
        self, target: Path, optimizer: Optimizers, state: Mapping[str, Any] | None, extra: Extra | None
    ) -> tuple[Publish, BackgroundCopies | None]:
        """The function that writes the checkpoint, and the copies that it reads. Collective.

        None in place of copies: it reads the weights, and training waits for it.
        """
        pipe, action = self._pipe, f"collect what goes into checkpoint {target}"

        def check() -> Callable[[BackgroundCopies | None], Publish]:
            pipe.files.check(pretrained=False)
            return collector(pipe, optimizer, state, extra)

        collect = pipe.ranks.attempt(action, check)
        fits = self._background and self._fits(target, optimizer)
        copies = pipe.files.new_copies() if fits else None
        try:
            return pipe.ranks.attempt(action, lambda: collect(copies)), copies
        except BaseException:
            if copies is not None:
                copies.drop()  # another rank may have failed
            raise

    def _publish(self, target: Path, publish: Publish, then: Then | None) -> None:
        """Write the checkpoint now. Collective."""

        def write() -> None:
            if self._pipe.files.written_here:
                publish(target, self._processes)
                follow(target, then, self._processes)

        self._pipe.ranks.attempt(f"write checkpoint {target}", write)

    def _fits(self, target: Path, optimizer: Optimizers) -> bool:
        """Whether each host has memory for the copies of its processes. Collective."""
        pipe = self._pipe
        everyone = pipe.ranks.gather([boot_id(), bytes_of(pipe, optimizer), room_in_memory()])
        for host in {host for host, _, _ in everyone}:
            copied = sum(nbytes for other, nbytes, _ in everyone if other == host)
            room = min(free for other, _, free in everyone if other == host)
            if copied > room:
                if pipe.ranks.index == 0:
                    _log.warning(
                        "checkpoint %s: training waits until it is written: copies take %s, a host has %s",
                        target, size(copied), size(room),
                    )  # fmt: skip
                return False
        return True

    def settle(self) -> None:
        """Wait for the copies; then weights and the optimizer's state may be changed. Not collective."""
        if self._copies is not None:
            self._copies.wait()

    def _forget_copies(self) -> None:
        for handle in self._waits:
            handle.remove()
        if self._copies is not None and self._pipe.files.under_way is self._copies:
            self._pipe.files.under_way = None  # or an error's traceback would keep all copies
        self._copies, self._waits = None, []

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk. Collective.

        Raises, on all processes, the error of its write: RunError or CheckpointError.
        """
        if self._target is None:
            return
        if self._write is not None:
            self._write.join()  # after Ctrl-C here it can still be waited for
        self.settle()
        self._forget_copies()
        action, write = f"write checkpoint {self._target}", self._write
        self._target = self._write = None  # on all pipelines, also if it failed
        self._pipe.ranks.attempt(action, (lambda: None) if write is None else write.raise_error)

    def check(self) -> None:
        """Raise the error of a write that has failed by now. Neither collective nor blocking.

        The threads of all processes that write end together, so that each has an error within moments. Among
        several processes the writer cannot be used again.
        """
        write = self._write
        if write is not None and write.failed:
            self.drop()
            write.raise_error()

    def drop(self, linger: float = _NOTICE) -> None:
        """Abandon the write under way: it leaves no checkpoint. Not collective.

        Among several processes the writer cannot be used again: others may still be in that write.

        Args:
            linger: seconds to wait for the write to notice
        """
        if self._target is None:
            return
        if self._copies is not None:
            self._copies.drop()
        if self._write is not None:
            self._write.drop(linger)
        self._forget_copies()
        self._write = self._target = None
        self._abandoned = True

    def _check_usable(self) -> None:
        """Raises RunError, on all processes: a second write would read the messages of an abandoned one."""
        pipe = self._pipe
        if not self._background or (pipe.processes.count == 1 and len(pipe.reductions.stage_ranks) <= 1):
            return
        if any(pipe.ranks.gather(self._abandoned)):
            raise RunError(
                "a CheckpointWriter that abandoned a write",
                "its group may still be in that write",
                "Make a new one",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        write = self._write
        if write is not None and isinstance(error, Exception):
            write.join(_GRACE)  # its checkpoint is from before the error; other ranks write it too
        self.drop()
        if write is not None and write.failure is not None:
            error.add_note(f"checkpoint {write.path}: {write.failure}")
