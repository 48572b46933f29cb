"""Context parallelism enters a transformers model through its registry of attention functions.

`enter` registers an attention function and a mask function under a name of the model's own and sets that
name in the model's configs: so no model is edited, and two models in one process have nothing in common.
The model makes its masks as ever, by the rules of its layers (causal, sliding window, chunks), but what comes
out is a `Mask` that knows the rule and the whole sequence and builds only what is asked of it.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from penstock.parallel.context.sequence import WHOLE, Whole
from penstock.parallel.expert.balance import asks_for_balance, balance_by, load_balancing_loss

How = Literal["ulysses", "ring"]
_REMEDY = "Set cp to 1 for this model"
Options = dict[str, Any]  # what a model gives its attention function beside
_numbers = itertools.count()


@dataclass(frozen=True)
class Context:
    """The ranks that a sequence is cut over, and how they attend over it together."""

    group: ProcessGroup
    how: How


class Installed(ABC):
    """What stands for one model's attention and mask functions. It knows the microbatch at hand."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._whole: Whole | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the model's forward: keep what is not the model's, and give it the rest."""
        self._whole = kwargs.pop(WHOLE, None)
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
        """In the place of transformers' mask functions. Raises ModelError for rules that are not causal."""
        whole = self._whole
        if whole is None or q_length != 2 * whole.piece or batch_size != len(whole.positions):
            rule = "a microbatch goes through `cut` first (penstock.parallel.context.sequence)"
            raise ModelError(f"a forward of {batch_size} rows of {q_length} tokens", rule, "Cut it")
        if use_vmap or not allow_is_causal_skip or kv_length != whole.padded or q_offset or kv_offset:
            raise ModelError(
                "a mask by rules of the model's own",
                "a part of a sequence knows causal masks, windows, chunks and documents",
                _REMEDY,
            )
        return Mask(mask_function, whole, local_size, self._base, dtype)

    @abstractmethod
    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
    ) -> tuple[Tensor, None]:
        """In the place of transformers' attention functions: (rows, part, heads, value_dim)."""


class Entered(Installed):
    """Attention together with the other ranks of a context."""

    def __init__(self, context: Context, base: str) -> None:
        super().__init__(base)
        self._context = context
        self._compared: set[type] = set()  # classes of attention modules that the ring is known to stand for

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
        """In the place of transformers' attention functions. Raises ModelError, ConfigError."""
        refuse_call(module, query, key, attention_mask, dropout, options)
        if query.is_meta:  # nobody to talk to
            return shape_of(query, value), None
        group, options = self._context.group, {"scaling": scaling, **options}
        if self._context.how == "ulysses":
            base = _base_of(module, self._base)
            return ulysses.attend(group, base, module, query, key, value, attention_mask, **options), None
        call = self._ring_call(query, attention_mask, options)
        if type(module) not in self._compared:
            ring.compare(_base_of(module, self._base), module, query, key, value, call, options)
            self._compared.add(type(module))
        return ring.attend(query, key, value, options.get("s_aux"), call), None

    def _ring_call(self, query: Tensor, mask: Mask, options: dict[str, Any]) -> ring.Call:
        scaling = query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
        uniform = self._base == "eager" and options.get("s_aux") is None
        return ring.Call(self._context.group, mask, scaling, options.get("softcap"), uniform)

    def balance(
        self,
        gate_logits: tuple[Tensor, ...],
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """In the place of the function that the model's file has for its routers' loss: this rank's part.

        attention_mask: as the model gives it, of the whole sequence; None where it counts masked tokens too
        """
        assert self._whole is not None  # attention has refused what was not cut
        counted = self._whole.counted(attention_mask is not None)
        return load_balancing_loss(gate_logits, num_experts, top_k, counted, self._context.group)


def shape_of(query: Tensor, value: Tensor) -> Tensor:
    """What attention gives, in shape, dtype and where its gradients go, but not in values."""
    grown = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (grown + query[..., :1]).transpose(1, 2)


def enter(model: PreTrainedModel, context: Context) -> Callable[[], None]:
    """Let `model`, a whole one or a stage's copy, attend together with the other ranks of `context`.

    From then on it takes what `cut` makes, and its routers' loss, where its config asks for one, is this
    rank's part of it. Its configs are changed and a hook is added, and in that case its class. What is
    returned undoes that. `check` (context_check.py) is for the whole model, before. Raises ConfigError
    where its attention functions cannot be replaced.
    """
    entered = Entered(context, base_of(model))
    undo = install(model, entered)
    if not asks_for_balance(model):
        return undo
    restore = balance_by(model, entered.balance)

    def undo_both() -> None:
        restore()
        undo()

    return undo_both


def install(model: PreTrainedModel, entered: Installed) -> Callable[[], None]:
    """Set `entered`'s functions in the place of the model's; the function returned takes them away again."""
    name = f"penstock_context_{next(_numbers)}"
    ALL_ATTENTION_FUNCTIONS.register(name, entered.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, entered.mask)
    before = [(config, config._attn_implementation) for config in _configs(model)]
    for config, _ in before:
        config._attn_implementation_internal = name  # each of them by itself: they may be shared
    hook = model.register_forward_pre_hook(entered.take, with_kwargs=True)
    forget = weakref.finalize(model, _forget, name)

    def undo() -> None:
        hook.remove()
        for config, own in before:
            config._attn_implementation_internal = own
        forget()

    return undo


def _forget(name: str) -> None:
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop(name, None)


def base_of(model: PreTrainedModel) -> str:
    """The attention function of all of the model's attention modules, by its name.

    Raises ConfigError where that is none that can be run on a share of the heads, or not one.
    """
    configs = [getattr(module, "config", None) for module in attentions(model)]
    found = {c._attn_implementation for c in configs if isinstance(c, PretrainedConfig)}
    found = found or {model.config.get_text_config()._attn_implementation}
    if not found <= {"sdpa", "eager"} or len(found) > 1:
        raise ConfigError(
            f"attn_implementation={'/'.join(sorted(map(str, found)))} with cp",
            "context parallelism runs a model whose attention is all 'sdpa' or all 'eager'",
            "Build the model with attn_implementation='sdpa' (it uses flash kernels where there are some)",
        )
    return str(found.pop())


def attentions(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that ask transformers' registry for their attention function."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) and registered(type(module)) is not None:
            yield module


def registered(kind: type) -> Callable[..., Any] | None:
    """The function of a class that asks the registry for its attention function."""
    for owner in kind.__mro__:
        if owner.__module__.split(".")[0] == "torch":
            break
        for value in filter(inspect.isfunction, vars(owner).values()):
            function: Any = inspect.unwrap(value)
            if "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names:
                return function  # type: ignore[no-any-return]
    return None


def _base_of(module: nn.Module, base: str) -> ulysses.Base:
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]  # type: ignore[no-any-return]
    asks = registered(type(module))
    names = () if asks is None else asks.__code__.co_names
    for name in names:  # the one that it names as what stands for "eager"
        if name.startswith("eager") and asks is not None:
            return asks.__globals__[name]  # type: ignore[no-any-return]
    raise ModelError(
        f"{type(module).__name__} in {sys.modules[type(module).__module__].__name__}",
        "it names no function of its own for eager attention",
        "Use the ring, or attn_implementation='sdpa'",
    )


def _configs(model: nn.Module) -> list[PretrainedConfig]:
    found: dict[int, PretrainedConfig] = {}
    todo = [getattr(module, "config", None) for module in model.modules()]
    while todo:
        config = todo.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            todo += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


# what models hand on to their attention function that changes nothing there, or that both ways know
_KNOWN = {"softcap", "s_aux", "sliding_window", "is_causal", "position_ids", "cache_position"}


def refuse_call(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, dropout: float, options: dict[str, Any]
) -> None:
    """Raise for what a call of attention asks that parts of a sequence cannot give."""
    if dropout:
        raise ConfigError(
            f"dropout={dropout} on attention weights with cp",
            "no rank draws the same ones as one process would",
            "Set the config's attention dropout to 0",
        )
    odd = [n for n, v in options.items() if n not in _KNOWN and type(v) in (Tensor, nn.Parameter, float)]
    if odd:
        told = f"{type(module).__name__}, whose attention takes {', '.join(odd)}"
        raise ModelError(told, "parts of a sequence know nothing of that", _REMEDY)
    if not isinstance(mask, Mask) or key.shape[2] != query.shape[2] or options.get("is_causal") is False:
        raise ModelError(
            f"{type(module).__name__}, whose attention has a mask or keys of its own",
            "context parallelism knows causal attention of a sequence to itself",
            _REMEDY,
        )
