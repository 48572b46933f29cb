"""How many sends must be buffered for a schedule to go on, where a send blocks until it is received.

The strict model of a channel: a rank that has computed what another one needs stands still until that one
has posted the receive, unless the channel can hold the result meanwhile. Receives on a channel are posted
in the order in which the other end sends, each when its rank begins the op before the one that needs it.
"""

from __future__ import annotations

from penstock.schedule.ops import Schedule
from penstock.schedule.order import NOTHING, Numbers


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
