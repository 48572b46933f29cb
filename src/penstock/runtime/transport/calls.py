"""Methods that all ranks call together: how ranks in different ones notice.

rank 0   pipe.costs()        sends crc32("costs()") in front of its first vector
rank 1   pipe.step(batch)    sends crc32("step()")      -> both raise ConfigError, which names both

On a mesh with other axes all its ranks compare their calls before each one (`Reductions.same_call`): a call
may begin with any of their groups, so that ranks in different calls would wait in different ones.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from penstock.errors import ConfigError
from penstock.runtime.transport.interface import Transport

F = TypeVar("F", bound=Callable[..., Any])
_NAMES: dict[int, str] = {}


def collective(method: F) -> F:
    """Mark a method of a pipeline that every rank calls."""
    name = f"{method.__name__}()"
    _NAMES[call_number(name)] = name

    @functools.wraps(method)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with calling(self._world.transport, name):
            return method(self, *args, **kwargs)

    return cast(F, called)


@contextmanager
def calling(transport: Transport, name: str) -> Iterator[None]:
    """Inside, every rank is in the call of this name. Of nested calls the outermost counts."""
    _NAMES[call_number(name)] = name
    if transport.call:
        yield
        return
    transport.call = name
    try:
        transport.same_call(name)
        yield
    finally:
        transport.call = ""


def call_number(name: str) -> int:
    return zlib.crc32(name.encode()) if name else 0


def name_of_call(number: float) -> str:
    return _NAMES.get(int(number), "another call")


def different_calls(names: Mapping[int, str]) -> ConfigError:
    """names: by rank"""
    return ConfigError(
        ", ".join(f"{name} on rank {rank}" for rank, name in names.items()),
        "these methods are collective: every rank calls the same ones in the same order",
        "Call it on every rank, and print on one of them",
    )
