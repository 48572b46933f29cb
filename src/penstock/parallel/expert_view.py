"""The plain forward of a module of experts on some of them: what each rank runs, and whether that adds up."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from penstock.errors import ModelError
from penstock.parallel.dispatch import Directions


@dataclass(frozen=True)
class Share:
    """What a module of experts knows once it is parallel.

    experts: how many there are, over all ranks; own: how many of them are this rank's
    plain: the class of the module before
    config: what the plain forward takes its implementation from
    """

    experts: int
    own: int
    plain: type[nn.Module]
    config: Any
    directions: Directions


def count_of(experts: nn.Module) -> int:
    """How many experts the module has, over all ranks."""
    count: Any = experts.num_experts
    return int(count)


def weight_names(experts: nn.Module) -> list[str]:
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if experts.has_bias else names


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def view_of(experts: nn.Module, share: Share, start: int, stop: int) -> Any:
    """The plain forward of `experts` as if it held only `start` to `stop` of what its parameters hold here.

    On a new object for each call, so that two threads may use the module at once.
    """
    view: Any = object.__new__(share.plain)
    view.__dict__.update(experts.__dict__)
    parameters = experts.named_parameters(recurse=False)
    view.__dict__["_parameters"] = {name: local(weight)[start:stop] for name, weight in parameters}
    view.__dict__["num_experts"] = stop - start
    view.__dict__["config"] = share.config
    return functools.partial(share.plain.forward, view)


@torch.no_grad()
def check_by_trial(name: str, experts: nn.Module, mesh: DeviceMesh) -> None:
    """A few tokens through the whole module, and through its parts: the parts' results must add up.

    Raises ModelError. The registry's form says so, but what a forward really does only a forward tells.
    """
    ranks = mesh.size()
    weight = getattr(experts, weight_names(experts)[0])
    if weight.is_meta:  # a few will do, of which two ranks would have some each
        experts, ranks = _drawn(experts, 2 * min(count_of(experts) // ranks, 2), mesh.device_type), 2
        weight = getattr(experts, weight_names(experts)[0])
    share = share_of(experts, ranks, mesh.device_type, None)
    ends = [expert for rank in range(ranks) for expert in (rank * share.own, (rank + 1) * share.own - 1)]
    first = torch.tensor(ends, device=weight.device)
    chosen = torch.stack((first, first.roll(1)), 1)
    width = weight.shape[1 if experts.is_transposed else 2]
    hidden = torch.arange(len(ends) * width, device=weight.device).view(-1, width).sin().to(weight.dtype)
    weights = torch.tensor([0.75, 0.5], device=weight.device, dtype=weight.dtype).expand(len(ends), 2)
    whole = view_of(experts, share, 0, share.experts)(hidden, chosen, weights)
    parts = torch.zeros_like(whole)
    for token, slot in ((token, slot) for token in range(len(ends)) for slot in range(2)):
        expert = int(chosen[token, slot])
        start = expert // share.own * share.own
        part = view_of(experts, share, start, start + share.own)
        row = slice(token, token + 1)
        parts[row] += part(hidden[row], chosen[row, slot : slot + 1] - start, weights[row, slot : slot + 1])
    # some compute a part in float32 whatever the dtype
    rounding = max(torch.finfo(dtype).eps for dtype in (whole.dtype, torch.float32))
    allowed = 16 * rounding * float(whole.abs().max())
    difference = float((whole - parts).abs().max())
    if not difference <= allowed:
        raise ModelError(
            f"{name}, a {type(experts).__name__}",
            f"a token's experts add up, but here the sum differs by {difference:.3g} from the whole",
            "Train this model without expert parallelism (ep=1)",
        )


def _drawn(experts: nn.Module, count: int, device: str) -> nn.Module:
    """In the place of a module on the meta device: one of `count` experts, with weights for a trial."""
    made: nn.Module = object.__new__(type(experts))
    made.__dict__.update(experts.__dict__)
    generator = torch.Generator(device).manual_seed(0)
    made.__dict__["_parameters"] = {
        name: nn.Parameter(
            torch.empty(count, *weight.shape[1:], dtype=weight.dtype, device=device).normal_(
                std=weight.shape[-1] ** -0.5, generator=generator
            )
        )
        for name, weight in experts.named_parameters(recurse=False)
    }
    made.__dict__["num_experts"] = count
    return made


def share_of(experts: nn.Module, ranks: int, device: str, directions: Directions | None) -> Share:
    count = count_of(experts)
    config: Any = copy.copy(experts.config)
    dtype = next(experts.parameters(recurse=False)).dtype
    if config._experts_implementation == "grouped_mm" and not takes_grouped(dtype, device):
        config._experts_implementation_internal = "eager"  # a loop over the experts
    return Share(count, count // ranks, type(experts), config, directions)  # type: ignore[arg-type]


@functools.cache
def takes_grouped(dtype: torch.dtype, device: str) -> bool:
    """Whether torch has a grouped matrix product for it here, with gradients."""
    rows = torch.ones(16, 16, dtype=dtype, device=device)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
    try:
        F.grouped_mm(rows, torch.ones(2, 16, 16, dtype=dtype, device=device), offs=ends)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True
