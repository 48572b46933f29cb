"""How far ahead of their use receives are posted: the one rule that plans and predictions follow.

A message crosses its edge unseen if its receive stands while the rank computes something else. So a receive
is posted at the last place in its rank's program from which `ahead` units of own compute lie before the op
that needs it, with F = I = W = 1 and B = 2. Here with two, for 1F1B on rank 1 of 2:

    1F0   1B0   1F1   1B1   1F2   1B2
         |           |-----^ 0F2 is posted before 1B1
         |-----^ 0F1 is posted before 1B0

- On each channel receives are posted in the order in which the other end sends, whatever the order of use.
- None is posted before the last own op whose result its sender waits for first: until that has run, the
  sender cannot have sent it, whatever the ops take, and its buffer would lie there for nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from penstock.schedule.ops import Op, Schedule

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
