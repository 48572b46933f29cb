"""Expert parallelism: each rank has some experts of every mixture, and tokens are sent to them.

    module     hidden --> router --> experts(hidden, chosen, weights) --> sum over a token's experts
    parallel   hidden --> router --> dispatch --> local experts --> combine --> the same sum

A mixture of transformers has the experts of a layer in one module, whose parameters have the experts as first
dimension, and calls it with each token's choices and their weights. Attributes that transformers' registry
sets identify that module; nothing else of the model changes. Its own forward runs here too, on a view of it
with fewer experts and on rows that chose one expert each. So it keeps its activations, clamps, biases and
layouts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.dispatch import combine, dispatch, plan_route, without_values
from penstock.runtime.around import around
from penstock.runtime.sharded_weights import local_shard as local

# the attributes that transformers' registry sets on every module of experts (integrations/moe.py)
_MARKS = ("config", "num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
_REMEDY = "Train this model without expert parallelism (ep=1)"


def mixtures(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts in `module` by name, parallel ones too.

    Raises ModelError for experts that are not of the registry's form.
    """
    expert_modules = {name: part for name, part in module.named_modules() if is_marked(part)}
    inside = tuple(f"{name}." for name in expert_modules)
    for name, part in module.named_modules():
        if name in expert_modules or f"{name}.".startswith(inside) or not _looks_like_experts(name, part):
            continue
        if not any(other.startswith(f"{name}.") for other in expert_modules):
            raise ModelError(
                f"{name}, a {type(part).__name__}",
                "experts are one module of the form that transformers' use_experts_implementation knows",
                _REMEDY,
            )
    return expert_modules


def is_marked(module: nn.Module) -> bool:
    """Whether `module` has experts in the form of transformers' registry."""
    return all(hasattr(module, mark) for mark in _MARKS)


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    """Whether its name, or a parameter with an entry per expert, shows a module of experts."""
    last = name.rpartition(".")[2].lower()
    if "expert" in last and "shared" not in last and any(True for _ in module.parameters()):
        return True
    counts = {value for key, value in vars(module).items() if "experts" in key and isinstance(value, int)}
    parameters = module.parameters(recurse=False)
    return any(parameter.dim() >= 3 and parameter.shape[0] in counts - {0, 1} for parameter in parameters)


def count_of(experts: nn.Module) -> int:
    """Number of experts in the module, over all ranks."""
    count: Any = experts.num_experts
    return int(count)


def check(model: nn.Module, ranks: int, copies: int = 1) -> None:
    """Raise the errors of `expert_parallel` over `ranks` ranks for a whole model, with or without values.

    Args:
        copies: number of ranks with the same experts, each with a shard of them

    Raises ConfigError, ModelError, also for a model without any mixture.
    """
    expert_modules = mixtures(model)
    if not expert_modules:
        value, rule = f"ep={ranks} for {type(model).__name__}", "it has no experts to distribute"
        raise ConfigError(value, rule, "Set ep to 1")
    for name, experts in expert_modules.items():
        _check(name, experts, ranks)
        for key, parameter in experts.named_parameters():  # FSDP2 shards dimension 1, evenly only
            if copies > 1 and (parameter.ndim == 1 or parameter.shape[1] % copies):
                shape = list(parameter.shape)
                raise ConfigError(
                    f"{name}.{key} of shape {shape} over {copies} ranks with the same experts",
                    "dp_shard x cp / ep divides its second dimension",
                    "Set ep to dp_shard x cp, or take another dp_shard",
                )


def expert_parallel(module: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Keep on each rank of `mesh` its share of the experts of every mixture in `module`. Collective.

    The parameters of modules of experts become DTensors, Shard(0) on `mesh`, under the same names;
    `to_local()` has the shape (local experts, ...). All ranks take part in each forward, with any number of
    tokens of their own. Where the ranks' losses sum up to the whole loss, an expert's gradient is complete:
    it covers all tokens of the group. Any other gradient is this rank's share, to be summed over the group.

    Args:
        module: a model that `check` accepts, or a stage of one, with the same values on every rank; it may
            have no mixture
        mesh: of one axis; rank r keeps experts r * n .. (r + 1) * n - 1 of each mixture

    Returns the names of the modules of experts.
    Raises ModelError for a mixture of another form, before any change.
    """
    expert_modules = mixtures(module)
    tried: set[type[nn.Module]] = set()
    for name, experts in expert_modules.items():
        if type(experts) not in tried:  # one trial per class is enough
            _check_by_trial(name, experts, mesh)
        tried.add(type(experts))
    for experts in expert_modules.values():
        _distribute(experts, mesh)
    return list(expert_modules)


@dataclass(frozen=True)
class _Share:
    """Attributes of a module of experts once it is parallel.

    experts, local: number of experts over all ranks, and on this rank
    plain: the former class of the module
    config: the config from which the plain forward reads its implementation
    group: the ranks that tokens are sent to; None for a trial without values
    """

    experts: int
    local: int
    plain: type[nn.Module]
    config: Any
    group: ProcessGroup | None

    @classmethod
    def of(cls, experts: nn.Module, ranks: int, device: str, group: ProcessGroup | None = None) -> _Share:
        config: Any = copy.copy(experts.config)
        dtype = next(experts.parameters(recurse=False)).dtype
        if config._experts_implementation == "grouped_mm" and not takes_grouped(dtype, device):
            config._experts_implementation_internal = "eager"  # a loop over the experts
        count = count_of(experts)
        return cls(count, count // ranks, type(experts), config, group)

    def view(self, experts: nn.Module, start: int, stop: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The plain forward of `experts` on its local experts from `start` to `stop` only."""
        view: Any = object.__new__(self.plain)
        view.__dict__.update(experts.__dict__)
        parameters = experts.named_parameters(recurse=False)
        view.__dict__["_parameters"] = {name: local(weight)[start:stop] for name, weight in parameters}
        view.__dict__.update(num_experts=stop - start, config=self.config)
        return functools.partial(self.plain.forward, view)


@functools.cache
def takes_grouped(dtype: torch.dtype, device: str) -> bool:
    """Whether torch has a grouped matrix product for this dtype and device, with gradients."""
    rows = torch.ones(16, 16, dtype=dtype, device=device)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
    try:
        F.grouped_mm(rows, torch.ones(2, 16, 16, dtype=dtype, device=device), offs=ends)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def _weight_names(experts: nn.Module) -> list[str]:
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if experts.has_bias else names


def _check(name: str, experts: nn.Module, ranks: int) -> None:
    count = count_of(experts)
    weights = dict(experts.named_parameters(recurse=False))
    wanted = _weight_names(experts)
    if set(weights) != set(wanted) or any(weight.shape[0] != count for weight in weights.values()):
        shown = ", ".join(f"{key} {list(weight.shape)}" for key, weight in weights.items())
        raise ModelError(
            f"{name}, a {type(experts).__name__} of {count} experts with the parameters {shown or 'none'}",
            f"experts of this form have exactly {', '.join(wanted)}, with an entry for each expert",
            _REMEDY,
        )
    if count % ranks:
        sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise ConfigError(
            f"ep={ranks} with the {count} experts of {name}",
            "every rank holds the same number of experts",
            f"Take one of {sizes} for ep",
        )


@torch.no_grad()
def _check_by_trial(name: str, experts: nn.Module, mesh: DeviceMesh) -> None:
    """Run a few tokens through the whole module and through its parts; raise ModelError unless these add up.

    The registry's form implies that, but only a trial proves it.
    """
    ranks = mesh.size()
    if next(experts.parameters()).is_meta:  # a few experts are enough, some for each of two ranks
        experts, ranks = _with_values(experts, 2 * min(count_of(experts) // ranks, 2), mesh.device_type), 2
    weight = getattr(experts, _weight_names(experts)[0])
    share = _Share.of(experts, ranks, mesh.device_type)
    ends = [expert for rank in range(ranks) for expert in (rank * share.local, (rank + 1) * share.local - 1)]
    first = torch.tensor(ends, device=weight.device)
    chosen = torch.stack((first, first.roll(1)), 1)
    width = weight.shape[1 if experts.is_transposed else 2]
    hidden = torch.arange(len(ends) * width, device=weight.device).view(-1, width).sin().to(weight.dtype)
    weights = torch.tensor([0.75, 0.5], device=weight.device, dtype=weight.dtype).expand(len(ends), 2)
    whole = share.view(experts, 0, share.experts)(hidden, chosen, weights)
    parts = torch.zeros_like(whole)
    for token, slot in ((token, slot) for token in range(len(ends)) for slot in range(2)):
        start = int(chosen[token, slot]) // share.local * share.local
        part = share.view(experts, start, start + share.local)
        row = slice(token, token + 1)
        parts[row] += part(hidden[row], chosen[row, slot : slot + 1] - start, weights[row, slot : slot + 1])
    # some modules compute a part in float32 for any dtype
    rounding = max(torch.finfo(dtype).eps for dtype in (whole.dtype, torch.float32))
    difference = float((whole - parts).abs().max())
    if not difference <= 16 * rounding * float(whole.abs().max()):
        rule = f"a token's experts add up, but here the sum differs by {difference:.3g} from the whole"
        raise ModelError(f"{name}, a {type(experts).__name__}", rule, _REMEDY)


def _with_values(experts: nn.Module, count: int, device: str) -> nn.Module:
    """A module like `experts`, a module on the meta device, with `count` experts of random values."""
    made: nn.Module = object.__new__(type(experts))
    made.__dict__.update(experts.__dict__)
    generator = torch.Generator(device).manual_seed(0)
    made.__dict__["_parameters"] = parameters = {}
    for name, weight in experts.named_parameters(recurse=False):
        values = torch.empty(count, *weight.shape[1:], dtype=weight.dtype, device=device)
        parameters[name] = nn.Parameter(values.normal_(std=weight.shape[-1] ** -0.5, generator=generator))
    made.__dict__["num_experts"] = count
    return made


def _distribute(experts: nn.Module, mesh: DeviceMesh) -> None:
    share = _Share.of(experts, mesh.size(), mesh.device_type, mesh.get_group())
    start = mesh.get_local_rank() * share.local
    for name, whole in list(experts.named_parameters(recurse=False)):
        # a copy, so that the whole one can be freed
        part = whole.detach()[start : start + share.local].clone()
        sharded = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        setattr(experts, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))
    experts._expert_share = share  # type: ignore[assignment]
    around(experts, forward=_parallel)


def _parallel(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a parallel module of experts: tokens are sent, and `share` runs the plain forward."""

    def forward(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if without_values(hidden):
            return hidden.clone()
        share: Any = self._expert_share
        route = plan_route(chosen, share.experts, share.group)
        rows, row_weights = dispatch(route, hidden, weights)
        if len(rows):
            rows = share.view(self, 0, share.local)(rows, route.experts.unsqueeze(1), row_weights)
        else:  # gradients of zero, where one process has zeros too, and a way back for the others' gradients
            rows = rows + sum(local(parameter)[:0].sum() for parameter in self.parameters())
        return combine(route, rows, *chosen.shape)

    return forward
