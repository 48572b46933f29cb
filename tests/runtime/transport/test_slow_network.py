"""An emulated network: what it delays, and where a timeline shows it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from benchmarks.slow_network import Network

from penstock.schedule import Costs, simulate
from penstock.schedule.choose import chosen_schedule
from support import jobs_channels as jobs
from support.pool import Pool

LATENCY, COMPUTE = 0.05, 0.02
CLOCK = 1e-3  # seconds that the stamp may lie before the op's end, where clocks are read


def test_a_delay_is_latency_and_size_over_bandwidth() -> None:
    assert Network().delay(10**9) == 0
    assert Network(latency=0.5).delay(10**9) == 0.5
    assert Network(0.5, bandwidth=100).delay(50) == 1.0


def test_a_message_is_held_back_until_it_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    network, sent = Network(latency=0.03), time.perf_counter_ns()
    network.hold_back(sent, 1)
    there = time.perf_counter_ns()
    assert there - sent >= 0.03e9
    monkeypatch.setattr(time, "sleep", pytest.fail)
    network.hold_back(there - 10**9, 1)  # long there: nothing to wait for


def timeline(pool: Pool, **options: Any) -> Any:
    """On rank 0, which knows all."""
    return pool.run(2, jobs.step_with, {"seconds": COMPUTE, **options})[0].timeline


def test_every_message_is_late_by_the_latency(pool: Pool) -> None:
    found = timeline(pool, microbatches=4, network=Network(LATENCY))
    ended = {span.op: span.end for span in found.spans}
    program = chosen_schedule("1f1b", 2, 4)
    for span in found.spans:
        for needed in program.predecessors(span.op):
            if needed.stage != span.op.stage:
                assert span.start >= ended[needed] + LATENCY - CLOCK


def test_waits_for_the_wire_and_for_the_peer_are_kept_apart(pool: Pool) -> None:
    """One microbatch: rank 0 stands while its result travels, rank 1 computes, and the gradient travels."""
    found = timeline(pool, microbatches=1, network=Network(LATENCY))
    first, second = found.idle
    assert LATENCY - CLOCK <= first.wire < LATENCY + 0.5
    # a rank that is busy with itself, on a full machine, comes to its wait later
    assert first.peer + first.runtime >= LATENCY + COMPUTE - 2 * CLOCK
    assert first.peer > first.runtime
    waits = {wait.rank: wait for wait in found.waits}
    assert waits[1].end - waits[1].turn >= LATENCY - CLOCK
    predicted = simulate(chosen_schedule("1f1b", 2, 1), Costs(
        forward=COMPUTE, input_grad=0.0, weight_grad=0.0, communication=LATENCY))  # fmt: skip
    assert found.makespan >= predicted.makespan - 4 * CLOCK
    assert second.wire < LATENCY  # its only wait is before its first op


def test_bandwidth_counts_the_bytes_on_the_wire(pool: Pool) -> None:
    nbytes = jobs.ROWS * jobs.WIDTH * 8
    found = timeline(pool, microbatches=1, network=Network(bandwidth=nbytes / LATENCY))
    assert found.idle[0].wire >= LATENCY - CLOCK
    narrow = timeline(pool, microbatches=1, wire_dtype=torch.bfloat16,
                      network=Network(bandwidth=nbytes / LATENCY))  # fmt: skip
    assert LATENCY / 4 - CLOCK <= narrow.idle[0].wire < found.idle[0].wire


@pytest.mark.parametrize("options", [{}, {"shapes": "exchanged"}])
def test_gradients_stay_as_they_are(pool: Pool, options: dict[str, Any]) -> None:
    for found in pool.run(2, jobs.step_with, {"network": Network(0.002, 1e6), **options}):
        jobs.assert_exact(found, 2, 4)
        assert all(wait.end >= wait.sent + 0.002 - CLOCK for wait in found.timeline.waits)
