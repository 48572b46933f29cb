"""The list scheduler that zb_v, v_half and v_min share."""

from collections.abc import Callable
from math import inf

import pytest

from penstock.schedule import Costs, Schedule, simulate, verify
from penstock.schedule.builders import v_list

# _repeated is replaced, so that no steady state is repeated
from penstock.schedule.builders.v_list import (
    Orders,
    TimedOrders,
    VRule,
    _repeated,
    by_block,
    ending_early,
    in_order,
    interval_of,
    legs_of,
    run,
    schedule,
    v_costs,
)
from penstock.schedule.builders.v_schedules import v_half, v_min, zb_v
from penstock.schedule.dispatch import OpCosts

RANKS, MICROBATCHES = 3, 5
COSTS = Costs(
    forward=[1, 0.5, 2, 1, 0.25, 1.5],
    input_grad=[[1.0 + i / 4 for i in range(MICROBATCHES)]] * 6,
    weight_grad=0.75,
    communication=0.125,
    bytes=[1, 2, 3, 4, 5, 6],
    bandwidth=8,
)
WORK = v_costs(RANKS, MICROBATCHES, COSTS)
LIMITS = [4, 6, 5]


def lines(ranks: int, *slots: list[int]) -> Orders:
    """Orders of legs 0 to 3, and 4 and 5 for the W of legs 2 and 3."""
    legs = [legs_of(ranks, rank) for rank in range(ranks)]
    return [
        [[*of_rank, of_rank[2] + 1, of_rank[3] + 1][slot] for slot in order]
        for of_rank, order in zip(legs, slots, strict=True)
    ]


def rule(lead: float = inf) -> VRule:
    return by_block(WORK, spread=1.5, gap=0.25, lead=lead)


@pytest.mark.parametrize("patience", [0.0, 0.5, 1.0])
def test_it_plans_what_simulate_predicts(patience: float) -> None:
    found = run(WORK, LIMITS, rule(), patience)
    built = schedule("built", WORK, found.orders)
    timeline = simulate(built, COSTS)
    assert timeline.makespan == pytest.approx(found.makespan, rel=1e-12)
    assert timeline.extent == pytest.approx(found.extent, rel=1e-12)
    assert all(live <= limit for live, limit in zip(verify(built).peak_live, LIMITS, strict=True))


def test_a_program_run_again_is_the_same() -> None:
    found = run(WORK, LIMITS, rule())
    assert run(WORK, LIMITS, in_order(found.orders), patience=None) == found


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
    work = v_costs(2, 20, Costs())

    def all_forwards_first(work: OpCosts) -> TimedOrders:
        order = [slot for slot in range(4) for _ in range(work.microbatches)]
        return run(work, [99] * 2, in_order(lines(2, order, order)))

    assert _repeated(all_forwards_first, work) == all_forwards_first(work)


def test_an_order_that_does_not_fit_in_memory_gets_stuck() -> None:
    forwards_first = [slot for slot in range(4) for _ in range(MICROBATCHES)]
    orders = lines(RANKS, *[forwards_first] * RANKS)
    assert run(WORK, [9] * RANKS, in_order(orders)).makespan == inf
    assert run(WORK, [10] * RANKS, in_order(orders)).makespan < inf


@pytest.mark.parametrize("limit", [2, 3])
def test_no_rank_gets_stuck_that_may_look_ahead_without_end(limit: int) -> None:
    found = run(WORK, [limit] * RANKS, rule())
    assert max(verify(schedule("tight", WORK, found.orders)).peak_live) <= limit


def test_a_patient_rank_waits_for_an_input_rather_than_begin_a_weight_gradient() -> None:
    """On rank 0, 3I0 ends at 5; the input of 3F1 is there at 5.5, and 3W0 takes a whole unit."""
    work = v_costs(2, 2, Costs(forward=[1, 1, [1, 1.5], 1]))
    orders = lines(2, [0, 0, 1, 2, 1, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3])
    eager, patient = (run(work, [4, 4], in_order(orders), patience).orders[0] for patience in (0.4, 0.6))
    assert eager[3:6] == lines(2, [2, 4, 1], [])[0]
    assert patient[3:6] == lines(2, [2, 1, 2], [])[0]


@pytest.mark.parametrize(
    ("of_rank_0", "waits"), [((0.4, 0.4), False), ((0.6, 0.4), False), ((0.4, 0.6), True), ((0.6, 0.6), True)]
)
def test_a_rank_has_another_patience_once_all_microbatches_have_entered(
    of_rank_0: tuple[float, float], waits: bool
) -> None:
    """As above; both microbatches have entered rank 0 by then."""
    work = v_costs(2, 2, Costs(forward=[1, 1, [1, 1.5], 1]))
    rule = in_order(lines(2, [0, 0, 1, 2, 1, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3]))
    order = run(work, [4, 4], rule, [of_rank_0, (0.0, 0.0)]).orders[0]
    assert order[4] == lines(2, [1 if waits else 4], [])[0][0]


def test_rank_0_fills_its_last_waits_with_weight_gradients() -> None:
    """Its order has three W behind its last I, 0I1. Two of them fit into the wait for that one's input."""
    work = v_costs(2, 2, Costs(input_grad=[1, 2, 1, 1]))
    orders = lines(2, [0, 0, 1, 2, 4, 1, 2, 3, 3, 4, 5, 5], [0, 1, 0, 1, 2, 3, 4, 2, 3, 5, 4, 5])
    as_listed = run(work, [4, 4], in_order(orders), None)
    early = run(work, [4, 4], ending_early(orders), None)
    assert early.orders[1] == as_listed.orders[1]
    assert early.extent < as_listed.extent
    first_w, last_i = lines(2, [5, 3], [])[0]
    assert early.orders[0].index(first_w) < len(early.orders[0]) - 1 - early.orders[0][::-1].index(last_i)


def test_the_interval_is_the_work_of_the_busiest_rank() -> None:
    assert interval_of(v_costs(2, 3, Costs(1, 2, [0, 0, 0, 4]))) == 2 * (1 + 2) + 4
