"""Activation offloading on paper: what leaves a rank and when, the proof of it, and its time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule import Costs, Op, Schedule, build, simulate, verify
from penstock.schedule.builders.gpipe import forwards
from penstock.schedule.offload import HostCopies, HostCopy, host_copies, offloaded, verify_copies
from penstock.schedule.ops import loop
from support.programs import valid
from support.refusals import refuses


def grid(program: Sequence[Op], copies: HostCopies) -> list[str]:
    """One line for each op: what is done in front of it, and the op."""
    return [" ".join(map(str, (*steps, op))) for op, steps in zip(program, copies, strict=True)]


def test_golden() -> None:
    schedule = build("1f1b", ranks=4, microbatches=4)
    copies = host_copies(schedule)
    assert grid(schedule.programs[0], copies[0]) == [
        "0F0",
        "offload 0F0 0F1",
        "offload 0F1 release 0F0 0F2",
        "offload 0F2 release 0F1 reload 0F0 0F3",
        "offload 0F3 release 0F2 reload 0F1 restore 0F0 0B0",
        "release 0F3 reload 0F2 restore 0F1 0B1",
        "reload 0F3 restore 0F2 0B2",
        "restore 0F3 0B3",
    ]
    assert grid(schedule.programs[1], copies[1]) == [
        "1F0",  # it stays, as 1F3 does: it would be back before it is gone
        "1F1",
        "offload 1F1 1F2",
        "offload 1F2 release 1F1 1B0",
        "release 1F2 reload 1F1 1F3",
        "reload 1F2 restore 1F1 1B1",
        "restore 1F2 1B2",
        "1B3",
    ]
    assert offloaded(copies) == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)}


def test_copies_that_get_the_time_of_two_ops() -> None:
    schedule = build("gpipe", ranks=1, microbatches=6)
    assert grid(schedule.programs[0], host_copies(schedule, ahead=2)[0])[:8] == [
        "0F0",
        "offload 0F0 0F1",
        "offload 0F1 0F2",
        "offload 0F2 release 0F0 0F3",
        "offload 0F3 release 0F1 reload 0F0 0F4",
        "offload 0F4 release 0F2 reload 0F1 0F5",
        "offload 0F5 release 0F3 reload 0F2 restore 0F0 0B0",
        "release 0F4 reload 0F3 restore 0F1 0B1",
    ]


def test_forwards_alone_offload_nothing() -> None:
    assert not offloaded(host_copies(forwards(loop(2), 8)))


@given(valid(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_whatever_the_schedule_all_that_leaves_comes_back(schedule: Schedule, ahead: int) -> None:
    proof, copies = verify(schedule), host_copies(schedule, ahead)
    verify_copies(proof, copies)
    costs = Costs(activation=5.0, offloaded=4.0, offload_ahead=ahead)
    slow = simulate(schedule, replace(costs, host_bandwidth=0.5))
    plain, fast = simulate(schedule, Costs(activation=5.0)), simulate(schedule, costs)
    # the link's speed changes when, and not how much
    assert slow.peak_memory == fast.peak_memory
    assert all(a <= b for a, b in zip(fast.peak_memory, plain.peak_memory, strict=True))
    assert fast.makespan == plain.makespan <= slow.makespan
    assert fast.stalled == (0.0,) * schedule.ranks


# ---- the proof


def broken(change: str) -> list[str]:
    """The violations after a change of rank 0's copies: "STEP 0Fi from AT to AT"; a place may be -."""
    schedule = build("1f1b", ranks=4, microbatches=4)
    copies = [list(map(list, rank)) for rank in host_copies(schedule)]
    step, forward, _, before, _, after = change.split()
    moved = HostCopy(step, *Op.parse(forward)[::2])  # type: ignore[arg-type]
    if before != "-":
        copies[0][int(before)].remove(moved)
    if after != "-":
        copies[0][int(after)].insert(0, moved)
    with pytest.raises(ScheduleError) as caught:
        verify_copies(verify(schedule), copies)
    return [str(violation) for violation in caught.value.violations]


ALL = ", and not offload, release, reload, restore"


@pytest.mark.parametrize(("change", "violation"), [
    ("reload 0F0 from 3 to -", f": 0F0: its steps are offload, release, restore{ALL}"),
    ("reload 0F0 from - to 4", f": 0F0: its steps are offload, release, reload, reload, restore{ALL}"),
    ("reload 0F0 from 3 to 1", f": 0F0: its steps are reload, offload, release, restore{ALL}"),
    ("restore 0F0 from 4 to 5",
     ", position 5: 0F0: restore: not between its forward at 0 and its backward at 4"),
    ("offload 0F1 from 2 to 1",
     ", position 1: 0F1: offload: not between its forward at 1 and its backward at 5"),
    ("offload 1F0 from - to 1", ": 1F0: offload: no forward on this rank, or no backward"),
])  # fmt: skip
def test_copies_out_of_order_are_refused(change: str, violation: str) -> None:
    assert broken(change) == [f"rank 0{violation}"]


def test_copies_of_another_schedule_are_refused() -> None:
    proof = verify(build("1f1b", ranks=4, microbatches=4))
    with refuses(ScheduleError, "schedule '1f1b'", "2 ranks, for 4"):
        verify_copies(proof, host_copies(build("1f1b", ranks=2, microbatches=4)))
    with refuses(ScheduleError, rule="host copies in front of 12 ops, and it has 8"):
        verify_copies(proof, host_copies(build("1f1b", ranks=4, microbatches=6)))


def test_what_waits_in_host_memory_is_not_held() -> None:
    """Of GPipe's 8 microbatches three are on the device, computed or copied, and of the others 1 of 5."""
    schedule = build("gpipe", ranks=2, microbatches=8)
    plain = simulate(schedule, Costs(activation=5.0, buffer=1.0))
    timeline = simulate(schedule, Costs(activation=5.0, buffer=1.0, offloaded=4.0))
    assert plain.peak_memory[0] - timeline.peak_memory[0] == 5 * 4
    assert timeline.memory[0][-1][1] == 0  # all that left came back, and was freed


@pytest.mark.parametrize(("wrong", "value", "rule"), [
    ({"host_bandwidth": 0.0}, "host_bandwidth=0.0", "divides bytes"),
    ({"offload_ahead": 0}, "offload_ahead=0", "number of ops"),
    ({"offloaded": 1.0, "exchange": 0.5}, "offloaded=..., exchange=...", "not simulated"),
])  # fmt: skip
def test_costs_that_cannot_be(wrong: Any, value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        Costs(**wrong)
