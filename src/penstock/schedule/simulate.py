"""Run a schedule on paper: when each op runs, what it waits for, and what each rank holds meanwhile.

1F1B with P = 2, m = 3, B = 2 F, and messages that take as long as a forward:

    rank 0 | F0 F1 .  .  .  .  B0 B0 F2 B1 B1 .  .  .  B2 B2
    rank 1 | .  .  F0 B0 B0 F1 B1 B1 .  .  F2 B2 B2 .  .  .

Each op starts as soon as its rank has ended the one before and its input has arrived. A rank holds

    an activation   from the start of F to the end of B or W (with sizes of its own in between, see `Costs`)
    a receive       from its post, at the op that `order.posts` says, until an op has taken it:
                    F keeps it as a part of its activation, I and B drop it at their end
    a send          from the end of its op until it has arrived
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from operator import itemgetter

from penstock.schedule.costs import Costs
from penstock.schedule.ops import Op, Pair, Schedule
from penstock.schedule.order import NOTHING, OpNumbers, Walk, posts, received, taker
from penstock.schedule.timeline import Curve, Span, Timeline, Wait, curve
from penstock.schedule.verify import verify

Change = tuple[float, float]  # when, and by how much what is held changes
Times = list[tuple[float, float]]  # start and end of each op of a program


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict one step of `schedule`. Times begin at 0, in the unit of `costs` (None: unit times).

    An input from another rank arrives when the delay of its edge has passed since its op ended. The ops of an
    overlapped pair run one after the other; with `Costs.exchange` they run side by side: they start when both
    inputs are there, and end together. Raises ScheduleError for a schedule that `verify` refuses.
    """
    costs = costs or Costs()
    proof = verify(schedule)
    run = _Run(schedule, costs)
    spans = tuple(
        Span(rank, op, *time)
        for rank, program in enumerate(schedule.programs)
        for op, time in zip(program, run.times[rank], strict=True)
    )
    return Timeline(
        schedule.name,
        schedule.ranks,
        spans,
        proof.peak_live,
        _memory(schedule, costs, run.times),
        run.critical_path(),
        schedule.overlaps,
        tuple(chain.from_iterable(run.waits)),
    )


class _Run:
    """One run of all ranks. times, waits: by rank, in the order of its program."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._numbers = numbers = OpNumbers(schedule)
        programs, needs = numbers.programs()
        durations = _durations(schedule, costs)
        delays = _delays(schedule, numbers, costs)
        pairs = _pairs(schedule, costs)
        self._ended = ended = [0.0] * (numbers.count + 1)  # at the last place: NOTHING, which is always there
        self._held_up_by = held_up_by = [NOTHING] * numbers.count
        self._last = last = [NOTHING] * schedule.ranks
        self.times: list[Times] = [[] for _ in programs]
        self.waits: list[list[Wait]] = [[] for _ in programs]
        free_at = [0.0] * schedule.ranks
        also_needs = {programs[rank][at]: needs[rank][at + 1] for rank, at in pairs}
        for rank, at in Walk(numbers.count, programs, needs, also_needs=also_needs):
            if at < len(self.times[rank]):  # the second of a pair, which ran with the first
                continue
            start, held_up = free_at[rank], last[rank]
            together = pairs.get((rank, at)) if pairs else None
            beyond = at + (1 if together is None else 2)
            for place in range(at, beyond):
                number, needed = programs[rank][place], needs[rank][place]
                there = ended[needed]
                if needed != NOTHING:
                    there += delays[min(number, needed)]
                if there > start:
                    op = schedule.programs[rank][place]
                    self.waits[rank].append(Wait(rank, op, start, there, ended[needed]))
                    start, held_up = there, needed
            end = start + (durations[rank][at] if together is None else together)
            for number in programs[rank][at:beyond]:
                ended[number], held_up_by[number] = end, held_up
                self.times[rank].append((start, end))
            free_at[rank], last[rank] = end, number

    def critical_path(self) -> tuple[Op, ...]:
        """The chain of ops, each held up by the one before, that ends with the last op of the step."""
        ends = [number for number in self._last if number != NOTHING]
        at = max(ends, key=self._ended.__getitem__, default=NOTHING)
        path: list[Op] = []
        while at != NOTHING:
            path.append(self._numbers.op(at))
            at = self._held_up_by[at]
        return tuple(reversed(path))


def _pairs(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], float]:
    """By rank and position of its first op, how long a pair takes side by side; empty if none does."""
    if not costs.overlaps or not schedule.overlaps:
        return {}
    length = costs.side_by_side(schedule.placement, schedule.microbatches)
    return {
        (rank, at): length(Pair(*two))
        for rank, program in enumerate(schedule.programs)
        for at, two in enumerate(pairwise(program))
        if two in schedule.overlaps
    }


def _durations(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """By rank and position."""
    by_kind = {kind: costs.durations(kind, schedule.placement, schedule.microbatches)
               for kind in ("F", "B", "I", "W")}  # fmt: skip
    return [[by_kind[kind][stage][microbatch] for stage, kind, microbatch in program]
            for program in schedule.programs]  # fmt: skip


def _delays(schedule: Schedule, numbers: OpNumbers, costs: Costs) -> list[float]:
    """By number of the lower stage's op, F or B, how long a message takes across the edge behind it."""
    hosts, delays = schedule.placement.rank_of, [0.0] * numbers.count
    for stage, row in enumerate(costs.delays(schedule.placement, schedule.microbatches)):
        if stage + 1 < schedule.stages and hosts[stage] != hosts[stage + 1]:
            first = stage * numbers.row
            delays[first : first + numbers.row : 3] = row
            delays[first + 1 : first + numbers.row : 3] = row
    return delays


# ---- What each rank holds


def _memory(schedule: Schedule, costs: Costs, times: Sequence[Times]) -> tuple[Curve, ...]:
    """By rank, what it holds over time."""
    held = _Held(schedule, costs)
    if not costs.counts_buffers:
        return tuple(curve(held.activations(rank, row)) for rank, row in enumerate(times))
    all_posts = [posts(schedule, rank) for rank in range(schedule.ranks)]
    posted_at = {op: reached for posted, row in zip(all_posts, times, strict=True)
                 for ops, reached in zip(posted, _reached(row), strict=True) for op in ops}  # fmt: skip
    in_time = itemgetter(0)  # changes at one time keep their order
    changes = (held.with_messages(rank, times[rank], all_posts[rank], posted_at)
               for rank in range(schedule.ranks))  # fmt: skip
    return tuple(curve(sorted(of_rank, key=in_time)) for of_rank in changes)


class _Held:
    """The sizes of activations and messages, and the changes that they make."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._trains = schedule, schedule.trains
        placement, microbatches = schedule.placement, schedule.microbatches
        names = ("activation", "held_in_backward", "held_for_weight", "buffer", "sent")
        rows = (costs.rows(name, placement, microbatches) for name in names)
        self._kept, self._in_backward, self._for_weight, self._buffer, self._sent = rows
        self._delays = costs.delays(placement, microbatches)

    def activations(self, rank: int, times: Times) -> Iterator[Change]:
        """In the order of the program."""
        for op, (start, end) in zip(self._schedule.programs[rank], times, strict=True):
            at_start, at_end = self._change(op)
            yield start, at_start
            yield end, at_end

    def _change(self, op: Op) -> tuple[float, float]:
        """At the start of `op`, and at its end."""
        stage, kind, microbatch = op
        if not self._trains:
            return 0.0, 0.0  # no backward needs it
        if kind == "F":
            return self._kept[stage][microbatch], 0.0
        after = 0.0 if kind == "B" else self._for_weight[stage][microbatch]
        if kind == "W":
            return 0.0, -after
        held = self._in_backward[stage][microbatch]
        return held - self._kept[stage][microbatch], after - held

    def with_messages(
        self, rank: int, times: Times, posted: list[list[Op]], posted_at: dict[Op, float]
    ) -> Iterator[Change]:
        """Activations, receives and sends. Of changes at one time, arrivals come last.

        A real message is never quite as fast as predicted, so that a peak that lasts no time still counts.

        posted: what the rank posts at each op; posted_at: when each result's receiver posts its receive.
            Until then the result stays with the sender
        """
        arrivals: list[Change] = []
        program = self._schedule.programs[rank]
        for op, posts_here, reached, (start, end) in zip(
            program, posted, _reached(times), times, strict=True
        ):
            for source in posts_here:
                yield reached, self._message(source)
            needed = received(self._schedule, op)
            taken = 0.0 if needed is None else self._message(needed)
            at_start, at_end = self._change(op)
            yield start, at_start - (taken if op.kind == "F" else 0.0)
            yield end, at_end - (0.0 if op.kind == "F" else taken)
            if taker(self._schedule, op) is not None:
                edge = _edge(op)
                size = self._sent[edge][op.microbatch] if op.kind == "F" else self._message(op)
                yield end, size
                arrivals.append((max(end, posted_at[op]) + self._delays[edge][op.microbatch], -size))
        yield from arrivals

    def _message(self, op: Op) -> float:
        """The buffer for the result of `op`."""
        return self._buffer[_edge(op)][op.microbatch]


def _reached(times: Times) -> Iterator[float]:
    """When a rank reaches each op: when the one before has ended, or started if they overlap."""
    return (min(times[at - 1][1], times[at][0]) if at else 0.0 for at in range(len(times)))


def _edge(op: Op) -> int:
    """The stage in front of the edge that the result of `op` crosses."""
    return op.stage if op.kind == "F" else op.stage - 1
