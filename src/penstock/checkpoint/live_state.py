"""The training state in one process's memory: nothing is gathered from the other processes.

    weight/0/model.norm.weight        a weight or a buffer of stage 0, or this process's shard of it
    exp_avg/0/model.norm.weight       a tensor that an optimizer keeps of that parameter
    random/cpu                        random state

It can be restored into the same layout of ranks only, which `StateDigests` identifies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from penstock.checkpoint.contents import gpu_of, set_random_state
from penstock.checkpoint.optimizer_state import OPTIONAL_PARTS, Number, ParamGroup, plain_parts, with_blocks
from penstock.checkpoint.save_load import facts_of
from penstock.errors import CheckpointError, UnfitError
from penstock.models.weights.saved_adapter import SavedAdapter
from penstock.models.weights.tensor_file import is_finite
from penstock.pipeline.split_model import SplitModel
from penstock.runtime.sharded_weights import local_shard
from penstock.runtime.stage import Stage

StateDigests = dict[str, str]  # digests of facts that must not change, by the fact's name in words


@dataclass(frozen=True)
class LiveState:
    """Tensors by name: `steady` change in an optimizer's step only, `passing` may change in a forward too.

    numbers: state of optimizers that is no tensor, by parameter and name
    """

    steady: dict[str, Tensor] = field(default_factory=dict)
    passing: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, dict[str, Number]] = field(default_factory=dict)


class Holdings:
    """Reads and restores this process's part of the state of a pipeline and its optimizers."""

    def __init__(self, pipe: SplitModel, optimizers: Sequence[Optimizer]) -> None:
        self._pipe, self._optimizers = pipe, optimizers
        # looked up once: a save comes after every step
        self._weights, self._buffers = list[tuple[str, Tensor]](), list[tuple[str, nn.Module, str]]()
        for stage, name, value in _saved_tensors(pipe):
            key = f"{stage.index}/{name}"
            if isinstance(value, nn.Parameter):
                self._weights.append((key, value))
            else:  # a module may replace the tensor
                owner, _, last = name.rpartition(".")
                self._buffers.append((key, stage.module.get_submodule(owner), last))
        self._trained = list(_trained(pipe, optimizers))

    @torch.no_grad()
    def now(self) -> LiveState:
        """The state as it is; no value is copied.

        Raises CheckpointError for optimizer state that is sharded otherwise than its parameter.
        """
        state = LiveState({f"weight/{key}": local_shard(value) for key, value in self._weights})
        for key, parameter, optimizer, _ in self._trained:
            for part, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    state.numbers.setdefault(key, {})[part] = value
                    continue
                for piece, tensor in plain_parts(part, value).items():
                    _check_alike(key, piece, tensor, parameter)
                    state.steady[f"{piece}/{key}"] = local_shard(tensor)
        for key, owner, name in self._buffers:
            state.passing[f"weight/{key}"] = getattr(owner, name)
        state.passing["random/cpu"] = torch.get_rng_state()
        if self._pipe.device.type == "cuda":
            state.passing["random/cuda"] = torch.cuda.get_rng_state(gpu_of(self._pipe))
        return state

    @torch.no_grad()
    def put_back(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Mapping[str, Number]]) -> None:
        """Restore weights, optimizer state and random state in place, bit for bit. Check the identity first.

        tensors: as of `LiveState`, in host memory
        """
        buffers = ((key, getattr(owner, name)) for key, owner, name in self._buffers)
        for key, value in (*self._weights, *buffers):
            local_shard(value).copy_(tensors[f"weight/{key}"])
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, key = name.partition("/")
            parts.setdefault(key, {})[part] = tensor
        for key, parameter, optimizer, group in self._trained:
            kept = {part: value for part, value in parts.get(key, {}).items() if part != "weight"}
            on_device = bool(group.get("capturable") or group.get("fused"))
            made = {part: _made_like(value, part, parameter, on_device) for part, value in kept.items()}
            state = {**numbers.get(key, {}), **with_blocks(made, optimizer, parameter)}
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
        random = (name.partition("/") for name in tensors)
        set_random_state(
            {kind: tensors[f"random/{kind}"] for part, _, kind in random if part == "random"}, self._pipe
        )

    def identity(self, world: int) -> StateDigests:
        """The facts that must be equal where the state is restored. world: processes of the job"""
        saved, mesh = self._pipe.files.saved, self._pipe.mesh
        facts: dict[str, Any] = {
            "the model's config": facts_of(type(saved.config), saved.config.to_json_string()),
            "the layout of ranks": [world, None if mesh is None else [mesh.mesh_dim_names, list(mesh.shape)]],
            "what this rank holds": [
                [stage.index, name, *_shape(value)] for stage, name, value in _saved_tensors(self._pipe)
            ],
            "the optimizer": [
                [key, type(optimizer).__name__, [bool(group.get(option)) for option in OPTIONAL_PARTS]]
                for key, _, optimizer, group in self._trained
            ],
        }
        if isinstance(saved, SavedAdapter):
            facts |= {"the adapter": saved.adapter.facts, "the base model": saved.base()}
        return {
            name: hashlib.sha256(json.dumps(fact, default=str).encode()).hexdigest()[:16]
            for name, fact in facts.items()
        }


def check_identity(saved: Mapping[str, str], own: StateDigests) -> None:
    """Raise UnfitError unless this process has the identity of the shard."""
    if odd := [name for name in own.keys() | saved.keys() if saved.get(name) != own.get(name)]:
        rule = "differs from that of the checkpoint"
        raise UnfitError("a checkpoint in memory", f"{min(odd)} {rule}", "An older checkpoint is loaded")


def check_finite(tensors: Mapping[str, Tensor], passing: Sequence[str]) -> None:
    """Raise CheckpointError if a weight or a moment holds NaN or infinity, as a mask may."""
    for name, tensor in tensors.items():
        if name not in passing and not is_finite(tensor.reshape(-1)):
            rule = "it holds NaN or infinity, and a run would train on nothing else"
            raise CheckpointError(f"{name} in memory", rule, "An older checkpoint is loaded")


def _made_like(value: Tensor, part: str, parameter: Tensor, on_device: bool) -> Tensor:
    """A copy of a state tensor where torch keeps it: on the parameter's device; counts of steps on the CPU.

    on_device: whether counts of steps are on the device too
    """
    local = local_shard(parameter.detach())
    made = value.to("cpu" if part == "step" and not on_device else local.device, copy=True)
    if isinstance(parameter, DTensor) and value.shape == local.shape and part != "step":
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            made, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return made


def _check_alike(key: str, part: str, tensor: Tensor, parameter: Tensor) -> None:
    if not isinstance(tensor, DTensor):
        return
    alike = isinstance(parameter, DTensor) and tensor.shape == parameter.shape
    if not (alike and tensor.placements == parameter.placements):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"{part} of {key}, sharded otherwise than its parameter",
            "a checkpoint in memory keeps state that is sharded as its parameter is",
            "Leave train.memory_checkpoint_every out",
        )


def _saved_tensors(pipe: SplitModel) -> Iterator[tuple[Stage, str, Tensor]]:
    """The tensors of this process's stages that a checkpoint holds, each tensor once."""
    saved = pipe.files.saved
    for stage in pipe.stages:
        met, written = set[int](), {*saved.written(stage.module), *saved.copies}
        for name, value in stage.module.state_dict(keep_vars=True).items():
            if name in written and id(value) not in met:
                met.add(id(value))
                yield stage, name, value


def _trained(
    pipe: SplitModel, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, nn.Parameter, Optimizer, ParamGroup]]:
    """Each parameter that an optimizer has, by stage and name, with that optimizer and its group."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    owner = {id(parameter): pair for pair in groups for parameter in pair[1]["params"]}
    for stage in pipe.stages:
        for name, parameter in stage.module.named_parameters():
            if id(parameter) in owner:
                yield f"{stage.index}/{name}", parameter, *owner[id(parameter)]


def _shape(value: Tensor) -> list[Any]:
    local = local_shard(value.detach())
    return [list(value.shape), list(local.shape), str(value.dtype), str(getattr(value, "placements", None))]
