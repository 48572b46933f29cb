"""Write docs/schedules.md from the builders' own words and the formulas below: ``python docs/schedules.py``.

tests/test_docs.py checks that the page is what this writes, that each drawing is what is built, and each
formula against the simulator.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from penstock.schedule import sample, slow_rank_costs, verify
from penstock.schedule.builders import BUILDERS

PAGE = Path(__file__).with_name("schedules.md")
_NAMES = {"min": min, "max": max, "ceil": ceil}


@dataclass(frozen=True)
class Formula:
    """What a schedule takes and holds, as Python expressions in P, m, v or w and the rank r.

    holds_for: for which sizes; makespan: in times of F = I = W = 1; bubble: of that
    live: live activations of rank r, of stages as large as this schedule has; exactly, or at `most`
    """

    schedule: str
    holds_for: str
    makespan: str
    bubble: str
    live: str
    most: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def value(self, expression: str, **sizes: int) -> Any:
        return eval(expression, {"__builtins__": {}, **_NAMES}, {**self.options, **sizes, **self._short})

    @property
    def _short(self) -> dict[str, int]:
        return {"v": self.options.get("stages_per_rank", 1), "w": self.options.get("waves", 1)}


_V2: dict[str, Any] = {"stages_per_rank": 2}
_W2: dict[str, Any] = {"waves": 2}

FORMULAS = (
    Formula("inference", "m % P == 0", "v*m + P-1", "(P-1) / (v*m + P-1)", "0", options=_V2),
    Formula("gpipe", "True", "3*(m + P-1)", "(P-1) / (m + P-1)", "m"),
    Formula("looped_bfs", "m >= P", "3*(v*m + P-1)", "(P-1) / (v*m + P-1)", "v*m", options=_V2),
    Formula("1f1b", "True", "3*(m + P-1)", "(P-1) / (m + P-1)", "min(P-r, m)"),
    Formula("1f1b", "m >= P", "3*m + 2*(P-1)", "2*(P-1) / (3*m + 2*(P-1))", "min(P-r, m)",
            options={"zero_bubble": True}),
    Formula("interleaved_1f1b", "m % P == 0", "3*(v*m + P-1)", "(P-1) / (v*m + P-1)",
            "min(2*(P-r)-1 + (v-1)*P, v*m)", options=_V2),
    Formula("interleaved_zero_bubble", "m % P == 0", "3*v*m + P-1", "(P-1) / (3*v*m + P-1)",
            "min(v*P, v*m)", options=_V2),
    Formula("zb_h1", "m >= P", "3*m + P-1", "(P-1) / (3*m + P-1)", "min(P, m)"),
    Formula("zb_h2", "m >= P", "3*m + P-1", "(P-1) / (3*m + P-1)", "min(2*P-1, m)"),
    Formula("hanayo", "m >= 2*P and m % P == 0", "6*w*m + 3*(P-1)", "(P-1) / (2*w*m + P-1)",
            "2*P-1 + (2*w-1)*P + P//3", most=True, options=_W2),
    Formula("zb_v", "m >= P", "6*m + P-1", "(P-1) / (6*m + P-1)", "min(2*P, 2*m, m+1+r)"),
    Formula("v_half", "m >= P", "6*m + P-1 + max(0, 2*P-6 if P % 2 == 0 else 2*P-3)",
            "1 - 6*m / (6*m + P-1 + max(0, 2*P-6 if P % 2 == 0 else 2*P-3))",
            "min(2*m, 2*(P//2) + 2)", most=True),
    Formula("v_min", "m >= P", "6*m + P-1 + max(0, 3*P - (6, 4, 8)[P % 3])",
            "1 - 6*m / (6*m + P-1 + max(0, 3*P - (6, 4, 8)[P % 3]))",
            "min(2*m, 2*((P+1)//3) + 2)", most=True),
    Formula("dualpipe_v", "m >= 2*P", "6*m + P-1", "(P-1) / (6*m + P-1)", "min(2*P+1, 2*m, m+1+r)"),
    Formula("dualpipe", "m >= 2*P", "3*m + P//2-1", "(P//2-1) / (3*m + P//2-1)",
            "min(P+1, m, m//2+1 + min(r, P-1-r))"),
)  # fmt: skip

_HEAD = """# Schedules

Written by `python docs/schedules.py` from the builders in `src/penstock/schedule/builders/`; do not edit.

`P` ranks, `m` microbatches, `v` stages a rank, `w` waves, rank `r` of 0 to P-1. Times are in units of one
forward, with F = I = W = 1 and B = 2, of a stage of *this* schedule: with v stages a rank a stage is a v-th
as large, and so is its live activation. The bubble counts from time zero to the end of the step. `//` rounds
down, `%` is the remainder. Each line is checked against the simulator by a test.

The least that training with one copy of the model can take is what a rank computes, and for the last of them
to begin the way of the first microbatch to it: 3vm + P-1. `penstock schedule compare` shows all of them for
your numbers.

"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, _table(), "\n", _SLOW, _slow_ranks(), "\n"]
    parts += [_section(name) for name in BUILDERS]
    parts.append(_SEARCHED)
    return "\n".join(parts)


def _table() -> str:
    lines = [
        "| schedule | holds for | step time | bubble | live activations of rank r |",
        "|---|---|---|---|---|",
    ]
    for formula in FORMULAS:
        options = "".join(f", {key}={value}" for key, value in formula.options.items())
        where = "any m" if formula.holds_for == "True" else f"`{formula.holds_for}`"
        live = f"{'at most ' if formula.most else ''}`{formula.live}`"
        lines.append(
            f"| [`{formula.schedule}`](#{formula.schedule}){options} | {where} | `{formula.makespan}` | "
            f"`{formula.bubble}` | {live} |"
        )
    return "\n".join(lines)


_RANKS, _MICROBATCHES = 8, 32
_REPLICAS, _JITTER, _SAMPLES = 1250, 0.02, 4

_SLOW = f"""## Slow ranks and jitter

By how many percent a step is longer, with P = {_RANKS} and m = {_MICROBATCHES}:

- with the ops of one rank alone 1 % longer, by rank;
- with jitter: every op's time is drawn anew, normally distributed with a standard deviation of
  {_JITTER:.0%} of it, on one pipeline and on {_REPLICAS:,} replicas ({_RANKS * _REPLICAS:,} ranks), which
  wait for each other where gradients are summed.

F = I = W = 1, and messages take no time. A rank that is busy from its first op to the end of the step costs
nearly all of its 1 %. Another one costs little where its inputs wait for it, as in `zb_h2`, and much where it
waits for them: then all ranks take its pace. `penstock schedule compare --slow-rank 1.01` and
`penstock schedule sample` give these figures for your numbers.
"""


def _slow_ranks() -> str:
    """A line for each schedule that trains."""
    ranks = " | ".join(map(str, range(_RANKS)))
    lines = [
        f"| schedule, slow rank | {ranks} | jitter | {_REPLICAS:,} replicas |",
        "|---|" + "---:|" * (_RANKS + 2),
    ]
    for formula in FORMULAS:
        schedule = BUILDERS[formula.schedule](ranks=_RANKS, microbatches=_MICROBATCHES, **formula.options)
        if not schedule.trains:
            continue
        proof = verify(schedule)
        losses = [sample(proof, jitter=_JITTER, replicas=replicas, samples=samples).loss
                  for replicas, samples in ((1, 1000), (_REPLICAS, _SAMPLES))]  # fmt: skip
        cells = [f"{100 * cost:.2f}" for cost in slow_rank_costs(proof)]
        cells += [f"{round(100 * loss, 1) + 0.0:.1f}" for loss in losses]  # never -0.0
        options = "".join(f", {key}={value}" for key, value in formula.options.items())
        lines.append(f"| [`{formula.schedule}`](#{formula.schedule}){options} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _section(name: str) -> str:
    doc = inspect.getdoc(BUILDERS[name]) or ""
    options = [
        f"`{option.name}={option.default}`"
        for option in inspect.signature(BUILDERS[name]).parameters.values()
        if option.default is not option.empty
    ]
    takes = f"\n\nOptions: {', '.join(options)}." if options else ""
    title, _, text = doc.partition("\n")
    return f"## {name}\n\n**{title}**\n{text}{takes}\n\n![{name}](pictures/{name}.svg)\n"


_SEARCHED = """## searched

**Searched: the best order found for given costs and a memory limit.**

`penstock.schedule.search` forms a schedule for the lengths and sizes that were measured, where the ones above
are formed for equal ones. It begins with every schedule above that fits, and never gives anything worse.
[Benchmarks](benchmarks.md#searched) has its figures beside theirs.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
