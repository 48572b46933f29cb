"""Exchanges: what a rank sends and receives between two ops goes together, and is over together.

So it is where a library moves it in one kernel (NCCL's grouped sends and receives, Megatron's ring exchange).
Here on rank 1 of 2 in 1F1B; what stands in brackets is one exchange:

    [<0F0]  1F0  1B0  [>1B0 <0F1]  1F1  1B1  [>1B1 <0F2]  1F2  1B2  [>1B2]

- A result is sent in the exchange that follows its op, and received in the last one before it is used.
  Between two ranks what is sent first is received first: without tags nothing else says which one it is.
- An exchange begins when its rank has come to it and the one before is over; it is over when all of its
  transfers are. A transfer needs both ends' exchanges to have begun. An op waits for the exchange that brings
  its input, and for no other.

Hence ranks can wait for one another in a circle though no op does: two send to each other what either wants
later only. So all ranks are run on paper. gpipe, 1f1b (zero bubble, too) and zb_h1 come to their end as
above. The other builders' schedules do where each result is received in the first exchange to which its
receiver comes, in units of time, once it has been sent. What ends neither way is refused: schedules of one's
own that run round a loop of three ranks or more and send on late what others wait for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedule.ops import Op, Schedule

# ---- How far ahead of their use receives are posted: the one rule that plans and predictions follow.
#
# A message crosses its edge unseen if its receive stands while the rank computes something else. So a
# receive is posted at the last place in its rank's program from which `ahead` units of own compute lie
# before the op that needs it, with F = I = W = 1 and B = 2. Here with two, for 1F1B on rank 1 of 2:
#
#     1F0   1B0   1F1   1B1   1F2   1B2
#          |           |-----^ 0F2 is posted before 1B1
#          |-----^ 0F1 is posted before 1B0
#
# - On each channel receives are posted in the order in which the other end sends, whatever the order of
# use. - None is posted before the last own op whose result its sender waits for first: until that has run,
# the sender cannot have sent it, whatever the ops take, and its buffer would lie there for nothing.


# A wire as slow as this many ops stays hidden even between the short ops of zero bubble, and in warm-up and
# drain, where no whole backward lies between post and use. Between whole backwards it is one op, as few as
# can hide anything. More would hold a further buffer on every channel, for wires slower than pipelines bear.
AHEAD = 2.0
_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def posts(schedule: Schedule, rank: int, ahead: float = AHEAD) -> list[list[Op]]:
    """By position in the program of `rank`: the ops of other ranks whose results it begins to receive there.

    That is when it has reached the op at that position, before it waits for that one's own input.
    `schedule` is one that `verify` has accepted.
    """
    program = schedule.programs[rank]
    found: list[list[Op]] = [[] for _ in program]
    done = list(accumulate((_UNITS[op.kind] for op in program), initial=0.0))  # units before each position
    for queue in _queues(schedule, rank):
        latest = len(program)
        places: list[int] = []
        for _, _, use in reversed(queue):  # what is needed early pulls forward all that is sent before it
            latest = min(latest, max(0, bisect_right(done, done[use] - ahead, hi=use + 1) - 1))
            places.append(latest)
        for (heard, op, _), place in zip(queue, reversed(places), strict=True):
            found[max(place, heard + 1)].append(op)
    return found


def received(schedule: Schedule, op: Op) -> Op | None:
    """The op of another rank whose result `op` takes over a channel."""
    stage, kind, microbatch = op
    placement = schedule.placement
    if kind == "W" or (placement.is_first if kind == "F" else placement.is_last)(stage):
        return None
    needed = Op(stage - 1, "F", microbatch) if kind == "F" else schedule.gradient(stage + 1, microbatch)
    return needed if placement.rank_of[needed.stage] != placement.rank_of[stage] else None


def taker(schedule: Schedule, op: Op) -> Op | None:
    """The other way round: the op of another rank that takes the result of `op`."""
    stage, kind, microbatch = op
    placement = schedule.placement
    if kind == "W" or (placement.is_last if kind == "F" else placement.is_first)(stage):
        return None
    taken_by = Op(stage + 1, "F", microbatch) if kind == "F" else schedule.gradient(stage - 1, microbatch)
    return taken_by if placement.rank_of[taken_by.stage] != placement.rank_of[stage] else None


def _queues(schedule: Schedule, rank: int) -> Iterator[list[tuple[int, Op, int]]]:
    """What comes over each channel, in the order in which it is sent: (heard, op, position of its use).

    heard: the last position in the program of `rank` whose result the sender has waited for before, or -1
    """
    program = schedule.programs[rank]
    uses = {needed: at for at, op in enumerate(program) if (needed := received(schedule, op)) is not None}
    hears = {there: at for at, op in enumerate(program) if (there := taker(schedule, op)) is not None}
    for peer in sorted({schedule.placement.rank_of[op.stage] for op in uses}):
        heard = -1
        channels: dict[tuple[int, bool], list[tuple[int, Op, int]]] = {}
        for op in schedule.programs[peer]:
            if op in hears:
                heard = max(heard, hears[op])
            if op in uses:
                channels.setdefault((op.stage, op.kind == "F"), []).append((heard, op, uses[op]))
        yield from channels.values()


# ---- One walk over a schedule in an order that its ranks could really follow.
#
# `verify` and `simulate` both take it: an op comes as soon as its rank has reached it and its predecessors
# have come. Receives are posted in the order in which the sender sends, so that first in, first out on a
# channel never pairs the wrong ends, and an op waits for its own inputs only.
#
# Schedules may hold half a million ops, so ops are numbers here, and what an op needs is arithmetic.


_SLOT = {"F": 0, "B": 1, "I": 1, "W": 2}
NOTHING = -1


class Numbers:
    """A number for each op: three a microbatch and stage. B and I share one: a schedule holds either."""

    def __init__(self, schedule: Schedule) -> None:
        self.microbatches, self.depth = schedule.microbatches, schedule.placement.depth
        self.row = 3 * schedule.microbatches  # from a stage to the next
        self.count = self.row * schedule.stages

    def of(self, op: Op) -> int:
        return op.stage * self.row + 3 * op.microbatch + _SLOT[op.kind]

    def places(self, number: int) -> tuple[int, int, int]:
        """Stage, microbatch, and slot of a number: 0 is F, 1 is B or I, 2 is W."""
        stage, within = divmod(number, self.row)
        return stage, *divmod(within, 3)

    def program(self, ops: Iterable[Op]) -> list[int]:
        row = self.row
        return [stage * row + 3 * microbatch + _SLOT[kind] for stage, kind, microbatch in ops]

    def needed(self, number: int) -> int:
        """What must come over from another stage before this op; NOTHING where it takes none.

        What it needs of its own stage stands before it in the same program, which `verify` has checked.
        """
        kind, stage = number % 3, number // self.row
        if kind == 0 and stage % self.depth:
            return number - self.row
        if kind == 1 and (stage + 1) % self.depth:
            return number + self.row
        return NOTHING

    def needs(self, program: Iterable[int]) -> list[int]:
        """`needed` of each."""
        needed = self.needed
        return [needed(number) for number in program]


class Walk:
    """Iterate to get (rank, position) in a feasible order; afterwards `blocked` tells who is left waiting.

    programs, needs: numbers by rank and position; needs come from `Numbers.needs`
    satisfied: numbers to take as done although no program holds them at a reachable place
    together: number -> what it needs besides, because its overlapped neighbour does
    """

    def __init__(
        self,
        numbers: Numbers,
        programs: list[list[int]],
        needs: list[list[int]],
        satisfied: Iterable[int] = (),
        together: dict[int, int] | None = None,
    ) -> None:
        self._programs, self._needs, self._together = programs, needs, together or {}
        self._done = bytearray(numbers.count + 1)
        self._done[NOTHING] = 1  # the last place: needing nothing is always fulfilled
        for number in satisfied:
            self._done[number] = 1
        self.reached = [0] * len(programs)
        self.blocked: dict[int, int] = {}  # rank -> the number that it waits for

    def __iter__(self) -> Iterator[tuple[int, int]]:
        done, reached, together = self._done, self.reached, self._together
        waiting: dict[int, list[int]] = {}  # a number not yet done -> the ranks that stand waiting for it
        ready = list(range(len(reached)))
        while ready:
            rank = ready.pop()
            program, needs = self._programs[rank], self._needs[rank]
            for at in range(reached[rank], len(program)):
                number, needed = program[at], needs[at]
                if together and done[needed]:
                    needed = together.get(number, NOTHING)
                if not done[needed]:
                    waiting.setdefault(needed, []).append(rank)
                    reached[rank] = at
                    break
                done[number] = 1
                yield rank, at
                if number in waiting:
                    ready += waiting.pop(number)
            else:
                reached[rank] = len(program)
        self.blocked = {rank: needed for needed, ranks in waiting.items() for rank in ranks}


# ---- How many sends must be buffered for a schedule to go on, where a send blocks until it is received.
#
# The strict model of a channel: a rank that has computed what another one needs stands still until that
# one has posted the receive, unless the channel can hold the result meanwhile. Receives on a channel are
# posted in the order in which the other end sends, each when its rank begins the op before the one that
# needs it.


def buffered_sends(schedule: Schedule) -> int:
    """The least number of results that each channel must be able to hold. `schedule` has no deadlock else."""
    model = _Model(schedule)
    capacity = 0
    while not model.finishes(capacity):
        capacity += 1
    return capacity


class _Model:
    """Each rank as the list of its ops: (number, what it needs from another rank, channel it sends on)."""

    def __init__(self, schedule: Schedule) -> None:
        self._numbers = numbers = Numbers(schedule)
        self._programs = [numbers.program(program) for program in schedule.programs]
        hosts, row = schedule.placement.rank_of, numbers.row
        senders: dict[int, tuple[tuple[int, int], int]] = {}  # number -> its channel, its place in it
        sent: dict[tuple[int, int], int] = {}
        self._receives: list[list[int]] = []
        for rank, program in enumerate(self._programs):
            needs = numbers.needs(program)
            self._receives.append([n if n != NOTHING and hosts[n // row] != rank else NOTHING for n in needs])
        wanted = {n for receives in self._receives for n in receives}
        for program in self._programs:
            for number in program:
                if number in wanted:
                    step = 1 if number % 3 == 0 else -1
                    channel = (number // row, number // row + step)
                    senders[number] = channel, sent.get(channel, 0)
                    sent[channel] = sent.get(channel, 0) + 1
        self._senders = senders

    def finishes(self, capacity: int) -> bool:
        """Whether all ranks come to their end where a channel holds up to `capacity` unreceived results."""
        senders = self._senders
        posted: dict[tuple[int, int], int] = {}  # channel -> receives posted on it
        started = [0] * len(self._programs)  # ops begun, by rank
        waits: dict[tuple[int, int], int] = {}  # channel -> the rank that stands at a send on it
        misses: dict[int, int] = {}  # number -> the rank that stands waiting for it
        done: set[int] = {NOTHING}
        ready = list(range(len(self._programs)))
        left = len(ready)
        sending: dict[int, int] = {}  # rank -> the number that it still has to hand over
        while ready:
            rank = ready.pop()
            program, receives = self._programs[rank], self._receives[rank]
            at = started[rank]
            while True:
                if rank in sending:
                    number = sending[rank]
                    channel, place = senders[number]
                    if place >= posted.get(channel, 0) + capacity:
                        waits[channel] = rank
                        break
                    del sending[rank]
                    done.add(number)
                    if number in misses:
                        ready.append(misses.pop(number))
                if at == len(program):
                    left -= 1
                    break
                for needed in receives[at : at + 2]:
                    if needed != NOTHING:
                        channel, place = senders[needed]
                        if place >= posted.get(channel, 0):
                            posted[channel] = place + 1
                            if channel in waits:
                                ready.append(waits.pop(channel))
                if receives[at] not in done:
                    misses[receives[at]] = rank
                    break
                number = program[at]
                at += 1
                if number in senders:
                    sending[rank] = number
            started[rank] = at
        return left == 0


_UNITS_of_exchanges = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True)
class Exchanges:
    """A schedule whose ranks come to their end that way. Made by `exchanges` only.

    receives[r][i]: the ops of other ranks whose results rank r receives in the exchange before its op i
    in_line: whether ranks come to their end too where every op waits for all exchanges before it
    """

    schedule: Schedule
    receives: tuple[tuple[tuple[Op, ...], ...], ...]
    in_line: bool


def exchanges(schedule: Schedule) -> Exchanges:
    """What is exchanged when; `schedule` is one that `verify` has accepted.

    Raises ConfigError where ranks would wait for each other for ever.
    """
    run = _Run(schedule, soon=False)
    if not run.ends():
        run = _Run(schedule, soon=True)
        if not run.ends():
            raise ConfigError(
                f"exchange='batched' with schedule {schedule.name!r}",
                "what a rank sends and receives between two ops is over together, and these wait in a "
                f"circle: {run.circle()}",
                "Take exchange='channels', where no message waits for another one, or another schedule",
            )
    receives = (tuple([tuple(map(run.op, here)) for here in row[:-1]]) for row in run.receives)
    return Exchanges(schedule, tuple(receives), run.ends(in_line=True))


class _Transfer(NamedTuple):
    """What `sender` sends at its place `sent`, and `receiver` uses for the op at position `use`."""

    number: int
    sender: int
    sent: int
    receiver: int
    use: int


class _Run:
    """All ranks on paper. What travels has the number of the op that made it (penstock.schedule.order).

    Between ops, before the first and after the last are places, from 0 to the number of the rank's ops.
    ends_of: by number, the two (rank, place) in whose exchanges it is: where it is sent, where it is received
    receives: by rank and place; awaited: by rank and op, the place of the exchange that the op waits for
    """

    def __init__(self, schedule: Schedule, soon: bool) -> None:
        self._schedule, self._numbers = schedule, Numbers(schedule)
        self._programs = [self._numbers.program(program) for program in schedule.programs]
        self.receives: list[list[list[int]]] = [[[] for _ in range(len(p) + 1)] for p in self._programs]
        self._awaited = [[NOTHING] * len(program) for program in self._programs]
        self._exchanged: list[list[list[int]]] = [[[] for _ in row] for row in self.receives]
        self._ends_of: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        times = self._times() if soon else None
        for queue in self._queues():
            self._place(queue, times)
        self._turn: list[int] = []  # by rank, the place of the exchange that is under way, or is to come

    def _queues(self) -> list[list[_Transfer]]:
        """By sender and receiver, in the order of sending."""
        hosts, row = self._schedule.placement.rank_of, self._numbers.row
        uses: dict[int, tuple[int, int]] = {}
        for rank, program in enumerate(self._programs):
            for at, needed in enumerate(self._numbers.needs(program)):
                if needed != NOTHING and hosts[needed // row] != rank:
                    uses[needed] = rank, at
        queues: dict[tuple[int, int], list[_Transfer]] = {}
        for rank, program in enumerate(self._programs):
            for at, number in enumerate(program):
                if number in uses:
                    transfer = _Transfer(number, rank, at + 1, *uses[number])
                    queues.setdefault((rank, transfer.receiver), []).append(transfer)
        return list(queues.values())

    def _times(self) -> list[list[float]]:
        """By rank and place, when it comes there if nothing that travels takes any time."""
        programs, needs = self._programs, [self._numbers.needs(program) for program in self._programs]
        ended = [0.0] * (self._numbers.count + 1)
        times = [[0.0] for _ in programs]
        for rank, at in Walk(self._numbers, programs, needs):
            start = max(times[rank][-1], ended[needs[rank][at]])
            ended[programs[rank][at]] = end = (
                start + _UNITS_of_exchanges[self._schedule.programs[rank][at].kind]
            )
            times[rank].append(end)
        return times

    def _place(self, queue: list[_Transfer], times: list[list[float]] | None) -> None:
        """times: given where each result is to be received as soon as it has been sent"""
        place = queue[-1].use
        for number, sender, sent, receiver, use in reversed(queue):
            place = min(place, use)  # what is used early pulls forward all that is sent before it
            if times is not None:
                place = min(place, bisect_left(times[receiver], times[sender][sent]))
            self._ends_of[number] = (sender, sent), (receiver, place)
            self._awaited[receiver][use] = place
            self._exchanged[sender][sent].append(number)
            self._exchanged[receiver][place].append(number)
            self.receives[receiver][place].insert(0, number)

    def ends(self, in_line: bool = False) -> bool:
        """Whether all ranks come to their end; else each of those that do not stands in an exchange."""
        reached = [0] * len(self._programs)  # by rank, the place that it has come to
        turns = self._turn = [0] * len(self._programs)
        half: set[int] = set()  # begun at one end
        # by rank, what is left of the exchange under way; NOTHING before it begins
        left = [NOTHING] * len(self._programs)
        ready = list(range(len(self._programs)))
        while ready:
            rank = ready.pop()
            exchanged, awaited = self._exchanged[rank], self._awaited[rank]
            at, turn, last = reached[rank], turns[rank], len(self._programs[rank])
            while True:
                while turn <= at:
                    if left[rank] == NOTHING:
                        left[rank] = len(exchanged[turn])
                        for number in exchanged[turn]:
                            if number not in half:
                                half.add(number)
                                continue
                            left[rank] -= 1
                            other = self._other(number, rank)
                            left[other] -= 1
                            if not left[other]:
                                ready.append(other)
                    if left[rank]:
                        break
                    turn, left[rank] = turn + 1, NOTHING
                if at == last or awaited[at] >= turn or (in_line and at >= turn):
                    break
                at += 1
            reached[rank], turns[rank] = at, turn
        return all(turn == len(row) for turn, row in zip(turns, self._exchanged, strict=True))

    def _other(self, number: int, rank: int) -> int:
        (sender, _), (receiver, _) = self._ends_of[number]
        return receiver if rank == sender else sender

    def op(self, number: int) -> Op:
        stage, microbatch, slot = self._numbers.places(number)
        return self._schedule.gradient(stage, microbatch) if slot else Op(stage, "F", microbatch)

    def circle(self) -> str:
        """Who waits for whom, in words, where not all came to their end."""
        rank = next(r for r, row in enumerate(self._exchanged) if self._turn[r] < len(row))
        path: list[int] = []
        words: dict[int, str] = {}
        while rank not in words:
            path.append(rank)
            number = next(n for n in self._exchanged[rank][self._turn[rank]] if not self._has_begun(n, rank))
            words[rank] = f"rank {rank} {self._words(rank)} and waits for rank {self._other(number, rank)}"
            rank = self._other(number, rank)
        return "; ".join(words[rank] for rank in path[path.index(rank) :])

    def _has_begun(self, number: int, rank: int) -> bool:
        """Whether the other end of what `rank` exchanges has come to it."""
        there, place = next(end for end in self._ends_of[number] if end[0] != rank)
        return self._turn[there] >= place

    def _words(self, rank: int) -> str:
        """What a rank exchanges where it stands."""
        place = self._turn[rank]
        told = []
        for number in self._exchanged[rank][place]:
            (sender, _), (receiver, _) = self._ends_of[number]
            sends = sender == rank
            told.append(f"sends {self.op(number)} to rank {receiver}" if sends
                        else f"receives {self.op(number)} from rank {sender}")  # fmt: skip
        after = f"after {self._schedule.programs[rank][place - 1]} " if place else ""
        return after + " and ".join(told)
