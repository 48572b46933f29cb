"""Side-effect-free runs of parts of a model: those that a user did not ask for leave no trace.

    probe, shapes      run on a copy without values, under `unseen`, after `detach_hooks` of the copy: no
                       hook, output recorder, buffer or generator of the user's is affected
    a layer run again  in the backward, under `LayerState.again`: it starts from the buffers and counters of
                       its forward, and restores the present ones. Hooks inside of it run again, as in torch's
                       own checkpointing: their changes are a part of the forward

`copy.deepcopy` does not copy functions. A hook that is a closure, or uses globals, would write to its user's
lists when the copy of its module runs. So the hook is copied too, with the containers that it reaches.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.private import GLOBAL_FORWARD_HOOKS

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_LIBRARIES = ("torch", "transformers", "penstock")
_CONTAINERS = (list, dict, set, bytearray, collections.deque)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no output recorder of transformers collects, and global hooks are replaced by `detached` ones.

    Afterwards the generators of Python, numpy and torch are as they were.
    """
    hooks = [dict(table) for table in GLOBAL_FORWARD_HOOKS]
    for table in GLOBAL_FORWARD_HOOKS:
        table.update({key: detached(hook, {}) for key, hook in table.items()})
    put_back = _generators()
    try:
        with unrecorded():
            yield
    finally:
        put_back()
        for table, before in zip(GLOBAL_FORWARD_HOOKS, hooks, strict=True):
            table.update(before)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, no output recorder of transformers collects."""
    capturing = sys.modules.get("transformers.utils.output_capturing")  # not imported means not used
    if capturing is None or capturing._active_collector.get() is None:
        yield
        return
    token = capturing._active_collector.set(None)
    try:
        yield
    finally:
        capturing._active_collector.reset(token)


def _generators() -> Callable[[], None]:
    """A function that restores the generators of Python, numpy and torch to their present state."""
    numpy = sys.modules.get("numpy")
    on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if on_gpu else []
    states = random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()
    on_devices = [torch.cuda.get_rng_state(device) for device in devices]

    def put_back() -> None:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for device, state in zip(devices, on_devices, strict=True):
            torch.cuda.set_rng_state(state, device)

    return put_back


# ---- Hooks on a copy


def detach_hooks(model: nn.Module) -> None:
    """Replace the forward hooks of `model`, a copy, by `detached` ones. In place."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for table in (vars(module)[name] for name in _HOOKS):
            table.update({key: detached(hook, memo) for key, hook in table.items()})


def detached(hook: Any, memo: dict[int, Any]) -> Any:
    """A copy of a user's function with copies of the containers that it reaches; else `hook` itself.

    Modules and tensors are not copied: models.huggingface.references reads which ones a hook uses.
    """
    if isinstance(hook, functools.partial):
        return functools.partial(detached(hook.func, memo), *hook.args, **hook.keywords)
    written_by = (getattr(hook, "__module__", None) or "").partition(".")[0]
    if not isinstance(hook, types.FunctionType) or written_by in _LIBRARIES:
        return hook
    if id(hook) in memo:
        return memo[id(hook)][0]
    cells = tuple(types.CellType() for _ in hook.__closure__ or ())
    scope = {**hook.__globals__}
    made = types.FunctionType(hook.__code__, scope, hook.__name__, None, cells if hook.__closure__ else None)
    memo[id(hook)] = functools.update_wrapper(made, hook), hook
    made.__defaults__ = tuple(_copied(value, memo) for value in hook.__defaults__ or ()) or None
    made.__kwdefaults__ = {key: _copied(value, memo) for key, value in (hook.__kwdefaults__ or {}).items()}
    scope.update({name: _copied(scope[name], memo) for name in hook.__code__.co_names if name in scope})
    for cell, own in zip(cells, hook.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copied(own.cell_contents, memo)
        except ValueError:  # a name that is assigned later
            continue
    return made


def _copied(value: Any, memo: dict[int, Any], depth: int = 3) -> Any:
    """A copy of a container, or of an object of a user's class, and of those inside it; else `value`."""
    if id(value) in memo:
        return memo[id(value)][0]
    if isinstance(value, types.FunctionType | functools.partial):
        return detached(value, memo)
    if depth == 0 or not (isinstance(value, _CONTAINERS) or _is_of_user(value)):
        return value
    try:
        made = copy.copy(value)
    except Exception:  # a lock, a file: the copy shares it
        return value
    memo[id(value)] = made, value  # kept, so that no other object gets its id
    inner = made if isinstance(made, dict) else getattr(made, "__dict__", {})
    inner.update({key: _copied(entry, memo, depth - 1) for key, entry in inner.items()})
    if isinstance(made, list):
        made[:] = [_copied(entry, memo, depth - 1) for entry in made]
    return made


def _is_of_user(value: Any) -> bool:
    if isinstance(value, nn.Module | Tensor | type):
        return False
    written_by = type(value).__module__.partition(".")[0]
    return written_by not in {*_LIBRARIES, *sys.stdlib_module_names} and hasattr(value, "__dict__")


# ---- A layer that runs again in a backward


class LayerState:
    """The buffers, counters and tensors that a layer's forward changes, as they were before it.

    with state.forward():   records them
    with state.again():     restores them for a run in the backward, any number of times
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._before: list[tuple[dict[str, Any], dict[str, _Kept]]] = []  # tables that changed

    @contextmanager
    def forward(self) -> Iterator[None]:
        tables = [table for module in self._layer.modules() for table in (vars(module), module._buffers)]
        before = [{name: _Kept.of(value) for name, value in _plain(table)} for table in tables]
        try:
            yield
        finally:
            pairs = zip(tables, before, strict=True)
            self._before = [(table, values) for table, values in pairs if _has_changed(table, values)]

    @contextmanager
    def again(self) -> Iterator[None]:
        now = [(table, dict(_plain(table))) for table, _ in self._before]
        for table, before in self._before:
            _set(table, {name: kept.value_then() for name, kept in before.items()})
        try:
            yield
        finally:
            for table, values in now:
                _set(table, values)


class _Kept(NamedTuple):
    """A value, and for a tensor also its version and a copy."""

    value: Any
    version: int = 0
    copy: Tensor | None = None

    @classmethod
    def of(cls, value: Any) -> _Kept:
        return cls(value, value._version, value.detach().clone()) if isinstance(value, Tensor) else cls(value)

    def has_changed(self, value: Any) -> bool:
        return value is not self.value or (self.copy is not None and value._version != self.version)

    def value_then(self) -> Any:
        if self.copy is None or (self.value.requires_grad and self.value._version == self.version):
            return self.value
        return self.copy.clone()


_PLAIN = (bool, int, float, type(None), Tensor)


def _plain(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in table.items() if type(value) in _PLAIN)


def _has_changed(table: dict[str, Any], before: dict[str, _Kept]) -> bool:
    count = 0
    for name, value in _plain(table):
        count += 1
        if name not in before or before[name].has_changed(value):
            return True
    return count != len(before)


def _set(table: dict[str, Any], values: dict[str, Any]) -> None:
    for name in [name for name, _ in _plain(table) if name not in values]:
        del table[name]
    table.update(values)
