"""Muon over weights that are spread.

Its update is of a whole matrix: Newton-Schulz on a shard makes the shard orthogonal, which is another update,
and torch's own, given DTensors, rounds differently on every mesh. Here each matrix's update is computed from
the whole of what momentum made of its gradient, by torch's own Muon, and each rank keeps its part. Momentum
stays spread as the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from penstock.parallel.expert.experts import is_marked
from penstock.runtime.sharded_weights import own


class Muon(Optimizer):
    """As torch.optim.Muon, of parameters that may be DTensors, also such with a matrix for each expert.

    options: those of torch.optim.Muon, and its defaults. Parameters have two dimensions, or three with the
    experts first; each expert's matrix is updated by itself.

    A step is collective over the meshes of the parameters: each matrix is gathered, one at a time, and every
    rank that holds a part of it computes the whole update.
    Raises ValueError for other parameters.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        plain = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))], lr=lr, **options)
        super().__init__(params, dict(plain.defaults))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim not in (2, 3):
                    raise ValueError(
                        f"Muon is for matrices, and not for one of shape {list(parameter.shape)}"
                    )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
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
        momentum, buffer = group["momentum"], state["momentum_buffer"]
        own(buffer).lerp_(own(gradient), 1 - momentum)
        moved = own(gradient).lerp(own(buffer), momentum) if group["nesterov"] else own(buffer)
        step = _of_whole(gradient, moved, group)
        own(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(step)


def _of_whole(like: Tensor, moved: Tensor, group: dict[str, Any]) -> Tensor:
    """What is added to this rank's part of a parameter. moved: its part, placed as `like` is."""
    if not isinstance(like, DTensor):
        return _orthogonal(moved, group)
    spread = DTensor.from_local(
        moved, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    # whole matrices; which of the experts are here may stay as it is
    kept: list[Placement] = [p if like.ndim == 3 and p.is_shard(0) else Replicate() for p in like.placements]
    gathered = spread.redistribute(placements=kept)
    update = DTensor.from_local(
        _orthogonal(gathered.to_local(), group), like.device_mesh, kept, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
    part = update.redistribute(placements=like.placements).to_local()
    return part.to(moved.device)  # which FSDP2 may have offloaded


def _orthogonal(whole: Tensor, group: dict[str, Any]) -> Tensor:
    """The step of each whole matrix, by torch's own Muon: from nothing, without momentum of its own."""
    if whole.ndim == 3:
        return torch.stack([_orthogonal(matrix, group) for matrix in whole]) if len(whole) else whole
    precise = torch.promote_types(whole.dtype, torch.float32)  # so that a weight is rounded once
    nothing = nn.Parameter(torch.zeros_like(whole, dtype=precise, memory_format=torch.contiguous_format))
    nothing.grad = whole.to(precise)
    own = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([nothing], weight_decay=0.0, momentum=0.0, nesterov=False, **own).step()  # type: ignore[no-untyped-call]
    return nothing.detach()


def matrices(model: nn.Module, layers: str) -> frozenset[str]:
    """Names of the weights that Muon is for: those of linear modules inside of layers, and of experts that
    stand together with the experts first.

    Not among them: routers, whose columns are one expert's each, what has a single row or column, and
    parameters of which only their module knows what they are (embeddings, convolutions, decays).
    model: the whole one, which may be on the meta device; layers: the name of the list of its layers
    """
    return frozenset(
        f"{name}.{own}"
        for name, module in model.named_modules(remove_duplicate=False)
        if name.startswith(f"{layers}.") and not _routes(model, name)
        for own, parameter in module.named_parameters(recurse=False)
        if _is_matrix(module, own, parameter)
    )


def _is_matrix(module: nn.Module, own: str, parameter: nn.Parameter) -> bool:
    if min(parameter.shape[-2:], default=0) < 2:
        return False
    if isinstance(module, nn.Linear | Conv1D):
        return own == "weight"
    return parameter.ndim == 3 and (is_marked(module) or "Experts" in type(module).__name__)


def _routes(model: nn.Module, name: str) -> bool:
    """Whether it is a router, or in one: by its name, for which models have few words."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        beside = (other for other, _ in model.get_submodule(".".join(parts[:at])).named_children())
        if "router" in part or (part == "gate" and any("experts" in other for other in beside)):
            return True
    return False


__all__ = ["Muon", "matrices"]
