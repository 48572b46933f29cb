"""What a model's own plan says of its modules for tensor parallelism, and what of it is exact.

transformers gives many models a plan: a style for each kind of module, such as "colwise" for a projection
whose outputs the ranks share out. Here the plan is read, laid over the modules that are there, and refused
where following it would be wrong. A stage lacks the modules of other stages; their entries are passed over.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ModelError

# ---- Whether what a module does between its projections treats each of their outputs by itself.
#
# Where ranks share the outputs out, anything else (a mean over them, halves of a fused projection) would
# be something different on each rank, of the right shape, and nothing would tell. It is found out by
# running the module's own forward on a few numbers in the place of the projections, as a whole and rank by
# rank.


_WIDTH = 4  # outputs a rank


class _Given(nn.Module):
    """In the place of a projection that ranks share out by its outputs."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class _Seen(nn.Module):
    """In the place of one that ranks share out by its inputs."""

    value: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.value = x
        return x


def mixes(module: nn.Module, columns: list[str], rows: list[str], ranks: int) -> bool:
    """Whether `module` mixes the outputs of its projections `columns` before they enter `rows`.

    Only where it takes a single argument and has no weights of its own beside them, as an MLP; else False.
    """
    taken = inspect.signature(module.forward).parameters.values()
    needed = [p for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) != 1 or len(rows) != 1:
        return False
    memo: dict[int, Any] = {id(module.get_submodule(name)): _Given() for name in columns}
    memo |= {id(module.get_submodule(name)): _Seen() for name in rows}
    memo |= {id(tensor): tensor for part in module.modules() for tensor in part._parameters.values()}
    twin = copy.deepcopy(module, memo)
    if next(twin.parameters(), None) is not None or any(b.is_meta for b in twin.buffers()):
        return False
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(2, 3, ranks * _WIDTH, generator=generator, device="cpu") for n in columns}
    whole = _run(twin, values, rows[0])
    pieces = [
        _run(twin, {n: value.chunk(ranks, -1)[rank] for n, value in values.items()}, rows[0])
        for rank in range(ranks)
    ]
    if whole is None or any(piece is None for piece in pieces):
        return False
    together = torch.cat([piece for piece in pieces if piece is not None], dim=-1)
    return together.shape != whole.shape or not torch.allclose(together, whole)


@torch.no_grad()
def _run(twin: nn.Module, values: dict[str, Tensor], seen: str) -> Tensor | None:
    """What enters `seen`; None where the forward needs more than its projections."""
    for name, value in values.items():
        vars(twin.get_submodule(name))["value"] = value
    where = vars(twin.get_submodule(seen))
    where["value"] = None
    try:
        twin(torch.zeros(2, 3, 1, device="cpu"))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    result: Tensor | None = where["value"]
    return result


COLUMNS, COLUMNS_GATHERED = "colwise", "colwise_gather_output"
ROWS, ROWS_SPLIT = "rowwise", "rowwise_split_input"
VOCABULARY, COMPRESSED, PARTIAL = "embedding_rowwise", "mla_kv_a_proj", "replicated_with_grad_allreduce"
WHOLE = frozenset({"replicate", "local_params"})  # parameters that every rank holds and uses alike
EXPERTS = "moe_tp_experts"
_OLDER = {"colwise_rep": COLUMNS_GATHERED, "rowwise_rep": ROWS_SPLIT}  # the same under its first name
# They take whole values and give whole values, so that leaving the module whole is exact as well.
_CLOSED = frozenset({COLUMNS_GATHERED, ROWS_SPLIT, VOCABULARY})
_LINEAR = frozenset({COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_SPLIT, COMPRESSED})
# A weight's dimension that the ranks share out; a bias goes with dimension 0, and is whole beside 1.
DIMENSION = {COLUMNS: 0, COLUMNS_GATHERED: 0, VOCABULARY: 0, ROWS: 1, ROWS_SPLIT: 1}

Plan = dict[str, str]


def plan_of(model: nn.Module) -> Plan:
    """The plan, with `*` for the numbers of layers. Raises ModelError where the model has none."""
    plan = getattr(model, "tp_plan", None)
    plan = dict(plan) if isinstance(plan, Mapping) else {}
    if not any("*" in name for name in plan):
        raise ModelError(
            f"{type(model).__name__}, whose plan for tensor parallelism names {sorted(plan) or 'nothing'}",
            "the plan says which modules of each layer are shared out, and how",
            "Set model.tp_plan, in the form of config.base_model_tp_plan, or leave out the tp axis",
        )
    return {name: _OLDER.get(style, style) for name, style in plan.items()}


def assigned(model: nn.Module, tp: int) -> Plan:
    """The style of every module and parameter that the plan names and `model` holds, by its full name.

    Mixtures' experts are left out: they stay whole and alike on every rank, and so does what takes and gives
    whole values but does not divide by `tp`, or is tied to a weight that is not shared out alike.
    """
    plan = plan_of(model)
    found = dict(_laid_over(model, plan))
    experts = tuple(f"{name}." for name, style in found.items() if style == EXPERTS)
    found = {n: s for n, s in found.items() if s != EXPERTS and not (experts and n.startswith(experts))}
    whole = {n for n, s in found.items() if s in _CLOSED and any(size % tp for size in _sizes(model, n, s))}
    whole |= _untied(model, plan, whole)
    return {name: style for name, style in found.items() if name not in whole}


def check(model: nn.Module, tp: int, *, sequence_parallel: bool = False) -> None:
    """Refuse what `tensor_parallel` over `tp` ranks would get wrong. Changes nothing.

    model: whole or a stage, on the meta device or not. Asked of the whole model, every rank of a pipeline
        gets the same answer.
    Raises ModelError for a model without a plan or with a style that is not understood, ConfigError for a
    `tp` that heads or widths do not divide by.
    """
    if tp < 1:
        raise ConfigError(f"tp={tp}", "it is a number of ranks", "Take 1 or more")
    plan_of(model)
    if tp == 1:
        return
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ModelError(
                f"{name}, a {type(module).__name__} with a forward of its own",
                "tensor parallelism takes the place of the forward of its class, which is not called here",
                "Set its forward after the model has been shared out",
            )
    found = assigned(model, tp)
    for name, style in found.items():
        _check_style(model, name, style)
    _check_sizes(model, found, tp)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in found.items() if style == COLUMNS):
        _check_beside(model, parent, found)
        _check_between(model, parent, found, tp)
    if sequence_parallel:
        _check_layers(model, found)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that the plan speaks of and that `model` holds: one without parameters is a placeholder."""
    modules = dict(model.named_modules())
    prefixes = {name.partition(".*")[0] for name in plan_of(model) if ".*." in name} & modules.keys()
    if len(prefixes) != 1:
        raise ModelError(
            f"{type(model).__name__}, whose plan speaks of layers in {sorted(prefixes)}",
            "sequence_parallel shares out the sequence between the layers of one list",
            "Set sequence_parallel to False",
        )
    prefix = prefixes.pop()
    named = modules[prefix].named_children()
    return {f"{prefix}.{n}": layer for n, layer in named if next(layer.parameters(), None) is not None}


def is_token_wise(module: nn.Module) -> bool:
    """Whether a part of a layer treats each token by itself, as its kind tells.

    Anything else gets the whole sequence, which is exact for whatever it is.
    """
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)):
        return True
    alone = next(module.children(), None) is None and next(module.buffers(), None) is None
    is_norm = re.search(r"(RMS|Layer)_?Norm", type(module).__name__) is not None
    return is_norm and alone and all(p.ndim == 1 for p in module.parameters())


def _laid_over(model: nn.Module, plan: Plan) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        style = _entry(plan, name)
        if style is not None and next(module.parameters(), None) is not None:
            yield name, style
        for own, parameter in module._parameters.items():
            full = f"{name}.{own}".lstrip(".")
            if parameter is not None and (style := _entry(plan, full)) is not None:
                yield full, style


def _entry(plan: Plan, name: str) -> str | None:
    return plan.get(name) or plan.get(_kind(name))


def _kind(name: str) -> str:
    """The name with `*` for the numbers of layers, as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _sizes(model: nn.Module, name: str, style: str) -> list[int]:
    """What the ranks share out of a module, or of a parameter that has an entry of its own."""
    if style not in DIMENSION:
        return []
    weight = _tensor(model, name)
    return [] if weight is None else [weight.shape[min(DIMENSION[style], weight.ndim - 1)]]


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    path, _, own = name.rpartition(".")
    found = model.get_submodule(path)._parameters.get(own)
    return model.get_submodule(name)._parameters.get("weight") if found is None else found


def _untied(model: nn.Module, plan: Plan, whole: set[str]) -> set[str]:
    """Modules whose weight is tied to one that stays whole, or that is shared out along another dimension.

    By the plan and by what the model says of itself, so that the stages at both ends of a pipeline agree,
    each of which has but one of the two modules.
    """
    pairs = [*getattr(model, "all_tied_weights_keys", {}).items()]
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        pairs.append((name, first.setdefault(id(parameter), name)))
    found: set[str] = set()
    for pair in pairs:
        one, other = (name.removesuffix(".weight") for name in pair)
        ways = [DIMENSION.get(_entry(plan, name) or "") for name in (one, other)]
        if one != other and (ways[0] != ways[1] or one in whole or other in whole):
            found |= {one, other}
    return found


def _check_style(model: nn.Module, name: str, style: str) -> None:
    owner, _, own = name.rpartition(".")
    parameter = model.get_submodule(owner)._parameters.get(own)
    module = None if parameter is not None else model.get_submodule(name)
    if style in WHOLE or style == PARTIAL:
        return
    if parameter is not None and parameter.ndim == 1 and style == COLUMNS:  # one number a head
        return
    told = style != COMPRESSED or hasattr(_config(model), "qk_rope_head_dim")
    if style in _LINEAR and told and _runs(module, nn.Linear):
        return
    if (
        style == VOCABULARY
        and isinstance(module, nn.Embedding)
        and not (module.max_norm or module.sparse or module.scale_grad_by_freq)
    ):
        return
    kind = "a parameter" if module is None else f"a {type(module).__name__}"
    raise ModelError(
        f"{style!r} in the plan of {type(model).__name__} for {name}, {kind}",
        "it is not known to be exact to share such a one out so",
        "Change model.tp_plan, or leave out the tp axis",
    )


def rotary_width(model: nn.Module) -> int:
    """How many of the compressed keys' outputs positions turn, as the config says."""
    return int(_config(model).qk_rope_head_dim)  # type: ignore[attr-defined]


def _runs(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling it is calling the forward of `kind`: adapters and quantised ones have their own."""
    return isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module)


def _config(model: nn.Module) -> object:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _check_sizes(model: nn.Module, found: Plan, tp: int) -> None:
    """All sizes that `tp` has to divide, so that the remedy fits all of them."""
    sizes: dict[str, int] = {}
    for name, style in found.items():
        for size in _sizes(model, name, style) if style not in _CLOSED else ():
            owner = model.get_submodule(name.rpartition(".")[0])
            width = next((w for n in _HEAD_WIDTHS if isinstance(w := getattr(owner, n, None), int)), None)
            kind = _kind(name)
            if style == COLUMNS and width and size > width and size % width == 0:
                sizes |= _heads(model) | {f"heads of {kind}": size // width}
            sizes[f"{'columns' if style in (ROWS, ROWS_SPLIT) else 'rows'} of {kind}"] = size
    wrong = {name: size for name, size in sizes.items() if size % tp}
    if wrong:
        common = math.gcd(*sizes.values())
        raise ConfigError(
            f"tp={tp} for a model with {', '.join(f'{size} {name}' for name, size in wrong.items())}",
            "every rank takes the same number of heads and of each projection's outputs",
            f"Take a tp of {' or '.join(str(n) for n in range(1, common + 1) if common % n == 0)}",
        )


_HEAD_WIDTHS = ("head_dim", "head_size", "qk_head_dim")


def _heads(model: nn.Module) -> dict[str, int]:
    config = _config(model)
    found = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: heads for name, heads in found.items() if isinstance(heads, int)}


def _check_beside(model: nn.Module, path: str, found: Plan) -> None:
    """Refuse weights that may work on one rank's heads where the plan does not say so.

    Each rank's gradient of such a weight covers its own heads only, and nothing would tell. What is as wide
    as a head, or a single number, is taken for one; what is not fits whole values only, or fails.
    """
    owner = model.get_submodule(path)
    widths = {getattr(owner, name, None) for name in _HEAD_WIDTHS}
    beside = [f"{path}.{name}" for name, parameter in owner._parameters.items() if parameter is not None]
    for name, part in owner.named_modules(prefix=path):
        own = [p for p in part._parameters.values() if p is not None]
        like_heads = any(p.numel() == 1 or p.shape[-1] in widths for p in own)
        if part is not owner and like_heads and not isinstance(part, nn.Linear):
            beside.append(name)
    for full in beside:
        if full not in found:
            raise ModelError(
                f"{full}, which the plan of {type(model).__name__} does not name",
                "it stands beside projections of which each rank has some heads, and may work on those",
                f"Add {_kind(full)!r} to model.tp_plan: {PARTIAL!r} where it works on each head by itself, "
                f"'replicate' where it works on what is whole",
            )


def _check_between(model: nn.Module, path: str, found: Plan, tp: int) -> None:
    """Refuse what mixes the outputs of projections of which each rank has some."""
    owner = model.get_submodule(path)
    styles = {name: found.get(f"{path}.{name}") for name, _ in owner.named_children()}
    columns, rows = ([name for name, style in styles.items() if style == one] for one in (COLUMNS, ROWS))
    if mixes(owner, columns, rows, tp):
        raise ModelError(
            f"{path}, a {type(owner).__name__}",
            f"between {', '.join(columns)} and {rows[0]} it does not treat each number by itself, "
            "and each rank would have some of them",
            f"Take {_kind(path)!r} and what is inside out of model.tp_plan, or leave out the tp axis",
        )


def _check_layers(model: nn.Module, found: Plan) -> None:
    """That every part of a layer can be given the whole sequence."""
    for path, layer in layers_of(model).items():
        for name, part in layer.named_children():
            is_called = type(part).forward is not nn.Module.forward  # a list of modules is not
            if found.get(f"{path}.{name}") in DIMENSION or not is_called:
                raise ModelError(
                    f"{path}.{name}, a {type(part).__name__}",
                    "sequence_parallel gives the whole sequence to a layer's parts as they are called, "
                    "and what stands in the layer itself is not known to treat each token by itself",
                    "Set sequence_parallel to False",
                )
