"""Where W goes, in programs whose forwards and input gradients keep their order."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from penstock.schedule.search.problem import NOTHING, Problem, Programs, W


def replaced(problem: Problem, programs: Programs) -> Programs | None:
    """Each W where its rank would else wait, or where it must make room; None where that gets stuck.

    A W does not begin where it would hold up what comes before half of it is done.
    """
    need, delay, duration = problem.need, problem.delay, problem.duration
    main = [[number for number in program if number % 3 != W] for program in programs]
    found: Programs = [[] for _ in programs]
    put_off: list[deque[int]] = [deque() for _ in programs]
    ends = [NOTHING] * problem.count
    at, held = [0] * len(programs), [0] * len(programs)
    waiting: dict[int, int] = {}
    queue = [(0, rank) for rank in range(len(programs))]
    while queue:
        now, rank = heappop(queue)
        weights, soon = put_off[rank], NOTHING
        number = main[rank][at[rank]] if at[rank] < len(main[rank]) else NOTHING
        if number != NOTHING and held[rank] + problem.take[number] <= problem.limit[rank]:
            needed = need[number]
            if needed == NOTHING or ends[needed] != NOTHING:
                soon = now if needed == NOTHING else max(now, ends[needed] + delay[number])
        if weights and (soon == NOTHING or soon - now > duration[weights[0]] / 2):
            number = weights.popleft()
            soon = now
        elif soon == NOTHING:
            if number != NOTHING:
                waiting[need[number]] = rank
            continue
        else:
            at[rank] += 1
        ends[number] = end = soon + duration[number]
        found[rank].append(number)
        held[rank] += problem.take[number] - problem.give[number]
        if number % 3 == 1:
            weights.append(number + 1)
        heappush(queue, (end, rank))
        if number in waiting:
            heappush(queue, (now, waiting.pop(number)))
    return found if all(len(new) == len(old) for new, old in zip(found, programs, strict=True)) else None
