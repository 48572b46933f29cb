"""How much of an exchange inside of ops a paired schedule hides: its step over the one without pairs.

Every op computes for a while, a backward twice as long as a forward, and spends about as long waiting for
other ranks, as a mixture does whose tokens travel to their experts: in each layer a forward computes
attention, exchanges, computes experts and exchanges, and a backward does the same from the end. Both are
emulated by sleeping; computing holds a lock, so that the two ops of a pair never compute at the same time.
P = 4, one process a rank.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rivals import Work, ours
from benchmarks.rounds import Rounds, in_turn, summary
from benchmarks.sleeping import HIDDEN, Timed, finish, first, timed, wake_at_once
from penstock.schedule import Costs, Schedule, simulate
from penstock.schedule.choose import ScheduleLike, chosen_schedule

RANKS, LAYERS, SECONDS = 4, 2, 0.02  # a forward's compute
MOST_REPEATS = 3  # a step takes up to 33 s
BAR = 0.7
PAIRED, APART = "side by side", "one after the other"
# with pairs and without
FORMS: dict[str, tuple[ScheduleLike, ScheduleLike]] = {
    "1f1b": ({"schedule": "1f1b", "paired": True}, "1f1b"),
    "dualpipe_v": ("dualpipe_v", "dualpipe_v"),
}


class Case(NamedTuple):
    """backward: what a backward exchanges over what a forward does; bar: whether it has one"""

    name: str
    backward: int
    microbatches: int
    bar: bool


CASES = (
    Case("exchange as long as compute", 2, 64, bar=True),
    Case("exchange as long as compute", 2, 128, bar=True),
    Case("as long in B as in F", 1, 16, bar=False),  # as many tokens
)
COMPUTING = threading.Lock()  # one a process: a rank computes one thing at a time


def compute(seconds: float) -> None:
    with COMPUTING:
        time.sleep(seconds)


class Mixture(torch.autograd.Function):
    """Touches no value, as what it takes beyond the sleep would count as the library's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, exchange_in_backward: float) -> Tensor:
        ctx.exchange = exchange_in_backward
        if not hidden.is_meta:  # while shapes are learnt
            for _part in range(2 * LAYERS):  # attention, or experts
                compute(SECONDS / 2 / LAYERS)
                time.sleep(SECONDS / 2 / LAYERS)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        for _part in range(2 * LAYERS):
            time.sleep(ctx.exchange / 2 / LAYERS)
            compute(2 * SECONDS / 2 / LAYERS)
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


def compare(pool: Pool, built: dict[str, Schedule], exchange: float, repeats: int) -> Rounds:
    """Seconds of a step of each, in turn; pairs side by side where the name says so."""
    for name, program in built.items():
        pool.run(prepare, name, program, exchange, name == PAIRED, timeout=180)

    def seconds(name: str) -> float:
        ranks: list[Timed] = pool.run(timed, name, timeout=120)
        return max(rank.end for rank in ranks) - min(rank.start for rank in ranks)

    rounds = in_turn({name: partial(seconds, name) for name in built}, repeats, warm_up=0)
    for name in built:
        pool.run(finish, name)
    return rounds


def measure(repeats: int) -> Found:
    repeats = min(repeats, MOST_REPEATS)
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    counted: list[Rounds] = []
    with Pool(RANKS) as pool:
        pool.run(wake_at_once)
        for case in CASES:
            for form, both in FORMS.items():
                name = f"{form}, m={case.microbatches}, {case.name}"
                built = {
                    how: chosen_schedule(schedule, RANKS, case.microbatches)
                    for how, schedule in zip((PAIRED, APART), both, strict=True)
                }
                rounds = compare(pool, built, case.backward * SECONDS, repeats)
                rows += _rows(name, case, built, rounds)
                raw[name] = rounds.found
                counted.append(rounds)
    notes = [
        f"{LAYERS} layers a stage; a forward computes for {SECONDS * 1e3:.0f} ms in all and exchanges as "
        "long; a backward computes for twice as long, and exchanges for as long as it computes, or as a "
        "forward does",
        "over 1f1b without pairs, or dualpipe_v with overlap=False; predicted: by simulate, without latency, "
        "where a pair takes what both ops compute, or the longer of the two alone",
        "where a backward exchanges for as long as it computes, it alone takes two thirds of what the ops of "
        "a pair take one after the other: no schedule of pairs can come below 0.667. Warm-up and drain pair "
        "nothing: the more microbatches, the nearer to that",
        f"the two in turn; {summary(counted)}",
    ]
    return Found("paired", f"Overlapped pairs, P={RANKS}, exchanges within ops emulated", rows, notes, raw)


def _rows(name: str, case: Case, built: dict[str, Schedule], rounds: Rounds) -> list[Row]:
    paired, plain = built.values()
    exchange = case.backward * SECONDS
    costs = Costs(2 * SECONDS, 2 * SECONDS + exchange, 0.0, exchange=SECONDS, exchange_in_backward=exchange)
    alone = simulate(plain, replace(costs, exchange=0.0, exchange_in_backward=0.0)).makespan
    predicted = simulate(paired, costs).makespan
    return [
        measured(name, PAIRED, rounds[PAIRED].scaled(1e3), "ms"),
        measured(name, APART, rounds[APART].scaled(1e3), "ms"),
        measured(name, "ratio", rounds.ratio(PAIRED, APART), at_most=BAR if case.bar else None,
                 quiet=rounds.quiet),
        Row(name, "ratio predicted", predicted / alone),
        measured(name, f"{PAIRED} / simulate", rounds[PAIRED].scaled(1 / predicted)),
        measured(name, f"{APART} / simulate", rounds[APART].scaled(1 / alone)),
    ]  # fmt: skip
