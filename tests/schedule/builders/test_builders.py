"""What all builders promise in their docstrings: drawing, placement, step time, memory, order of sends.

P is the number of ranks, m of microbatches, r a rank, and v the number of stages per rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from torch.distributed.pipelining import schedules as torchs

from penstock.schedule import Costs, Placement, Schedule, both_ways, loop, render, simulate, wave
from penstock.schedule.builders import BUILDERS
from penstock.schedule.builders.conformance import check_builder
from support.orders import torch_interleaves, torch_order
from support.schedules import FORMS


class Promise(NamedTuple):
    """A builder with options, and what it promises for P and m; None where it promises nothing.

    makespan: in unit times
    peak: the live activations of rank r
    """

    name: str
    makespan: Callable[[int, int], int | None]
    peak: Callable[[int, int, int], int | None]
    placement: Callable[[int], Placement] = loop
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    ranks: Sequence[int] = range(1, 6)
    microbatches: Sequence[int] = range(1, 10)

    @property
    def id(self) -> str:
        return " ".join([self.name, *(f"{option}={value}" for option, value in self.options.items())])

    def build(self, ranks: int, microbatches: int) -> Schedule:
        return BUILDERS[self.name](ranks=ranks, microbatches=microbatches, **self.options)

    def sizes(self) -> list[tuple[int, int]]:
        """All sizes at which a formula changes, and some far from there."""
        near = [
            (p, m)
            for p in range(1, 8)
            for m in {1, 2, p - 1, p, p + 1, p + 2, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 3 * p + 1}
            if m > 0
        ]
        found = [*near, (8, 24), (12, 26), (4, 40)]
        return [size for size in found if self.name != "dualpipe" or not any(n % 2 for n in size)]


def largest_group(p: int, m: int) -> int:
    return -(-m // max(1, m // p))


def on_a_loop(v: int) -> list[Promise]:
    """Builders with v stages per rank."""

    def placement(p: int) -> Placement:
        return loop(p, v)

    def whole(p: int, m: int) -> int:
        return 3 * (v * m + p - 1) if m >= p else 3 * (v * p + m - 1)

    def peak(p: int, m: int, r: int) -> int:
        return min(p - r, m) if v == 1 else min(2 * (p - r) - 1 + (v - 1) * largest_group(p, m), v * m)

    options = {"stages_per_rank": v}
    return [
        Promise(
            "inference",
            lambda p, m: v * m + p - 1 if v == 1 or m % p == 0 else None,
            lambda p, m, r: 0,
            placement,
            options,
        ),
        Promise("looped_bfs", whole, lambda p, m, r: v * m, placement, options),
        Promise("interleaved_1f1b", whole, peak, placement, options),
        Promise(
            "interleaved_zero_bubble",
            lambda p, m: 3 * v * m + p - 1 if m >= p else None,
            lambda p, m, r: min(p + (v - 1) * largest_group(p, m), v * m),
            placement,
            options,
        ),
    ]


def in_waves(waves: int) -> Promise:
    return Promise(
        "hanayo",
        lambda p, m: 6 * waves * m + 3 * (p - 1) if m >= 3 * p else None,
        lambda p, m, r: None,
        lambda p: wave(p, 2 * waves),
        options={"waves": waves},
    )


def dualpipe_v_makespan(p: int, m: int) -> int:
    return 6 * m + p - 1 + max(0, 2 * p - m) if m > p else 4 * m + 4 * p - 2


def dualpipe_makespan(p: int, m: int) -> int:
    return 3 * m + p // 2 - 1 + max(0, p - m // 2) if m > p else 2 * m + 2 * p - 2


def at_p(formula: Callable[[int, int], int]) -> Callable[[int, int], int | None]:
    """What is promised from m = P on."""
    return lambda p, m: formula(p, m) if m >= p else None


PROMISES = [
    Promise("gpipe", lambda p, m: 3 * (m + p - 1), lambda p, m, r: m),
    *on_a_loop(1), *on_a_loop(2), *on_a_loop(3),
    Promise("1f1b", lambda p, m: 3 * (m + p - 1), lambda p, m, r: min(p - r, m)),
    Promise("1f1b", lambda p, m: 3 * m + 2 * (p - 1), lambda p, m, r: min(p - r, m), loop,
            {"zero_bubble": True}),
    Promise("1f1b", lambda p, m: 3 * (m + p - 1), lambda p, m, r: min(2 * (p - r), m),
            options={"paired": True}),
    Promise("1f1b", lambda p, m: None, lambda p, m, r: min(2 * (p - r), m),
            options={"zero_bubble": True, "paired": True}),
    Promise("zb_h1", lambda p, m: 3 * m + p - 1 + max(0, p - m), lambda p, m, r: min(p, m)),
    Promise("zb_h2", lambda p, m: 3 * m + p - 1 + max(0, p - m), lambda p, m, r: min(2 * p - 1, m)),
    in_waves(1), in_waves(2), in_waves(3),
    Promise("zb_v", at_p(lambda p, m: 6 * m + p - 1), lambda p, m, r: min(2 * p, 2 * m, m + 1 + r), wave),
    Promise("v_half", at_p(lambda p, m: 6 * m + p - 1 + max(0, 2 * p - (3 if p % 2 else 6))),
            lambda p, m, r: at_p(lambda p, m: min(2 * m, 2 * (p // 2) + 2))(p, m), wave),
    Promise("v_min", at_p(lambda p, m: 6 * m + p - 1 + max(0, 3 * p - (6, 4, 8)[p % 3])),
            lambda p, m, r: at_p(lambda p, m: min(2 * m, 2 * ((p + 1) // 3) + 2))(p, m), wave),
    Promise("dualpipe_v", dualpipe_v_makespan, lambda p, m, r: min(2 * p + 1, 2 * m, m + 1 + r), wave),
    Promise("dualpipe", dualpipe_makespan, lambda p, m, r: min(p + 1, m, m // 2 + 1 + min(r, p - 1 - r)),
            both_ways, ranks=(2, 4, 6), microbatches=range(2, 15, 2)),
]  # fmt: skip

each = pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.id)


def test_every_builder_makes_a_promise() -> None:
    assert {promise.name for promise in PROMISES} == BUILDERS.keys(), "write its line in PROMISES"


def test_every_builder_is_run_on_models() -> None:
    assert BUILDERS.keys() - {"inference"} <= FORMS.keys(), "write its line in tests/support/schedules.py"


@each
def test_it_conforms(promise: Promise) -> None:
    check_builder(
        BUILDERS[promise.name],
        ranks=promise.ranks,
        microbatches=promise.microbatches,
        placement=promise.placement,
        **promise.options,
    )


@each
def test_it_takes_as_long_and_holds_as_much_as_promised(promise: Promise) -> None:
    for ranks, microbatches in promise.sizes():
        makespan = promise.makespan(ranks, microbatches)
        peaks = [promise.peak(ranks, microbatches, rank) for rank in range(ranks)]
        if (makespan, peaks[0]) != (None, None):
            timeline = simulate(promise.build(ranks, microbatches))
            assert makespan in (None, timeline.makespan)
            assert peaks[0] is None or timeline.peak_live == tuple(peaks)


# how long rank 0 idles, for each rank behind it
IDLE: dict[str, Callable[[float, float, float], float]] = {
    "gpipe": lambda f, i, w: f + i + w,
    "1f1b": lambda f, i, w: f + i + w,
    "1f1b zero_bubble=True": lambda f, i, w: f + i,
    "zb_h1": lambda f, i, w: f + i - w,
}


@pytest.mark.parametrize("promise", [each for each in PROMISES if each.id in IDLE], ids=lambda each: each.id)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1.25, 0.75), (2, 2.5, 1), (1, 2, 0.2), (3, 2, 2)])
def test_rank_0_idles_as_the_papers_say(promise: Promise, f: float, i: float, w: float) -> None:
    for ranks in range(2, 8):
        for microbatches in (ranks, ranks + 1, 3 * ranks):
            timeline = simulate(promise.build(ranks, microbatches), Costs(f, i, w))
            work, idle = microbatches * (f + i + w), (ranks - 1) * IDLE[promise.id](f, i, w)
            assert timeline.makespan == pytest.approx(work + idle)
            assert timeline.bubble == pytest.approx(idle / (work + idle))


@pytest.mark.parametrize(
    ("name", "other"),
    [("gpipe", "looped_bfs"), ("1f1b", "interleaved_1f1b"), ("zb_h1", "interleaved_zero_bubble")],
)
def test_with_one_stage_a_rank_it_is_another_schedule(name: str, other: str) -> None:
    for ranks, microbatches in PROMISES[0].sizes():
        looped = BUILDERS[other](ranks=ranks, microbatches=microbatches, stages_per_rank=1)
        assert looped.programs == BUILDERS[name](ranks=ranks, microbatches=microbatches).programs


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_no_rank_pauses_from_twice_p_minus_1_microbatches_on(name: str) -> None:
    for ranks in range(1, 9):
        for microbatches in (2 * ranks - 1, 2 * ranks, 5 * ranks):
            timeline = simulate(BUILDERS[name](ranks=ranks, microbatches=microbatches))
            assert timeline.rank_inner_bubble == pytest.approx((0.0,) * ranks)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("interleaved_1f1b", torchs.ScheduleInterleaved1F1B),
     ("interleaved_zero_bubble", torchs.ScheduleInterleavedZeroBubble)],
)  # fmt: skip
def test_where_torch_has_it_it_is_torchs_order(name: str, theirs: type[Any]) -> None:
    for ranks, microbatches in PROMISES[0].sizes():
        for v in (2, 3) if torch_interleaves(ranks, microbatches) else ():
            ours = BUILDERS[name](ranks=ranks, microbatches=microbatches, stages_per_rank=v)
            assert ours.programs == torch_order(theirs, ranks, microbatches, v).programs


@pytest.mark.parametrize("ranks", range(1, 9))
def test_dualpipe_v_is_torchs_order(ranks: int) -> None:
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks):
        ours = BUILDERS["dualpipe_v"](ranks=ranks, microbatches=microbatches)
        theirs = torch_order(torchs.ScheduleDualPipeV, ranks, microbatches)
        assert (ours.programs, ours.overlaps) == (theirs.programs, theirs.overlaps)


GOLDEN = """
gpipe ranks=2 microbatches=3
    rank 0 | F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
    rank 1 | .  F0 F1 F2 B0 B0 B1 B1 B2 B2 .  .

gpipe ranks=3 microbatches=1
    rank 0 | F0 .  .  .  .  .  .  B0 B0
    rank 1 | .  F0 .  .  .  B0 B0 .  .
    rank 2 | .  .  F0 B0 B0 .  .  .  .

looped_bfs ranks=2 microbatches=3
    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B0 2B0 2B1 2B1 2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
    rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B0 3B1 3B1 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2 .   .

inference ranks=2 microbatches=3 stages_per_rank=2
    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2F2 .
    rank 1 | .   1F0 1F1 3F0 3F1 1F2 .   3F2

1f1b ranks=2 microbatches=4
    rank 0 | F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
    rank 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .

1f1b ranks=4 microbatches=5
    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 .  B2 B2 .  B3 B3 .  B4 B4
    rank 1 | .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4 .  .
    rank 2 | .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .  .  .
    rank 3 | .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .  .  .

1f1b ranks=4 microbatches=2
    rank 0 | F0 F1 .  .  .  .  .  .  .  .  B0 B0 .  B1 B1
    rank 1 | .  F0 F1 .  .  .  .  .  B0 B0 .  B1 B1 .  .
    rank 2 | .  .  F0 F1 .  .  B0 B0 .  B1 B1 .  .  .  .
    rank 3 | .  .  .  F0 B0 B0 F1 B1 B1 .  .  .  .  .  .

1f1b ranks=1 microbatches=2
    rank 0 | F0 B0 B0 F1 B1 B1

1f1b ranks=3 microbatches=4 zero_bubble=True
    rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 .  I2 W2 .  I3 W3
    rank 1 | .  F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 .  I3 W3 .
    rank 2 | .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 .  .

interleaved_1f1b ranks=2 microbatches=3
    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 2B0 .   2B1 2B1 .   2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
    rank 1 | .   1F0 1F1 1F2 3F0 3B0 3B0 3F1 3B1 3B1 3F2 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2 .   .

interleaved_1f1b ranks=2 microbatches=3 microbatch_group_size=2
    one microbatch alone in the last group: its second lap waits for its first
    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 2B0 .   2B1 2B1 2F2 0B0 0B0 0B1 0B1 .   2B2 2B2 .   .   0B2 0B2
    rank 1 | .   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1B1 1B1 3F2 3B2 3B2 .   .   1B2 1B2 .   .

interleaved_zero_bubble ranks=2 microbatches=3
    rank 0 | 0F0 0F1 0F2 2F0 2F1 .   2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1 | .   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2

zb_h1 ranks=4 microbatches=6
    rank 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    rank 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

zb_h2 ranks=2 microbatches=4
    rank 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .
    rank 1 | .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

zb_h2 ranks=3 microbatches=3
    rank 1 defers one weight gradient instead of two: all three would hold up the gradients
    rank 0 | F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
    rank 1 | .  F0 F1 F2 I0 .  I1 W0 I2 W1 W2
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2

hanayo ranks=2 microbatches=3
    rank 0 | 0F0 0F1 0F2 3F0 3B0 3B0 3F1 3B1 3B1 .   0B0 0B0 3F2 3B2 3B2 0B1 0B1 .   .   0B2 0B2
    rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 1B0 1B0 2F2 2B1 2B1 1B1 1B1 2B2 2B2 1B2 1B2 .   .

hanayo ranks=2 microbatches=1 waves=2
    rank 0 | 0F0 .   .   3F0 4F0 .   .   7F0 7B0 7B0 .   .   .   .   4B0 4B0 3B0 3B0 .   .   .   .   0B0 0B0
    rank 1 | .   1F0 2F0 .   .   5F0 6F0 .   .   .   6B0 6B0 5B0 5B0 .   .   .   .   2B0 2B0 1B0 1B0 .   .

zb_v ranks=2 microbatches=3
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

v_half ranks=2 microbatches=3
    rank 0 | 0F0 0F1 .   3F0 3I0 3F1 3W0 0F2 0I0 3I1 0W0 3F2 3I2 0I1 3W1 0I2 3W2 0W1 0W2
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

v_min ranks=2 microbatches=3
    rank 0 | 0F0 0F1 .   3F0 3I0 3F1 3I1 0I0 3W0 0F2 0I1 3W1 0W0 3F2 3I2 0W1 3W2 0I2 0W2
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1F2 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2
"""


def rows(drawing: str) -> list[str]:
    """The rows of the ranks."""
    return [line.strip() for line in drawing.splitlines() if line.strip().startswith("rank ") and "|" in line]


@pytest.mark.parametrize("golden", GOLDEN.strip().split("\n\n"), ids=lambda golden: golden.partition("\n")[0])
def test_golden(golden: str) -> None:
    head, _, drawing = golden.partition("\n")
    name, *sizes = head.split()
    options = {key: json.loads(value.lower()) for key, value in (size.split("=") for size in sizes)}
    assert rows(render(BUILDERS[name](**options))) == rows(drawing)


@pytest.mark.parametrize(
    ("name", "sizes", "programs"),
    [
        ("1f1b", {"ranks": 3, "microbatches": 4, "paired": True}, [  # the drawing in the docstring
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
            "1F0 1F1 1F2 (1F3;1B0) 1B1 1B2 1B3",
            "2F0 (2F1;2B0) (2F2;2B1) (2F3;2B2) 2B3",
        ]),
        ("dualpipe", {"ranks": 2, "microbatches": 8}, [
            "0F0 3F4 0F1 3B4 (3F5;0B0) (0F2;3B5) (3F6;0B1) (0F3;3B6) (3F7;0B2) 3B7 0I3 0W3",
            "2F4 1F0 2F5 1B0 (1F1;2B4) (2F6;1B1) (1F2;2B5) (2F7;1B2) (1F3;2B6) 1B3 2I7 2W7",
        ]),
        ("dualpipe_v", {"ranks": 2, "microbatches": 4}, [
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3",
            "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3",
        ]),
    ],
)  # fmt: skip
def test_golden_with_pairs(name: str, sizes: dict[str, Any], programs: list[str]) -> None:
    assert str(BUILDERS[name](**sizes)).replace("OVERLAP_F_B", "").splitlines() == programs
