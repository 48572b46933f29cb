"""Reads a model's own plan for tensor parallelism, and refuses those parts that would not be exact.

transformers gives many models a plan: a style for each kind of module, such as "colwise" for a projection
whose outputs are sharded. A stage lacks the modules of other stages; their entries are skipped.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ModelError
from penstock.parallel.tensor.styles import (
    COLUMNS,
    COLUMNS_GATHERED,
    COMPRESSED,
    EXPERTS,
    FORMER_NAMES,
    PARTIAL,
    ROWS,
    STYLES,
    VOCABULARY,
    Style,
)
from penstock.runtime.unseen import detach_hooks, unseen

_HEAD_WIDTHS = ("head_dim", "head_size", "qk_head_dim")

TPPlan = dict[str, str]  # styles by name


def plan_of(model: nn.Module) -> TPPlan:
    """The plan, with `*` for the indices of layers. Raises ModelError for a model without one."""
    plan = getattr(model, "tp_plan", None)
    plan = dict(plan) if isinstance(plan, Mapping) else {}
    if not any("*" in name for name in plan):
        raise ModelError(
            f"{type(model).__name__}, whose plan for tensor parallelism names {sorted(plan) or 'nothing'}",
            "the plan says which modules of each layer are sharded, and how",
            "Set model.tp_plan, in the form of config.base_model_tp_plan, or leave out the tp axis",
        )
    return {name: FORMER_NAMES.get(style, style) for name, style in plan.items()}


def assigned(model: nn.Module, tp: int) -> TPPlan:
    """The style of every module and parameter of `model` that the plan names, by its full name.

    Excluded, as they stay whole and equal on every rank, are experts, and modules that take and return whole
    values but do not divide by `tp`, or are tied to a weight that is sharded in another way.
    """
    plan = plan_of(model)
    styles = dict(_planned(model, plan))
    experts = tuple(f"{name}." for name, style in styles.items() if style == EXPERTS)
    styles = {n: s for n, s in styles.items() if s != EXPERTS and not (experts and n.startswith(experts))}
    whole = {
        n for n, s in styles.items() if _style(s).closed and any(size % tp for size in _sizes(model, n, s))
    }
    whole |= _tied_to_others(model, plan, whole)
    return {name: style for name, style in styles.items() if name not in whole}


class LogitsPlan(NamedTuple):
    """Where the logits are for a loss that takes them sharded.

    head: name of the head whose logits stay sharded; None where every rank has them whole
    reason: why they are whole
    """

    head: str | None
    reason: str = ""


def logits_plan(model: nn.Module, plan: TPPlan) -> LogitsPlan:
    """Where the logits of `model` are. plan: from `assigned`"""
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    names = (name for name, module in model.named_modules() if module is output)
    head = next((name for name in names if plan.get(name) == COLUMNS_GATHERED), None)
    if head is None:
        return LogitsPlan(None, "the head is not sharded, by the model's plan or by its vocabulary")
    segments = head.split(".")
    for count in range(len(segments) + 1):
        around = ".".join(segments[:count])
        module = model.get_submodule(around)
        if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
            return LogitsPlan(None, f"a hook of {around or type(model).__name__} may read them")
    return LogitsPlan(head)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` that the plan names, without placeholders, which have no parameters."""
    modules = dict(model.named_modules())
    prefixes = {name.partition(".*")[0] for name in plan_of(model) if ".*." in name} & modules.keys()
    if len(prefixes) != 1:
        raise ModelError(
            f"{type(model).__name__}, whose plan names layers in {sorted(prefixes)}",
            "sequence_parallel shards the sequence between the layers of one list",
            "Set sequence_parallel to False",
        )
    prefix = prefixes.pop()
    children = modules[prefix].named_children()
    return {f"{prefix}.{n}": layer for n, layer in children if next(layer.parameters(), None) is not None}


def is_token_wise(module: nn.Module) -> bool:
    """Whether a layer's part treats each token by itself, by its class.

    Any other part gets the whole sequence, which is always exact.
    """
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)):
        return True
    alone = next(module.children(), None) is None and next(module.buffers(), None) is None
    is_norm = re.search(r"(RMS|Layer)_?Norm", type(module).__name__) is not None
    return is_norm and alone and all(p.ndim == 1 for p in module.parameters())


def rotary_width(model: nn.Module) -> int:
    """Number of outputs of the compressed keys to which rotary positions apply."""
    return int(_config(model).qk_rope_head_dim)  # type: ignore[attr-defined]


def _style(name: str) -> Style:
    return STYLES.get(name, Style())


def _planned(model: nn.Module, plan: TPPlan) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        style = _entry(plan, name)
        if style is not None and next(module.parameters(), None) is not None:
            yield name, style
        for key, parameter in module._parameters.items():
            full = f"{name}.{key}".lstrip(".")
            if parameter is not None and (style := _entry(plan, full)) is not None:
                yield full, style


def _entry(plan: TPPlan, name: str) -> str | None:
    return plan.get(name) or plan.get(_pattern(name))


def _pattern(name: str) -> str:
    """The name with `*` for the indices of layers, as in plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _sizes(model: nn.Module, name: str, style: str) -> list[int]:
    """The sharded size of a module, or of a parameter that the plan names itself; at most one."""
    path, _, key = name.rpartition(".")
    weight = model.get_submodule(path)._parameters.get(key)
    dimension = _style(style).dimension
    if dimension is not None and weight is None:
        weight = model.get_submodule(name)._parameters.get("weight")
    return [] if dimension is None or weight is None else [weight.shape[min(dimension, weight.ndim - 1)]]


def _tied_to_others(model: nn.Module, plan: TPPlan, whole: set[str]) -> set[str]:
    """Modules whose weight is tied to one that stays whole, or that is sharded along another dimension.

    Decided by the plan and the model's declared ties, so that the stages at both ends of a pipeline, which
    have one of the two modules each, agree.
    """
    pairs = [*getattr(model, "all_tied_weights_keys", {}).items()]
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        pairs.append((name, first.setdefault(id(parameter), name)))
    groups: dict[str, set[str]] = {}  # module -> the modules with the same weight
    for pair in pairs:
        names = {name.removesuffix(".weight") for name in pair}
        group = names.union(*(groups.get(name, ()) for name in names))
        groups |= dict.fromkeys(group, group)
    return {
        name
        for name, group in groups.items()
        if len({_style(_entry(plan, one) or "").dimension for one in group}) > 1 or group & whole
    }


def _config(model: nn.Module) -> object:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


# ---- refusals of models that would train wrongly


def check(model: nn.Module, tp: int, *, sequence_parallel: bool = False) -> None:
    """Refuse a model that `tensor_parallel` over `tp` ranks would compute wrongly. Changes nothing.

    Args:
        model: whole or a stage, on the meta device or not. For the whole model every rank of a pipeline gets
            the same answer

    Raises ModelError for a model without a plan or with an unknown style, ConfigError for a `tp` that does
    not divide heads or widths.
    """
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ModelError(
                f"{name}, a {type(module).__name__} with a forward of its own",
                "tensor parallelism replaces the forward of its class, which is not called here",
                "Set its forward after the model has been sharded",
            )
    plan = assigned(model, tp)
    _refuse_edits(model, plan)
    for name, style in plan.items():
        _check_style(model, name, style)
    _check_sizes(model, plan, tp)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == COLUMNS):
        _check_neighbours(model, parent, plan)
        _check_between(model, parent, plan, tp)
    if sequence_parallel:
        _check_layers(model, plan)


def _refuse_edits(model: nn.Module, plan: TPPlan) -> None:
    """Refuse parametrizations of sharded weights, and hooks around them: these would see one rank's part."""
    parents = {f"{name.rpartition('.')[0]}." for name, style in plan.items() if not _style(style).closed}
    for name, module in model.named_modules():
        if _is_hooked(module) and name.startswith(tuple(parents - {"."})):
            raise ModelError(
                f"a hook of {name}",
                "tensor parallelism computes with a part of the values there",
                "Put it on the module around it, or leave out the tp axis",
            )
        if hasattr(module, "parametrizations") and name in plan:
            raise ModelError(
                f"{name}, whose weight is computed by a parametrization",
                "tensor parallelism shards its weight, and the parametrization would see a part of it",
                "Leave out the tp axis, or make the weight a plain one",
            )


def _is_hooked(module: nn.Module) -> bool:
    tables = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    return any((*tables, module._backward_pre_hooks))


def _check_style(model: nn.Module, name: str, style: str) -> None:
    owner, _, key = name.rpartition(".")
    if style in STYLES and STYLES[style].kind is None:
        return
    if (parameter := model.get_submodule(owner)._parameters.get(key)) is not None:
        fits, kind = parameter.ndim == 1 and style == COLUMNS, "a parameter"  # with one entry per head
    else:
        module = model.get_submodule(name)
        fits, kind = _fits(model, module, style), f"a {type(module).__name__}"
    if not fits:
        raise ModelError(
            f"{style!r} in the plan of {type(model).__name__} for {name}, {kind}",
            "this style is not known to be exact for it",
            "Change model.tp_plan, or leave out the tp axis",
        )


def _fits(model: nn.Module, module: nn.Module, style: str) -> bool:
    if style == VOCABULARY and isinstance(module, nn.Embedding):
        return not (module.max_norm or module.sparse or module.scale_grad_by_freq)
    if style == COMPRESSED and not hasattr(_config(model), "qk_rope_head_dim"):
        return False
    # adapters and quantised linear layers have a forward of their own
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return _style(style).kind is nn.Linear and is_linear


def _check_sizes(model: nn.Module, plan: TPPlan, tp: int) -> None:
    """Check all sizes that `tp` has to divide, so that the remedy fits all of them."""
    sizes: dict[str, int] = {}
    for name, style in plan.items():
        for size in () if _style(style).closed else _sizes(model, name, style):
            owner = model.get_submodule(name.rpartition(".")[0])
            width = next((w for n in _HEAD_WIDTHS if isinstance(w := getattr(owner, n, None), int)), None)
            pattern = _pattern(name)
            if style == COLUMNS and width and size % width == 0:
                sizes |= _heads(model) | {f"heads of {pattern}": size // width}
            sizes[f"{'columns' if style == ROWS else 'rows'} of {pattern}"] = size
    wrong = {name: size for name, size in sizes.items() if size % tp}
    if wrong:
        common = math.gcd(*sizes.values())
        raise ConfigError(
            f"tp={tp} for a model with {', '.join(f'{size} {name}' for name, size in wrong.items())}",
            "every rank takes the same number of heads and of each projection's outputs",
            f"Take a tp of {' or '.join(str(n) for n in range(1, common + 1) if common % n == 0)}",
        )


def _heads(model: nn.Module) -> dict[str, int]:
    config = _config(model)
    counts = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: heads for name, heads in counts.items() if isinstance(heads, int)}


def _check_neighbours(model: nn.Module, path: str, plan: TPPlan) -> None:
    """Refuse weights that the plan does not name, but that may work on one rank's heads.

    On each rank, the gradient of such a weight would silently cover that rank's heads only. Refused are
    weights as wide as a head, and single numbers; any other weight fits whole values only, or fails.
    """
    owner = model.get_submodule(path)
    widths = {getattr(owner, name, None) for name in _HEAD_WIDTHS}
    names = [f"{path}.{name}" for name, parameter in owner._parameters.items() if parameter is not None]
    for name, part in owner.named_modules(prefix=path):
        parameters = [p for p in part._parameters.values() if p is not None]
        like_heads = any(p.numel() == 1 or p.shape[-1] in widths for p in parameters)
        if part is not owner and like_heads and not isinstance(part, nn.Linear):
            names.append(name)
    for name in names:
        if name not in plan:
            raise ModelError(
                f"{name}, which the plan of {type(model).__name__} does not name",
                "it is a sibling of projections whose heads are split over the ranks, and may work on heads",
                f"Add {_pattern(name)!r} to model.tp_plan: {PARTIAL!r} where it works on each head by "
                f"itself, 'replicate' where it works on whole values",
            )


def _check_between(model: nn.Module, path: str, plan: TPPlan, tp: int) -> None:
    """Refuse a module that mixes outputs of projections whose outputs are sharded."""
    owner = model.get_submodule(path)
    styles = {name: plan.get(f"{path}.{name}") for name, _ in owner.named_children()}
    columns, rows = ([name for name, style in styles.items() if style == one] for one in (COLUMNS, ROWS))
    if len(rows) == 1 and mixes(owner, columns, rows[0], tp):
        raise ModelError(
            f"{path}, a {type(owner).__name__}",
            f"between {', '.join(columns)} and {rows[0]} it does not treat each value by itself, "
            "and each rank would have some of the values",
            f"Take {_pattern(path)!r} and what is inside out of model.tp_plan, or leave out the tp axis",
        )


def _check_layers(model: nn.Module, plan: TPPlan) -> None:
    """Refuse a layer with a part that cannot be given the whole sequence, or with a hook."""
    for path, layer in layers_of(model).items():
        for name, part in layer.named_modules(prefix=path):
            if _is_hooked(part):
                raise ModelError(
                    f"a hook of {name}, with sequence_parallel",
                    "each rank has a part of the sequence there, and the hook would see only that part",
                    "Set sequence_parallel to False, or take the hook out",
                )
        for name, part in layer.named_children():
            is_called = type(part).forward is not nn.Module.forward  # a list of modules is not
            if _style(plan.get(f"{path}.{name}", "")).dimension is not None or not is_called:
                raise ModelError(
                    f"{path}.{name}, a {type(part).__name__}",
                    "sequence_parallel gives the whole sequence to a layer's parts when they are called, "
                    "and a layer's own code is not known to treat each token by itself",
                    "Set sequence_parallel to False",
                )


class _Stub(nn.Module):
    """Replaces a projection: returns `value`, or keeps its input there if `sees`."""

    def __init__(self, sees: bool = False) -> None:
        super().__init__()
        self.sees, self.value = sees, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.sees:
            self.value = x
        return self.value


@torch.no_grad()
def mixes(module: nn.Module, columns: list[str], rows: str, ranks: int) -> bool:
    """Whether `module` mixes the outputs of its projections `columns` before they enter `rows`.

    Such a module (a mean over outputs, halves of a fused projection) computes wrong values of the right shape
    on each rank. As a test, its forward runs on a few numbers in place of the projections' outputs, on all of
    them and rank by rank. The test needs a module with one argument and no other weights, as an MLP; else the
    result is False.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) != 1:
        return False
    stubs = {name: _Stub(sees=name == rows) for name in (*columns, rows)}
    memo: dict[int, Any] = {id(module.get_submodule(name)): stub for name, stub in stubs.items()}
    memo |= {id(tensor): tensor for part in module.modules() for tensor in part._parameters.values()}
    twin = copy.deepcopy(module, memo)
    detach_hooks(twin)
    if next(twin.parameters(), None) is not None or any(b.is_meta for b in twin.buffers()):
        return False
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(2, 3, ranks * 4, generator=generator, device="cpu") for name in columns}
    results = []
    for count, rank in ((1, 0), *((ranks, rank) for rank in range(ranks))):
        for name, value in values.items():
            stubs[name].value = value.chunk(count, -1)[rank]
        try:
            with unseen():
                twin(torch.zeros(2, 3, 1, device="cpu"))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # its forward needs more than its projections
        results.append(stubs[rows].value)
    whole, together = results[0], torch.cat(results[1:], dim=-1)
    return together.shape != whole.shape or not torch.allclose(together, whole)
