"""How much of an exchange inside of ops a paired schedule hides: its step over the one without pairs.

Every op computes for a while, a backward twice as long as a forward, and spends about as long waiting for
other ranks, as a mixture does whose tokens travel to their experts: half before and half after it computes.
Both are emulated by sleeping; computing holds a lock, so that the two ops of a pair never compute at the
same time. P = 4 over gloo, one process a rank.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import Work, ours
from benchmarks.steptime import HIDDEN, finish, first, timed
from penstock.schedule import Costs, Schedule, simulate
from penstock.schedule.config import ScheduleLike, chosen_schedule

RANKS, SECONDS = 4, 0.02  # a forward's compute
BAR = 0.7
PAIRED = "side by side"
# with pairs and without, and the numbers of microbatches
FORMS: dict[str, tuple[ScheduleLike, ScheduleLike, tuple[int, ...]]] = {
    "1f1b": ({"schedule": "1f1b", "paired": True}, "1f1b", (16, 64)),
    "dualpipe_v": ("dualpipe_v", "dualpipe_v", (16, 64)),
}
# exchange of a backward over that of a forward: as long as it computes, or as many tokens
BACKWARDS = {"exchange as long as compute": 2, "as long in B as in F": 1}
COMPUTING = threading.Lock()  # one a process: a rank computes one thing at a time


def work_and_wait(compute: float, exchange: float) -> None:
    time.sleep(exchange / 2)
    with COMPUTING:
        time.sleep(compute)
    time.sleep(exchange / 2)


class Mixture(torch.autograd.Function):
    """Touches no value, as what it takes beyond the sleep would count as the library's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, exchange_in_backward: float) -> Tensor:
        ctx.exchange = exchange_in_backward
        if not hidden.is_meta:  # while shapes are learnt
            work_and_wait(SECONDS, SECONDS)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        work_and_wait(2 * SECONDS, ctx.exchange)
        return gradients[0], torch.zeros(()), None


class Sleeper(nn.Module):
    def __init__(self, exchange_in_backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._exchange = exchange_in_backward

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Mixture.apply(x, self.weight, self._exchange)  # type: ignore[no-untyped-call]
        return result


def prepare(rank: Rank, name: str, program: Schedule, exchange: float, overlap: bool) -> None:
    torch.manual_seed(0)
    batch = torch.randn(HIDDEN[0] * program.microbatches, *HIDDEN[1:])
    work = Work(lambda: Sleeper(exchange), first, batch, batch, program.microbatches)
    rank.kept["pipe", name], rank.kept[name] = ours(work, program, rank.count, overlap=overlap)
    rank.kept[name]()  # the first step makes what later ones reuse


def step(pool: Pool, name: str, program: Schedule, exchange: float, repeats: int) -> list[float]:
    """Seconds of each of `repeats` steps, with pairs side by side where the name says so."""
    pool.run(prepare, name, program, exchange, name.endswith(PAIRED), timeout=120)
    walls = []
    for _ in range(repeats):
        results = pool.run(timed, name)
        walls.append(max(r[1] for r in results) - min(r[0] for r in results))
    pool.run(finish, name)
    return walls


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, list[float]] = {}
    with Pool(RANKS) as pool:
        for what, times in BACKWARDS.items():
            for name, (paired, plain, counts) in FORMS.items():
                for count in counts:
                    case = f"{name}, m={count}, {what}"
                    programs = {f"{case}, {PAIRED}": paired, f"{case}, one after the other": plain}
                    built = {key: chosen_schedule(form, RANKS, count) for key, form in programs.items()}
                    for key, program in built.items():
                        raw[key] = step(pool, key, program, times * SECONDS, repeats)
                    rows += _rows(case, built, raw, times, bar=times == 2 and count == max(counts))
    notes = [
        f"a forward computes for {SECONDS * 1e3:.0f} ms and exchanges as long; a backward computes for twice "
        "as long, and exchanges for as long as it computes, or as a forward does",
        "over 1f1b without pairs, or dualpipe_v with overlap=False; predicted: by simulate, without latency",
        "where a backward exchanges for as long as it computes, it alone takes two thirds of what the ops of "
        "a pair take one after the other: no schedule of pairs can come below 0.667. Warm-up and drain pair "
        "nothing, so the bar is for the larger number of microbatches",
        f"median of {repeats}",
    ]
    return Found("paired", f"Pairs side by side, P={RANKS}, exchanges within ops emulated", rows, notes, raw)


def _rows(
    case: str, built: dict[str, Schedule], raw: dict[str, list[float]], times: int, *, bar: bool
) -> list[Row]:
    beside, after = [median(raw[key]) for key in built]
    paired, plain = built.values()
    whole = 2 * SECONDS + times * SECONDS
    costs = Costs(2 * SECONDS, whole, 0.0, exchange=SECONDS, exchange_in_backward=times * SECONDS)
    alone = simulate(plain, replace(costs, exchange=0.0, exchange_in_backward=0.0)).makespan
    predicted = simulate(paired, costs).makespan
    ratio = beside / after
    return [
        Row(case, "side by side", beside * 1e3, "ms"),
        Row(case, "one after the other", after * 1e3, "ms"),
        Row(case, "ratio", ratio, "", None, f"at most {BAR}" if bar else "", ratio <= BAR if bar else None),
        Row(case, "ratio predicted", predicted / alone),
        Row(case, "side by side / simulate", beside / predicted),
        Row(case, "one after the other / simulate", after / alone),
    ]
