"""What one step works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.runtime.shapes import Microbatch, microbatch_key

# (what the last stage returned, number of the microbatch) -> whatever the caller wants to keep of it
Collect = Callable[[Any, int], Any]


@dataclass(frozen=True)
class StepInput:
    """What a step works on; every rank has all of it.

    weight: valid items over all microbatches, what the loss is divided by
    collect: takes the place of the loss where nothing is trained
    """

    microbatches: Sequence[Microbatch]
    weight: int
    collect: Collect | None = None

    @cached_property
    def keys(self) -> tuple[object, ...]:
        """Of each microbatch, equal where all shapes and dtypes are."""
        return tuple([microbatch_key(microbatch) for microbatch in self.microbatches])

    @cached_property
    def shapes(self) -> tuple[int, ...]:
        """The same as numbers of this step's own."""
        numbers: dict[object, int] = {}
        return tuple([numbers.setdefault(key, len(numbers)) for key in self.keys])
