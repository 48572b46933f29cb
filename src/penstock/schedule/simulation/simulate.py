"""Run a schedule on paper: when each op runs, what it waits for, and what each rank holds meanwhile.

1F1B with P = 2, m = 3, B = 2 F, and messages that take as long as a forward:

    rank 0 | F0 F1 .  .  .  .  B0 B0 F2 B1 B1 .  .  .  B2 B2
    rank 1 | .  .  F0 B0 B0 F1 B1 B1 .  .  F2 B2 B2 .  .  .

Each op starts as soon as its rank has ended the one before and its input has arrived. A rank holds

    an activation   from the start of F to the end of B or W (with sizes of its own while F, I or B runs, and
                    between I and W, see `Costs`)
    a receive       from its post, at the op that `order.posts` says, until an op has taken it:
                    F keeps it as a part of its activation, I and B drop it at their end
    a send          from the end of its op until it has arrived

Activations do not count while they are in host memory (`penstock.schedule.offload`).

A rank sums a stage's gradients over the mesh when the last of them is there (`Costs.reduction`), and does
nothing else meanwhile. Replicas of the pipeline take the same time, so that one stands for all: they meet in
these sums, and none waits. `sample` runs replicas that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from penstock.schedule.collector import collector_paused
from penstock.schedule.op_arrays import NOTHING, OpArrays
from penstock.schedule.ops import KINDS, Op, Pair, Schedule
from penstock.schedule.order import posts
from penstock.schedule.simulation.costs import Costs
from penstock.schedule.simulation.host_link import Change, HostLinks
from penstock.schedule.simulation.timeline import Curve, Reduction, Span, Timeline, Wait, curve
from penstock.schedule.turns import ends, last_gradients
from penstock.schedule.verify import Proof, verify

if TYPE_CHECKING:
    from penstock.schedule.op_arrays import Floats

Times = list[tuple[float, float]]  # start and end of each op of a program


def simulate(schedule: Schedule | Proof, costs: Costs | None = None) -> Timeline:
    """Predict one step of `schedule`, or of its proof, which need not be made again. Times begin at 0.

    costs: of each op, in one unit of time; None: unit times

    An input from another rank arrives when the delay of its edge has passed since its op ended. The ops of an
    overlapped pair run one after the other; with `Costs.exchange` they run side by side: they start when both
    inputs are there, and end together. Raises ScheduleError for a schedule that `verify` refuses.
    """
    costs = costs or Costs()
    proof = schedule if isinstance(schedule, Proof) else verify(schedule)
    with collector_paused(all_stay=True):
        run = _Run(proof, costs)
        return Timeline(
            proof.schedule.name,
            proof.schedule.ranks,
            run.spans(),
            proof.peak_live,
            _memory(proof, costs, run),
            run.critical_path(),
            proof.schedule.overlaps,
            run.waits(),
            run.reductions(),
            copies=() if run.links is None else tuple(run.links.copies),
        )


class _Run:
    """One run of all ranks. Everything is by index of the op, as in `OpArrays`.

    start, end: of each op
    reduced: by the op that it follows, how long a reduction takes
    pauses: how long its rank reduces gradients in front of it
    free_at: when its rank has ended what comes before
    sent, there: when the op that it needs has ended, and when that result is there; 0 if it needs none
    links: to host memory; None where nothing is offloaded
    """

    def __init__(self, proof: Proof, costs: Costs) -> None:
        import numpy as np

        self._arrays, arrays, order = proof.arrays, proof.arrays, proof.order
        delays, pairs = delays_of(arrays, costs), pairs_of(arrays, costs)
        durations, self.reduced = durations_of(arrays, costs), reductions_of(arrays, costs)
        self.pauses = _pauses(arrays, self.reduced)
        self.links = None
        if costs.offloads and arrays.schedule.trains:
            self.links = HostLinks(arrays, order, durations, delays, costs, self.pauses)
            self.end = self.links.end
        else:
            self.end = ends(arrays, order, durations, delays, pairs, self.reduced)
        self.sent = np.where(arrays.source == NOTHING, 0.0, self.end[arrays.source])
        self.there = self.sent + delays
        self.free_at = np.where(arrays.before == NOTHING, 0.0, self.end[arrays.before]) + self.pauses
        # the op whose end was waited for, on this rank or on another, or NOTHING
        self._held_up_by = np.where(self.there > self.free_at, arrays.source, arrays.before)
        for one in pairs:
            self._side_by_side(one)
        self.start = np.maximum(self.there, self.free_at)
        if self.links is not None:
            self.start = np.maximum(self.start, self.links.gate)
        for one in pairs:
            self.start[one] = self.start[one + 1]

    def _side_by_side(self, one: int) -> None:
        """The second op of a pair begins to wait when the input of the first is there."""
        self.free_at[one + 1] = max(self.there[one], self.free_at[one])
        if self.there[one + 1] > self.free_at[one + 1]:
            self._held_up_by[one] = self._arrays.source[one + 1]
        self._held_up_by[one + 1] = self._held_up_by[one]

    def spans(self) -> tuple[Span, ...]:
        columns = (self._arrays.rank.tolist(), self._arrays.ops, self.start.tolist(), self.end.tolist())
        return tuple(map(partial(tuple.__new__, Span), zip(*columns, strict=True)))  # in half of Span's time

    def waits(self) -> tuple[Wait, ...]:
        """The waits of all ranks, by rank and in the order of its program."""
        import numpy as np

        waited = np.flatnonzero(self.there > self.free_at)
        times = (column[waited].tolist() for column in (self.free_at, self.there, self.sent))
        ops = [self._arrays.ops[at] for at in waited.tolist()]
        return tuple(map(Wait, self._arrays.rank[waited].tolist(), ops, *times))

    def reductions(self) -> tuple[Reduction, ...]:
        arrays, ended = self._arrays, self.end
        return tuple(
            Reduction(int(arrays.rank[at]), int(arrays.stage[at]), float(ended[at]), float(ended[at] + takes))
            for at, takes in sorted(self.reduced.items())
        )

    def critical_path(self) -> tuple[Op, ...]:
        """The chain of ops, each held up by the one before, that ends with the last op of the step."""
        last = [stop - 1 for start, stop in pairwise(self._arrays.bounds) if stop > start]
        at, held_up_by = max(last, key=self._rank_ends), self._held_up_by.tolist()
        path: list[Op] = []
        while at != NOTHING:
            path.append(self._arrays.ops[at])
            at = held_up_by[at]
        return tuple(reversed(path))

    def reached(self, rank: int) -> list[float]:
        """When a rank reaches each op: when it has ended what comes before, or started it if they overlap."""
        start, stop = self._arrays.bounds[rank : rank + 2]
        if start == stop:
            return []
        free_at = self.end[start : stop - 1] + self.pauses[start + 1 : stop]
        return [0.0, *map(min, free_at.tolist(), self.start[start + 1 : stop].tolist())]

    def _rank_ends(self, last: int) -> float:
        """When a rank has ended its last op, and the reduction behind it."""
        return float(self.end[last]) + self.reduced.get(last, 0.0)

    def of_rank(self, rank: int) -> Times:
        start, stop = self._arrays.bounds[rank : rank + 2]
        return list(zip(self.start[start:stop].tolist(), self.end[start:stop].tolist(), strict=True))


def pairs_of(arrays: OpArrays, costs: Costs) -> dict[int, float]:
    """By the first op of each pair, how long it takes side by side; empty if none runs so."""
    schedule, pairs = arrays.schedule, arrays.pairs if costs.overlaps else []
    if not pairs:
        return {}
    length = costs.side_by_side(schedule.placement, schedule.microbatches)
    return {one: length(Pair(arrays.ops[one], arrays.ops[one + 1])) for one in pairs}


def durations_of(arrays: OpArrays, costs: Costs) -> Floats:
    """How long each op takes, with what its stage gathers first."""
    import numpy as np

    schedule = arrays.schedule
    by_kind = [np.array(costs.durations(kind, schedule.placement, schedule.microbatches)) for kind in KINDS]
    durations: Floats = np.stack(by_kind)[arrays.kind, arrays.stage, arrays.microbatch]
    gathered = costs.of_stages("gather", schedule.placement)
    if any(gathered):
        forwards = np.flatnonzero(arrays.slot == 0)[::-1]
        first = dict(zip(arrays.stage[forwards].tolist(), forwards.tolist(), strict=True))
        for stage, at in first.items():
            durations[at] += gathered[stage]
    return durations


def reductions_of(arrays: OpArrays, costs: Costs) -> dict[int, float]:
    """By the op that it follows, how long each reduction takes that takes any time."""
    takes = costs.of_stages("reduction", arrays.schedule.placement)
    if not any(takes):
        return {}
    return {at: takes[stage] for stage, at in last_gradients(arrays).items() if takes[stage]}


def _pauses(arrays: OpArrays, reduced: Mapping[int, float]) -> Floats:
    """By op, how long its rank reduces gradients in front of it."""
    import numpy as np

    pauses = np.zeros(len(arrays.ops))
    for at, takes in reduced.items():
        if at + 1 < len(pauses) and arrays.rank[at + 1] == arrays.rank[at]:
            pauses[at + 1] = takes
    return pauses


def delays_of(arrays: OpArrays, costs: Costs) -> Floats:
    """How long the result that each op needs takes from another rank."""
    import numpy as np

    schedule, edge = arrays.schedule, arrays.edge
    hosts = np.array(schedule.placement.rank_of)
    delays = np.array(costs.delays(schedule.placement, schedule.microbatches))
    crosses = (edge != NOTHING) & (hosts[edge] != np.roll(hosts, -1)[edge])
    return np.where(crosses, delays[edge, arrays.microbatch], 0.0)


# ---- What each rank holds


def _memory(proof: Proof, costs: Costs, run: _Run) -> tuple[Curve, ...]:
    """By rank, what it holds over time."""
    arrays, schedule, held = proof.arrays, proof.schedule, _Held(proof.arrays, costs)
    if not costs.counts_buffers:
        return held.activations(run)
    times = [run.of_rank(rank) for rank in range(schedule.ranks)]
    all_posts = [posts(proof, rank) for rank in range(schedule.ranks)]
    reached = [run.reached(rank) for rank in range(schedule.ranks)]
    posted_at = {op: time for posted, row in zip(all_posts, reached, strict=True)
                 for ops, time in zip(posted, row, strict=True) for op in ops}  # fmt: skip
    in_time = itemgetter(0)  # changes at one time keep their order
    curves = []
    for rank, row in enumerate(times):
        offloaded = [[]] * len(row) if run.links is None else run.links.of_rank(arrays, rank)
        changes = sorted(
            held.with_messages(rank, row, reached[rank], all_posts[rank], posted_at, offloaded), key=in_time
        )
        curves.append(curve([time for time, _ in changes], [change for _, change in changes]))
    return tuple(curves)


def _with_copies(times: Floats, changes: Floats, copies: Sequence[Sequence[Change]]) -> tuple[Floats, Floats]:
    """The changes of a rank's ops and of the copies in front of each. Those at one time keep their order.

    times, changes: of the start and the end of each op
    """
    import numpy as np

    in_front = [(at, *change) for at, of_op in enumerate(copies) for change in of_op]
    positions, when, sizes = np.array(in_front, float).reshape(-1, 3).T
    turns = np.concatenate([2 * positions - 0.5, np.arange(len(times))])
    times, changes = np.concatenate([when, times]), np.concatenate([sizes, changes])
    order = np.lexsort((turns, times))
    return times[order], changes[order]


class _Held:
    """The sizes of activations and messages, and the changes that they make."""

    def __init__(self, arrays: OpArrays, costs: Costs) -> None:
        self._arrays, self._schedule = arrays, arrays.schedule
        placement, microbatches = self._schedule.placement, self._schedule.microbatches
        self._buffer, self._sent = (costs.rows(name, placement, microbatches) for name in ("buffer", "sent"))
        self._delays = costs.delays(placement, microbatches)
        self._at_start, self._at_end = self._changes(costs)

    def _changes(self, costs: Costs) -> tuple[Floats, Floats]:
        """By index of the op, what its start and its end change."""
        import numpy as np

        arrays, schedule = self._arrays, self._schedule
        names = ("activation", "held_in_forward", "held_in_backward", "held_for_weight")
        rows = (costs.rows(name, schedule.placement, schedule.microbatches) for name in names)
        kept, in_forward, in_backward, for_weight = (
            np.array(row)[arrays.stage, arrays.microbatch] for row in rows
        )
        nothing = np.zeros_like(kept)
        if not schedule.trains:  # no backward needs it
            return nothing, nothing
        is_f, is_b, is_i, is_w = (arrays.kind == kind for kind in range(len(KINDS)))
        at_start = np.select([is_f, is_b | is_i], [in_forward, in_backward - kept], nothing)
        at_end = np.select(
            [is_f, is_b, is_i, is_w],
            [kept - in_forward, nothing - in_backward, for_weight - in_backward, -for_weight],
            nothing,
        )
        return at_start, at_end

    def activations(self, run: _Run) -> tuple[Curve, ...]:
        """By rank, what it holds over time, without messages."""
        import numpy as np

        times = np.stack([run.start, run.end], axis=1)
        changes = np.stack([self._at_start, self._at_end], axis=1)
        by_rank = [(times[a:b].ravel(), changes[a:b].ravel()) for a, b in pairwise(self._arrays.bounds)]
        if run.links is not None:
            copied = (run.links.of_rank(self._arrays, rank) for rank in range(self._schedule.ranks))
            by_rank = [_with_copies(*ops, copies) for ops, copies in zip(by_rank, copied, strict=True)]
        return tuple(curve(time, change) for time, change in by_rank)

    def of_rank(self, rank: int) -> list[Change]:
        """By position, what the start and the end of the op change."""
        start, stop = self._arrays.bounds[rank : rank + 2]
        columns = (column[start:stop].tolist() for column in (self._at_start, self._at_end))
        return list(zip(*columns, strict=True))

    def with_messages(
        self,
        rank: int,
        times: Times,
        reached: Sequence[float],
        posted: list[list[Op]],
        posted_at: dict[Op, float],
        offloaded: Sequence[Sequence[Change]],
    ) -> Iterator[Change]:
        """Activations, receives and sends. Of changes at one time, arrivals come last.

        A real message is never quite as fast as predicted, so that a peak that lasts no time still counts.

        reached: when the rank reaches each op; posted: what it posts there
        posted_at: when each result's receiver posts its receive.
            Until then the result stays with the sender
        offloaded: what releases and reloads in front of each op change
        """
        arrivals: list[Change] = []
        program = self._schedule.programs[rank]
        for op, posts_here, time, (start, end), (at_start, at_end), copied in zip(
            program, posted, reached, times, self.of_rank(rank), offloaded, strict=True
        ):
            for source in posts_here:
                yield time, self._message(source)
            yield from copied
            source = self._schedule.source(op)
            taken = 0.0 if source is None or source not in posted_at else self._message(source)
            yield start, at_start - (taken if op.kind == "F" else 0.0)
            yield end, at_end - (0.0 if op.kind == "F" else taken)
            if op in posted_at:
                edge = _edge(op)
                size = self._sent[edge][op.microbatch] if op.kind == "F" else self._message(op)
                yield end, size
                arrivals.append((max(end, posted_at[op]) + self._delays[edge][op.microbatch], -size))
        yield from arrivals

    def _message(self, op: Op) -> float:
        """The buffer for the result of `op`."""
        return self._buffer[_edge(op)][op.microbatch]


def _edge(op: Op) -> int:
    """The stage in front of the edge that the result of `op` crosses."""
    return op.stage if op.kind == "F" else op.stage - 1
