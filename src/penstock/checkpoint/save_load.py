"""Checkpoints of a training run: weights, optimizer state, random state, and whatever JSON the loop adds.

A checkpoint is a folder that is complete or absent, and that `from_pretrained` opens. Beside the weights lie
the optimizer's state by parameter name (penstock.checkpoint.optimizer_state), each process's random state,
and state.json. It is read at any number of ranks and under any schedule, placement or split.

    writer = CheckpointWriter(pipe)                      # or save_checkpoint(), which waits for the disk
    with writer:
        for step in range(start, steps):
            ...
            if step % 100 == 0:
                writer.save(f"checkpoints/{step}", optimizer, {"step": step})
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from transformers import PretrainedConfig

from penstock.checkpoint.background import DROPPED, LINGERS, Background
from penstock.checkpoint.contents import Extra, planned, random_state, read_state, set_random_state
from penstock.checkpoint.optimizer_state import Optimizers, Stored, unfit
from penstock.errors import CheckpointError, PenstockError, RunError
from penstock.models.weights.folder import check_folder_together, together
from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.transport.distributed import apart
from penstock.runtime.transport.groups import Processes

# keys of a model's config that may differ between a checkpoint and the model that goes on from it
_INCIDENTAL = {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"}

T = TypeVar("T")
Then = Callable[[], None]


def save_checkpoint(
    path: str | Path, pipe: Pipeline, optimizer: Optimizers, state: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint, whole or not at all, and return when it is on the disk. Collective.

    path: on a file system that all processes share. A checkpoint that stands there is replaced
    optimizer: one of torch's, or several over disjoint parameters of the pipeline; their state is tensors and
        numbers
    state: what else the loop needs to go on, such as its step, its place in the data and a scheduler's
        state_dict(): text, numbers, lists and dicts by text. That of process 0 is kept.
    Raises CheckpointError for what cannot be kept (a weight sharded over another mesh, too), ModelError for
    weights that are not under the model's own names and for a pipeline made by from_provider; RunError names
    the process, or tells of the other pipeline of the mesh, that failed on all others.
    """
    CheckpointWriter(pipe, background=False).save(path, optimizer, state)


def load_checkpoint(
    path: str | Path, pipe: Pipeline, optimizer: Optimizers, *, learning_rates: bool = True
) -> dict[str, Any]:
    """Put weights, optimizer state and random state back, in place, and return the `state`. Collective.

    The pipeline may have another number of ranks, schedule, placement or split than the one that saved. The
    optimizers are of the same kinds, and their options stay as they were made, but for the learning rates:
    each group gets the one that its parameters had (not with learning_rates=False). A learning-rate scheduler
    is made before this, and given its part of the returned state.

    The random state is put back where there are as many processes as there were, and otherwise left alone.
    Raises CheckpointError where a file is missing or altered, or the checkpoint is of another model or
    optimizer, before anything is changed on any process.
    """
    folder, processes = Path(path).expanduser(), pipe.processes
    saved = pipe._needs_saved()
    pipe.all_or_none(f"check checkpoint {folder}", lambda: check_folder_together(folder, processes))
    named = list(pipe.named_parameters(remove_duplicate=False))
    known = {name for names in processes.gather([name for name, _ in named]) for name in names}

    def check() -> Callable[[], dict[str, Any]]:
        state = read_state(folder)
        check_config(folder, saved.config)
        stored = Stored(folder, saved.ties)
        if foreign := sorted(stored.names - known - saved.copies.union(*saved.ties)):
            raise unfit(folder, f"it holds {foreign[0]}", "the model has no such parameter")
        saved.check(folder, dict(zip(pipe.modules, pipe.stages, strict=True)))
        put = stored.plan(optimizer, named, learning_rates=learning_rates)
        random = random_state(folder, pipe)

        def apply() -> dict[str, Any]:
            pipe.load_weights(folder)
            put()
            set_random_state(random)
            return state

        return apply

    apply = _agreed(pipe, f"go on from checkpoint {folder}", check)
    return _agreed(pipe, f"read checkpoint {folder}", apply)


def check_config(path: Path, config: PretrainedConfig) -> None:
    """Raise CheckpointError unless the checkpoint `path` is one of a model with this config.

    Both are compared as files give them back; who wrote it, its name, dtype and cache do not count.
    """
    try:
        told = json.loads((path / "config.json").read_text(encoding="utf-8"))
        theirs = _comparable(type(config).from_dict(told).to_dict())
        kind = told.get("model_type")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: config.json", f"it cannot be read: {error!r}", "Take another one"
        ) from error
    if kind != config.model_type:
        raise unfit(path, f"model config model_type={kind}", f"the model has {config.model_type}")
    ours = _comparable(type(config).from_dict(json.loads(config.to_json_string())).to_dict())
    for key in sorted(ours.keys() | theirs.keys()):
        if theirs.get(key) != ours.get(key):
            raise unfit(path, f"model config {key}={theirs.get(key)}", f"the model has {ours.get(key)}")


def _comparable(config: Any) -> Any:
    """Without what is incidental, in configs of parts too."""
    if not isinstance(config, Mapping):
        return list(config) if isinstance(config, tuple) else config
    return {key: _comparable(value) for key, value in config.items() if key not in _INCIDENTAL}


class CheckpointWriter:
    """Writes checkpoints while training goes on: `save` takes copies in host memory, a thread writes them.

    Made collectively, once for a pipeline, by every process of the job. A context: leaving it waits for the
    last write; after an error it gives that write 30 s to end, after Ctrl-C it gives it up, and where no
    checkpoint came of it the error bears a note that says which and why. Whoever uses it otherwise calls
    `wait` at the end, before `pipe.close()`. Where a job has several pipelines, one of them saves, or each to
    a path of its own.
    background: False writes in `save` itself, from where the tensors are
    """

    def __init__(self, pipe: Pipeline, *, background: bool = True) -> None:
        self._pipe, self._background = pipe, background
        self._processes = apart(pipe.processes) if background else pipe.processes
        self._target: Path | None = None  # of the write under way
        self._task: Background | None = None  # on the pipeline of a mesh that writes
        self._gave_up = False

    def save(
        self,
        path: str | Path,
        optimizer: Optimizers,
        state: Mapping[str, Any] | None = None,
        *,
        extra: Extra | None = None,
        then: Then | None = None,
    ) -> None:
        """As save_checkpoint, but return as soon as all is copied. Waits for the write before. Collective.

        extra: called by process 0 with the folder that is being written, to add files of its own
        then: called by process 0 when the checkpoint stands under its name; both in the writer's thread
        Raises what `wait` raises; then nothing was saved, and the next call is a fresh one. Where `then`
        fails the checkpoint stands, and the RunError says so. After `drop` among several processes the
        writer takes no more: RunError.
        """
        pipe, target = self._pipe, Path(os.path.abspath(Path(path).expanduser()))
        self._check_usable()
        self.wait()
        pipe._needs_saved()
        deed = f"collect what goes into checkpoint {target}"
        pipe.all_or_none(deed, pipe._check_savable)
        collect = _agreed(pipe, deed, lambda: planned(pipe, optimizer, state, extra, copied=self._background))
        contents = _agreed(pipe, deed, collect)
        if not self._background:

            def publish() -> None:
                contents.publish(target, pipe.processes)
                _follow(target, pipe.processes, then)

            pipe.first_alone(f"write checkpoint {target}", publish)
            return
        self._target = target
        if pipe.writes:
            self._task = Background(
                target,
                lambda processes: contents.publish(target, processes),
                lambda processes: _follow(target, processes, then),
                self._processes,
            )

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk. Collective.

        Raises, on all processes, the error that its write ended in: RunError or CheckpointError.
        """
        if self._target is None:
            return
        if self._task is not None:
            self._task.join()  # Ctrl-C leaves it to be waited for
        deed, task = f"write checkpoint {self._target}", self._task
        self._target = self._task = None  # on all pipelines alike, whatever came of it

        def tell() -> None:
            assert task is not None
            together(self._pipe.processes, deed, task.tell)

        self._pipe.first_alone(deed, tell)

    def drop(self, linger: float = DROPPED) -> None:
        """Give up the write under way: it leaves no checkpoint. Not collective; takes `linger` s at most.

        Among several processes the writer is then used up: theirs may still be in that write.
        """
        if self._target is None:
            return
        if self._task is not None:
            self._task.drop(linger)
        self._task = self._target = None
        self._gave_up = True

    def _check_usable(self) -> None:
        """Raises RunError, on all processes: a second write would read the messages of the one given up."""
        pipe = self._pipe
        if not self._background or (pipe.processes.count == 1 and len(pipe.reductions.stage_ranks) <= 1):
            return
        gave_up = any(pipe.processes.gather(self._gave_up))
        if pipe.reductions.first_problem("it gave up" if gave_up else None):
            raise RunError(
                "a CheckpointWriter that gave a write up",
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
        task = self._task
        if task is not None and isinstance(error, Exception):
            task.join(LINGERS)  # a whole checkpoint from before the error; other ranks write it too
        self.drop()
        if task is not None and task.failure is not None:
            error.add_note(f"checkpoint {task.path}: {task.failure}")


def _follow(path: Path, processes: Processes, then: Then | None) -> None:
    """Call `then` on process 0. Collective."""
    if then is None:
        return

    def follow() -> None:
        try:
            if processes.index == 0:
                then()
        except PenstockError:
            raise
        except Exception as error:
            rule = f"it was written, and what was to follow it failed: {type(error).__name__}: {error}"
            raise RunError(f"checkpoint {path}", rule, "Mend that; the checkpoint stands") from error

    together(processes, f"do what follows checkpoint {path}, which was written", follow)


def _agreed(pipe: Pipeline, deed: str, work: Callable[[], T]) -> T:
    """This process's result of `work`, which no message could hold; or an error on every process of the mesh
    where it fails on any."""
    results: list[T] = []
    pipe.all_or_none(deed, lambda: together(pipe.processes, deed, lambda: results.append(work())))
    return results[0]
