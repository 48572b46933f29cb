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

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.order import NOTHING, Numbers, Walk

_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


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
            ended[programs[rank][at]] = end = start + _UNITS[self._schedule.programs[rank][at].kind]
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
