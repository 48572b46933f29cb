"""Which modules' initialisations have to do with the same tensors, found out without values.

    attention.c_proj      fills its weight        \\
    attention             fills that weight anew   }  one piece: the weight is there until both have run
    mlp.c_fc              fills its weight            another: by then the first one's is passed on
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.models.meta import Table


class Place(NamedTuple):
    """Where a tensor stands: in a module's table, under a name there; full: its name in the model."""

    table: Table
    name: str
    full: str


@dataclass(frozen=True)
class Empty:
    """A tensor on the meta device, which is the same in all of its places."""

    tensor: Tensor
    places: list[Place]


class Call(NamedTuple):
    """A module's initialisation."""

    module: nn.Module
    run: Callable[[], None]


@dataclass(frozen=True)
class Piece:
    """Tensors by their identity, and the calls that have to do with them by their number among all."""

    tensors: set[int]
    calls: dict[int, Call]

    @property
    def in_order(self) -> list[Call]:
        return [call for _, call in sorted(self.calls.items())]


def all_empty(module: nn.Module) -> dict[int, Empty]:
    """All tensors on the meta device, by their identity."""
    found: dict[int, Empty] = {}
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is not None and value.is_meta:
                    place = Place(table, name, f"{prefix}.{name}" if prefix else name)
                    found.setdefault(id(value), Empty(value, [])).places.append(place)
    return found


def pieces(calls: Sequence[Call], seen: set[int], tensors: Collection[int]) -> list[Piece]:
    """What has to do with a common one of `tensors` goes together.

    Each call is made without values; seen: where the model's tables note what is read of them. To read is
    taken for more than ops on the meta device would tell: some of torch's initialisations do none there.
    """
    homes: dict[int, Piece] = {}
    for number, call in enumerate(calls):
        piece = Piece(_used(call, seen) & set(tensors), {number: call})
        for other in {id(homes[key]): homes[key] for key in piece.tensors if key in homes}.values():
            piece.tensors.update(other.tensors)
            piece.calls.update(other.calls)
        homes |= dict.fromkeys(piece.tensors, piece)
    return list({id(piece): piece for piece in homes.values()}.values())


def _used(call: Call, seen: set[int]) -> set[int]:
    seen.clear()
    try:
        call.run()
    except Exception:  # it needs values, and may go on to anything it holds; what else fails will fail again
        _read(call.module.parameters(), call.module.buffers())
    _read(call.module._parameters.values(), call.module._buffers.values())
    return set(seen)


def _read(*tables: Any) -> None:
    for table in tables:
        for _ in table:
            pass
