"""How long a step takes over a slower network, over what `simulate` predicts for it.

The work is that of the steptime benchmark: an F, an I and a W of 20 ms each, P = 4 over gloo, m = 16.
Messages take half an op (10 ms), or have a bandwidth at which they take 5 ms
(`penstock.runtime.transport.emulated`).
Where the time goes in which a rank does not compute is told as well, measured and predicted: what it waits
for another rank's compute, what for the wire, and what is left.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import NamedTuple

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import ours
from benchmarks.steptime import (
    FORMS,
    HIDDEN,
    MICROBATCHES,
    RANKS,
    SECONDS,
    emulated,
    finish,
    latency,
    oversleep,
    timed,
)
from penstock.runtime.transport.emulated import Network
from penstock.schedule import Costs, Schedule, Timeline, simulate
from penstock.schedule.choose import chosen_schedule

BAR = 1.05
NBYTES = 4 * HIDDEN[0] * HIDDEN[1] * HIDDEN[2]
SLOW = Network(latency=SECONDS / 2)
NARROW = Network(bandwidth=NBYTES / 0.005)


class Case(NamedTuple):
    """bar: whether there is one; batched exchanges hold ops up that `simulate` lets go on"""

    form: str
    network: Network
    exchange: str = "channels"
    bar: bool = True


CASES = {
    **{f"{form}, 10 ms": Case(form, SLOW) for form in FORMS},
    "1f1b, 10 ms, batched": Case("1f1b", SLOW, "batched", bar=False),
    "1f1b, 5 ms by bandwidth": Case("1f1b", NARROW),
    "zb_v, 5 ms by bandwidth": Case("zb_v", NARROW),
}


class Step(NamedTuple):
    wall: float
    timeline: Timeline


def prepare(rank: Rank, name: str, case: Case, program: Schedule) -> None:
    """Make one pipeline, the only one of its process, and run it once."""
    pipe, step = ours(emulated(), program, rank.count, network=case.network, exchange=case.exchange)
    rank.kept["pipe", name], rank.kept[name] = pipe, step
    step()


def measure(repeats: int) -> Found:
    programs = {form: chosen_schedule(FORMS[form], RANKS, MICROBATCHES) for form in FORMS}
    steps: dict[str, list[Step]] = {name: [] for name in CASES}
    latencies = []
    with Pool(RANKS) as pool:
        for name, case in CASES.items():
            pool.run(prepare, name, case, programs[case.form])
            for _ in range(repeats):
                results = pool.run(timed, name)
                wall = max(end for _, end, _ in results) - min(start for start, _, _ in results)
                steps[name].append(Step(wall, results[0][2]))
            latencies.append(latency(pool, SECONDS))
            pool.run(finish, name)
        late = median(pool.run(oversleep))
    link = median(latencies)
    rows = [row for name, case in CASES.items() for row in _rows(name, case, programs, link, steps[name])]
    notes = [
        f"a step's time: as in steptime; median of {repeats}; `simulate` is given the emulated delay and the "
        f"link's own {link * 1e6:.0f} µs; they run side by side, so that it is given up to so much too much "
        "for each message",
        f"a sleep of {SECONDS * 1e3:.0f} ms takes {late * 1e6:.0f} µs longer than asked; nothing is "
        "subtracted",
        "peer, wire, runtime: shares of the ranks' time from the step's first op to its last: waiting for "
        "another rank's compute, for the way from there, and gaps of no wait; in brackets as predicted",
        "ops as long as they really were: `simulate` is given the medians of the ops' recorded times",
        "batched: exchanges hold up ops that `simulate` lets go on, so no bar",
    ]
    raw = {name: [step.wall for step in found] for name, found in steps.items()} | {"latency": latencies}
    title = f"Step time over emulated networks, P={RANKS}, m={MICROBATCHES}, ops of {SECONDS * 1e3:.0f} ms"
    return Found("networks", title, rows, notes, raw)


def _rows(name: str, case: Case, programs: dict[str, Schedule], link: float, steps: list[Step]) -> list[Row]:
    program, delay = programs[case.form], case.network.delay(NBYTES) + link
    predicted = simulate(program, Costs(SECONDS, SECONDS, SECONDS, communication=delay))
    wall = median(step.wall for step in steps)
    recorded = median(step.timeline.makespan for step in steps)
    real = median(
        step.timeline.makespan / simulate(program, Costs.measured(step.timeline, delay)).makespan
        for step in steps
    )
    ratio = wall / predicted.makespan
    expected = idle(predicted)
    found = [median(column) for column in zip(*(idle(step.timeline) for step in steps), strict=True)]
    return [
        Row(name, "step", wall * 1e3, "ms"),
        Row(name, "step / simulate", ratio, "", None, f"at most {BAR}" if case.bar else "",
            ratio <= BAR if case.bar else None),
        Row(name, "recorded / simulate", recorded / predicted.makespan),
        Row(name, "recorded / simulate, ops as long as they really were", real),
        *(Row(name, f"{what} (simulate: {abs(of):.1f} %)", share, "%")
          for what, of, share in zip(("peer", "wire", "runtime"), expected, found, strict=True)),
    ]  # fmt: skip


def idle(timeline: Timeline) -> list[float]:
    """peer, wire and runtime, in percent of the ranks' time."""
    whole = timeline.makespan
    return [fmean(of[part] for of in timeline.idle) / whole * 100 for part in range(3)]
