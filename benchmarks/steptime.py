"""How long a step takes where computing takes a known time, over what `simulate` predicts.

Every stage sleeps in place of computing (`benchmarks.sleeping`), so that what is over the prediction is the
library's own, or the machine's. Both libraries sleep as often, on every rank. torch's first stage has no I:
it leaves both sleeps to W, and is predicted so. P = 4 over gloo, m = 16.

The limit of the machine is measured in the same rounds: a loop without a library that runs the same program
with the same sleeps, `isend` and `irecv`. What a step takes over the prediction is divided by its trace:
sleeps longer than asked, which each rank measures; ops as long as they were; the trace as a whole; the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.pool import Pool
from benchmarks.report import Found, Row, measured
from benchmarks.rivals import TORCH, as_schedule
from benchmarks.rounds import Interval, Rounds, in_turn, interval, summary
from benchmarks.sleeping import (
    HIDDEN,
    LOOP,
    MICROBATCHES,
    RANKS,
    SECONDS,
    Step,
    finish,
    latency,
    predicted,
    prepare,
    prepare_loop,
    step,
    wake_at_once,
)
from penstock.schedule import Costs, Schedule, Timeline, simulate
from penstock.schedule.choose import ScheduleLike, chosen_schedule

BAR = 1.02
# torch's schedules under penstock's names, and those that torch lacks
FORMS: dict[str, ScheduleLike] = {
    **{name: name for name in TORCH},
    "looped_bfs": "looped_bfs",
    "zb_h1": "zb_h1",
    "zb_h2": "zb_h2",
    "v_half": "v_half",
    "v_min": "v_min",
    "dualpipe": "dualpipe",
    "hanayo": "hanayo",
    "searched": {"schedule": "searched", "memory_limit": 6, "seconds": 5},
}


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {"latency": [], "latency without a pause": []}
    counted: list[Rounds] = []
    with Pool(RANKS) as mine, Pool(RANKS) as other:
        pools = {"penstock": mine, "torch": other}
        for pool in pools.values():
            pool.run(wake_at_once)
        other.pause()
        for name, form in FORMS.items():
            program = chosen_schedule(form, RANKS, MICROBATCHES)
            libraries = pools if name in TORCH else {"penstock": mine}
            rounds, steps, theirs, links = compare(name, program, libraries, repeats)
            rows += _rows(name, rounds, steps, links[0], program, theirs)
            counted.append(rounds)
            raw |= {
                f"{library} {name}": [s._replace(timeline=None) for s in of] for library, of in steps.items()
            }
            raw["latency"].append(links[0])
            raw["latency without a pause"].append(links[1])
        other.resume()
    link, hot = (median(raw[key]) * 1e6 for key in ("latency", "latency without a pause"))
    notes = [
        "step: from the first rank's start to the last rank's end, after a barrier; the libraries in turn, "
        f"each in processes of its own, the other's stopped meanwhile; {summary(counted)}",
        "equal work: every rank of both libraries slept 3 times for each microbatch of each of its stages, "
        "in every step, or this benchmark fails",
        f"simulate is given the one-way latency of {torch.zeros(HIDDEN).nbytes // 1024} KiB between two "
        f"ranks that do something else for {SECONDS * 1e3:.0f} ms before, as in the step: {link:.0f} µs; of "
        f"messages that follow at once it is {hot:.0f} µs",
        "limit: a loop without a library that runs the same program, with the same sleeps, isend and irecv",
        "over simulate, of penstock's steps: by what the prediction grows when it is given the mean length "
        "of each rank's sleeps, then each op's recorded length; then the recorded step, then the step",
        "sleeps as long as they were: simulate is given the mean length of each rank's sleeps in that step",
        "each library's ratios are to its own order of the ops, which differ",
    ]
    title = f"Step time, P={RANKS}, m={MICROBATCHES}, computing emulated by sleeping"
    return Found("steptime", title, rows, notes, raw)


def compare(
    name: str, program: Schedule, pools: Mapping[str, Pool], repeats: int
) -> tuple[Rounds, dict[str, list[Step]], Schedule, tuple[float, float]]:
    """Rounds, all steps by library, torch's order, and the link's latency with a pause and without."""
    theirs = program
    for library, pool in pools.items():
        pool.resume()
        if order := pool.run(prepare, library, name, program)[0]:
            theirs = as_schedule(name, order, RANKS, MICROBATCHES)
        pool.pause()
    steps: dict[str, list[Step]] = {library: [] for library in pools}

    def one(library: str) -> float:
        pools[library].resume()
        steps[library].append(step(pools[library], name, program))
        pools[library].pause()
        return steps[library][-1].wall

    def without() -> float:
        pools["penstock"].resume()
        wall = step(pools["penstock"], (LOOP, name), program).wall
        pools["penstock"].pause()
        return wall

    pools["penstock"].resume()
    pools["penstock"].run(prepare_loop, name, program)
    pools["penstock"].pause()
    rounds = in_turn({library: partial(one, library) for library in pools} | {LOOP: without}, repeats)
    for library, pool in pools.items():
        pool.resume()
        if library == "penstock":
            links = latency(pool, SECONDS), latency(pool, 0.0)
        pool.run(finish, name)
        if library == "torch":
            pool.pause()
    return rounds, steps, theirs, links


def _rows(
    name: str, rounds: Rounds, steps: dict[str, list[Step]], link: float, program: Schedule, theirs: Schedule
) -> list[Row]:
    """program: the order that penstock runs; theirs: torch's"""
    orders = {"penstock": program, "torch": theirs}
    base = {of: predicted(orders[of], link, of_torch=of == "torch") for of in steps}
    ideal = {of: predicted(orders[of], 0.0, of_torch=of == "torch") for of in steps}

    def over(library: str) -> Interval:
        """The step over what is predicted for sleeps as long as they were."""
        return interval([
            each.wall / predicted(orders[library], link, each.sleep, library == "torch")
            for each in steps[library]
        ])  # fmt: skip

    mine = rounds["penstock"]
    traces = [shares(each, program, link) for each in steps["penstock"]]
    rows = [
        measured(name, "step / simulate", mine.scaled(1 / base["penstock"]), at_most=BAR, quiet=rounds.quiet),
        measured(name, "step / limit", rounds.ratio("penstock", LOOP), at_most=BAR, quiet=rounds.quiet),
        measured(name, "limit / simulate", rounds[LOOP].scaled(1 / base["penstock"])),
        *(measured(name, f"over simulate: {what}", interval([trace[what] for trace in traces]), "%")
          for what in traces[0]),
    ]  # fmt: skip
    if "torch" not in steps:
        return [measured(name, "step", mine.scaled(1e3), "ms"), *rows]
    other = rounds["torch"].middle
    return [
        measured(name, "step", rounds.ratio("penstock", "torch"), "ms",
                 ours=mine.middle * 1e3, torch=other * 1e3),
        *rows,
        measured(name, "torch: step / simulate, of its own order", rounds["torch"].scaled(1 / base["torch"])),
        measured(name, "torch: step / simulate, sleeps as long as they were", over("torch")),
        measured(name, "step / zero-latency ideal",
                 rounds.ratio("penstock", "torch").scaled(ideal["torch"] / ideal["penstock"]),
                 ours=mine.middle / ideal["penstock"], torch=other / ideal["torch"], at_most=1.0,
                 quiet=rounds.quiet),
    ]  # fmt: skip


def shares(step: Step, program: Schedule, link: float) -> dict[str, float]:
    """What a step takes over the prediction, in percent of it, by the trace."""
    assert step.timeline is not None
    asked = predicted(program, link)
    slept = predicted(program, link, step.sleep)
    ops = simulate(program, replayed(program, step.timeline, link)).makespan
    trace = step.timeline.makespan
    return {
        "sleeps longer than asked": 100 * (slept - asked) / asked,
        "in ops, other than sleeping": 100 * (ops - slept) / asked,
        "between ops, and messages": 100 * (trace - ops) / asked,
        "before the first op and after the last": 100 * (step.wall - trace) / asked,
    }


def replayed(program: Schedule, timeline: Timeline, link: float) -> Costs:
    """Each op as long as it was."""
    rows = {kind: [[0.0] * program.microbatches for _ in range(program.stages)] for kind in ("F", "I", "W")}
    for span in timeline.spans:
        kind = "I" if span.op.kind == "B" else span.op.kind
        rows[kind][span.op.stage][span.op.microbatch] = span.end - span.start
    return Costs(rows["F"], rows["I"], rows["W"], communication=link)
