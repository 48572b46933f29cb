"""Copies of a model, with and without its values.

deep_copy(module)      copy.deepcopy, faster
without_values(module) a deep copy on the meta device, which does not keep the weights, and can be run
shadow(model)          the same with fake tensors, within a context: a forward takes neither memory nor time
write_through(stage)   a twin on the meta device: values assigned to it are copied into `stage`
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from penstock.private import FakeTensorMode
from penstock.runtime.sharded_weights import meta_like, shard_like
from penstock.runtime.unseen import detach_hooks, unseen

Table = dict[str, Any]
M = TypeVar("M", bound=nn.Module)


class WriteThrough(Table):
    """A twin's table of tensors. An assigned value is copied into the live tensor of the same name.

    live: the table of the module with the real tensors; it may change between assignments
    seen: the ids of all tensors read so far from this table and the twin's other tables
    """

    def __init__(
        self, live: Mapping[str, Tensor | None], empty: Mapping[str, Tensor | None], seen: set[int]
    ) -> None:
        super().__init__(empty)
        self.live, self.seen = live, seen

    def __setitem__(self, name: str, value: Any) -> None:
        live = self.live.get(name)
        if live is None or value is None or value.is_meta:
            live = value
        elif live is not value:
            with torch.no_grad():
                live.copy_(shard_like(value, live))
        super().__setitem__(name, live)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.seen.add(id(value))
        return value

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in list(self))

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[name] for name in list(self))


def write_through(module: PreTrainedModel) -> PreTrainedModel:
    """A twin with parameters on the meta device. A value assigned to one is copied into `module`'s parameter.

    The parameters of `module` may become DTensors after this call; each process then copies its own shard.
    Buffers and all other attributes but hooks are shared, as FSDP2's modules cannot be copied.
    """
    made: dict[int, Any] = {}
    seen = set[int]()

    def empty(parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else made.setdefault(id(parameter), _empty(parameter, meta_like))

    def twin_of(part: nn.Module | None) -> nn.Module | None:
        if part is None or id(part) in made:
            return None if part is None else made[id(part)]
        made[id(part)] = twin = object.__new__(type(part))
        attributes = dict(vars(part))
        hooks = {
            name: type(attributes[name])() for name in _TABLES & attributes.keys() if name.endswith("_hooks")
        }
        parameters = {name: empty(parameter) for name, parameter in part._parameters.items()}
        tables = {
            "_parameters": WriteThrough(part._parameters, parameters, seen),
            "_buffers": WriteThrough(part._buffers, part._buffers, seen),
            "_modules": {name: twin_of(child) for name, child in part._modules.items()},
        }
        vars(twin).update(attributes | hooks | tables)
        return twin

    return cast(PreTrainedModel, twin_of(module))


def destinations(twin: nn.Module) -> dict[str, Tensor]:
    """By name, the parameters into which a `write_through` twin copies assigned values."""
    return {
        f"{prefix}.{name}" if prefix else name: live
        for prefix, module in twin.named_modules()
        if isinstance(table := module._parameters, WriteThrough)
        for name, live in table.live.items()
        if live is not None
    }


def without_values(
    module: M, replaced: Mapping[int, Any] | None = None, like: Callable[[Tensor], Tensor] = meta_like
) -> M:
    """A deep copy without values, to be run under `unseen`.

    Args:
        replaced: id of an original -> the copy to use for it
        like: makes a parameter or a buffer of the copy from the original, by default on the meta device
    """
    replaced = replaced or {}
    memo: dict[int, Any] = {}
    for part in _without_replaced(module, replaced):
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in memo:
                memo[id(parameter)] = _empty(parameter, like)
        memo |= {id(buffer): like(buffer) for buffer in part.buffers(recurse=False)}
        results = (value for value in vars(part).values() if isinstance(value, Tensor) and value.grad_fn)
        memo |= {id(result): meta_like(result) for result in results}  # of an earlier forward
    copied = deep_copy(module, {**memo, **replaced})
    detach_hooks(copied)
    return copied


class Uninitialised(TorchFunctionMode):
    """Inside, torch.nn.init skips meta tensors, for which it would run Python without effect."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _INITIAL and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **kwargs)


_INITIAL = frozenset({nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_})
_UNCHANGING = frozenset({bool, int, float, str, type(None), torch.dtype})
_TABLES = frozenset(nn.Module().__dict__)  # every module has its own
_PICKLED = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getattr__")


def deep_copy(module: M, memo: dict[int, Any]) -> M:
    """`copy.deepcopy` in a third of its time: most of a module's attributes are plain, or empty tables."""
    if id(module) in memo:
        return cast(M, memo[id(module)])
    kind, attributes = type(module), vars(module)
    copies_itself = hasattr(kind, "__deepcopy__") or "__deepcopy__" in attributes
    if copies_itself or any(getattr(kind, n, None) is not getattr(nn.Module, n, None) for n in _PICKLED):
        return copy.deepcopy(module, memo)
    memo[id(module)] = fresh = kind.__new__(kind)
    for name, value in attributes.items():
        copied: Any
        if type(value) in _UNCHANGING:
            copied = value
        elif name in _TABLES and type(value) in (dict, OrderedDict, set) and not value:
            copied = type(value)()
        elif name == "_modules":
            copied = {key: None if child is None else deep_copy(child, memo) for key, child in value.items()}
        else:
            copied = copy.deepcopy(value, memo)
        fresh.__dict__[name] = copied
    return fresh


def is_empty(module: nn.Module) -> bool:
    """Whether all tensors are on the meta device."""
    return all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def placed(module: nn.Module, device: torch.device) -> None:
    """Move tensors with values to `device`, in place; the rest stays on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


def _empty(parameter: nn.Parameter, like: Callable[[Tensor], Tensor]) -> nn.Parameter:
    return nn.Parameter(like(parameter), parameter.requires_grad)


@contextmanager
def shadow(model: M, replaced: Mapping[int, Any] | None = None) -> Iterator[M]:
    """A copy of `model` with fake tensors on the CPU; tensors that are made inside the context are fake too.

    transformers recognises fake tensors, unlike meta tensors, so its mask code reads no values.
    replaced: id of an original -> the copy to use for it
    """
    # eager: torch.compile would give up for good on code that it first meets under a mode
    with unseen(), FakeTensorMode(), _without_log(), torch.compiler.set_stance("force_eager"):
        kept = (value for module in model.modules() for value in vars(module).values())
        # of an earlier forward, such as Qwen's rope_deltas
        attributes = {id(value): _cpu_like(value) for value in kept if isinstance(value, Tensor)}
        yield without_values(model, attributes | {**(replaced or {})}, _cpu_like)


def _cpu_like(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    local = torch.empty(tensor._local_tensor.shape, dtype=tensor.dtype)
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())


@contextmanager
def _without_log() -> Iterator[None]:
    """Silence torch's log of ops that fail without values, as the exception has the same information.

    A grouped product in float32, for example, logs that it takes only bfloat16.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _without_replaced(module: nn.Module, replaced: Mapping[int, Any]) -> Iterator[nn.Module]:
    """All modules except for replaced ones and those inside them."""
    if id(module) not in replaced:
        yield module
        for child in module.children():
            yield from _without_replaced(child, replaced)
