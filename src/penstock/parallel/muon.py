"""Muon for sharded weights.

Its update needs the whole matrix: Newton-Schulz on a shard makes the shard orthogonal, which is a different
update, and torch's own Muon on DTensors rounds differently on every mesh. Here torch's Muon computes each
matrix's update from its whole gradient with momentum, and each rank keeps its shard. Momentum is sharded as
the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from penstock.parallel.expert.experts import is_marked
from penstock.runtime.sharded_weights import local_shard as local


class Muon(Optimizer):
    """torch.optim.Muon for parameters that may be DTensors, also with a matrix for each expert.

    A step is collective over the meshes of the parameters: matrices are gathered one at a time, and every
    rank with a shard computes the whole update.

    Args:
        params: of two dimensions, or of three with the experts first, where each expert is updated by itself
        options: those of torch.optim.Muon, with its defaults

    Raises ValueError for other parameters.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        plain = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))], lr=lr, **options)
        super().__init__(params, dict(plain.defaults))
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon is for matrices, not for one of shape {list(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum, buffer = group["momentum"], local(state["momentum_buffer"])
        buffer.lerp_(local(gradient), 1 - momentum)
        update = local(gradient).lerp(buffer, momentum) if group["nesterov"] else buffer
        step = _sharded_step(gradient, update, group)
        local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(step)


def _sharded_step(like: Tensor, update: Tensor, group: dict[str, Any]) -> Tensor:
    """The step for this rank's shard of a parameter. update: a shard with the placements of `like`"""
    if not isinstance(like, DTensor):
        return _step(update, group)
    mesh = like.device_mesh
    how: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    sharded = DTensor.from_local(update, mesh, like.placements, **how)
    # gather whole matrices; a distribution of experts may stay
    kept: list[Placement] = [p if like.ndim == 3 and p.is_shard(0) else Replicate() for p in like.placements]
    whole = sharded.redistribute(placements=kept).to_local()
    step = DTensor.from_local(_step(whole, group), mesh, kept, **how)
    return step.redistribute(placements=like.placements).to_local().to(update.device)  # FSDP2 may offload


def _step(whole: Tensor, group: dict[str, Any]) -> Tensor:
    """The step for whole matrices, by torch's own Muon: on zeros, without momentum."""
    if whole.ndim == 3:
        return torch.stack([_step(matrix, group) for matrix in whole]) if len(whole) else whole
    dtype = torch.promote_types(whole.dtype, torch.float32)  # so that a weight is rounded once
    zeros = nn.Parameter(torch.zeros_like(whole, dtype=dtype, memory_format=torch.contiguous_format))
    zeros.grad = whole.to(dtype)
    options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    muon: Any = torch.optim.Muon([zeros], weight_decay=0.0, momentum=0.0, nesterov=False, **options)
    muon.step()
    return zeros.detach()


def matrices(model: nn.Module, layers: str) -> frozenset[str]:
    """Names of the weights that Muon is for: those of linear modules in layers, and experts in one tensor.

    Excluded are routers, whose columns belong to one expert each, weights with a single row or column, and
    parameters with another meaning (embeddings, convolutions, decays).

    Args:
        model: the whole model, which may be on the meta device
        layers: name of the list of its layers
    """
    return frozenset(
        f"{name}.{key}"
        for name, module in model.named_modules(remove_duplicate=False)
        if name.startswith(f"{layers}.") and not _in_router(model, name)
        for key, parameter in module.named_parameters(recurse=False)
        if _is_matrix(module, key, parameter)
    )


def _is_matrix(module: nn.Module, key: str, parameter: nn.Parameter) -> bool:
    if min(parameter.shape[-2:], default=0) < 2:
        return False
    if isinstance(module, nn.Linear | Conv1D):
        return key == "weight"
    return parameter.ndim == 3 and (is_marked(module) or "Experts" in type(module).__name__)


def _in_router(model: nn.Module, name: str) -> bool:
    """Whether the parameter belongs to a router, by its name: models use few words for routers."""
    path = name.split(".")
    for depth, part in enumerate(path):
        siblings = (other for other, _ in model.get_submodule(".".join(path[:depth])).named_children())
        if "router" in part or (part == "gate" and any("experts" in other for other in siblings)):
            return True
    return False
