"""The seconds that a run of a mesh and a schedule takes at least, in any split and with anything recomputed.

For rank r with c seconds of layers a microbatch, S seconds of them on the ranks before it, m microbatches:

    time      step >= first F reaches r + m c + reductions and optimizer          f S + m c + e c
              step >= first F + m c + last B to rank 0 (one stage, whole B)       S + m c
    memory    `together` microbatches live at one time, `times` times one after the other, none of them twice:
              each time, what exceeds the limit is recomputed, at the least seconds a byte
    offload   or, what exceeds it and the host's room together, and of the microbatch at work what exceeds it
              alone; or what exceeds it, but for rate x T bytes that a step of T seconds moves to the host

Each line is linear in c and S. T is below the bound if ranks that are filled up to their lines, one after
another, do not hold all layers. Then no split does: a rank's end, S + c, never falls where S grows. Of layers
of several kinds, a second counts the least bytes that a second of any kind has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from penstock.pipeline.building.memory import RankMemory
from penstock.planner.candidate import Candidate
from penstock.planner.communication import groups
from penstock.planner.estimate import HostRoom, optimizer_seconds, reduction_seconds
from penstock.planner.hardware import Cluster
from penstock.planner.space import ScheduleKind
from penstock.planner.stages import Parts, PartSeconds
from penstock.planner.work import PartWork
from penstock.planner.workload import Workload

_HALVINGS = 16  # of the interval that holds the bound: to 0.002 % of a step
_ROUNDING = 1e-9
_RETURN = ("zb_v", "v_half", "v_min", "dualpipe_v")  # a V: the first rank holds the first stage and the last
_WHOLE_BACKWARD = ("1f1b",)  # of those with one stage a rank


class LiveTogether(NamedTuple):
    """So many microbatches of a rank's stages live together, so many times with other ones each time."""

    together: int
    times: int


def lives(kind: ScheduleKind, rank: int, ranks: int, microbatches: int) -> list[LiveTogether]:
    """What is live on a rank from F to the end of I or B, of each of its stages, whatever ops take.

    When a rank's last stage begins a microbatch's I or B, all its stages have this microbatch.
    """
    always = LiveTogether(1, microbatches)
    if kind.name == "looped_bfs":
        return [always, LiveTogether(microbatches, 1)]
    if kind.name == "1f1b" and kind.stages > 1:  # rounds of as many microbatches as ranks
        together = ranks - rank
        return [always, LiveTogether(together, microbatches // ranks * (ranks // together))]
    most = {
        "1f1b": ranks - rank,
        "zb_h1": ranks - rank,
        "zb_h2": 2 * (ranks - rank) - 1,
        "zb_v": rank + 1,  # of its second stage, of which it holds fewer up to the middle rank
        "dualpipe_v": rank + 1,
    }.get(kind.name, 1)
    together = min(most, microbatches)
    return [always, LiveTogether(together, microbatches // together)]


class Load(NamedTuple):
    """What a part adds to its rank.

    seconds: F, I and W of a microbatch; forward: F
    end: seconds of its reduction and of the optimizer
    fixed: bytes of weights, gradients and states
    kept, recomputed: bytes of a live microbatch
    """

    seconds: float
    forward: float
    end: float
    fixed: float
    kept: float
    recomputed: float


_NOTHING = Load(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class _Line(NamedTuple):
    """constant + before x S + slope x c is at most the seconds of a step"""

    constant: float
    before: float
    slope: float


class _Room(NamedTuple):
    """What is live at one time finds room in so many bytes or runs again, `times` times with other ones.

    layers, ends: microbatches of each of a rank's layers, and of its embedding or head
    rate: bytes/s that may leave in a step
    """

    layers: float
    ends: int
    times: int
    nbytes: float
    rate: float = 0.0


def _rooms(
    kind: ScheduleKind, live: Iterable[LiveTogether], limit: float, host: HostRoom | None
) -> Iterator[_Room]:
    """host: where all wait but a microbatch at work, on one of the rank's stages: each on the largest once"""
    for together, times in live:
        if host is None:
            yield _Room(together, together, times, limit)
            continue
        yield _Room(together, together, times, limit + host.nbytes)
        yield _Room(together, together, times, limit, host.rate)
        if together == 1:
            yield _Room(1 / kind.stages, int(kind.stages == 1), times, limit)


@dataclass(frozen=True)
class Loads:
    """The loads of a mesh's parts.

    layer: the least of any kind of layer, for a second of F, I and W
    one: seconds of F, I and W of a layer where all are alike, else 0
    again: the least seconds by which recomputation frees a byte
    """

    embedding: Load
    head: Load
    layer: Load
    inner: tuple[Load, ...]
    one: float
    again: float

    @classmethod
    def of(cls, model: Workload, mesh: Candidate, cluster: Cluster) -> Loads:
        """With the recomputation of `mesh`, and the least of its losses, chunked or whole."""
        across, sent = groups(mesh.ranks, mesh.axes, cluster), model.traffic(mesh)
        *others, parts = (
            Parts.of(model.measured(loss), sent, across, cluster, mesh.practice.overlapped)
            for loss in model.losses(mesh)
        )
        first, of_kinds, last = part_weights(model, mesh)

        def load(work: PartWork, time: PartSeconds, memory: RankMemory) -> Load:
            end = reduction_seconds([memory], across, cluster) + optimizer_seconds([memory], cluster.device)
            fixed = memory._replace(gathered_weights=0).fixed  # they may be freed layer by layer
            kept, again = work.nbytes.activation, work.nbytes.recomputed_activation
            return Load(time.total(recomputed=False), time.forward, end, fixed, kept, again)

        kinds = list(map(load, parts.work.kinds, parts.kinds, of_kinds))
        heads = [load(one.work.head, one.head, last) for one in (parts, *others)]
        shares = [Load(*(value / kind.seconds for value in kind)) for kind in kinds]
        freed = [
            time.recomputed / (kind.kept - kind.recomputed)
            for time, kind in zip(parts.kinds, kinds, strict=True)
            if kind.kept > kind.recomputed
        ]
        return cls(
            load(parts.work.embedding, parts.embedding, first),
            Load(*map(min, zip(*heads, strict=True))),
            Load(*map(min, zip(*shares, strict=True))),
            tuple(kinds[kind] for kind in parts.work.layers),
            kinds[0].seconds if len(kinds) == 1 else 0.0,
            min(freed, default=0.0),
        )

    @cached_property
    def layers(self) -> float:
        """Seconds of F, I and W of a microbatch on all layers."""
        return self.total.seconds - self.embedding.seconds - self.head.seconds

    @cached_property
    def total(self) -> Load:
        """Of all parts."""
        return _sum([self.embedding, *self.inner, self.head])

    def least(
        self, kind: ScheduleKind, ranks: int, microbatches: int, limit: float, host: HostRoom | None = None
    ) -> float:
        """Seconds of a step; inf where no split fits into `limit` bytes a rank.

        host: where activations may wait; None: they stay
        """
        least = self._least(kind, ranks, microbatches, limit, None)
        return least if host is None else min(least, self._least(kind, ranks, microbatches, limit, host))

    def _least(
        self, kind: ScheduleKind, ranks: int, microbatches: int, limit: float, host: HostRoom | None
    ) -> float:
        """With all activations offloaded that are not at work, or none."""
        lines, most = list[list[_Line]](), list[float]()
        for rank in range(ranks):
            ends = self._ends(kind, rank, ranks)
            rooms = list(_rooms(kind, lives(kind, rank, ranks, microbatches), limit, host))
            most.append(min(self._most(ends, room) for room in rooms))
            times = list(self._times(kind, rank, ends, microbatches))
            tight = (line for room in rooms if limit < inf for line in self._tight(times, ends, room))
            lines.append([*times, *tight])
        if not self._holds(lines, most, inf):
            return inf
        low, high = 0.0, microbatches * self.total.seconds / ranks
        while not self._holds(lines, most, high):
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._holds(lines, most, middle) else (middle, high)
        return low

    def _holds(self, lines: list[list[_Line]], most: list[float], step: float) -> bool:
        """Whether all layers find room in a step of so many seconds."""
        before = 0.0
        for of_rank, room in zip(lines, most, strict=True):
            fill = min(
                room,
                max(0.0, self.layers - before),
                *((step - line.constant - line.before * before) / line.slope for line in of_rank),
            )
            if fill < 0:  # the rank's ends alone are too much
                return False
            if self.one:
                fill = self.one * (fill / self.one * (1 + _ROUNDING) // 1)
            before += fill
        return before >= self.layers * (1 - _ROUNDING)

    def _ends(self, kind: ScheduleKind, rank: int, ranks: int) -> Load:
        """Of the embedding and the head, where they belong to this rank."""
        head = 0 if kind.name in _RETURN else ranks - 1
        return _sum([self.embedding] * (rank == 0) + [self.head] * (rank == head))

    def _times(self, kind: ScheduleKind, rank: int, ends: Load, microbatches: int) -> Iterator[_Line]:
        """Of a rank that recomputes nothing."""
        layer, single = self.layer, kind.stages == 1
        first = self.embedding.forward if rank else 0.0
        busy = microbatches * ends.seconds
        yield _Line(first + busy + ends.end, layer.forward * single, microbatches + layer.end)
        if single and kind.name in _WHOLE_BACKWARD and rank:
            yield _Line(self.embedding.seconds + busy, 1.0, microbatches)

    def _tight(self, times: Iterable[_Line], ends: Load, room: _Room) -> Iterator[_Line]:
        """`times` and what a room has run again: step >= line + again x (bytes above it - rate x step)"""
        price = self.again * room.times
        above = price * (ends.fixed + room.ends * ends.kept - room.nbytes)
        more = price * (self.layer.fixed + room.layers * self.layer.kept)
        rest = 1 / (1 + self.again * room.rate)
        for line in times:
            yield _Line(rest * (line.constant + above), rest * line.before, rest * (line.slope + more))

    def _most(self, ends: Load, room: _Room) -> float:
        """Seconds of layers that fit with all of them recomputed."""
        if room.rate:  # all of them may leave
            return inf
        rest = room.nbytes - ends.fixed - room.ends * ends.recomputed
        return rest / (self.layer.fixed + room.layers * self.layer.recomputed)


def _sum(loads: Iterable[Load]) -> Load:
    return Load(*(sum(values) for values in zip(_NOTHING, *loads, strict=True)))


def part_weights(model: Workload, mesh: Candidate) -> tuple[RankMemory, Sequence[RankMemory], RankMemory]:
    """Of the embedding, of each kind of layer, and of the head: a tied weight as often as stages hold it."""
    memory = model.memory(mesh)
    if mesh.ranks == 1:
        outside = memory.stages([range(model.layers)])[0][0]
        return outside, memory.kinds, RankMemory(0, 0, 0)
    return memory.embedding, memory.kinds, memory.head
