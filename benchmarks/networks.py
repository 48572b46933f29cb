"""How long a step takes over a slower network, over what `simulate` predicts for it.

The work is that of the steptime benchmark: an F, an I and a W of 20 ms each, P = 4 over gloo, m = 16.
Messages take half an op (10 ms), or have a bandwidth at which they take 5 ms (benchmarks.slow_network).
Where the time goes in which a rank does not compute is told as well, measured and predicted: what it waits
for another rank's compute, what for the wire, and what is left.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rivals import ours
from benchmarks.rounds import Numbers, Rounds, interval, rounds_of, summary
from benchmarks.sleeping import (
    HIDDEN,
    MICROBATCHES,
    RANKS,
    SECONDS,
    Step,
    emulated,
    finish,
    latency,
    predicted,
    step,
    wake_at_once,
)
from benchmarks.slow_network import Network, slowed_down
from benchmarks.steptime import FORMS
from penstock.schedule import Costs, Schedule, Timeline, simulate
from penstock.schedule.choose import chosen_schedule

BAR = 1.05
NBYTES = 4 * HIDDEN[0] * HIDDEN[1] * HIDDEN[2]
SLOW = Network(latency=SECONDS / 2)
NARROW = Network(bandwidth=NBYTES / 0.005)


class Case(NamedTuple):
    form: str
    network: Network


CASES = {
    **{f"{form}, 10 ms": Case(form, SLOW) for form in FORMS},
    "1f1b, 5 ms by bandwidth": Case("1f1b", NARROW),
    "zb_v, 5 ms by bandwidth": Case("zb_v", NARROW),
}


def prepare(rank: Rank, name: str, case: Case, program: Schedule) -> None:
    """Make one pipeline, the only one of its process, and run it once."""
    with slowed_down(case.network):
        pipe, step = ours(emulated(), program, rank.count, transport="gloo")
    rank.kept["pipe", name], rank.kept[name] = pipe, step
    step()


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {"latency": []}
    counted: list[Rounds] = []
    with Pool(RANKS) as pool:
        pool.run(wake_at_once)
        for name, case in CASES.items():
            program = chosen_schedule(FORMS[case.form], RANKS, MICROBATCHES)
            pool.run(prepare, name, case, program)
            steps: list[Step] = []
            rounds = rounds_of(partial(_round, pool, name, program, steps), repeats)
            link = latency(pool, SECONDS)
            pool.run(finish, name)
            rows += _rows(name, case, program, link, rounds, steps)
            raw[name] = rounds.found
            raw["latency"].append(link)
            counted.append(rounds)
    notes = [
        "a step's time, equal work and the sleeps' lengths: as in steptime; `simulate` is given the emulated "
        f"delay and the link's own {median(raw['latency']) * 1e6:.0f} µs; they run side by side, so that it "
        f"is given up to so much too much for each message; {summary(counted)}",
        "peer, wire, runtime: shares of the ranks' time from the step's first op to its last: waiting for "
        "another rank's compute, for the way from there, and gaps of no wait; in brackets as predicted",
    ]
    title = f"Step time over emulated networks, P={RANKS}, m={MICROBATCHES}, ops of {SECONDS * 1e3:.0f} ms"
    return Found("networks", title, rows, notes, raw)


def _round(pool: Pool, name: str, program: Schedule, steps: list[Step], _: int) -> Numbers:
    steps.append(step(pool, name, program))
    return {"step": steps[-1].wall}


def _rows(
    name: str, case: Case, program: Schedule, link: float, rounds: Rounds, steps: list[Step]
) -> list[Row]:
    delay = case.network.delay(NBYTES) + link
    expected = simulate(program, Costs(SECONDS, SECONDS, SECONDS, communication=delay))
    over = interval([each.wall / predicted(program, delay, each.sleep) for each in steps])
    found = [
        interval(column)
        for column in zip(*(idle(each.timeline) for each in steps if each.timeline), strict=True)
    ]
    return [
        measured(name, "step", rounds["step"].scaled(1e3), "ms"),
        measured(name, "step / simulate", rounds["step"].scaled(1 / expected.makespan),
                 at_most=BAR, quiet=rounds.quiet),
        measured(name, "step / simulate, sleeps as long as they were", over),
        *(measured(name, f"{what} (simulate: {abs(of):.1f} %)", share, "%")
          for what, of, share in zip(("peer", "wire", "runtime"), idle(expected), found, strict=True)),
    ]  # fmt: skip


def idle(timeline: Timeline) -> list[float]:
    """peer, wire and runtime, in percent of the ranks' time."""
    whole = timeline.makespan
    return [fmean(of[part] for of in timeline.idle) / whole * 100 for part in range(3)]
