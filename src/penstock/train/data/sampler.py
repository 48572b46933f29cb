"""The rows of a step: a pure function of the number of rows before it, so that a resumed run needs no state.

Each source has its rows in epochs: every row once, in a random order. A mixture interleaves its sources by
weights. Row k, from 0, of a source of weight w has time (2k + 1) / 2w, and rows come in the order of time:

    weights 2 and 1      a at 1/4 3/4 5/4 7/4 ...    b at 1/2 3/2 ...
                         a b a a b a a b a ...

So after any number of rows no source is more than a row or so away from its share. After a source has ended,
by its limit of epochs, the others go on with their weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from heapq import merge
from itertools import islice
from math import lcm

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Mixture:
    """Which source each row of a run comes from. limits: rows of each source, None for no limit"""

    weights: tuple[float, ...]
    limits: tuple[int | None, ...]

    @property
    def total(self) -> int | None:
        """All rows there are; None where some source has no limit."""
        limits = [limit for limit, weight in zip(self.limits, self.weights, strict=True) if weight]
        return None if None in limits else sum(filter(None, limits))

    @cached_property
    def _halves(self) -> list[int]:
        """Half of the time between two rows of each source, in whole units; 0 for weight 0."""
        fractions = [Fraction(str(weight)) for weight in self.weights]
        whole = lcm(*(fraction.denominator for fraction in fractions))
        weights = [int(fraction * whole) for fraction in fractions]
        unit = lcm(*filter(None, weights))
        return [unit // weight if weight else 0 for weight in weights]

    def _before(self, time: int) -> list[int]:
        """The number of rows of each source before `time`."""
        counts = [(time + half - 1) // (2 * half) if half else 0 for half in self._halves]
        return [count if limit is None else min(count, limit)
                for count, limit in zip(counts, self.limits, strict=True)]  # fmt: skip

    def rows(self, first: int, count: int) -> list[tuple[int, int]]:
        """For each of the run's rows `first` to `first + count`: its source, and its index in that source."""
        low, high = 1, 2
        while sum(self._before(high)) <= first:
            low, high = high, 2 * high
        while high - low > 1:  # the last time before which there are no more than `first` rows
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self._before(middle)) <= first else (low, middle)
        before = self._before(low)
        skipped = first - sum(before)
        in_turn = merge(*(self._from(source, index) for source, index in enumerate(before)))
        return [(source, index) for _, source, index in islice(in_turn, skipped, skipped + count)]

    def _from(self, source: int, first: int) -> Iterator[tuple[int, int, int]]:
        """Time, source and index of the rows of a source, from index `first` on."""
        half, limit = self._halves[source], self.limits[source]
        indices = itertools.count(first) if limit is None else range(first, limit)
        return (((2 * index + 1) * half, source, index) for index in indices) if half else iter(())


@dataclass(frozen=True)
class Sampler:
    """The rows of a run. counts: rows of each source, which are numbered through"""

    mixture: Mixture
    counts: tuple[int, ...]
    seed: int

    def rows(self, first: int, count: int) -> list[int]:
        """The indices, over all sources, of the run's rows `first` to `first + count`."""
        rows = []
        for source, index in self.mixture.rows(first, count):
            epoch, position = divmod(index, self.counts[source])
            rows.append(self.starts[source] + int(self._orders[source](epoch)[position]))
        return rows

    @cached_property
    def starts(self) -> Sequence[int]:
        return [sum(self.counts[:source]) for source in range(len(self.counts))]

    @cached_property
    def _orders(self) -> list[Callable[[int], npt.NDArray[np.int32]]]:
        """Of each source, a function of the epoch; a batch touches two epochs at most."""
        return [lru_cache(maxsize=2)(partial(_order, self.seed, source, count))
                for source, count in enumerate(self.counts)]  # fmt: skip


def _order(seed: int, source: int, count: int, epoch: int) -> npt.NDArray[np.int32]:
    seeds = (seed, epoch, source) if source else (seed, epoch)
    return np.random.default_rng(seeds).permutation(count).astype(np.int32)
