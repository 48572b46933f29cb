"""The footprints of forwards: the bytes that each leaves in memory, by stage and shape.

A forward is measured where nothing tells its footprint yet, which on CPUs takes twice as long as the forward.
Where rows have many lengths, a few of them tell the others:

    bytes = a + b length + c length ** 2        on CPUs, where modules do the same for all lengths

So the four measured lengths about a new one tell its footprint, if they agree on a, b and c. A module that
pads to a multiple of n does the same for all multiples of n: they tell the footprints of others.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor

from penstock.batch.shapes import MicrobatchKey, without_length
from penstock.private import storage_use_count

_REMEMBERED = 4096  # shapes of each stage


class Footprint(NamedTuple):
    """The bytes that a forward of one microbatch leaves in memory on one stage.

    activation: held until its backward: its input, and all that autograd saved
    output: bytes for the next stage that are held only to be sent
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
    """The footprints of one stage's forwards, as far as they are known."""

    def __init__(self) -> None:
        self._known: dict[ForwardKey, KnownFootprint] = {}
        # the measured ones by length, for each key without its length
        self._measured: dict[ForwardKey, dict[int, Footprint]] = {}

    def find(self, key: ForwardKey) -> KnownFootprint | None:
        """As measured, or as the lengths measured about this one tell; None: measure it."""
        known = self._known.get(key)
        if known is None and (split := _without_length(key)) is not None:
            rest, length = split
            if (estimate := between(self._measured.get(rest, {}), length)) is not None:
                known = KnownFootprint(estimate, provisional=False)
                self._keep(key, known)
        return known

    def add(self, key: ForwardKey, measured: Footprint, provisional: bool) -> None:
        """Keep what was measured, in place of what was kept before."""
        self._keep(key, KnownFootprint(measured, provisional))
        if not provisional and (split := _without_length(key)) is not None:
            rest, length = split
            self._measured.setdefault(rest, {})[length] = measured

    def _keep(self, key: ForwardKey, known: KnownFootprint) -> None:
        self._known[key] = known
        if len(self._known) > _REMEMBERED:
            self._forget(next(iter(self._known)))

    def _forget(self, key: ForwardKey) -> None:
        del self._known[key]
        if (split := _without_length(key)) is not None:
            rest, length = split
            lengths = self._measured.get(rest, {})
            lengths.pop(length, None)
            if not lengths:
                self._measured.pop(rest, None)


def between(measured: Mapping[int, Footprint], length: int) -> Footprint | None:
    """The footprint at `length`, from four lengths about it; None where they are missing or do not agree.

    None, too, where they agree and all are multiples of a number, or all lie so far above multiples, and
    `length` does not.
    """
    lengths = sorted(measured)
    first = max(0, min(bisect(lengths, length) - 2, len(lengths) - 4))
    near = lengths[first : first + 4]
    if len(near) < 4 or not near[0] < length < near[-1]:
        return None
    if (length - near[0]) % math.gcd(*(other - near[0] for other in near)):
        return None
    footprints = [measured[each] for each in near]
    activation = _on_quadratic(near, [each.activation for each in footprints], length)
    output = _on_quadratic(near, [each.output for each in footprints], length)
    if activation is None or output is None:
        return None
    return Footprint(activation, output)


def _on_quadratic(lengths: Sequence[int], values: Sequence[int], length: int) -> int | None:
    """The value at `length` of the quadratic through all four points; None where there is none."""

    def at(place: int) -> Fraction:
        """By Lagrange, through the first three."""
        total = Fraction(0)
        for own, value in zip(lengths[:3], values[:3], strict=True):
            factors = [Fraction(place - other, own - other) for other in lengths[:3] if other != own]
            total += value * math.prod(factors)
        return total

    value = at(length)
    return int(value) if at(lengths[3]) == values[3] and value.denominator == 1 else None


def _without_length(key: ForwardKey) -> tuple[ForwardKey, int] | None:
    """The key without the length of its rows, and that length; None for inputs that have none."""
    if (split := without_length(key.microbatch)) is None:
        return None
    rest, length = split
    return key._replace(microbatch=rest), length


def footprint(nbytes: int | None, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Footprint:
    """The footprint of a forward that received `inputs`.

    nbytes: left in memory by it, outputs included; None where nobody measured: what it received counts alone
    """
    only_sent = sum([output.nbytes for output in outputs if not is_held_elsewhere(output)])
    received = sum([tensor.untyped_storage().nbytes() for tensor in inputs])
    return Footprint((only_sent if nbytes is None else nbytes) - only_sent + received, only_sent)


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether anything but `tensor` itself keeps its memory, such as the graph that made it."""
    storage = tensor.untyped_storage()  # counts as one use
    return bool(storage_use_count(storage._cdata) > 2)
