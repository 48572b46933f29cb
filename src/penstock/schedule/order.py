"""The messages of a proven schedule: what crosses between ranks, when it is received, and what goes together.

Receives are posted in the order in which the sender sends, so first in, first out on a channel pairs the
right messages.

    posts            when a rank posts each receive, so that it lands before its use
    blocked_in_line  the ranks that would wait forever if a GPU began all that is queued strictly in order
    exchanges        the same schedule where everything sent and received between two ops is one call
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedule.op_arrays import NOTHING, OpArrays, run_all
from penstock.schedule.ops import SOURCE, Op, Schedule
from penstock.schedule.turns import ends
from penstock.schedule.verify import Proof, cycles


class Channel(NamedTuple):
    """A directed edge between two stages on different ranks; first in, first out."""

    source: int
    target: int


class Message(NamedTuple):
    """The result of `op` on its way to stage `target`: activations forward, gradients backward."""

    op: Op
    target: int

    @classmethod
    def of(cls, op: Op) -> Message:
        """The message that the result of `op` becomes, which another stage takes."""
        return cls(op, op.stage - SOURCE[op.kind])

    @property
    def channel(self) -> Channel:
        return Channel(self.op.stage, self.target)


class Crossing(NamedTuple):
    """A message by index: of the op that is sent, and of the op on another rank that uses its result."""

    sent: int
    used: int


def crossings(arrays: OpArrays, receiver: int) -> list[Crossing]:
    """All that a rank takes from other ranks, in the order of sending, one sender after the other."""
    start, stop = arrays.bounds[receiver : receiver + 2]
    pairs = zip(arrays.source[start:stop].tolist(), arrays.crosses[start:stop].tolist(), strict=True)
    return sorted(Crossing(source, at) for at, (source, crosses) in enumerate(pairs, start) if crosses)


def _by_channel(arrays: OpArrays, messages: Iterable[Crossing]) -> list[list[Crossing]]:
    queues: dict[Channel, list[Crossing]] = {}
    for message in messages:
        queues.setdefault(Message.of(arrays.ops[message.sent]).channel, []).append(message)
    return list(queues.values())


# ---- Posting receives
#
# A message costs its receiver no time if the receive is posted while the rank computes something else. So a
# receive is posted at the last position from which `ahead` units of compute lie before its use, with
# F = I = W = 1 and B = 2. Rank 1 of 2 in 1F1B with ahead = 2:
#
#     1F0   1B0   1F1   1B1   1F2   1B2
#          |           |-----^ 0F2 is posted before 1B1
#          |-----^ 0F1 is posted before 1B0
#
# Receives on a channel are posted in the order in which they are sent. No receive is posted before the last
# op whose result its sender takes first: until then the sender cannot have sent it, and its buffer would be
# held for nothing.

# Two units hide a link as slow as two short ops, also between the ops of zero bubble and in the warm-up and
# drain, where no whole backward lies between post and use. More would hold one more buffer per channel.
AHEAD = 2.0
_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def posts(proof: Proof, rank: int, ahead: float = AHEAD) -> list[list[Op]]:
    """The results of other ranks whose receives `rank` posts before each op of its program.

    The receives at position i are posted when the rank reaches op i, before it waits for that op's input.
    """
    arrays, program = proof.arrays, proof.schedule.programs[rank]
    posted: list[list[Op]] = [[] for _ in program]
    units = list(accumulate((_UNITS[op.kind] for op in program), initial=0.0))  # before each position
    taken: dict[int, list[int]] = {}
    for queue in _by_channel(arrays, crossings(arrays, rank)):
        sender, _ = arrays.position(queue[0].sent)
        if sender not in taken:
            taken[sender] = _taken_by(arrays, sender, rank)
        latest, positions = len(program), []
        for message in reversed(queue):  # an early use also moves what is sent before it
            use = message.used - arrays.bounds[rank]
            enough = bisect_right(units, units[use] - ahead, hi=use + 1) - 1
            latest = min(latest, max(0, enough))
            positions.append(latest)
        for (sent, _), position in zip(queue, reversed(positions), strict=True):
            earliest = taken[sender][sent - arrays.bounds[sender]] + 1
            posted[max(position, earliest)].append(arrays.ops[sent])
    return posted


def _taken_by(arrays: OpArrays, taker: int, rank: int) -> list[int]:
    """By position of `taker`: the last position of `rank` whose result it has taken by then, or NOTHING."""
    import numpy as np

    source = arrays.source[slice(*arrays.bounds[taker : taker + 2])]
    of_rank = (source != NOTHING) & (arrays.rank[source] == rank)
    positions: list[int] = np.maximum.accumulate(
        np.where(of_rank, source - arrays.bounds[rank], NOTHING)
    ).tolist()
    return positions


# ---- Who waits forever
#
# A program is a sequence of steps. A step may cause an event, and may wait for an event of another program.

OrderEvent = tuple[str, Op | int, int]
EventStep = tuple[OrderEvent | None, OrderEvent | None]  # the one it causes, and the one it waits for


def _blocked(programs: Sequence[Sequence[EventStep]]) -> dict[int, OrderEvent]:
    """By program that does not come to its end, the event that it waits for."""
    steps = [*chain.from_iterable(programs)]
    step_of = {event: at for at, (event, _) in enumerate(steps) if event is not None}
    needs = [NOTHING if needed is None else step_of[needed] for _, needed in steps]
    walk = run_all([*accumulate(map(len, programs), initial=0)], needs)
    events = {at: event for event, at in step_of.items()}
    return {program: events[step] for program, step in walk.blocked.items()}


# ---- One hardware queue
#
# A GPU takes work from a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 if unset), which its streams
# share. Of each queue it begins the entries in order: one that waits for the entry before it on its own
# stream, or for another stream, holds up all behind it. NCCL has a stream for each communicator, on which a
# message begins when the one before is complete. With one queue the second receive on a channel holds up the
# op that the first one's sender waits for:
#
#     <0F0  <0F1  1B0        1B0 is behind 0F1, which is behind 0F0
#
# Several queues leave out some of these waits and add none. So what runs in one queue runs in any number.


def blocked_in_line(proof: Proof, ahead: float = AHEAD) -> list[int]:
    """The ranks that wait forever where each has one hardware queue and a stream for each channel.

    Receives are posted as `posts` says.
    """
    arrays = proof.arrays
    # by op that is sent: the receiver, and the op before on the same channel
    receiver: dict[Op, int] = {}
    before: dict[Op, Op] = {}
    for rank in range(proof.schedule.ranks):
        for queue in _by_channel(arrays, crossings(arrays, rank)):
            ops = [arrays.ops[message.sent] for message in queue]
            receiver |= dict.fromkeys(ops, rank)
            before |= {later: earlier for earlier, later in pairwise(ops)}

    def begun(op: Op, rank: int) -> OrderEvent:
        return "message begun", op, rank

    def complete(op: Op | None) -> list[EventStep]:
        if op is None:
            return []
        ends = proof.schedule.placement.rank_of[op.stage], receiver[op]
        return [(None, begun(op, rank)) for rank in ends]

    programs = []
    for rank, program in enumerate(proof.schedule.programs):
        steps: list[EventStep] = []
        for op, posted in zip(program, posts(proof, rank, ahead), strict=True):
            for source in posted:
                steps += [*complete(before.get(source)), (begun(source, rank), None)]
            needed = proof.schedule.source(op)
            steps += complete(needed if needed in receiver else None)
            if op in receiver:
                steps += [*complete(before.get(op)), (begun(op, rank), None)]
        programs.append(steps)
    return sorted(_blocked(programs))


# ---- Exchanges: everything that a rank sends and receives between two ops completes together
#
# Libraries move such a group in one kernel: NCCL's grouped sends and receives, Megatron's ring exchange.
# Rank 1 of 2 in 1F1B; each bracket is one exchange:
#
#     [<0F0]  1F0  1B0  [>1B0 <0F1]  1F1  1B1  [>1B1 <0F2]  1F2  1B2  [>1B2]
#
# - A result is sent in the exchange after its op, and received in the last exchange before its use. Between
#   two ranks, what is sent first is received first, because no tag tells messages apart.
# - An exchange begins when its rank has reached it and the exchange before is complete. It completes when
#   both ends of all its transfers have begun. An op waits only for the exchange with its input.
#
# So ranks can wait in a cycle although no op does: two ranks each send what the other wants later. gpipe,
# 1f1b, zb_h1 and others run as above. The other builders' schedules run if each result is received in the
# first exchange that its receiver reaches, in unit times, after it was sent. A schedule that fails both ways
# is refused: some schedules of the user's own that loop over three ranks or more.


@dataclass(frozen=True)
class Exchanges:
    """A schedule that runs with exchanges. Made only by `exchanges`.

    receives[r][i]: the results that rank r receives in the exchange before its op i
    """

    schedule: Schedule
    receives: tuple[tuple[tuple[Op, ...], ...], ...]


def exchanges(proof: Proof) -> Exchanges:
    """Group the messages of a schedule into exchanges.

    Raises ConfigError if the ranks would wait for each other forever.
    """
    for soon in (False, True):
        grouped = _Grouped(proof, soon)
        blocked = _blocked([*grouped.ops(), *grouped.exchanges()])
        if not blocked:
            return Exchanges(proof.schedule, grouped.receives())
    raise ConfigError(
        f"exchange='batched' with schedule {proof.schedule.name!r}",
        "what a rank sends and receives between two ops completes together, and these wait in a "
        f"circle: {grouped.circle(blocked)}",
        "Take exchange='channels', where no message waits for another one, or another schedule",
    )


class _Grouped:
    """The exchanges of all ranks. A rank with n ops has n + 1 gaps for them: before each op and at the end.

    transfers[rank][gap]: the messages of that exchange
    """

    def __init__(self, proof: Proof, soon: bool) -> None:
        """soon: receive each result as soon as it is sent, in unit times; else as late as its use allows"""
        self.arrays, self.programs = proof.arrays, proof.schedule.programs
        self.transfers: list[list[list[Crossing]]] = [[[] for _ in range(len(p) + 1)] for p in self.programs]
        self.awaited: dict[int, int] = {}  # by the op that uses a message, the gap that receives it
        times = _arrivals(proof) if soon else None
        for receiver in range(len(self.programs)):
            by_sender = groupby(crossings(self.arrays, receiver), lambda m: self.arrays.rank[m.sent])
            for _, queue in by_sender:
                self._place([*queue], times)

    def _place(self, queue: list[Crossing], times: list[list[float]] | None) -> None:
        """Choose the exchanges that receive the messages of one sender."""
        receiver, gap = self.arrays.position(queue[-1].used)
        gaps = []
        for message in reversed(queue):  # an early use also moves what is sent before it
            (sender, sent), (_, use) = map(self.arrays.position, message)
            gap = min(gap, use)
            if times is not None:
                gap = min(gap, bisect_left(times[receiver], times[sender][sent + 1]))
            gaps.append(gap)
        for message, gap in zip(queue, reversed(gaps), strict=True):
            sender, sent = self.arrays.position(message.sent)
            self.awaited[message.used] = gap
            self.transfers[sender][sent + 1].append(message)
            self.transfers[receiver][gap].append(message)

    def receives(self) -> tuple[tuple[tuple[Op, ...], ...], ...]:
        arrays = self.arrays
        return tuple(
            tuple(tuple(arrays.ops[m.sent] for m in here if arrays.rank[m.used] == rank) for here in row[:-1])
            for rank, row in enumerate(self.transfers)
        )

    def ops(self) -> list[list[EventStep]]:
        """The steps of each rank: it reaches a gap when it has run the op before."""
        programs: list[list[EventStep]] = []
        for rank in range(len(self.programs)):
            steps: list[EventStep] = [(("reached", 0, rank), None)]
            for position, at in enumerate(range(*self.arrays.bounds[rank : rank + 2])):
                gap = self.awaited.get(at)
                needed = None if gap is None else ("complete", gap, rank)
                steps.append((("reached", position + 1, rank), needed))
            programs.append(steps)
        return programs

    def exchanges(self) -> list[list[EventStep]]:
        """The steps of each rank's exchanges."""
        programs: list[list[EventStep]] = []
        for rank, row in enumerate(self.transfers):
            steps: list[EventStep] = []
            for gap, here in enumerate(row):
                steps.append((None, ("reached", gap, rank)))
                steps += [(self._begun(message, rank), None) for message in here]
                steps += [(None, self._begun(message, self._other(message, rank))) for message in here]
                steps.append((("complete", gap, rank), None))
            programs.append(steps)
        return programs

    def _begun(self, message: Crossing, rank: int) -> OrderEvent:
        return "begun", self.arrays.ops[message.sent], rank

    def _other(self, message: Crossing, rank: int) -> int:
        """The end of a message that is not `rank`."""
        (sender, _), (receiver, _) = map(self.arrays.position, message)
        return receiver if rank == sender else sender

    def circle(self, blocked: Mapping[int, OrderEvent]) -> str:
        """Describe the first cycle among the ranks whose exchanges wait for another rank."""
        ranks = len(self.transfers)
        waits = {program - ranks: event for program, event in blocked.items() if event[0] == "begun"}
        ring = next(cycles({rank: peer for rank, (_, _, peer) in waits.items()}))
        return "; ".join(f"rank {rank} {self._described(rank, waits[rank])}" for rank in ring)

    def _described(self, rank: int, event: OrderEvent) -> str:
        """The exchange in which a rank waits for the other end of a message to begin."""
        _, op, peer = event
        ops, row = self.arrays.ops, self.transfers[rank]
        gap = next(gap for gap, here in enumerate(row) if any(ops[m.sent] == op for m in here))
        sends, receives = [], []
        for message in row[gap]:
            other = self._other(message, rank)
            if self.arrays.rank[message.sent] == rank:
                sends.append(f"sends {ops[message.sent]} to rank {other}")
            else:
                receives.append(f"receives {ops[message.sent]} from rank {other}")
        after = f"after {self.programs[rank][gap - 1]} " if gap else ""
        return f"{after}{' and '.join(sends + receives)} and waits for rank {peer}"


def _arrivals(proof: Proof) -> list[list[float]]:
    """When each rank reaches each gap, in unit times and with messages that take none."""
    import numpy as np

    units = np.array([_UNITS[op.kind] for op in proof.arrays.ops])
    ended = ends(proof.arrays, proof.order, units, np.zeros_like(units), {}).tolist()
    return [[0.0, *ended[start:stop]] for start, stop in pairwise(proof.arrays.bounds)]
