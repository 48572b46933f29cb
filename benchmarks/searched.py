"""What a search finds, beside the best of the published schedules that keep the same limit of memory.

Nothing is timed: every number is `simulate`'s. The bubble is the one inside, from a rank's first op to its
last, which is what zero-bubble papers count; a search for it makes the longest such time of a rank small.
Published means as the papers have it: the order that a builder gives for unit times, run at these costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.report import Found, Row
from penstock.schedule import Costs, simulate
from penstock.schedule.ops import Placement, loop, wave
from penstock.schedule.search import search
from penstock.schedule.search.search import candidates

SECONDS = 20.0  # for one search
LONG_HEAD = [1.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.8]
BAR = 1 / 3  # of the published bubble, where the known heuristics leave most


@dataclass(frozen=True)
class Case:
    """share: the limit, in multiples of what 1F1B holds on its first rank; judged: by the bar"""

    title: str
    placement: Placement
    microbatches: int
    costs: Costs
    share: float
    judged: bool = False

    @property
    def limit(self) -> float:
        return self.share * self.placement.stages

    def __str__(self) -> str:
        return f"{self.title}, P={self.placement.ranks} m={self.microbatches}, {self.share:g} x 1F1B's memory"


_UNEVEN, _LONG_I = Costs(1, 1.2, 0.8, communication=0.1), Costs(1, 2, 1, communication=0.1)
CASES = (
    *(Case("one stage a rank", loop(8), 24, Costs(), share, share == 1.5) for share in (1.0, 1.25, 1.5, 2.0)),
    Case("one stage a rank, W holds half", loop(8), 24, Costs(held_for_weight=0.5), 1.5, True),
    Case("one stage a rank, 1 : 2 : 1", loop(8), 24, _LONG_I, 1.5),
    Case("V, 1 : 1.2 : 0.8", wave(4), 16, _UNEVEN, 1.5, True),
    Case("V, 1 : 2 : 1", wave(4), 16, _LONG_I, 1.5, True),
    Case("V, 1 : 1.2 : 0.8", wave(8), 24, _UNEVEN, 1.0),
    Case("V, 1 : 1.2 : 0.8", wave(8), 24, _UNEVEN, 1.5, True),
    Case("V, 1 : 2 : 1", wave(8), 24, _LONG_I, 1.5, True),
    Case("unequal stages", loop(8), 24, Costs(LONG_HEAD, LONG_HEAD, LONG_HEAD, 0.1), 1.0),
    Case("unequal stages", loop(8), 24, Costs(LONG_HEAD, LONG_HEAD, LONG_HEAD, 0.1), 1.5),
    Case("one stage a rank, 1 : 1.2 : 0.8", loop(8), 24, _UNEVEN, 0.5),
    Case("V, 1 : 1.2 : 0.8", wave(8), 24, _UNEVEN, 0.5),
    *(
        Case(f"{title}, a message takes {delay:g}", placement, 64, Costs(communication=delay), share)
        for title, placement in (("two stages a rank", loop(8, 2)), ("V", wave(8)))
        for delay in (0.0, 0.1)
        for share in (1.0, 0.5)
    ),
)


def published(case: Case) -> tuple[str, float] | None:
    """The name and the bubble of the best published schedule that keeps the limit."""
    found = []
    for name, schedule in candidates(case.placement, case.microbatches, Costs()):
        timeline = simulate(schedule, case.costs)
        if max(timeline.peak_memory) <= case.limit + 1e-9:
            found.append((timeline.inner_bubble, name))
    return (min(found)[1], min(found)[0]) if found else None


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for case in CASES:
        known = published(case)
        found = search(
            ranks=case.placement.ranks,
            microbatches=case.microbatches,
            costs=case.costs,
            placement=case.placement,
            memory_limit=case.limit,
            objective="extent",
            seconds=SECONDS,
        )
        bubble = found.timeline.inner_bubble
        beside = f"{known[0]}: {known[1]:.4f}" if known else "none built fits"
        proof = "optimal" if found.optimal else f"at least {found.lower_bound:.1f}"
        met = bubble <= BAR * known[1] if case.judged and known else None
        bar = "at most a third of the published" if case.judged else ""
        rows.append(Row(str(case), f"bubble ({beside})", bubble, "", None, bar, met))
        rows.append(Row(str(case), f"longest rank ({proof})", found.value))
        raw[str(case)] = {
            "published": known,
            "value": found.value,
            "lower_bound": found.lower_bound,
            "gap": found.value / found.lower_bound - 1,
            "optimal": found.optimal,
            "makespan": found.makespan,
            "bubble": found.timeline.bubble,
            "inner_bubble": bubble,
            "peak_memory": found.timeline.peak_memory,
            "method": found.method,
        }
    notes = [
        f"each search: {SECONDS:g} s of counted work, one run ({repeats} would be alike)",
        "bubble: inside, from a rank's first op to its last; beside it the best published order that fits",
        "longest rank: from its first op to its last, in times of an F, and the least that is possible",
    ]
    return Found("searched", "Searched and published schedules", rows, notes, raw)
