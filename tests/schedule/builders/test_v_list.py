"""The list scheduler that zb_v, v_half and v_min share."""

from collections.abc import Callable
from math import inf

import pytest

from penstock.schedule import Costs, Schedule, simulate, verify
from penstock.schedule.builders import v_list

# _repeated is replaced, so that no steady state is repeated
from penstock.schedule.builders.v_list import (
    DispatchRule,
    TimedPrograms,
    VDurations,
    _repeated,
    by_block,
    ending_early,
    in_order,
    run,
    schedule,
)
from penstock.schedule.builders.v_schedules import v_half, v_min, zb_v

RANKS, MICROBATCHES = 3, 5
COSTS = Costs(
    forward=[1, 0.5, 2, 1, 0.25, 1.5],
    input_grad=[[1.0 + i / 4 for i in range(MICROBATCHES)]] * 6,
    weight_grad=0.75,
    communication=0.125,
    bytes=[1, 2, 3, 4, 5, 6],
    bandwidth=8,
)
WORK = VDurations.of(RANKS, MICROBATCHES, COSTS)
LIMITS = [4, 6, 5]


def rule(lead: float = inf) -> DispatchRule:
    return by_block(WORK, spread=1.5, gap=0.25, lead=lead)


@pytest.mark.parametrize("patience", [0.0, 0.5, 1.0])
def test_it_plans_what_simulate_predicts(patience: float) -> None:
    found = run(WORK, LIMITS, rule(), patience)
    built = schedule("built", WORK, found.programs)
    timeline = simulate(built, COSTS)
    assert timeline.makespan == pytest.approx(found.makespan, rel=1e-12)
    assert timeline.extent == pytest.approx(found.extent, rel=1e-12)
    assert all(live <= limit for live, limit in zip(verify(built).peak_live, LIMITS, strict=True))


def test_a_program_run_again_is_the_same() -> None:
    found = run(WORK, LIMITS, rule())
    order = in_order([[slot for slot, _ in slots] for slots in found.programs])
    assert run(WORK, LIMITS, order, patience=None) == found


# _repeated is replaced, so that no steady state is repeated
@pytest.mark.parametrize("build", [zb_v, v_half, v_min])
def test_a_steady_state_repeated_is_the_whole_run(
    build: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(ranks, count) for ranks in (*range(1, 8), 12) for count in (3 * ranks + 1, 5 * ranks)]
    repeated = [build(*size) for size in sizes]
    monkeypatch.setattr(v_list, "_repeated", lambda rule, work: rule(work))
    assert repeated == [build(*size) for size in sizes]


def test_without_a_steady_state_the_rule_runs_on_all_microbatches() -> None:
    """All forwards first: the middle of no program has every op of an interval."""
    work = VDurations.of(2, 20, Costs())

    def all_forwards_first(work: VDurations) -> TimedPrograms:
        orders = [[slot] * work.microbatches for slot in range(4)]
        return run(work, [99] * 2, in_order([[slot for order in orders for slot in order]] * 2))

    assert _repeated(all_forwards_first, work) == all_forwards_first(work)


def test_an_order_that_does_not_fit_in_memory_gets_stuck() -> None:
    forwards_first = [[0] * MICROBATCHES + [1] * MICROBATCHES + [2] * MICROBATCHES + [3] * MICROBATCHES]
    assert run(WORK, [9] * RANKS, in_order(forwards_first * RANKS)).makespan == inf
    assert run(WORK, [10] * RANKS, in_order(forwards_first * RANKS)).makespan < inf


@pytest.mark.parametrize("limit", [2, 3])
def test_no_rank_gets_stuck_that_may_look_ahead_without_end(limit: int) -> None:
    found = run(WORK, [limit] * RANKS, rule())
    assert max(verify(schedule("tight", WORK, found.programs)).peak_live) <= limit


def test_a_patient_rank_waits_for_an_input_rather_than_begin_a_weight_gradient() -> None:
    """On rank 0, 3I0 ends at 5; the input of 3F1 is there at 5.5, and 3W0 takes a whole unit."""
    work = VDurations.of(2, 2, Costs(forward=[1, 1, [1, 1.5], 1]))
    orders = [[0, 0, 1, 2, 1, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3]]
    eager, patient = (run(work, [4, 4], in_order(orders), patience).programs[0] for patience in (0.4, 0.6))
    assert eager[3:6] == [(2, 0), (4, 0), (1, 1)]
    assert patient[3:6] == [(2, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("of_rank_0", "waits"), [((0.4, 0.4), False), ((0.6, 0.4), False), ((0.4, 0.6), True), ((0.6, 0.6), True)]
)
def test_a_rank_has_another_patience_once_all_microbatches_have_entered(
    of_rank_0: tuple[float, float], waits: bool
) -> None:
    """As above; both microbatches have entered rank 0 by then."""
    work = VDurations.of(2, 2, Costs(forward=[1, 1, [1, 1.5], 1]))
    orders = in_order([[0, 0, 1, 2, 1, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3]])
    program = run(work, [4, 4], orders, [of_rank_0, (0.0, 0.0)]).programs[0]
    assert program[4] == ((1, 1) if waits else (4, 0))


def test_rank_0_fills_its_last_waits_with_weight_gradients() -> None:
    """Its order has three W behind its last I, 0I1. Two of them fit into the wait for that one's input."""
    work = VDurations.of(2, 2, Costs(input_grad=[1, 2, 1, 1]))
    orders = [[0, 0, 1, 2, 4, 1, 2, 3, 3, 4, 5, 5], [0, 1, 0, 1, 2, 3, 4, 2, 3, 5, 4, 5]]
    as_listed = run(work, [4, 4], in_order(orders), None)
    early = run(work, [4, 4], ending_early(orders, 2), None)
    assert early.programs[1] == as_listed.programs[1]
    assert early.extent < as_listed.extent
    assert early.programs[0].index((5, 0)) < early.programs[0].index((3, 1))


def test_the_interval_is_the_work_of_the_busiest_rank() -> None:
    assert VDurations.of(2, 3, Costs(1, 2, [0, 0, 0, 4])).interval == 2 * (1 + 2) + 4
