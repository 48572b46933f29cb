"""Measurements that take turns: a round holds one of each way, and ratios are made within a round.

What else runs on a machine changes from minute to minute, and less within a round. So a ratio divides two
measurements of the same round. It is reported as the median over the rounds, with the quartiles; or, where
several fresh processes compare a few ways, as the median over these, with its 95 % interval.

A round is quiet where programs outside of the benchmark took less than `OTHERS` of the cores' time. Only
quiet rounds count. Where fewer than half of those asked for were found, all count, and no bar is resolved.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

OTHERS = 0.05  # share of the cores' time
TICKS = 0.04  # seconds: the kernel counts a process's time in ticks of 10 ms
TRIES = 2  # rounds tried for each that is asked for
Numbers = Mapping[str, float]


class Interval(NamedTuple):
    """The median of some measurements, between its quartiles or the ends of its confidence interval."""

    low: float
    middle: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.middle * factor, self.high * factor)


def interval(values: Sequence[float]) -> Interval:
    if len(values) == 1:
        return Interval(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Interval(low, median(values), high)


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its 95 % confidence interval: two of the values, whatever their distribution.

    The true median lies below the k-th smallest of n values as often as fewer than k of n tosses of a coin
    are heads, where no value depends on another. Of fewer than 6 values the least and the most cover less
    than 95 %.
    """
    ordered, count = sorted(values), len(values)
    rank = 1  # the largest with which both tails together are at most 5 %
    while 2 * sum(math.comb(count, heads) for heads in range(rank + 1)) <= 0.05 * 2**count:
        rank += 1
    return Interval(ordered[rank - 1], median(values), ordered[count - rank])


@dataclass(frozen=True)
class Rounds:
    """What each way took, by round. tried: rounds, those that do not count included"""

    found: Sequence[Numbers]
    tried: int
    quiet: bool

    def __getitem__(self, way: str) -> Interval:
        return self.of(lambda numbers: numbers[way])

    def of(self, function: Callable[[Numbers], float]) -> Interval:
        """`function` of each round's numbers, with quartiles."""
        return interval([function(numbers) for numbers in self.found])

    def ratio(self, way: str, other: str) -> Interval:
        """What `way` took over what `other` took in the same round."""
        return self.of(lambda numbers: numbers[way] / numbers[other])

    def __str__(self) -> str:
        return summary([self])


def summary(counted: Sequence[Rounds]) -> str:
    """How many rounds count, for a note."""
    loud = sum(not rounds.quiet for rounds in counted)
    count = (
        f"{sum(len(each.found) for each in counted)} of {sum(each.tried for each in counted)} rounds count"
    )
    if not loud:
        return f"{count}, in which programs outside took less than {OTHERS:.0%} of the cores' time"
    return (
        f"{count}; in {loud} of {len(counted)} cases programs outside ran in most: no bar is resolved there"
    )


def in_turn(
    ways: Mapping[str, Callable[[], float]], count: int, warm_up: int = 1, others: float | None = OTHERS
) -> Rounds:
    """Take `count` quiet rounds, each of one measurement of every way. Arguments as in `rounds_of`.

    A round begins with another way than the one before, as the first finds caches as the last has left them;
    and after each has begun one, the order is the reverse.
    """

    def turns(number: int) -> Numbers:
        again, start = divmod(number, len(ways))
        order = [*list(ways)[start % len(ways) :], *list(ways)[: start % len(ways)]]
        return {way: ways[way]() for way in (order[::-1] if again % 2 else order)}

    return rounds_of(turns, count, warm_up, others)


def rounds_of(
    take: Callable[[int], Numbers], count: int, warm_up: int = 1, others: float | None = OTHERS
) -> Rounds:
    """Take `count` quiet rounds.

    Args:
        take: gives the numbers of a round, by way; takes the round's number
        warm_up: rounds before the first that counts
        others: share of the cores' time that programs outside may take, or None: every round counts
    """
    found: list[tuple[bool, Numbers]] = []
    for number in range(warm_up + count * (1 if others is None else TRIES)):
        before, began = _outside(), time.perf_counter()
        numbers = take(number)
        spent, lasted = _outside() - before, time.perf_counter() - began
        quiet = others is None or spent < others * (os.cpu_count() or 1) * lasted + TICKS
        if number >= warm_up:
            found.append((quiet, numbers))
        if sum(calm for calm, _ in found) == count:
            break
    calm = [numbers for quiet, numbers in found if quiet]
    enough = 2 * len(calm) >= count
    return Rounds(calm if enough else [numbers for _, numbers in found], len(found), enough)


def _outside() -> float:
    """Seconds of processor time that programs outside of this benchmark have taken, and the host."""
    user, nice, system, _, _, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    busy = user + nice + system + sum(interrupts)
    own = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    return (busy - sum(map(_ticks, own))) / os.sysconf("SC_CLK_TCK")


def _ticks(process: int | None) -> int:
    """Of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))
