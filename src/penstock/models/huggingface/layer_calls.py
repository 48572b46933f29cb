"""The calls of a stage's layers, which the model makes anew for each microbatch, kept for one step.

Between two edges a model's forward makes masks, positions and rotary tables, and calls the layers with them.
For a stage in the middle all of these depend on shapes alone where a microbatch is token ids and nothing
else. So the first forward of a shape in a step is the model's own, and `LayerCalls` keeps what each layer is
called with; those that follow call the layers themselves. Narrow layers take no longer than what is left out.

It is kept where it is shown that the model's forward would do the same again:

    the whole model, run once without values     no token goes into what layers take beside hidden states
    the first forward of a step                  a layer takes the very tensor that the one before returned,
                                                 no random number is drawn between them, nothing else needs
                                                 a gradient
    each forward that calls the layers           modules around the layers, their buffers and configs are the
                                                 same, and nobody has written into a table
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from transformers import PreTrainedConfig

from penstock.models.huggingface.boundary import ModulePlaceholder
from penstock.models.tracing.placeholder import Placeholder, hidden_of, without_hidden
from penstock.private import (
    has_any_global_hook,
    is_any_autocast_enabled,
    len_torch_dispatch_stack,
    len_torch_function_stack,
)
from penstock.runtime.rng import generator_of
from penstock.runtime.split_backward.modules import all_modules

_PLAIN_VALUES = (bool, int, float, str, type(None))


def tensors_of(values: Any) -> list[Tensor] | None:
    """The tensors among the arguments of a layer; None where one is neither a tensor nor a plain value."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, _PLAIN_VALUES):
        return []
    if type(values) is not tuple:  # a layer could write into a list, or a cache
        return None
    inner = [tensors_of(value) for value in values]
    return None if None in inner else [tensor for tensors in inner for tensor in tensors or ()]


class _Call(NamedTuple):
    """Of one layer. by_name: whether it takes the hidden states by their name"""

    run: Callable[..., Any]
    by_name: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Kept(NamedTuple):
    calls: list[_Call]
    tables: list[tuple[Tensor, int]]  # with their versions


class LayerCalls:
    """Those of one stage.

    Args:
        model: the stage.
        layers: the name of its list of layers, and the numbers of the stage's own.
    """

    def __init__(self, model: nn.Module, layers: str, own: range) -> None:
        self._model, self._name, self._own = model, layers, own
        self._open = False  # within a step
        self._kept: dict[object, _Kept | None] = {}  # by shape; None where the model has to be called
        self._around: _Around | None = None

    def begin_step(self) -> None:
        self._open = True

    def end_step(self) -> None:
        self._open, self._around = False, None
        self._kept.clear()

    @property
    def storages(self) -> Iterator[UntypedStorage]:
        """The memory that is kept."""
        return (t.untyped_storage() for kept in self._kept.values() if kept for t, _ in kept.tables)

    @staticmethod
    def _key(ids: Tensor) -> object:
        return (
            ids.shape,
            ids.dtype,
            ids.device,
            torch.is_grad_enabled(),
            is_any_autocast_enabled(),
            len_torch_function_stack(),
            len_torch_dispatch_stack(),
        )

    def find(self, ids: Tensor) -> _Kept | None:
        """What is kept for microbatches like `ids`, if it holds for this one."""
        kept = self._kept.get(self._key(ids))
        if kept is None or self._around is None or not self._around.is_same():
            return None
        for tensor, version in kept.tables:
            if tensor._version != version:
                return None
        return kept

    def recording(self, ids: Tensor, received: Any) -> Recording | None:
        """What records the forward that begins, if it is the first like `ids` in the step."""
        key = self._key(ids)
        if not self._open or key in self._kept or not isinstance(received, Tensor):
            return None
        self._kept[key] = None
        if self._around is None:
            self._around = _Around(self._model, self._name, self._own)
        return Recording(received) if self._around.is_same() else None

    def keep(self, ids: Tensor, recorded: Recording) -> None:
        """The forward that `recorded` has seen has ended."""
        if self._around is not None and self._around.is_same() and recorded.is_whole(self._around.own):
            self._kept[self._key(ids)] = _Kept(recorded.calls, recorded.tables)


def call_layers(kept: _Kept, hidden: Tensor) -> Tensor:
    """What the last of the layers returns for hidden states that were received."""
    for run, by_name, args, kwargs in kept.calls:
        result = run(hidden_states=hidden, **kwargs) if by_name else run(hidden, *args, **kwargs)
        hidden = result if isinstance(result, Tensor) else result[0]
    return hidden


class Recording:
    """Sees each layer of one forward called, and what it returns. received: by the first one"""

    def __init__(self, received: Tensor) -> None:
        self._hidden: Any = received
        self._received = received
        self._generator = generator_of(received.device)
        self._state = self._generator.get_state()
        self.layers: list[nn.Module] = []
        self.calls: list[_Call] = []
        self.tables: list[tuple[Tensor, int]] = []
        self.same = True  # so far, to what calls of the layers alone would do

    def before(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        by_name, hidden = not args, hidden_of(args, kwargs)
        args, kwargs = without_hidden(args, kwargs)
        tensors = tensors_of((args, tuple(kwargs.values())))
        self.same &= hidden is self._hidden and torch.equal(self._generator.get_state(), self._state)
        if tensors is None or any(
            type(t) is not Tensor or t.requires_grad or t.is_inference() for t in tensors
        ):
            self.same = False
            return
        self.tables += [(tensor, tensor._version) for tensor in tensors]
        self.layers.append(layer)
        self.calls.append(_Call(layer.call_alone, by_name, args, kwargs))

    def after(self, result: Any) -> None:
        self._hidden = result if isinstance(result, Tensor) else result[0]
        self._state = self._generator.get_state()

    def is_whole(self, own: list[nn.Module | None]) -> bool:
        """Whether it has seen all layers, and what they take is small: it lives as long as the step."""
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t, _ in self.tables}
        same = self.same and len(self.layers) == len(own) and all(map(operator.is_, self.layers, own))
        return same and sum(sizes.values()) <= self._received.nbytes


class _Around:
    """The modules around a stage's layers, and the configs, as they were when the step began."""

    def __init__(self, model: nn.Module, layers: str, own: range) -> None:
        self.own = [_inner(model, f"{layers}.{index}") for index in own]
        inner = {id(module) for layer in self.own if layer is not None for module in all_modules(layer)}
        modules = [module for module in all_modules(model) if id(module) not in inner]
        self._modules = [(module, type(module)) for module in modules]
        # placeholders are ours
        changing = [module for module in modules if not isinstance(module, (Placeholder, ModulePlaceholder))]
        held: list[dict[str, Any]] = []
        for module in changing:
            inside: list[dict[str, Any]] = [module._parameters, module._buffers, module._modules]
            held += [module.__dict__, *filter(None, inside)]
        configs = {id(value): value for module in changing for value in module.__dict__.values()
                   if isinstance(value, PreTrainedConfig)}  # fmt: skip
        held += [config.__dict__ for config in configs.values()]
        self._held = [(mapping, list(mapping.values())) for mapping in held]
        self._ids = [list(map(id, values)) for _, values in self._held]
        self._buffers = [
            (b, b._version) for module in changing for b in module._buffers.values() if b is not None
        ]

    def is_same(self) -> bool:
        """Whether the model's forward still is what it was, but for the layers. Each forward asks."""
        for module, kind in self._modules:
            held = module.__dict__
            if (
                type(module) is not kind
                or held["_forward_hooks"]
                or held["_forward_pre_hooks"]
                or held["_backward_hooks"]
                or held["_backward_pre_hooks"]
                or "forward" in held
                or "_compiled_call_impl" in held
            ):
                return False
        for (mapping, _), ids in zip(self._held, self._ids, strict=True):
            if list(map(id, mapping.values())) != ids:
                return False
        for buffer, version in self._buffers:
            if buffer._version != version:
                return False
        return not has_any_global_hook()  # type: ignore[no-untyped-call]


def _inner(model: nn.Module, name: str) -> nn.Module | None:
    """The module of that name; None where a user has replaced what was around it."""
    inner: nn.Module | None = model
    for part in name.split("."):
        inner = None if inner is None else inner._modules.get(part)
    return inner
