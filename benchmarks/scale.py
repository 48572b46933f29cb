"""How long a schedule of many ranks and microbatches takes to build, to prove and to simulate."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Numbers, rounds_of, summary
from penstock.schedule import Costs, build, simulate, verify

RANKS, MICROBATCHES = 64, 1024
BAR = 1.0  # seconds in all
# two stages a rank
FORMS: dict[str, dict[str, int]] = {
    "interleaved_1f1b": {"stages_per_rank": 2},
    "interleaved_zero_bubble": {"stages_per_rank": 2},
    "zb_v": {},
    "dualpipe_v": {},
}


def seconds(name: str, _: int) -> Numbers:
    """Of each of the three."""
    times = [time.perf_counter()]
    schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES, **FORMS[name])
    times.append(time.perf_counter())
    proof = verify(schedule)
    times.append(time.perf_counter())
    simulate(proof, Costs(1, 1, 1, communication=0.1))
    times.append(time.perf_counter())
    names = ("build", "verify", "simulate")
    found = {each: end - start for each, start, end in zip(names, times, times[1:], strict=False)}
    return found | {"all": times[-1] - times[0]}


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw, counted = {}, []
    for name in FORMS:
        rounds = rounds_of(partial(seconds, name), repeats)
        counted.append(rounds)
        raw[name] = rounds.found
        for what in ("all", "build", "verify", "simulate"):
            bar = BAR if what == "all" else None
            quantity = "build, verify and simulate" if what == "all" else what
            rows.append(measured(name, quantity, rounds[what], "s", at_most=bar, quiet=rounds.quiet))
    notes = [
        f"P={RANKS}, m={MICROBATCHES}, two stages a rank; one process; {summary(counted)}",
        "simulate: of the proof; a schedule is verified first",
    ]
    return Found("scale", "Large schedules: build, verify, simulate", rows, notes, raw)
