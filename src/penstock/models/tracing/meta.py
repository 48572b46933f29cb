"""A model without values: its modules as they are, parameters and buffers on the meta device.

outlined(stage)     what values are put into, one tensor after the other: those of `stage` get them, each
                    rank's own part where they are spread over a mesh
bare(model)         what is asked for a forward or a config long after, and holds no weight of `model`
hollow(model)       the memo of a deep copy that is laid out before any weight is copied
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.runtime.sharded_weights import outline, spread_like

Table = dict[str, Any]


class Passing(Table):
    """A module's table of tensors: values that are put in go into `live`, which stand there then.

    live: the table of the module that has the tensors, as it is when a value comes
    seen: the identities of all that was read from the table, and from others with the same set
    """

    def __init__(
        self, live: Mapping[str, Tensor | None], held: Mapping[str, Tensor | None], seen: set[int]
    ) -> None:
        super().__init__(held)
        self._live, self.seen = live, seen

    def __setitem__(self, name: str, value: Any) -> None:
        own = self._live.get(name)
        if own is None or value is None or value.is_meta:
            super().__setitem__(name, value)
            return
        if own is not value:
            with torch.no_grad():
                own.copy_(spread_like(value, own))
        super().__setitem__(name, own)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.seen.add(id(value))
        return value

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in list(self))

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[name] for name in list(self))


def outlined(module: PreTrainedModel) -> PreTrainedModel:
    """The same modules with parameters on the meta device; what they are given, those of `module` get.

    What axes or FSDP2 make of the parameters of `module` later on counts as well, as long as its modules
    stay. Buffers without values are there as well, the others are shared.
    """
    seen = set[int]()
    return _twin(module, lambda live, held: Passing(live, held, seen), lambda buffer: buffer)


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules with all tensors on the meta device."""
    return _twin(model, lambda _, held: dict(held), outline)


def hollow(model: nn.Module) -> dict[int, Any]:
    """Parameters on the meta device, by the identity of those of `model` that they stand for.

    Those that are more than plain numbers (a class of their own) are left out.
    """
    plain = [p for p in model.parameters() if type(p) is nn.Parameter and not isinstance(p.data, DTensor)]
    return {id(parameter): _empty(parameter) for parameter in plain}


def placed(module: nn.Module, device: torch.device) -> None:
    """What has values is moved to `device`, in place; the rest stays on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


def _twin(
    model: PreTrainedModel,
    table: Callable[[Table, Mapping[str, Tensor | None]], Table],
    of_buffer: Callable[[Tensor], Tensor],
) -> PreTrainedModel:
    """Not a deep copy: hooks and what users hang on a module (locks, open files, kept outputs) cannot always
    be copied. Hooks are left out, and what is no module, parameter or buffer is shared.
    """
    made: dict[int, Any] = {}
    own = nn.Module().__dict__

    def once(value: Any, make: Callable[[Any], Any]) -> Any:
        if value is not None and id(value) not in made:
            made[id(value)] = make(value)
        return made.get(id(value))

    def of(module: nn.Module) -> nn.Module:
        fresh: nn.Module = object.__new__(type(module))
        made[id(module)] = fresh
        held = dict(module.__dict__)
        hooks = {name: type(held[name])() for name in own if name.endswith("_hooks") and name in held}
        parameters, buffers = module._parameters, module._buffers
        tables = {
            "_parameters": table(parameters, {name: once(p, _empty) for name, p in parameters.items()}),
            "_buffers": table(buffers, {name: once(b, of_buffer) for name, b in buffers.items()}),
            "_modules": {name: once(child, of) for name, child in module._modules.items()},
        }
        fresh.__dict__.update(held | hooks | tables)
        return fresh

    return cast(PreTrainedModel, of(model))


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(outline(parameter), parameter.requires_grad)


# ---- A model without values: its forward runs at full size and takes neither memory nor time.
#
# Fake tensors know shape, dtype and device. transformers knows them too, so that its mask code, which
# looks at values on the plain meta device, does not ask for any.


M = TypeVar("M", bound=nn.Module)


@contextmanager
def shadow(model: M, replaced: Mapping[int, Any] | None = None) -> Iterator[M]:
    """A copy of `model` with fake tensors on the CPU for its parameters and buffers.

    replaced: copies to take in place of those made here, by the id of the original. Tensors that are made
    inside the context are fake too.
    """
    with FakeTensorMode(), _not_told():
        memo: dict[int, Any] = {}
        for module in _kept(model, replaced or {}):
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in memo:
                    values = torch.empty(parameter.shape, dtype=parameter.dtype)
                    memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            for buffer in module.buffers(recurse=False):
                memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
        memo |= replaced or {}
        yield copy.deepcopy(model, memo)


@contextmanager
def _not_told() -> Iterator[None]:
    """torch logs an error, with its traceback, for each op that fails without values. Whoever asked is told
    by the exception, and may do without: a grouped product in float32 says that it takes bfloat16 only.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _kept(module: nn.Module, replaced: Mapping[int, Any]) -> Iterator[nn.Module]:
    """Its modules, but for those that are replaced and what is in them."""
    if id(module) not in replaced:
        yield module
        for child in module.children():
            yield from _kept(child, replaced)
