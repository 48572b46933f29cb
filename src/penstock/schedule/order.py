"""The order in which ranks can run a schedule: what waits for what, and when receives are posted.

A rank runs its program in order; an op also waits for the result of the neighbouring stage. Receives are
posted in the order in which the sender sends, so first in, first out on a channel pairs the right messages.

    Walk             runs all ranks as far as they can go; `blocked` says who waits forever
    posts            when a rank posts each receive, so that it lands before its use
    buffered_sends   how many sent results a channel must hold if a send blocks until its receive is posted
    exchanges        the same schedule where everything sent and received between two ops is one call
    blocked_in_line  the ranks that would wait forever if a GPU began all that is queued strictly in order
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedule.op_arrays import NOTHING, OpArrays, OpNumbers, ends, possible_order
from penstock.schedule.ops import Op, Schedule


class Walk:
    """Run all programs at once, each as far as the others let it.

    Afterwards `blocked` maps each rank that did not finish to the number it waits for, and `reached` has the
    position of every rank.

    programs: what each step completes, by rank and position: numbers below `count`, or NOTHING
    needs: the number that each step waits for, or NOTHING
    done: numbers that count as completed from the beginning
    also_needs: a second number that the step of this number waits for, because its overlapped neighbour does
    """

    def __init__(
        self,
        count: int,
        programs: Sequence[Sequence[int]],
        needs: Sequence[Sequence[int]],
        done: Iterable[int] = (),
        also_needs: Mapping[int, int] | None = None,
    ) -> None:
        self._programs, self._needs, self._also_needs = programs, needs, also_needs or {}
        self._done = bytearray(count + 1)
        self._done[NOTHING] = 1  # the last place, which -1 refers to
        for number in done:
            self._done[number] = 1
        self.reached = [0] * len(programs)
        self.blocked: dict[int, int] = {}

    def run(self) -> None:
        """Go to the end."""
        done, reached, also_needs = self._done, self.reached, self._also_needs
        waiting: dict[int, list[int]] = {}  # number -> the ranks that wait for it
        ready = list(range(len(reached)))
        while ready:
            rank = ready.pop()
            program, needs = self._programs[rank], self._needs[rank]
            for at in range(reached[rank], len(program)):
                number, needed = program[at], needs[at]
                if also_needs and done[needed]:
                    needed = also_needs.get(number, NOTHING)
                if not done[needed]:
                    waiting.setdefault(needed, []).append(rank)
                    reached[rank] = at
                    break
                done[number] = 1
                if number in waiting:
                    ready += waiting.pop(number)
            else:
                reached[rank] = len(program)
        self.blocked = {rank: needed for needed, ranks in waiting.items() for rank in ranks}


WalkStep = tuple[int, int]  # the number that it completes, and the one that it waits for


def walk_of(count: int, programs: Sequence[Sequence[WalkStep]]) -> Walk:
    """Run programs of steps to the end."""
    completes = [[number for number, _ in steps] for steps in programs]
    walk = Walk(count, completes, [[needed for _, needed in steps] for steps in programs])
    walk.run()
    return walk


def cycles(waits_for: Mapping[int, int]) -> Iterator[list[int]]:
    """Each cycle of ranks that wait for one another. waits_for: rank -> the rank that it waits for."""
    seen: set[int] = set()
    for start in sorted(waits_for):
        path, rank = [], start
        while rank in waits_for and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for[rank]
        if rank in path:
            yield path[path.index(rank) :]


# ---- Messages between ranks


class ScheduledMessage(NamedTuple):
    """The result of `op`, sent after position `sent` of the sender and taken at position `use`."""

    op: Op
    sender: int
    sent: int
    receiver: int
    use: int

    @property
    def channel(self) -> tuple[int, bool]:
        """The directed edge that it crosses."""
        return self.op.stage, self.op.kind == "F"

    def other(self, rank: int) -> int:
        """The end that is not `rank`."""
        return self.receiver if rank == self.sender else self.sender


def received(schedule: Schedule, op: Op) -> Op | None:
    """The op on another rank whose result `op` takes."""
    stage, kind, microbatch = op
    placement = schedule.placement
    if kind == "W" or (placement.is_first if kind == "F" else placement.is_last)(stage):
        return None
    source = Op(stage - 1, "F", microbatch) if kind == "F" else schedule.gradient(stage + 1, microbatch)
    return source if placement.rank_of[source.stage] != placement.rank_of[stage] else None


def taker(schedule: Schedule, op: Op) -> Op | None:
    """The op on another rank that takes the result of `op`: `received` the other way round."""
    stage, kind, microbatch = op
    placement = schedule.placement
    if kind == "W" or (placement.is_last if kind == "F" else placement.is_first)(stage):
        return None
    target = Op(stage + 1, "F", microbatch) if kind == "F" else schedule.gradient(stage - 1, microbatch)
    return target if placement.rank_of[target.stage] != placement.rank_of[stage] else None


def messages(schedule: Schedule, receiver: int) -> list[ScheduledMessage]:
    """All messages to a rank, by sender, in the order of sending."""
    program = enumerate(schedule.programs[receiver])
    uses = {source: at for at, op in program if (source := received(schedule, op)) is not None}
    senders = sorted({schedule.placement.rank_of[op.stage] for op in uses})
    return [
        ScheduledMessage(op, sender, sent, receiver, uses[op])
        for sender in senders
        for sent, op in enumerate(schedule.programs[sender])
        if op in uses
    ]


def _by_channel(traffic: Iterable[ScheduledMessage]) -> list[list[ScheduledMessage]]:
    queues: dict[tuple[int, bool], list[ScheduledMessage]] = {}
    for message in traffic:
        queues.setdefault(message.channel, []).append(message)
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


def posts(schedule: Schedule, rank: int, ahead: float = AHEAD) -> list[list[Op]]:
    """The results of other ranks whose receives `rank` posts before each op of its program.

    The receives at position i are posted when the rank reaches op i, before it waits for that op's input.
    `schedule` has passed `verify`.
    """
    program = schedule.programs[rank]
    posted: list[list[Op]] = [[] for _ in program]
    units = list(accumulate((_UNITS[op.kind] for op in program), initial=0.0))  # before each position
    hears = {target: at for at, op in enumerate(program) if (target := taker(schedule, op)) is not None}
    heard: dict[int, list[int]] = {}  # by sender and its position: the last own op whose result it has taken
    incoming = messages(schedule, rank)
    for sender in {message.sender for message in incoming}:
        heard[sender] = list(accumulate((hears.get(op, -1) for op in schedule.programs[sender]), max))
    for queue in _by_channel(incoming):
        latest, places = len(program), []
        for message in reversed(queue):  # an early use also moves what is sent before it
            enough = bisect_right(units, units[message.use] - ahead, hi=message.use + 1) - 1
            latest = min(latest, max(0, enough))
            places.append(latest)
        for message, place in zip(queue, reversed(places), strict=True):
            posted[max(place, heard[message.sender][message.sent] + 1)].append(message.op)
    return posted


# ---- Sends that block


def buffered_sends(schedule: Schedule) -> int:
    """The number of unreceived results that each channel must hold, if a send blocks until it has room.

    A rank posts the receive of an op when it begins the op before. `schedule` has no other deadlock.
    """
    capacity = 0
    while walk_of(*_blocking_steps(schedule, capacity)).blocked:
        capacity += 1
    return capacity


def _blocking_steps(schedule: Schedule, capacity: int) -> tuple[int, list[list[WalkStep]]]:
    """The posts, receives and sends of each rank as steps: 2n is the result of op n, 2n + 1 its post."""
    numbers = OpNumbers(schedule)
    traffic = [message for rank in range(schedule.ranks) for message in messages(schedule, rank)]
    taken = {(message.receiver, message.use): message for message in traffic}
    sent = {(message.sender, message.sent): message for message in traffic}
    queues = {
        queue[0].channel: [2 * numbers.of(message.op) for message in queue] for queue in _by_channel(traffic)
    }
    place = {number: at for queue in queues.values() for at, number in enumerate(queue)}
    programs = []
    for rank, program in enumerate(schedule.programs):
        posted: Counter[tuple[int, bool]] = Counter()
        steps: list[WalkStep] = []
        for at in range(len(program)):
            for message in filter(None, (taken.get((rank, at)), taken.get((rank, at + 1)))):
                queue, since = queues[message.channel], posted[message.channel]
                until = max(since, place[2 * numbers.of(message.op)] + 1)
                steps += [(number + 1, NOTHING) for number in queue[since:until]]
                posted[message.channel] = until
            if (rank, at) in taken:
                steps.append((NOTHING, 2 * numbers.of(taken[rank, at].op)))
            if (rank, at) in sent:
                queue, number = queues[sent[rank, at].channel], 2 * numbers.of(sent[rank, at].op)
                room = place[number] - capacity
                steps.append((number, queue[room] + 1 if room >= 0 else NOTHING))
        programs.append(steps)
    return 2 * numbers.count, programs


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


def blocked_in_line(schedule: Schedule, ahead: float = AHEAD) -> list[int]:
    """The ranks that wait forever where each has one hardware queue and a stream for each channel.

    Receives are posted as `posts` says; `schedule` has passed `verify`.
    """
    numbers = OpNumbers(schedule)
    traffic = [message for rank in range(schedule.ranks) for message in messages(schedule, rank)]
    # by message, a number for its beginning at the sender; one more is that at the receiver
    begun = {message.op: 2 * numbers.of(message.op) for message in traffic}
    before = {later.op: earlier.op for queue in _by_channel(traffic) for earlier, later in pairwise(queue)}

    def complete(op: Op | None) -> list[WalkStep]:
        return [] if op is None else [(NOTHING, begun[op]), (NOTHING, begun[op] + 1)]

    programs = []
    for rank, program in enumerate(schedule.programs):
        steps: list[WalkStep] = []
        for op, posted in zip(program, posts(schedule, rank, ahead), strict=True):
            for source in posted:
                steps += [*complete(before.get(source)), (begun[source] + 1, NOTHING)]
            steps += complete(received(schedule, op))
            if op in begun:
                steps += [*complete(before.get(op)), (begun[op], NOTHING)]
        programs.append(steps)
    return sorted(walk_of(2 * numbers.count, programs).blocked)


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
    in_line: whether it also runs if every op waits for all exchanges before it
    """

    schedule: Schedule
    receives: tuple[tuple[tuple[Op, ...], ...], ...]
    in_line: bool


def exchanges(schedule: Schedule) -> Exchanges:
    """Group the messages of a verified schedule into exchanges.

    Raises ConfigError if the ranks would wait for each other forever.
    """
    grouped = _Grouped(schedule, soon=False)
    if grouped.walk().blocked:
        grouped = _Grouped(schedule, soon=True)
        if blocked := grouped.walk().blocked:
            raise ConfigError(
                f"exchange='batched' with schedule {schedule.name!r}",
                "what a rank sends and receives between two ops completes together, and these wait in a "
                f"circle: {grouped.circle(blocked)}",
                "Take exchange='channels', where no message waits for another one, or another schedule",
            )
    receives = tuple(
        tuple(tuple(message.op for message in here if message.receiver == rank) for here in row[:-1])
        for rank, row in enumerate(grouped.transfers)
    )
    return Exchanges(schedule, receives, not grouped.walk(in_line=True).blocked)


class _Grouped:
    """The exchanges of all ranks. A rank with n ops has n + 1 places for them: before each op and at the end.

    transfers[rank][place]: the messages of that exchange
    """

    def __init__(self, schedule: Schedule, soon: bool) -> None:
        """soon: receive each result as soon as it is sent, in unit times; else as late as its use allows"""
        self.schedule = schedule
        lengths = [len(program) for program in schedule.programs]
        self.transfers: list[list[list[ScheduledMessage]]] = [[[] for _ in range(n + 1)] for n in lengths]
        self._awaited: list[dict[int, int]] = [{} for _ in lengths]  # position -> the exchange of its input
        self._first = list(accumulate(map(len, self.transfers), initial=0))  # of each rank's places, over all
        times = _arrivals(schedule) if soon else None
        for receiver in range(schedule.ranks):
            for _, of_sender in groupby(messages(schedule, receiver), lambda message: message.sender):
                self._place(list(of_sender), times)

    def _place(self, queue: list[ScheduledMessage], times: list[list[float]] | None) -> None:
        """Choose the exchanges that receive the messages of one sender."""
        place, places = queue[-1].use, []
        for message in reversed(queue):  # an early use also moves what is sent before it
            place = min(place, message.use)
            if times is not None:
                sent_at = times[message.sender][message.sent + 1]
                place = min(place, bisect_left(times[message.receiver], sent_at))
            places.append(place)
        for message, place in zip(queue, reversed(places), strict=True):
            self._awaited[message.receiver][message.use] = place
            self.transfers[message.sender][message.sent + 1].append(message)
            self.transfers[message.receiver][place].append(message)

    def walk(self, in_line: bool = False) -> Walk:
        """Run the ops of each rank and, as further programs, the exchanges of each rank.

        The places of all ranks are counted on, and each has four numbers: its rank has reached it, its
        exchange is complete, and what is sent there has begun at the sender, and at the receiver.
        """
        ops: list[list[WalkStep]] = []
        for rank, row in enumerate(self.transfers):
            reached = self._reached(rank)
            awaited: Mapping[int, int] = self._awaited[rank]
            if in_line:
                awaited = {at: at for at in range(len(row) - 1)}
            needs = (reached[awaited[at]] + 1 if at in awaited else NOTHING for at in range(len(row) - 1))
            ops.append([(reached[0], NOTHING), *zip(reached[1:], needs, strict=True)])
        return walk_of(4 * self._first[-1], ops + self._exchanged)

    @cached_property
    def _exchanged(self) -> list[list[WalkStep]]:
        """The steps of each rank's exchanges."""
        programs: list[list[WalkStep]] = []
        for rank, row in enumerate(self.transfers):
            steps: list[WalkStep] = []
            for number, here in zip(self._reached(rank), row, strict=True):
                begun = [self._begun(message, rank) for message in here]
                steps.append((NOTHING, number))
                steps += [(mine, NOTHING) for mine in begun]
                steps += [(NOTHING, mine ^ 1) for mine in begun]
                steps.append((number + 1, NOTHING))
            programs.append(steps)
        return programs

    def _reached(self, rank: int) -> range:
        """The numbers for reaching each place of `rank`."""
        return range(4 * self._first[rank], 4 * self._first[rank + 1], 4)

    def _begun(self, message: ScheduledMessage, rank: int) -> int:
        """The number for the beginning of a message at the end that is `rank`."""
        return 4 * (self._first[message.sender] + message.sent + 1) + 2 + (rank == message.receiver)

    def circle(self, blocked: Mapping[int, int]) -> str:
        """Describe the first cycle among ranks that are left waiting."""
        ranks = len(self.transfers)
        # rank -> the place and the message at which it is blocked
        stuck: dict[int, tuple[int, ScheduledMessage]] = {}
        for rank, row in enumerate(self.transfers):
            for place, here in enumerate(row if rank + ranks in blocked else ()):
                for message in here:
                    if self._begun(message, rank) ^ 1 == blocked[rank + ranks]:
                        stuck[rank] = place, message
        waits_for = {rank: message.other(rank) for rank, (_, message) in stuck.items()}
        return "; ".join(
            f"rank {rank} {self._described(rank, stuck[rank][0])} and waits for rank {waits_for[rank]}"
            for rank in next(cycles(waits_for))
        )

    def _described(self, rank: int, place: int) -> str:
        transfers = (
            f"sends {m.op} to rank {m.receiver}"
            if m.sender == rank
            else f"receives {m.op} from rank {m.sender}"
            for m in sorted(self.transfers[rank][place], key=lambda m: m.receiver == rank)
        )
        after = f"after {self.schedule.programs[rank][place - 1]} " if place else ""
        return after + " and ".join(transfers)


def _arrivals(schedule: Schedule) -> list[list[float]]:
    """When each rank reaches each place, in unit times and with messages that take none."""
    import numpy as np

    arrays = OpArrays.of(schedule)
    order = possible_order(arrays) if arrays else None
    assert arrays is not None, "the schedule is verified"
    assert order is not None, "the schedule is verified"
    units = np.array([_UNITS[op.kind] for op in arrays.ops])
    ended = ends(arrays, order, units, np.zeros_like(units), {}).tolist()
    return [[0.0, *ended[start:stop]] for start, stop in pairwise(arrays.bounds)]
