"""Checkpoints of a training run: weights, optimizer state, random state, and whatever JSON the loop adds.

A checkpoint is a folder that is complete or absent, and that `from_pretrained` opens. Beside the weights lie
the optimizer's state by parameter name (penstock.optimizer_state), each process's random state, and
state.json. It is read at any number of ranks and under any schedule, placement or split.

    writer = CheckpointWriter(pipe)                      # or save_checkpoint(), which waits for the disk
    with writer:
        for step in range(start, steps):
            ...
            if step % 100 == 0:
                writer.save(f"checkpoints/{step}", optimizer, {"step": step})
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.background import DROPPED, LINGERS, Background
from penstock.commit import check_folder_together, together, write_folder
from penstock.errors import CheckpointError
from penstock.optimizer_state import Optimizers, OptimizerState, Stored, host_copy, state_of
from penstock.pipeline import Pipeline
from penstock.runtime.distributed import apart
from penstock.runtime.processes import Processes
from penstock.runtime.stage import Stage, StageCall

STATE = "state.json"
T = TypeVar("T")
Extra = Callable[[Path], None]
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
    Raises CheckpointError for what cannot be kept, ModelError for a pipeline made by from_provider; RunError
    names the process that failed on all others.
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
    Raises CheckpointError where a file is missing or altered, or the checkpoint does not fit, before
    optimizer or random state are touched.
    """
    folder, processes = Path(path), pipe.processes
    check_folder_together(folder, processes)

    def read() -> dict[str, Any]:
        state = _read_state(folder)
        stored = Stored(folder, pipe._needs_saved().ties)
        pipe.load_weights(folder)
        stored.restore(
            optimizer, list(pipe.named_parameters(remove_duplicate=False)), learning_rates=learning_rates
        )
        _restore_random(folder, processes)
        return state

    return _agreed(processes, f"read checkpoint {folder}", read)


class CheckpointWriter:
    """Writes checkpoints while training goes on: `save` takes copies in host memory, a thread writes them.

    Made collectively, once for a pipeline, by every process of the job. A context: leaving it waits for the
    last write; after Ctrl-C it gives that write up. Whoever uses it otherwise calls `wait` at the end, before
    `pipe.close()`. Where a job has several pipelines, one of them saves, or each to a path of its own.
    background: False writes in `save` itself, from where the tensors are
    """

    def __init__(self, pipe: Pipeline, *, background: bool = True) -> None:
        self._pipe, self._background = pipe, background
        self._processes = apart(pipe.processes) if background else pipe.processes
        self._task: Background | None = None

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
        Raises what `wait` raises; then nothing was saved, and the next call is a fresh one.
        """
        self.wait()
        pipe, target = self._pipe, Path(path)
        contents = _agreed(
            pipe.processes,
            f"collect what goes into checkpoint {target}",
            lambda: _collect(pipe, optimizer, state, extra, copied=self._background),
        )
        if self._background:
            self._task = Background(target, lambda processes: contents.publish(target, processes, then),
                               self._processes)  # fmt: skip
        else:
            contents.publish(target, pipe.processes, then)

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk. Collective.

        Raises, on all processes, the error that its write ended in: RunError or CheckpointError.
        """
        if self._task is None:
            return
        task, self._task = self._task, None
        try:
            task.join()
        except BaseException:  # Ctrl-C
            self._task = task
            raise
        together(self._pipe.processes, f"write checkpoint {task.path}", task.tell)

    def drop(self, linger: float = DROPPED) -> None:
        """Give up the write under way: it leaves no checkpoint. Not collective; takes `linger` s at most."""
        if self._task is not None:
            self._task.drop(linger)
            self._task = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        if self._task is not None and isinstance(error, Exception):
            self._task.join(LINGERS)  # a whole checkpoint from before the error; other ranks write it too
        self.drop()


@dataclass(frozen=True)
class _Contents:
    """What this process puts into a checkpoint. write_weights: collective, over the processes given"""

    write_weights: Callable[[Path, Processes], None]
    optimizer: OptimizerState
    random: dict[str, Tensor]
    state: str
    extra: Extra | None

    def publish(self, path: Path, processes: Processes, then: Then | None) -> None:
        write_folder(path, lambda folder: self._write(folder, processes), processes)
        if then is not None:
            first = processes.index == 0
            together(processes, f"do what follows checkpoint {path}", lambda: then() if first else None)

    def _write(self, folder: Path, processes: Processes) -> None:
        self.write_weights(folder, processes)
        self.optimizer.write(folder, processes.index, processes.count)
        save_file(self.random, folder / _random_file(processes))
        if processes.index == 0:
            if self.extra is not None:
                self.extra(folder)
            (folder / STATE).write_text(self.state, encoding="utf-8")


def _collect(
    pipe: Pipeline,
    optimizer: Optimizers,
    state: Mapping[str, Any] | None,
    extra: Extra | None,
    *,
    copied: bool,
) -> _Contents:
    """copied: in host memory of its own, so that training may go on while it is written."""
    held = state_of(optimizer, list(pipe.named_parameters(remove_duplicate=False)), copied=copied)
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        random["cuda"] = torch.cuda.get_rng_state()
    text = _as_json(state or {})
    return _Contents(_weights(pipe, copied=copied), held, random, text, extra)


def _weights(pipe: Pipeline, *, copied: bool) -> Callable[[Path, Processes], None]:
    saved, depth = pipe._needs_saved(), pipe.schedule.placement.depth
    stages = {}
    for index, module in pipe.modules.items():
        if index < depth:  # further copies of the model are alike
            held = _host_module(module) if copied else module
            stages[index] = Stage(index, held, cast(StageCall, held))
    return lambda folder, processes: saved.write(folder, stages, processes)


def _host_module(module: nn.Module) -> nn.Module:
    """A copy of `module` in host memory, without gradients."""
    memo: dict[int, Any] = {id(p): nn.Parameter(host_copy(p), p.requires_grad) for p in module.parameters()}
    memo |= {id(buffer): host_copy(buffer) for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def _restore_random(path: Path, processes: Processes) -> None:
    file = path / _random_file(processes)
    if not file.is_file():  # of an older checkpoint, or one of another number of processes
        return
    held = load_file(file)
    torch.set_rng_state(held["cpu"].clone())
    if "cuda" in held and torch.cuda.is_available():
        torch.cuda.set_rng_state(held["cuda"].clone())


def _random_file(processes: Processes) -> str:
    return f"random-{processes.index + 1:05d}-of-{processes.count:05d}.safetensors"


def _as_json(state: Mapping[str, Any]) -> str:
    _check_json(state, "state")
    return json.dumps(state, indent=1) + "\n"


def _check_json(value: object, name: str) -> None:
    """Whether JSON gives it back as it was, but for tuples, which come back as lists."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):  # JSON would make it text in silence
                raise _no_json(f"{name}: the key {key!r}")
            _check_json(inner, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_json(inner, f"{name}[{number}]")
    elif not (value is None or isinstance(value, str | int | float)):
        raise _no_json(f"{name} is a {type(value).__name__}")


def _no_json(found: str) -> CheckpointError:
    return CheckpointError(
        found,
        "the state of a checkpoint is JSON: text, numbers, lists, and dicts by text",
        "Make it that, e.g. by str(key), int(value) or tensor.tolist()",
    )


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((path / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE}", "it cannot be read", "Give a checkpoint that penstock wrote"
        ) from error


def _agreed(processes: Processes, deed: str, work: Callable[[], T]) -> T:
    """This process's result of `work`, which no message could hold; or an error on all if it fails on any."""
    results: list[T] = []
    together(processes, deed, lambda: results.append(work()))
    return results[0]
