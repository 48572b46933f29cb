"""What ran when: the one type that `simulate` predicts and the recorder measures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.schedule.ops import Op


class Span(NamedTuple):
    """One op on one rank, from `start` to `end` (seconds, or the unit of the costs)."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step. `spans` in order of rank, then start; `peak_live[r]` live activations of rank r."""

    name: str
    ranks: int
    spans: tuple[Span, ...]
    peak_live: tuple[int, ...]

    @cached_property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time spent computing, per rank."""
        busy = [0.0] * self.ranks
        for span in self.spans:
            busy[span.rank] += span.end - span.start
        return tuple(busy)

    @cached_property
    def rank_bubble(self) -> tuple[float, ...]:
        """1 - busy / makespan, per rank."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @cached_property
    def bubble(self) -> float:
        """1 - busy / makespan, over all ranks: the share of the ranks' time that was idle."""
        return sum(self.rank_bubble) / self.ranks

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)
