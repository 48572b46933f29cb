"""Hanayo: the data runs out and back over the ranks, in one or more waves."""

from __future__ import annotations

from heapq import heappop, heappush

from penstock.schedule.builders.interleaved_1f1b import microbatch_groups
from penstock.schedule.ops import Op, Placement, Schedule, wave


def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Schedule:
    """Hanayo: the data runs out and back over the ranks, in one or more waves.

    Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
    Efficiency", 2023 (arXiv 2308.15762). P = 3 ranks, m = 2 microbatches, w = 1 wave, a backward twice as
    long as a forward:

        rank 0 | 0F0 0F1 .   .   .   5F0 5B0 5B0 5F1 5B1 5B1 .   .   .   .   .   0B0 0B0 .   .   0B1 0B1
        rank 1 | .   1F0 1F1 .   4F0 .   4F1 .   4B0 4B0 .   4B1 4B1 .   1B0 1B0 .   .   1B1 1B1 .   .
        rank 2 | .   .   2F0 3F0 2F1 3F1 .   .   .   .   3B0 3B0 2B0 2B0 3B1 3B1 2B1 2B1 .   .   .   .

    The paper draws P microbatches; here list scheduling makes the order for any number. A microbatch takes 2S
    steps, through the S = 2wP stages and back. Whenever a rank is free, it takes the ready op with the lowest

        S g + 2 j + k                   for step k of the j-th microbatch of group g

    The groups are those of `interleaved_1f1b`; the largest has G microbatches. With this number a group goes
    forward while the group before it comes back: all ranks stay busy, and live activations stay bounded.

    From m = 3P on the makespan in unit times is 6wm + 3(P-1), and so the bubble (P-1) / (2wm + P-1), that of
    `interleaved_1f1b` with 2w stages per rank. From 2P on it is up to P/6 longer, between P and 2P up to
    3P/2. A rank holds at most 2P - 1 + (2w-1) G live activations, with several waves up to P/3 more. A wave
    saves sends: at each turn the data stays on its rank.
    """
    placement = wave(ranks, 2 * waves)
    groups = microbatch_groups(ranks, microbatches, size=None)
    offsets = [placement.stages * g + 2 * j for g, group in enumerate(groups) for j in range(len(group))]
    return Schedule("hanayo", placement, microbatches, list_schedule(placement, offsets))


def list_schedule(placement: Placement, offsets: list[int]) -> tuple[tuple[Op, ...], ...]:
    """The programs if each free rank takes the ready op with the lowest number.

    offsets: step k of a microbatch has the number offsets[microbatch] + k; a tie goes to the lower microbatch
    """
    count, stages = len(offsets), placement.stages
    hosts = (*placement.rank_of, *reversed(placement.rank_of))  # by step
    programs: list[list[Op]] = [[] for _ in range(placement.ranks)]
    ready: list[list[int]] = [[] for _ in programs]  # heaps of number * count + microbatch
    ready[hosts[0]] = sorted(offset * count + microbatch for microbatch, offset in enumerate(offsets))
    busy = [False for _ in programs]
    in_one: list[tuple[int, int, int]] = []  # (rank, microbatch, step) that end a unit of time from now
    in_two: list[tuple[int, int, int]] = []
    woken = {hosts[0]}
    while woken or in_one or in_two:
        for rank in woken:
            if busy[rank] or not ready[rank]:
                continue
            priority, microbatch = divmod(heappop(ready[rank]), count)
            step = priority - offsets[microbatch]
            forward, busy[rank] = step < stages, True
            programs[rank].append(
                Op(step, "F", microbatch) if forward else Op(2 * stages - 1 - step, "B", microbatch)
            )
            (in_one if forward else in_two).append((rank, microbatch, step))
        ended, in_one, in_two, woken = in_one, in_two, [], set()
        for rank, microbatch, step in ended:
            busy[rank] = False
            woken.add(rank)
            if step + 1 < 2 * stages:
                heappush(ready[hosts[step + 1]], (offsets[microbatch] + step + 1) * count + microbatch)
                woken.add(hosts[step + 1])
    return tuple(map(tuple, programs))
