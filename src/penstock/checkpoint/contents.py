"""What one process puts into a checkpoint: weights, optimizer state, random state, and the loop's JSON.

Collected at one moment, and written then or later. Random state and JSON are read back here too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.optimizer_state import Optimizers, OptimizerState, check_state, state_of
from penstock.errors import CheckpointError
from penstock.models.weights.folder import write_folder
from penstock.pipeline.pipeline import SplitModel, laid_out
from penstock.runtime.transport.groups import Processes

STATE = "state.json"

Extra = Callable[[Path], None]


@dataclass(frozen=True)
class Contents:
    """What this process puts into a checkpoint.

    write_weights: collective, over the processes given
    random: by file, the random state of this process and of those beside it in the mesh
    """

    write_weights: Callable[[Path, Processes], None]
    optimizer: OptimizerState
    random: dict[str, dict[str, Tensor]]
    state: str
    extra: Extra | None

    def publish(self, path: Path, processes: Processes) -> None:
        write_folder(path, lambda folder: self._write(folder, processes), processes)

    def _write(self, folder: Path, processes: Processes) -> None:
        self.write_weights(folder, processes)
        self.optimizer.write(folder, processes.index, processes.count)
        for file, state in self.random.items():
            save_file(state, folder / file)
        if processes.index == 0:
            if self.extra is not None:
                self.extra(folder)
            (folder / STATE).write_text(self.state, encoding="utf-8")


def planned(
    pipe: SplitModel,
    optimizer: Optimizers,
    state: Mapping[str, Any] | None,
    extra: Extra | None,
    *,
    copied: bool,
) -> Callable[[], Contents]:
    """What collects what this process puts into a checkpoint; here it is only checked, and nothing is sent.

    To collect is collective over the mesh: what is spread over it is gathered by all its pipelines, and the
    first one keeps it. So all must have passed the check. Nothing is written.

    copied: in host memory of its own, so that training may go on while it is written
    Raises CheckpointError for what cannot be kept.
    """
    named = list(pipe.named_parameters(remove_duplicate=False))
    check_state(optimizer, named)
    text = _as_json(state or {})

    def collect() -> Contents:
        held = state_of(optimizer, named, copied=copied)
        return Contents(_weights(pipe, copied=copied), held, _random_states(pipe), text, extra)

    return collect


def _weights(pipe: SplitModel, *, copied: bool) -> Callable[[Path, Processes], None]:
    """Only values are copied: modules, with their hooks and all that hangs on them, stay the pipeline's."""
    saved, stages = pipe._needs_saved(), pipe._first_stages()
    held = pipe.whole_values() if copied or pipe.is_spread else None

    def write(folder: Path, processes: Processes) -> None:
        saved.write(folder, laid_out(saved, stages, processes, held), processes)

    return write


def _random_states(pipe: SplitModel) -> dict[str, dict[str, Tensor]]:
    """By file, of this process and of those beside it. Collective over these."""
    own = {"cpu": torch.get_rng_state()}
    if pipe.reductions.min(int(torch.cuda.is_initialized())):  # type: ignore[no-untyped-call]
        own["cuda"] = torch.cuda.get_rng_state()
    files, place = _random_files(pipe)
    states: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    for kind, state in own.items():
        table = torch.zeros(len(files), len(state), dtype=torch.uint8, device=pipe._world.device)
        table[place] = state
        for file, row in zip(files, pipe.reductions.sum_over_mesh(table).cpu(), strict=True):
            states[file][kind] = row.clone()
    return states


def random_state(path: Path, pipe: SplitModel) -> dict[str, Tensor]:
    """Empty for an older checkpoint, or one of another number of processes."""
    files, place = _random_files(pipe)
    file = path / files[place]
    return load_file(file) if file.is_file() else {}


def set_random_state(held: Mapping[str, Tensor]) -> None:
    """Put back what random_state read; nothing where it read nothing."""
    if not held:
        return
    torch.set_rng_state(held["cpu"].clone())
    if "cuda" in held and torch.cuda.is_available():
        torch.cuda.set_rng_state(held["cuda"].clone())


def _random_files(pipe: SplitModel) -> tuple[list[str], int]:
    """Of this process and of those beside it, which host the same stages; and which of them is its own."""
    processes, ranks = pipe.processes, sorted(pipe.reductions.stage_ranks)
    beside = max(1, len(ranks))  # a pipeline that is all there is has no ranks beside it
    first, count = processes.index * beside + 1, processes.count * beside
    files = [f"random-{first + place:05d}-of-{count:05d}.safetensors" for place in range(beside)]
    return files, ranks.index(dist.get_rank()) if ranks else 0


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


def read_state(path: Path) -> dict[str, Any]:
    """The loop's JSON of the checkpoint `path`. Raises CheckpointError where it cannot be read."""
    try:
        return dict(json.loads((path / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE}", "it cannot be read", "Give a checkpoint that penstock wrote"
        ) from error
