"""A model without values: its modules as they are, parameters and buffers on the meta device.

write_through(stage)   a twin on the meta device: a tensor assigned to it is copied into `stage`, or into this
                       rank's shard
bare(model)            a twin that outlives the weights of `model`: for its config, its signature, a dry run
deep_copy(module)      copy.deepcopy, faster
without_values(module) a deep copy on the meta device
hollow(model)          the memo for a deep copy without values
shadow(model)          a copy with fake tensors, whose forward takes neither memory nor time
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

    live: the table of the module that holds the real tensors; it may change between assignments
    seen: the ids of all tensors read so far from this table, and from the twin's other tables
    """

    def __init__(
        self, live: Mapping[str, Tensor | None], held: Mapping[str, Tensor | None], seen: set[int]
    ) -> None:
        super().__init__(held)
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
    """A twin with parameters on the meta device. A value assigned to one is copied into that of `module`.

    The parameters of `module` may become DTensors after this call; each process then copies its own shard.
    Buffers are shared.
    """
    seen = set[int]()
    return _twin(module, lambda live, held: WriteThrough(live, held, seen), lambda buffer: buffer)


def destinations(twin: nn.Module) -> dict[str, Tensor]:
    """By name, the parameters to which a `write_through` twin copies what it is assigned."""
    return {
        f"{prefix}.{name}" if prefix else name: live
        for prefix, module in twin.named_modules()
        if isinstance(table := module._parameters, WriteThrough)
        for name, live in table.live.items()
        if live is not None
    }


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """A twin with all tensors on the meta device."""
    return _twin(model, lambda _, held: dict(held), meta_like)


def without_values(module: M, replaced: Mapping[int, Any] | None = None) -> M:
    """A deep copy with all tensors on the meta device, to be run under `unseen`.

    replaced: copies to take in place of those made here, by the id of the original
    """
    memo: dict[int, Any] = {}
    for each in _without_replaced(module, replaced or {}):
        for parameter in each.parameters(recurse=False):
            if id(parameter) not in memo:
                memo[id(parameter)] = _empty(parameter)
        memo |= {id(buffer): meta_like(buffer) for buffer in each.buffers(recurse=False)}
    copied = deep_copy(module, memo | {**(replaced or {})})
    detach_hooks(copied)
    return copied


class Uninitialised(TorchFunctionMode):
    """Inside, torch.nn.init leaves meta tensors alone: for each it would run Python, and change nothing."""

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
    """`copy.deepcopy` in a third of its time: most of what a module holds is plain, or an empty table."""
    if id(module) in memo:
        return cast(M, memo[id(module)])
    kind, held = type(module), vars(module)
    copies_itself = hasattr(kind, "__deepcopy__") or "__deepcopy__" in held
    if copies_itself or any(getattr(kind, n, None) is not getattr(nn.Module, n, None) for n in _PICKLED):
        return copy.deepcopy(module, memo)
    memo[id(module)] = fresh = kind.__new__(kind)
    for name, value in held.items():
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


def hollow(model: nn.Module) -> dict[int, Any]:
    """Parameters on the meta device, by the identity of those of `model` that they replace.

    Parameters of classes of their own are left out.
    """
    plain = [p for p in model.parameters() if type(p) is nn.Parameter and not isinstance(p.data, DTensor)]
    return {id(parameter): _empty(parameter) for parameter in plain}


def is_empty(module: nn.Module) -> bool:
    """Whether all tensors are on the meta device."""
    return all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def placed(module: nn.Module, device: torch.device) -> None:
    """Move tensors with values to `device`, in place; the rest stays on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


def _twin(
    model: PreTrainedModel,
    table: Callable[[Table, Mapping[str, Tensor | None]], Table],
    of_buffer: Callable[[Tensor], Tensor],
) -> PreTrainedModel:
    """The same modules with other tensors. Hooks are left out, all else is shared.

    Not a deep copy: what users hang on a module (locks, open files, kept outputs) cannot always be copied.
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
    return nn.Parameter(meta_like(parameter), parameter.requires_grad)


@contextmanager
def shadow(model: M, replaced: Mapping[int, Any] | None = None) -> Iterator[M]:
    """A copy of `model` with fake tensors on the CPU; tensors that are made inside the context are fake too.

    Unlike meta tensors, transformers knows fake ones, so its mask code asks for no values.
    replaced: copies to take in place of those made here, by the id of the original
    """
    # eager: torch.compile would give up for good on code that it first meets under a mode
    with unseen(), FakeTensorMode(), _without_log(), torch.compiler.set_stance("force_eager"):
        memo: dict[int, Any] = {}
        for module in _without_replaced(model, replaced or {}):
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in memo:
                    memo[id(parameter)] = nn.Parameter(_like(parameter), parameter.requires_grad)
            for buffer in module.buffers(recurse=False):
                memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
            for value in vars(module).values():  # of an earlier forward, such as Qwen's rope_deltas
                if isinstance(value, Tensor):
                    memo[id(value)] = torch.empty(value.shape, dtype=value.dtype)
        memo |= replaced or {}
        copied = deep_copy(model, memo)
        detach_hooks(copied)
        yield copied


def _like(parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty(parameter.shape, dtype=parameter.dtype)
    local = torch.empty(parameter._local_tensor.shape, dtype=parameter.dtype)
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def _without_log() -> Iterator[None]:
    """Silence torch, which logs each op that fails without values: the exception says the same to the caller.

    A grouped product in float32, for example, says that it takes bfloat16 only.
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
