"""What each rank holds over time: activations, and what is on its way between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from penstock.schedule.costs import Costs
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.order import posts, received, taker
from penstock.schedule.timeline import Curve, curve

Change = tuple[float, float]  # when, and by how much what is held changes
Times = Sequence[tuple[float, float]]  # start and end of each op of a program


def memory(schedule: Schedule, costs: Costs, times: Sequence[Times]) -> tuple[Curve, ...]:
    """By rank, for ops that run at `times`. `schedule` is one that `verify` has accepted."""
    activations = _Activations(schedule, costs)
    if not costs.counts_buffers:
        return tuple(curve(activations.changes(rank, of_rank)) for rank, of_rank in enumerate(times))
    messages = _Messages(schedule, costs, activations, times)
    in_time = itemgetter(0)  # changes at one time stay in their order
    return tuple(curve(sorted(messages.changes(rank), key=in_time)) for rank in range(schedule.ranks))


class _Activations:
    """From the start of F to the end of B or W."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._trains = schedule, schedule.trains
        self._kept, self._in_backward, self._for_weight = (
            costs.rows(name, schedule.placement, schedule.microbatches)
            for name in ("activation", "held_in_backward", "held_for_weight")
        )

    def change(self, op: Op) -> tuple[float, float]:
        """At the start of `op`, and at its end."""
        stage, kind, microbatch = op
        if not self._trains:
            return 0.0, 0.0  # nothing is held for a backward that never comes
        if kind == "F":
            return self._kept[stage][microbatch], 0.0
        after = 0.0 if kind == "B" else self._for_weight[stage][microbatch]
        if kind == "W":
            return 0.0, -after
        held = self._in_backward[stage][microbatch]
        return held - self._kept[stage][microbatch], after - held

    def changes(self, rank: int, times: Times) -> Iterator[Change]:
        """In the order of the program."""
        for op, (start, end) in zip(self._schedule.programs[rank], times, strict=True):
            at_start, at_end = self.change(op)
            yield start, at_start
            yield end, at_end


class _Messages:
    """What is received from its post until an op has taken it over, and what is sent until it has arrived."""

    def __init__(
        self, schedule: Schedule, costs: Costs, activations: _Activations, times: Sequence[Times]
    ) -> None:
        self._schedule, self._activations, self._times = schedule, activations, times
        self._posts = [posts(schedule, rank) for rank in range(schedule.ranks)]
        # by op, when the rank that takes its result begins to receive: until then it stays with the sender
        self._awaited = {source: reached for rank in range(schedule.ranks)
                         for posted, reached in zip(self._posts[rank], _reached(times[rank]), strict=True)
                         for source in posted}  # fmt: skip
        placement, microbatches = schedule.placement, schedule.microbatches
        self._buffer = costs.rows("buffer", placement, microbatches)
        self._sent = costs.rows("sent", placement, microbatches)
        self._delays = costs.delays(placement, microbatches)

    def changes(self, rank: int) -> Iterator[Change]:
        """With those of the activations. At one time, what an op begins comes before what has arrived then.

        For no wire is quite as fast as its prediction, and a peak that lasts no time is one all the same.
        """
        arrivals: list[Change] = []
        program, times = self._schedule.programs[rank], self._times[rank]
        for op, posted, reached, (start, end) in zip(
            program, self._posts[rank], _reached(times), times, strict=True
        ):
            for source in posted:
                yield reached, self._of(source)
            needed = received(self._schedule, op)
            taken = 0.0 if needed is None else self._of(needed)
            at_start, at_end = self._activations.change(op)
            if op.kind == "F":
                yield start, at_start - taken
                yield end, at_end
            else:
                yield start, at_start
                yield end, at_end - taken
            if taker(self._schedule, op) is not None:
                edge = _edge(op)
                held = self._sent[edge][op.microbatch] if op.kind == "F" else self._of(op)
                yield end, held
                leaves = max(end, self._awaited[op])
                arrivals.append((leaves + self._delays[edge][op.microbatch], -held))
        yield from arrivals

    def _of(self, op: Op) -> float:
        """What the message that `op` makes takes."""
        return self._buffer[_edge(op)][op.microbatch]


def _reached(times: Times) -> Iterator[float]:
    """When a rank gets to each op of its program: as soon as the one before has ended, or begins with it."""
    return (min(times[at - 1][1], times[at][0]) if at else 0.0 for at in range(len(times)))


def _edge(op: Op) -> int:
    """The stage in front of the edge that the result of `op` crosses."""
    return op.stage if op.kind == "F" else op.stage - 1
