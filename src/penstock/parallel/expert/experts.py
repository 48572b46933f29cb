"""Expert parallelism: each rank holds some of the experts of every mixture, and tokens come to them.

    module     hidden --> router --> experts(hidden, chosen, weights) --> sum over a token's experts
    parallel   hidden --> router --> dispatch --> own experts --> combine --> the same sum

A mixture of transformers keeps the experts of a layer in one module, with parameters that have the experts as
their first dimension, and calls it with each token's choices and their weights. That module is found by the
marks which transformers' registry of such modules leaves on it; nothing else of the model changes. Its own
forward runs here as well, on a view of it that has fewer experts and on rows that chose one expert each. So
activations, clamps, biases and layouts are the model's own business.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.dispatch import Directions, combine, dispatch, plan_route, without_values

# ---- The plain forward of a module of experts on some of them: what each rank runs, and whether that adds
# up.


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


# what transformers' registry sets on every module of experts (integrations/moe.py)
_MARKS = ("config", "num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")


def expert_parallel(module: nn.Module, mesh: DeviceMesh, directions: Directions | None = None) -> list[str]:
    """Leave each rank of `mesh` its own part of the experts of every mixture in `module`.

    module: a model, or a stage of one, with the same values on every rank. It may hold no mixture at all.
    mesh: one axis long; rank r of it keeps experts r * n .. (r + 1) * n - 1 of each mixture
    directions: the groups that tokens travel over; None takes the mesh's own for forward and backward

    Returns the names of the modules of experts. Their parameters become DTensors, Shard(0) on `mesh`, under
    the same names; `to_local()` has the shape (own experts, ...). Every rank takes part in each forward, all
    with their own tokens, any number of them.

    Where the ranks' losses sum up to the whole loss, an expert's gradient is complete: it holds the part of
    all the group's tokens. Any other gradient is this rank's part, to be summed over the group.

    Raises ConfigError for experts that cannot be dealt out evenly, ModelError for a mixture of another form;
    both before anything is changed.
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"a mesh with the axes {mesh.mesh_dim_names}",
            "experts are dealt out along one axis",
            "Give that axis alone, e.g. mesh['ep']",
        )
    found = mixtures(module)
    checked: set[type[nn.Module]] = set()
    for name, experts in found.items():
        _check(name, experts, mesh.size())
        if type(experts) not in checked:  # one of a kind tells for all of them
            check_by_trial(name, experts, mesh)
        checked.add(type(experts))
    directions = directions or Directions.of(mesh)
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for experts in found.values():
        _share_out(experts, mesh, directions, made)
    return list(found)


def check(model: nn.Module, ranks: int, copies: int = 1) -> None:
    """Refuse what `expert_parallel` over so many ranks would; of a whole model, with or without values.

    copies: ranks that hold the same experts, each a part of them
    Raises ConfigError, ModelError, also where the model has no mixture at all.
    """
    found = mixtures(model)
    if not found:
        raise ConfigError(
            f"ep={ranks} for {type(model).__name__}", "it has no experts to deal out", "Set ep to 1"
        )
    for name, experts in found.items():
        _check(name, experts, ranks)
        _check_parts(name, experts, copies)


def _check_parts(name: str, experts: nn.Module, copies: int) -> None:
    """FSDP2 spreads what is left of them along the second dimension, and evenly only."""
    for own, parameter in experts.named_parameters():
        if copies > 1 and (parameter.ndim == 1 or parameter.shape[1] % copies):
            raise ConfigError(
                f"{name}.{own} of shape {list(parameter.shape)} over {copies} ranks with the same experts",
                "dp_shard x cp / ep divides its second dimension",
                "Set ep to dp_shard x cp, or take another dp_shard",
            )


def mixtures(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts in `module` by name, parallel ones too.

    Raises ModelError where there is one that is not of the registry's form.
    """
    found = {name: part for name, part in module.named_modules() if is_marked(part)}
    inside = tuple(f"{name}." for name in found)
    for name, part in module.named_modules():
        if name in found or f"{name}.".startswith(inside) or not _looks_like_experts(name, part):
            continue
        if not any(other.startswith(f"{name}.") for other in found):
            raise ModelError(
                f"{name}, a {type(part).__name__}",
                "experts are one module of the form that transformers' use_experts_implementation knows",
                "Train this model without expert parallelism (ep=1)",
            )
    return found


def is_marked(module: nn.Module) -> bool:
    """Whether it is a module of experts by the marks of transformers' registry."""
    return all(hasattr(module, mark) for mark in _MARKS) and hasattr(module, "_apply_gate")


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    """Whether this is a module of experts by its name, or by a parameter with an entry for each of them."""
    last = name.rpartition(".")[2].lower()
    if "expert" in last and "shared" not in last and any(True for _ in module.parameters()):
        return True
    counts = {value for key, value in vars(module).items() if "experts" in key and isinstance(value, int)}
    own = module.parameters(recurse=False)
    return any(parameter.dim() >= 3 and parameter.shape[0] in counts - {0, 1} for parameter in own)


def _check(name: str, experts: nn.Module, ranks: int) -> None:
    count = count_of(experts)
    held = dict(experts.named_parameters(recurse=False))
    wanted = weight_names(experts)
    if set(held) != set(wanted) or any(weight.shape[0] != count for weight in held.values()):
        shown = ", ".join(f"{key} {list(weight.shape)}" for key, weight in held.items())
        raise ModelError(
            f"{name}, a {type(experts).__name__} of {count} experts with the parameters {shown or 'none'}",
            f"experts of this form have exactly {', '.join(wanted)}, with an entry for each expert",
            "Train this model without expert parallelism (ep=1)",
        )
    if any(isinstance(weight, DTensor) for weight in held.values()):
        raise ModelError(
            f"{name}, whose parameters are DTensors",
            "experts are dealt out before anything else is sharded, and once",
            "Call expert_parallel before fully_shard and tensor parallelism",
        )
    if count % ranks:
        sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise ConfigError(
            f"ep={ranks} with the {count} experts of {name}",
            "every rank holds the same number of experts",
            f"Take one of {sizes} for ep",
        )


def _share_out(
    experts: nn.Module, mesh: DeviceMesh, directions: Directions, made: dict[type[nn.Module], type[nn.Module]]
) -> None:
    share = share_of(experts, mesh.size(), mesh.device_type, directions)
    start = mesh.get_local_rank() * share.own
    for name, whole in list(experts.named_parameters(recurse=False)):
        # a copy, so that the whole one can go
        own = whole.detach()[start : start + share.own].clone()
        sharded = DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        setattr(experts, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))
    if share.plain not in made:  # one for all of a kind, as compilers like it
        made[share.plain] = _parallel(share.plain)
    experts._expert_share = share  # type: ignore[assignment]
    experts.__class__ = made[share.plain]


def _parallel(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of experts whose tokens travel."""

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if without_values(hidden):
            return hidden.clone()
        share: Any = self._expert_share
        route = plan_route(chosen, share.experts, share.directions)
        rows, row_weights = dispatch(route, hidden, weights)
        if len(rows):
            view = view_of(self, share, 0, share.own)
            rows = view(rows, route.experts.unsqueeze(1), row_weights)
        else:  # gradients of zero, where one process has zeros too, and a way back for the others' gradients
            rows = rows + sum(local(parameter)[:0].sum() for parameter in self.parameters())
        return combine(route, rows, *chosen.shape)

    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "forward": forward})


def sharded_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of `module` that are dealt out: fully_shard must leave them alone."""
    for name, part in module.named_modules():
        if hasattr(part, "_expert_share"):
            for key, parameter in part.named_parameters(recurse=False):
                yield f"{name}.{key}" if name else key, parameter
