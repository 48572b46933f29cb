"""The contents that one process adds to a checkpoint: weights, optimizer and random state, the loop's JSON.

    model-*.safetensors, config.json ...      the weights, as save_pretrained writes them
    optimizer-*.safetensors, optimizer-*.json   see penstock.checkpoint.optimizer_state
    random-*.safetensors                      the random state of each process
    state.json                                the loop's state, which load_checkpoint returns
    manifest.json                             size and sha256 of every file (penstock.models.weights.folder)

Contents are collected at one moment, and written then or later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoint.background import Publish
from penstock.checkpoint.optimizer_state import Optimizers, check_state, optimizers_of, state_of
from penstock.errors import CheckpointError
from penstock.models.weights.folder import UNREADABLE, Hashed, readable, write_folder
from penstock.models.weights.tensor_file import write_tensors
from penstock.pipeline.split_model import SplitModel
from penstock.reading import read_json
from penstock.runtime.device.copies import BackgroundCopies
from penstock.runtime.ranks import Ranks

STATE = "state.json"

Extra = Callable[[Path], None]
RandomState = dict[str, Tensor]  # by device type


def bytes_of(pipe: SplitModel, optimizers: Optimizers) -> int:
    """The bytes that this process adds to a checkpoint, or a few more."""
    if not pipe.files.written_here:
        return 0
    tensors = [value for module in pipe.modules.values() for value in module.state_dict().values()]
    for optimizer in optimizers_of(optimizers):
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def collector(
    pipe: SplitModel,
    optimizer: Optimizers,
    state: Mapping[str, Any] | None,
    extra: Extra | None,
) -> Callable[[BackgroundCopies | None], Publish]:
    """Check what this process adds to a checkpoint; the result collects it, and returns its publisher.

    The check sends nothing. Collecting is collective over the mesh, as it gathers shards: every process must
    have passed the check.

    Args:
        extra: adds files of the caller's, on process 0

    Returns a function of the copier into host memory, with which training may go on during the write; None
    for none.
    Raises CheckpointError for optimizer state or `state` that a checkpoint cannot hold.
    """
    named = list(pipe.named_parameters(remove_duplicate=False))
    check_state(optimizer, named)
    _check_json(state or {}, "state")
    text = json.dumps(state or {}, indent=1) + "\n"

    def collect(copies: BackgroundCopies | None) -> Publish:
        random = _random_states(pipe)
        optimizer_state = state_of(optimizer, named, copies)
        # collected last, as its function is called first: that waits until all is copied
        write_weights = pipe.files.collect(copies)
        if copies is not None:
            copies.begin()

        def write(folder: Path, processes: Ranks) -> Hashed:
            entries = write_weights(folder, processes)
            entries |= optimizer_state.write(folder, processes.index, processes.count)
            entries |= {file: write_tensors(folder / file, states) for file, states in random.items()}
            if processes.index == 0:
                if extra is not None:
                    extra(folder)
                (folder / STATE).write_text(text, encoding="utf-8")
            return entries

        return lambda path, processes: write_folder(path, lambda folder: write(folder, processes), processes)

    return collect


# ---- random state


def _random_states(pipe: SplitModel) -> dict[str, RandomState]:
    """The random states of the processes that host the same stages, by file. Collective over these."""
    local = {"cpu": torch.get_rng_state()}
    if pipe.reductions.min(int(torch.cuda.is_initialized())):  # type: ignore[no-untyped-call]
        local["cuda"] = torch.cuda.get_rng_state(gpu_of(pipe))
    files, own_index = _random_files(pipe)
    states: dict[str, RandomState] = {file: {} for file in files}
    for kind, state in local.items():
        table = torch.zeros(len(files), len(state), dtype=torch.uint8, device=pipe.device)
        table[own_index] = state
        for file, row in zip(files, pipe.reductions.sum_over_mesh(table).cpu(), strict=True):
            states[file][kind] = row.clone()
    return states


def read_random_state(path: Path, pipe: SplitModel) -> RandomState:
    """This process's random state; empty for a checkpoint of another number of processes, or an older one."""
    files, own_index = _random_files(pipe)
    file = path / files[own_index]
    with readable(path, file.name):
        return load_file(file) if file.is_file() else {}


def set_random_state(state: RandomState, pipe: SplitModel) -> None:
    """Restore what read_random_state read, if anything."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone(), gpu_of(pipe))


def gpu_of(pipe: SplitModel) -> torch.device:
    """The pipeline's GPU, whichever is current; the current GPU if the pipeline is on none."""
    return pipe.device if pipe.device.type == "cuda" else torch.device("cuda")


def _random_files(pipe: SplitModel) -> tuple[list[str], int]:
    """The files of the processes that host this process's stages, and this process's index among them."""
    processes, ranks = pipe.processes, sorted(pipe.reductions.stage_ranks)
    replicas = max(1, len(ranks))  # no ranks without a mesh
    first, count = processes.index * replicas + 1, processes.count * replicas
    files = [f"random-{first + index:05d}-of-{count:05d}.safetensors" for index in range(replicas)]
    return files, ranks.index(dist.get_rank()) if ranks else 0


# ---- the loop's JSON


def _check_json(value: object, name: str) -> None:
    """Raise CheckpointError unless JSON returns `value` unchanged, except that tuples become lists."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):  # JSON would make it text silently
                raise _no_json(f"{name}: the key {key!r}")
            _check_json(inner, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_json(inner, f"{name}[{index}]")
    elif not (value is None or isinstance(value, str | int | float)):
        raise _no_json(f"{name} is a {type(value).__name__}")


def _no_json(subject: str) -> CheckpointError:
    rule = "the state of a checkpoint is JSON: text, numbers, lists, and dicts with text as keys"
    return CheckpointError(subject, rule, "Make it that, e.g. by str(key), int(value) or tensor.tolist()")


def read_state(path: Path) -> dict[str, Any]:
    """The loop's JSON of the checkpoint `path`. Raises CheckpointError if it cannot be read."""
    try:
        return dict(read_json(path / STATE))
    except UNREADABLE as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE}", "it cannot be read", "Give a checkpoint that penstock wrote"
        ) from error
