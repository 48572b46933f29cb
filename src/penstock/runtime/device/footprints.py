"""The footprints of forwards: the bytes that each leaves in memory, by stage and shape.

A forward is measured where its shape is new to its stage, which on CPUs takes twice as long as the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.batch.shapes import MicrobatchKey
from penstock.private import storage_use_count

_REMEMBERED = 4096  # shapes of each stage


class Footprint(NamedTuple):
    """The bytes that a forward of one microbatch leaves in memory on one stage.

    activation: kept until its backward: the input, and all that autograd saved
    output: bytes for the next stage that are kept only to be sent
    """

    activation: int
    output: int


class KnownFootprint(NamedTuple):
    """The footprint of forwards of one shape. provisional: the next one is measured too, and replaces it"""

    footprint: Footprint
    provisional: bool


class ForwardKey(NamedTuple):
    """Equal for forwards of a stage with the same footprint."""

    microbatch: MicrobatchKey
    split: bool
    recompute: bool
    training: bool
    autocast: bool


class Footprints:
    """The measured footprints of one stage's forwards; beyond a limit, the oldest are dropped."""

    def __init__(self) -> None:
        self._known: dict[ForwardKey, KnownFootprint] = {}

    def find(self, key: ForwardKey) -> KnownFootprint | None:
        """The known footprint; None: measure it."""
        return self._known.get(key)

    def add(self, key: ForwardKey, measured: Footprint, provisional: bool) -> None:
        """Replace the footprint of `key` by what was measured."""
        self._known[key] = KnownFootprint(measured, provisional)
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]


def footprint(nbytes: int | None, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Footprint:
    """The footprint of a forward that received `inputs`.

    nbytes: what it left in memory, outputs included; None where it was not measured: only inputs count
    """
    only_sent = sum([output.nbytes for output in outputs if not is_held_elsewhere(output)])
    received = sum([tensor.untyped_storage().nbytes() for tensor in inputs])
    return Footprint((only_sent if nbytes is None else nbytes) - only_sent + received, only_sent)


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether anything but `tensor` itself keeps its memory, such as the graph that made it."""
    storage = tensor.untyped_storage()  # counts as one use
    return bool(storage_use_count(storage._cdata) > 2)
