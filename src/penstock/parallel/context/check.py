"""Find the modules of a model that would be wrong on a split sequence, from the model object alone.

There is no table of model names. The check reads the modules that take their attention function from
transformers' registry, the other modules of a layer, the names in their code, and the layer types of the
config. The first forward refuses the rest, with the same error on every rank (attention.py).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.errors import ConfigError, ModelError, PenstockError
from penstock.parallel.context import ulysses
from penstock.parallel.context.attention import (
    REMEDY,
    ContextAttention,
    Method,
    attentions,
    base_of,
    functions_of,
    register,
)
from penstock.parallel.context.positions import LENGTH, MixedPositionsError, Positions
from penstock.parallel.context.sequence import split
from penstock.parallel.expert.balance import asks_for_balance, balance_function, check_load_balancing
from penstock.parallel.expert.experts import is_marked
from penstock.private import ConvNd
from penstock.runtime.unseen import detach_hooks, unseen

# layer types of configs that are causal attention
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# functions with which code works along the sequence itself
_ALONG = {"arange", "cumsum", "roll", "conv1d", "topk", "tril", "triu", "fft", "flip"}
_log = logging.getLogger(__name__)


def check(model: PreTrainedModel, count: int, method: Method, tp: int = 1) -> None:
    """Raise ModelError or ConfigError for a model that cannot be split over `count` ranks of cp.

    Packed documents are checked elsewhere (penstock.batch.packing.refuse_packed), as without a split.

    Args:
        model: the whole model, with or without values
        tp: the number of ranks over which its heads are sharded before; it divides the heads
    """
    reason = next(_reasons(model), None)
    if reason is not None:
        rule = "context parallelism is exact where only registered causal attention mixes tokens"
        raise ModelError(f"cp={count} for {type(model).__name__}: {reason}", rule, REMEDY)
    base_of(model)
    if asks_for_balance(model):
        _refuse_balance_loss(model)
    rule = "with cp each rank has a part of the sequence, and this op works along all of it"
    _refuse_mixed_positions(model, "cp", rule, "Set cp to 1, or take that op out", PenstockError)
    if method == "ulysses":
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        ulysses.repeats(heads // tp, max(key_heads // tp, 1), count)


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        yield "its state runs over the sequence"
    if getattr(model.config, "is_encoder_decoder", False):
        yield "its decoder looks at another sequence"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "it takes no position_ids, and would count each part's tokens from 0"
    if others := set(getattr(config, "layer_types", None) or ()) - _ATTENTION:
        yield f"it has layers of {', '.join(map(repr, sorted(others)))}"
    yield from _reasons_of_modules(model)
    for name, layer in _layers(model):
        if next(attentions(layer), None) is None:
            yield f"{name} ({type(layer).__name__}) has no attention of transformers' registry"
    if next(attentions(model), None) is None:
        yield "it has no attention of transformers' registry"


def _reasons_of_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if any("position_ids_from" in method for method in dir(type(module))):
            yield f"{name} ({kind}) counts positions in a way of its own"
        if isinstance(module, ConvNd):
            yield f"{name} is a convolution"
        rope = getattr(module, "rope_type", None)
        if {"dynamic", "longrope"} & set(rope.values() if isinstance(rope, dict) else (rope,)):
            yield f"{name} ({kind}) rotates by the longest position, which another part may have"
    for attention in attentions(model):
        kind = type(attention).__name__
        if getattr(attention, "is_causal", True) is False:
            yield f"{kind} looks ahead"
        for part in attention.modules():
            if used := _ALONG & _names(type(part)):
                yield f"{type(part).__name__} in {kind} works along the sequence by itself ({min(used)})"


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules of transformers' class for a model's layers."""
    for name, module in model.named_children():
        if isinstance(module, GradientCheckpointingLayer):
            yield name, module
        else:
            yield from ((f"{name}.{inner}", layer) for inner, layer in _layers(module))


def _names(kind: type) -> set[str]:
    """The names that the code of a class of transformers uses."""
    return {
        name
        for function in functions_of(kind)
        if function.__name__ != "__init__" and function.__module__ != "transformers.modeling_utils"
        for name in function.__code__.co_names
    }


def _refuse_balance_loss(model: PreTrainedModel) -> None:
    """Raise ConfigError, ModelError for a routers' loss that does not add up over parts of a sequence."""
    function = balance_function(model)
    if function is None:
        raise ConfigError(
            "output_router_logits=True with cp",
            f"the forward of {type(model).__name__} calls no load_balancing_loss_func, and the routers' "
            "losses of parts of a sequence do not add up by themselves",
            "Set output_router_logits=False in the model's config",
        )
    for experts, top_k in ((4, 2), (6, 1)):
        check_load_balancing(function, experts, top_k)


def _refuse_mixed_positions(
    model: PreTrainedModel, option: str, rule: str, remedy: str, *passed: type[Exception]
) -> None:
    """Raise ModelError where more than attention mixes positions, or where an edit hides whether it does.

    passed: the type of errors that the first forward raises too; they are passed on unchanged
    """
    try:
        _follow_positions(model)
    except passed:
        raise
    except MixedPositionsError as mixed:
        raise ModelError(f"{mixed}, with {option}", rule, remedy) from None
    except Exception as error:  # because tensors have no values
        if edit := next(_edits(model), None):
            rule = f"a forward without values, which would show whether it mixes positions, ends in {error!r}"
            raise ModelError(f"{edit}, with {option}", rule, remedy) from error
        _log.debug("a forward of %s without values ended in %r", type(model).__name__, error)


def check_padded(model: PreTrainedModel) -> None:
    """Raise ModelError for a model with edits, if more than attention mixes positions, and so padding too.

    For transformers' unchanged models, see models.huggingface.stages.refuse_padding.
    """
    if next(_edits(model), None) is not None:
        rule = "this op works along the sequence, and would treat padding as tokens"
        remedy = "Take shapes='inferred', which pads nothing, or take it out"
        _refuse_mixed_positions(model, "shapes='padded'", rule, remedy)


def _follow_positions(model: PreTrainedModel) -> None:
    """Run a copy without values, with an attention that keeps positions apart.

    Raises MixedPositionsError, with the op and the module, where the rest of the forward mixes positions, and
    passes on any other error of the forward.
    """
    memo: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in model.buffers()}
    memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in model.parameters()}
    memo |= {id(module): _PassesOn(module) for name, module in model.named_modules()
             if _are_experts(name, module)}  # fmt: skip
    shadow = copy.deepcopy(model, memo).eval()  # dropout is checked elsewhere, for all axes
    detach_hooks(shadow)
    for module in shadow.modules():
        if isinstance(module, PreTrainedModel):  # the routers' loss is a mean over tokens, and summed over cp
            module.config.get_text_config().output_router_logits = False
    register(shadow, ContextAttention(base_of(model)))
    part = split({"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)}, 0, 1)
    part = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in part.items()}
    entered = [""]
    for name, module in shadow.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name), prepend=True)
    positions = Positions()
    positions.follow(part["input_ids"])
    try:
        with unseen(), positions:
            shadow(**part, use_cache=False)
    except MixedPositionsError as mixed:
        raise MixedPositionsError(f"{mixed}, in or after {entered[-1] or type(model).__name__}") from None


def _edits(model: nn.Module) -> Iterator[str]:
    """A user's changes to a model of transformers: hooks, forwards and modules, by name."""
    for name, module in model.named_modules():
        attributes = vars(module)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            yield f"a hook of {name or type(model).__name__}"
        elif "forward" in attributes:
            yield f"the replaced forward of {name or type(model).__name__}"
        elif type(module).__module__.partition(".")[0] not in ("torch", "transformers"):
            yield f"{name or 'the model'}, a {type(module).__name__}"


def _are_experts(name: str, module: nn.Module) -> bool:
    return is_marked(module) or (name.endswith(".experts") and not isinstance(module, nn.ModuleList))


class _PassesOn(nn.Module):
    """Replaces experts, which reorder tokens inside but not in their result. Keeps the experts' hooks."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        hooks = ("_forward_hooks", "_forward_pre_hooks")
        for name in (*hooks, *(f"{hook}_with_kwargs" for hook in hooks), "_forward_hooks_always_called"):
            setattr(self, name, getattr(experts, name).copy())

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states
