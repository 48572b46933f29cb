"""Context parallelism enters a transformers model through its registry of attention functions.

`parallelize_attention` registers an attention function and a mask function under a name of the model's own,
and sets that name in the model's configs. So no model is edited, and two models in one process share nothing.
The model makes its masks as always, by the rules of its layers (causal, sliding window, chunks), but gets a
`Mask`, which has the rule and the full sequence and builds only the pieces that attention needs.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.batch.loss import VALID_ITEMS
from penstock.errors import ConfigError, ModelError
from penstock.parallel.context import ring, ulysses
from penstock.parallel.context.mask import Mask
from penstock.parallel.context.sequence import FULL_SEQUENCE, FullSequence
from penstock.parallel.expert.balance import asks_for_balance, load_balancing_loss, replace_balance_loss

Method = Literal["ulysses", "ring"]
REMEDY = "Set cp to 1 for this model"
_numbers = itertools.count()


class ContextAttention:
    """One model's attention and mask functions under context parallelism, for the current microbatch.

    Args:
        base: name of the attention function that the model uses otherwise
        group: the ranks that a sequence is split over; None computes shapes only
    """

    def __init__(self, base: str, group: ProcessGroup | None = None, method: Method = "ulysses") -> None:
        self._base, self._group, self._method = base, group, method
        self._full: FullSequence | None = None
        self._compared: set[type] = set()  # classes of attention modules that the ring can replace

    def before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the model: take out and keep the entries that the model does not know."""
        self._full = kwargs.pop(FULL_SEQUENCE, None)
        for name in ("shift_labels", VALID_ITEMS):
            kwargs.pop(name, None)
        return args, kwargs

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        *,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        use_vmap: bool = False,
        dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> Mask:
        """Replaces transformers' mask functions. Raises ModelError for rules that are not causal."""
        full = self._full
        if full is None or q_length != 2 * full.piece or batch_size != len(full.positions):
            rule = "a microbatch is split first (penstock.parallel.context.sequence.split)"
            raise ModelError(f"a forward of {batch_size} rows of {q_length} tokens", rule, "Split it")
        if use_vmap or not allow_is_causal_skip or kv_length != full.padded or q_offset or kv_offset:
            raise ModelError(
                "a mask by rules of the model's own",
                "on a part of a sequence, masks are causal, with windows, chunks and documents",
                REMEDY,
            )
        return Mask(mask_function, full, local_size, self._base, dtype)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Replaces transformers' attention functions. Returns (rows, local tokens, heads, value_dim).

        Raises ModelError, ConfigError for a call that cannot be computed on a part of a sequence.
        """
        _refuse_call(module, query, key, attention_mask, dropout, options)
        if self._group is None or query.is_meta:  # shapes, dtypes and the autograd graph, without values
            grown = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            return (grown + query[..., :1]).transpose(1, 2).contiguous(), None
        options = {"scaling": scaling, **options}
        if self._method == "ulysses":
            base = _base_function(module, self._base)
            result = ulysses.attend(self._group, base, module, query, key, value, attention_mask, **options)
            return result, None
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        uniform = self._base == "eager" and options.get("s_aux") is None
        call = ring.AttentionCall(self._group, attention_mask, scaling, options.get("softcap"), uniform)
        if type(module) not in self._compared:
            ring.compare(_base_function(module, self._base), module, query, key, value, call, options)
            self._compared.add(type(module))
        return ring.attend(query, key, value, options.get("s_aux"), call), None

    def balance_loss(
        self,
        gate_logits: tuple[Tensor, ...],
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """This rank's share of the routers' loss; replaces the function in the model's file.

        attention_mask: of the full sequence, from the model; None where the loss counts masked tokens too
        """
        assert self._full is not None  # attention has refused a microbatch that is not split
        counted = self._full.counted_tokens(attention_mask is not None)
        return load_balancing_loss(gate_logits, num_experts, top_k, counted, self._group)


def parallelize_attention(model: PreTrainedModel, group: ProcessGroup, method: Method) -> None:
    """Make the attention of `model`, whole or a stage's copy, run over the ranks of `group`.

    From then on it takes microbatches from `split`, and its routers' loss, if its config enables one, is this
    rank's share. Changes its configs, adds a hook and, for the routers' loss, changes its class. Call `check`
    (check.py) with the whole model before. Raises ConfigError where its attention cannot be replaced.
    """
    attention = ContextAttention(base_of(model), group, method)
    register(model, attention)
    if asks_for_balance(model):
        replace_balance_loss(model, attention.balance_loss)


def register(model: PreTrainedModel, attention: ContextAttention) -> None:
    """Replace the model's attention and mask functions by those of `attention`."""
    name = f"penstock_context_{next(_numbers)}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, attention.mask)
    for config in _configs(model):
        config._attn_implementation_internal = name  # on every config, as submodels may share one
    model.register_forward_pre_hook(attention.before_forward, with_kwargs=True)
    weakref.finalize(model, _unregister, name)


def _unregister(name: str) -> None:
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop(name, None)


def base_of(model: PreTrainedModel) -> str:
    """Name of the attention function that all of the model's attention modules use.

    Raises ConfigError unless it is one function that also works on some of the heads.
    """
    configs = [getattr(module, "config", None) for module in attentions(model)]
    implementations = {c._attn_implementation for c in configs if isinstance(c, PretrainedConfig)}
    implementations = implementations or {model.config.get_text_config()._attn_implementation}
    if not implementations <= {"sdpa", "eager"} or len(implementations) > 1:
        raise ConfigError(
            f"attn_implementation={'/'.join(sorted(map(str, implementations)))} with cp",
            "context parallelism runs a model whose attention is all 'sdpa' or all 'eager'",
            "Build the model with attn_implementation='sdpa' (it uses flash kernels where they exist)",
        )
    return str(implementations.pop())


def attentions(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that take their attention function from transformers' registry."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) and _asking_function(type(module)) is not None:
            yield module


def functions_of(kind: type) -> Iterator[FunctionType]:
    """The methods of a model's class and of those above it, up to torch's, without their decorators."""
    for owner in kind.__mro__:
        if owner.__module__.split(".")[0] == "torch":
            return
        yield from map(inspect.unwrap, filter(inspect.isfunction, vars(owner).values()))


def _asking_function(kind: type) -> FunctionType | None:
    """The method of a class that takes an attention function from the registry."""
    return next((f for f in functions_of(kind) if "ALL_ATTENTION_FUNCTIONS" in f.__code__.co_names), None)


def _base_function(module: nn.Module, base: str) -> ulysses.AttentionFunction:
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]  # type: ignore[no-any-return]
    if (function := _asking_function(type(module))) is not None:
        for name in function.__code__.co_names:
            if name.startswith("eager"):  # its file's own eager attention
                return function.__globals__[name]  # type: ignore[no-any-return]
    raise ModelError(
        f"{type(module).__name__} in {sys.modules[type(module).__module__].__name__}",
        "it names no function of its own for eager attention",
        "Use the ring, or attn_implementation='sdpa'",
    )


def _configs(model: nn.Module) -> list[PretrainedConfig]:
    configs: dict[int, PretrainedConfig] = {}
    todo = [getattr(module, "config", None) for module in model.modules()]
    while todo:
        config = todo.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            todo += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())


# options of models' attention functions that have no effect here, or that both methods support
_KNOWN = {"softcap", "s_aux", "sliding_window", "is_causal", "position_ids", "cache_position"}


def _refuse_call(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, dropout: float, options: dict[str, Any]
) -> None:
    """Raise for a call of attention that cannot be computed on parts of a sequence."""
    if dropout:
        raise ConfigError(
            f"dropout={dropout} on attention weights with cp",
            "no rank draws the same random numbers as one process would",
            "Set the config's attention dropout to 0",
        )
    odd = [n for n, v in options.items() if n not in _KNOWN and type(v) in (Tensor, nn.Parameter, float)]
    if odd:
        taken = f"{type(module).__name__}, whose attention takes {', '.join(odd)}"
        raise ModelError(taken, "cp does not know how to apply that to a part of a sequence", REMEDY)
    if not isinstance(mask, Mask) or key.shape[2] != query.shape[2] or options.get("is_causal") is False:
        raise ModelError(
            f"{type(module).__name__}, whose attention has a mask or keys of its own",
            "context parallelism supports causal self-attention only",
            REMEDY,
        )
