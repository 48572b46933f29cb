"""The timeline of a step: when each op ran. `simulate` predicts one, the runtime measures one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from penstock.errors import ConfigError
from penstock.schedule.ops import Kind, Op, Pair

if TYPE_CHECKING:
    from penstock.schedule.op_arrays import Floats

# (time, what is held from then on) in order of time; a time may come twice for a peak that lasts no time
Curve = tuple[tuple[float, float], ...]
_LIVE = {"F": 1.0, "B": -1.0, "I": 0.0, "W": -1.0}


# The two measures of a step's length, and what a schedule is formed for: `Timeline.makespan` and `.extent`
Objective = Literal["makespan", "extent"]


def check_objective(objective: object) -> None:
    """Raise ConfigError for another objective."""
    if objective not in get_args(Objective):
        rule = "a schedule is formed for a small makespan or a small extent"
        raise ConfigError(f"objective={objective!r}", rule, "Give 'makespan' or 'extent'")


def measure_of(*, reports: bool = True, max_norm: float = inf, checks_gradients: bool = False) -> Objective:
    """The measure that says how long the steps of a run take if they follow each other.

    A step takes its makespan if all ranks wait for each other before the next one: then the last rank counts.
    It takes its extent if no rank waits for all others: a rank that ends early begins the next step early.

    reports: every rank learns the loss and the times of all others at the end of a step. `Pipeline.step`
        does that (penstock.runtime.step_report), so the measure of penstock's own runs is the makespan. Give
        False for a system that does not wait, as in the zero-bubble paper (arXiv 2401.10241, section 4)
    max_norm: the norm of all gradients is known before the optimizer steps, for clipping; inf clips nothing
    checks_gradients: all gradients are known to be finite before any optimizer steps
    """
    return "makespan" if reports or checks_gradients or max_norm != inf else "extent"


class Span(NamedTuple):
    """One op on one rank, from `start` to `end` (seconds, or the unit of the costs)."""

    rank: int
    op: Op
    start: float
    end: float


class Wait(NamedTuple):
    """Rank `rank` waited from `start` to `end` for the input of `op`, whose producer ended at `sent`."""

    rank: int
    op: Op
    start: float
    end: float
    sent: float

    @property
    def turn(self) -> float:
        """When the wait for the peer's compute ended and that for the wire began."""
        return min(max(self.start, self.sent), self.end)


class Reduction(NamedTuple):
    """Rank `rank` reduced the gradients of `stage` over the data-parallel ranks."""

    rank: int
    stage: int
    start: float
    end: float


class Copy(NamedTuple):
    """Activations of a microbatch on their way between the device of `rank` and its host memory.

    up: back to the device; stalled: how long the rank stood still until they were there
    """

    rank: int
    stage: int
    microbatch: int
    up: bool
    start: float
    end: float
    stalled: float = 0.0


class DeviceTime(NamedTuple):
    """A GPU takes `seconds` for an op of this stage and kind, once its host has launched all of it."""

    stage: int
    kind: Kind
    seconds: float


class Idle(NamedTuple):
    """The time in which a rank did not compute. With its busy time it adds up to the makespan.

    peer, wire: waiting for another rank's compute, and for its message
    runtime: the rest of the gaps between its first op and its last, waits for the host link among them
    outside: before its first op and after its last
    reduce: reducing gradients over the data-parallel ranks, which counts as an op here
    """

    peer: float
    wire: float
    runtime: float
    outside: float
    reduce: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """One step. `spans` are in order of rank, then of its program.

    peak_live[r]: the peak of live activations on rank r
    memory[r]: what rank r holds over time, in the unit of `Costs.activation`; empty if only counted
    critical_path: the ops that determine the makespan, each held up by the one before; empty if measured
    overlaps: the pairs meant to run side by side
    waits: when each rank waited, and for which op; empty if not recorded
    reductions: when each rank reduced gradients over the data-parallel ranks
    copies: the activations that went to host memory and back; only of a simulation
    device: what GPUs take for ops, as far as it is known; empty on the CPU
    host_bound[r]: how long the GPU of rank r waited, within ops, for its host to launch the rest of them: a
        part of `busy`. Empty where it is not known, and on the CPU
    """

    name: str
    ranks: int
    spans: tuple[Span, ...]
    peak_live: tuple[int, ...]
    memory: tuple[Curve, ...] = ()
    critical_path: tuple[Op, ...] = ()
    overlaps: frozenset[Pair] = frozenset()
    waits: tuple[Wait, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    copies: tuple[Copy, ...] = ()
    device: tuple[DeviceTime, ...] = ()
    host_bound: tuple[float, ...] = ()

    @property
    def microbatches(self) -> int:
        return len({span.op.microbatch for span in self.spans})

    @cached_property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks, of ops and of reductions."""
        ends = [span.end for span in self.spans] + [reduction.end for reduction in self.reductions]
        return max(ends, default=0.0) - self.start

    @cached_property
    def rank_extent(self) -> tuple[float, ...]:
        """From a rank's own first start to its own last end, of ops and of reductions, per rank."""
        ends = [max((span.end for span in spans), default=0.0) for spans in self._by_rank]
        for reduction in self.reductions:
            ends[reduction.rank] = max(ends[reduction.rank], reduction.end)
        both = zip(ends, self._by_rank, strict=True)
        return tuple(end - spans[0].start if spans else 0.0 for end, spans in both)

    @cached_property
    def extent(self) -> float:
        """The longest `rank_extent`: the time of a step if ranks that end early begin the next one early.

        Zero-bubble papers measure a schedule by this. `measure_of` says which runs have it.
        """
        return max(self.rank_extent, default=0.0)

    def length(self, objective: Objective) -> float:
        """The makespan or the extent."""
        return self.makespan if objective == "makespan" else self.extent

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time spent in ops, per rank; what runs side by side counts once."""
        return tuple(covered((span.start, span.end) for span in spans) for spans in self._by_rank)

    @cached_property
    def device_busy(self) -> tuple[float, ...]:
        """Time in which the device computed, per rank: `busy` without what is known to be `host_bound`."""
        gaps = self.host_bound or (0.0,) * self.ranks
        return tuple(busy - gap for busy, gap in zip(self.busy, gaps, strict=True))

    @cached_property
    def rank_host_share(self) -> tuple[float, ...]:
        """host_bound / makespan, per rank; empty where it is not known."""
        return tuple(gap / self.makespan if self.makespan else 0.0 for gap in self.host_bound)

    @cached_property
    def host_share(self) -> float | None:
        """The share of the ranks' time in which the host was the limit; None where it is not known.

        With `bubble`, and with the share of the time in which devices computed, it adds up to 1.
        """
        return sum(self.rank_host_share) / self.ranks if self.host_bound else None

    @cached_property
    def rank_bubble(self) -> tuple[float, ...]:
        """1 - busy / makespan, per rank."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @cached_property
    def bubble(self) -> float:
        """1 - busy / makespan, over all ranks: the share of the ranks' time that was idle."""
        return sum(self.rank_bubble) / self.ranks

    @cached_property
    def extent_bubble(self) -> float:
        """1 - busy / extent, over all ranks: the bubble rate of the zero-bubble papers."""
        return 1 - sum(self.busy) / (self.ranks * self.extent) if self.extent else 0.0

    @cached_property
    def rank_inner_bubble(self) -> tuple[float, ...]:
        """The idle share of `rank_extent`, per rank."""
        return tuple(1 - b / e if e else 0.0 for b, e in zip(self.busy, self.rank_extent, strict=True))

    @cached_property
    def inner_bubble(self) -> float:
        """`rank_inner_bubble` over all ranks: the average rank counts, in `extent_bubble` the longest one."""
        return 1 - sum(self.busy) / sum(self.rank_extent) if sum(self.rank_extent) else 0.0

    @cached_property
    def inner_waits(self) -> tuple[Wait, ...]:
        """The waits after the first op of their rank."""
        first = [spans[0].start if spans else inf for spans in self._by_rank]
        return tuple(wait for wait in self.waits if wait.start >= first[wait.rank])

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The time that is not `busy`, per rank."""
        peer, wire, reduce = ([0.0] * self.ranks for _ in range(3))
        for wait in self.inner_waits:
            turn = wait.turn
            peer[wait.rank] += turn - wait.start
            wire[wait.rank] += wait.end - turn
        for reduction in self.reductions:
            reduce[reduction.rank] += reduction.end - reduction.start
        figures = zip(peer, wire, reduce, self.busy, self.rank_extent, strict=True)
        return tuple(Idle(p, w, extent - busy - p - w - r, self.makespan - extent, r)
                     for p, w, r, busy, extent in figures)  # fmt: skip

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank holds; its peak of live activations if memory is not known."""
        if not self.memory:
            return tuple(map(float, self.peak_live))
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.memory)

    @cached_property
    def live(self) -> tuple[Curve, ...]:
        """The number of live activations over time, per rank, counted from F's start to the end of B or W."""
        trains = any(span.op.kind != "F" for span in self.spans)
        changes = _LIVE if trains else {}
        return tuple(
            curve(
                [s.start if s.op.kind == "F" else s.end for s in spans],
                [changes.get(s.op.kind, 0.0) for s in spans],
            )
            for spans in self._by_rank
        )

    @cached_property
    def pairs(self) -> tuple[tuple[Span, Span], ...]:
        """The spans of each pair meant to overlap."""
        spans = {span.op: span for span in self.spans} if self.overlaps else {}
        both = (pair for pair in sorted(self.overlaps) if pair.forward in spans and pair.backward in spans)
        return tuple((spans[forward], spans[backward]) for forward, backward in both)

    @cached_property
    def side_by_side(self) -> frozenset[Op]:
        """The ops of pairs that did run at the same time."""
        return frozenset(
            span.op
            for forward, backward in self.pairs
            if max(forward.start, backward.start) < min(forward.end, backward.end)
            for span in (forward, backward)
        )

    def from_zero(self) -> Timeline:
        """The same step with times from its start."""
        if not self.start:
            return self
        start = self.start
        return replace(
            self,
            spans=tuple(s._replace(start=s.start - start, end=s.end - start) for s in self.spans),
            memory=tuple(tuple((time - start, held) for time, held in points) for points in self.memory),
            waits=tuple(
                w._replace(start=w.start - start, end=w.end - start, sent=w.sent - start) for w in self.waits
            ),
            reductions=tuple(r._replace(start=r.start - start, end=r.end - start) for r in self.reductions),
            copies=tuple(c._replace(start=c.start - start, end=c.end - start) for c in self.copies),
        )

    def to_data(self) -> dict[str, Any]:
        """What `from_data` reads, for JSON: all that a run measures, from its start, to 0.1 µs."""
        step = self.from_zero()

        def plain(records: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
            return [
                [str(entry) if isinstance(entry, Op) else round(entry, 7) for entry in record]
                for record in records
            ]

        return {
            "name": self.name,
            "ranks": self.ranks,
            "spans": plain(step.spans),
            "peak_live": list(self.peak_live),
            "waits": plain(step.waits),
            "reductions": plain(step.reductions),
            "overlaps": plain(sorted(self.overlaps)),
            "critical_path": [*map(str, self.critical_path)],
            "device": [list(time) for time in self.device],
            "host_bound": list(self.host_bound),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Timeline:
        """Raises KeyError, TypeError, ValueError or ConfigError for what `to_data` did not write."""
        return cls(
            str(data["name"]),
            int(data["ranks"]),
            tuple(Span(rank, Op.parse(op), *times) for rank, op, *times in data["spans"]),
            tuple(data["peak_live"]),
            critical_path=tuple(map(Op.parse, data["critical_path"])),
            waits=tuple(Wait(rank, Op.parse(op), *times) for rank, op, *times in data["waits"]),
            reductions=tuple(Reduction(*fields) for fields in data["reductions"]),
            overlaps=frozenset(Pair(*map(Op.parse, ops)) for ops in data["overlaps"]),
            device=tuple(DeviceTime(*fields) for fields in data.get("device", ())),  # written from 0.6.0 on
            host_bound=tuple(data.get("host_bound", ())),
        )

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        return self._by_rank[rank]

    @cached_property
    def stalled(self) -> tuple[float, ...]:
        """How long each rank stood still for its link to host memory."""
        stalls = [0.0] * self.ranks
        for copy in self.copies:
            stalls[copy.rank] += copy.stalled
        return tuple(stalls)

    @cached_property
    def _by_rank(self) -> tuple[tuple[Span, ...], ...]:
        by_rank = {rank: tuple(spans) for rank, spans in groupby(self.spans, lambda span: span.rank)}
        return tuple(by_rank.get(rank, ()) for rank in range(self.ranks))


def covered(times: Iterable[tuple[float, float]]) -> float:
    """The total time covered by intervals (start, end)."""
    total, until = 0.0, -inf
    for start, end in sorted(times):
        if start >= until:
            total += end - start
        elif end > until:
            total += end - until
        until = max(until, end)
    return total


def curve(times: Sequence[float] | Floats, changes: Sequence[float] | Floats) -> Curve:
    """The amount held over time, from the changes at these times, in order.

    Of points at one time the last stays, and before it a peak that lasts no time.
    """
    import numpy as np

    time, change = np.asarray(times, float), np.asarray(changes, float)
    time, change = time[change != 0], change[change != 0]
    held = change.cumsum()
    same = np.diff(time) == 0
    if (same[1:] & same[:-1]).any():  # more than two at once
        return _one_by_one(time.tolist(), held.tolist())
    before = np.append(0.0, held)[:-2]
    stays = np.append(~same | ((held[:-1] > before) & (held[:-1] > held[1:])), len(held) > 0)[: len(held)]
    return tuple(zip(time[stays].tolist(), held[stays].tolist(), strict=True))


def _one_by_one(times: Sequence[float], amounts: Sequence[float]) -> Curve:
    """The points of `curve`, of any amounts at one time."""
    points: list[tuple[float, float]] = []
    before = last = 0.0  # what is held at the last two points
    latest = -inf
    for time, held in zip(times, amounts, strict=True):
        if time == latest and (last <= before or last <= held):
            points[-1] = time, held
        else:
            points.append((time, held))
            before, latest = last, time
        last = held
    return tuple(points)
