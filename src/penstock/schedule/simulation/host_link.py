"""A rank's link to host memory on paper: when copies run, and how long ops wait for them.

Each direction is a queue: one copy at a time, in the order in which they begin.

    ops of a rank   | F0  F1  F2  .  F3     F3 waits until F2 is released
    down            |     0000001111112222
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from penstock.schedule.offload import HostCopies, HostCopy, host_copies
from penstock.schedule.op_arrays import OpArrays
from penstock.schedule.simulation.costs import Costs
from penstock.schedule.simulation.timeline import Copy

if TYPE_CHECKING:
    from penstock.schedule.op_arrays import Floats

Change = tuple[float, float]  # when, and by how much what is held changes


class HostLinks:
    """One run of all ranks, with their links. Everything of an op is by its index, as in `OpArrays`.

    end: of each op
    gate: from when on an op does not wait for its rank's link
    copies: every copy
    """

    def __init__(
        self,
        arrays: OpArrays,
        order: list[int],
        durations: Floats,
        delays: Floats,
        costs: Costs,
        pauses: Floats,
    ) -> None:
        """pauses: by op, how long its rank reduces gradients in front of it"""
        import numpy as np

        schedule = arrays.schedule
        self.copies: list[Copy] = []
        self._changes: list[list[Change]] = [[] for _ in order]
        self._sizes = costs.rows("offloaded", schedule.placement, schedule.microbatches)
        self._bandwidth = costs.host_bandwidth
        self._links = [_Link(rank, self) for rank in range(schedule.ranks)]
        in_front = in_front_of(arrays, costs.offload_ahead)
        columns = (arrays.rank, arrays.source, arrays.before, delays, durations, pauses)
        ops = list(zip(*(column.tolist() for column in columns), strict=True))
        end, gate = [0.0] * (len(order) + 1), [0.0] * len(order)  # the last end is that of NOTHING
        for at in order:
            rank, needed, before, delay, takes, pause = ops[at]
            reached, there = end[before] + pause, end[needed] + delay
            gate[at] = self._links[rank].take(in_front[at], reached, there, self._changes[at])
            end[at] = max(reached, there, gate[at]) + takes
        self.end, self.gate = np.array(end[:-1]), np.array(gate)

    def of_rank(self, arrays: OpArrays, rank: int) -> list[list[Change]]:
        """By position, what releases and reloads in front of the op change."""
        return self._changes[slice(*arrays.bounds[rank : rank + 2])]

    def takes(self, key: tuple[int, int]) -> float:
        """How long a copy of these activations takes. key: stage and microbatch"""
        size = self._sizes[key[0]][key[1]]
        return 0.0 if self._bandwidth is None else size / self._bandwidth

    def size(self, key: tuple[int, int]) -> float:
        return self._sizes[key[0]][key[1]]


@lru_cache(maxsize=16)  # a search simulates a schedule in several forms
def in_front_of(arrays: OpArrays, ahead: int) -> HostCopies:
    """The steps of the copies in front of each op, by its index."""
    return [*chain.from_iterable(host_copies(arrays.schedule, ahead))]


class _Link:
    """The link of one rank, up to the op that the rank has reached."""

    def __init__(self, rank: int, run: HostLinks) -> None:
        self._rank, self._run = rank, run
        self._free = {"down": 0.0, "up": 0.0}
        self._under_way: dict[tuple[int, int], tuple[float, float]] = {}  # start and end of the copy

    def take(self, steps: Sequence[HostCopy], reached: float, there: float, changes: list[Change]) -> float:
        """Take the steps in front of an op. Returns from when on the op does not wait for the link.

        reached: when the rank has ended the op before; there: when the op's input is there
        """
        now = reached
        for step, stage, microbatch in steps:
            key = stage, microbatch
            if step == "offload":
                self._begin("down", key, now)
            elif step == "release":
                now = self._wait(key, now, up=False)
                changes.append((now, -self._run.size(key)))
            elif step == "reload":
                self._begin("up", key, now)
                changes.append((now, self._run.size(key)))
            else:
                now = self._wait(key, max(now, there), up=True)
        return now

    def _begin(self, way: str, key: tuple[int, int], now: float) -> None:
        start = max(now, self._free[way])
        self._free[way] = start + self._run.takes(key)
        self._under_way[key] = start, self._free[way]

    def _wait(self, key: tuple[int, int], now: float, *, up: bool) -> float:
        """Until a copy is over. Returns when that is, or `now` if it is over by then."""
        start, end = self._under_way.pop(key)
        self._run.copies.append(Copy(self._rank, *key, up, start, end, max(0.0, end - now)))
        return max(now, end)
