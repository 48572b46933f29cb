import pytest

from penstock.schedule import Costs, Op, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.gpipe import gpipe
from penstock.schedule.builders.one_f_one_b import one_f_one_b, turns
from penstock.schedule.ops import loop
from support.orders import grid

SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 18)]


def peak(ranks: int, microbatches: int, rank: int) -> int:
    return min(ranks - rank, microbatches)


def paired_peak(ranks: int, microbatches: int, rank: int) -> int:
    return min(2 * (ranks - rank), microbatches)


def idle(ranks: int, costs: Costs, zero_bubble: bool) -> float:
    """How long rank 0 waits."""
    forward, input_grad, weight_grad = costs.forward, costs.input_grad, costs.weight_grad
    assert isinstance(forward, float)
    assert isinstance(input_grad, float)
    assert isinstance(weight_grad, float)
    return (ranks - 1) * (forward + input_grad + (0 if zero_bubble else weight_grad))


def test_golden() -> None:
    expected = """
        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 .  B2 B2 .  B3 B3 .  B4 B4
        rank 1 | .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4 .  .
        rank 2 | .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .  .  .
        rank 3 | .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .  .  .
        """
    assert grid(render(one_f_one_b(4, 5))) == grid(expected)


def test_golden_with_zero_bubble() -> None:
    expected = """
        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 .  I2 W2 .  I3 W3
        rank 1 | .  F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 .  I3 W3 .
        rank 2 | .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 .  .
        """
    assert grid(render(one_f_one_b(3, 4, zero_bubble=True))) == grid(expected)


@pytest.mark.parametrize("zero_bubble", [False, True])
def test_conforms(zero_bubble: bool) -> None:
    check_builder(
        one_f_one_b,
        ranks=range(1, 7),
        microbatches=range(1, 14),
        placement=loop,
        peak_live=peak,
        zero_bubble=zero_bubble,
    )


@pytest.mark.parametrize("zero_bubble", [False, True])
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 0.5, 0.25), Costs(2.0, 1.0, 3.0)])
def test_the_bubble(costs: Costs, zero_bubble: bool) -> None:
    for ranks, microbatches in SIZES:
        timeline = simulate(one_f_one_b(ranks, microbatches, zero_bubble), costs)
        expected = timeline.busy[0] + idle(ranks, costs, zero_bubble)
        assert timeline.makespan == pytest.approx(expected)
        assert timeline.bubble == pytest.approx(1 - timeline.busy[0] / expected)


def test_the_bubble_in_unit_times() -> None:
    for ranks, microbatches in SIZES:
        whole, split = (simulate(one_f_one_b(ranks, microbatches, zb)) for zb in (False, True))
        assert whole.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert whole.makespan == simulate(gpipe(ranks, microbatches)).makespan
        assert split.bubble == pytest.approx(2 * (ranks - 1) / (3 * microbatches + 2 * (ranks - 1)))


def test_zero_bubble_defers_no_weight_gradient() -> None:
    """Each W follows its I, so that not even a part of an activation outlives its place in 1F1B."""
    assert verify(one_f_one_b(4, 9, zero_bubble=True)).peak_deferred == (1, 1, 1, 1)


def test_no_send_needs_a_buffer() -> None:
    for ranks, microbatches in SIZES:
        for zero_bubble in (False, True):
            assert verify(one_f_one_b(ranks, microbatches, zero_bubble)).buffered_sends == 0


@pytest.mark.parametrize("defer_by", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("warm_up", [0, 1, 3, 5])
def test_turns_leave_nothing_out(warm_up: int, defer_by: int) -> None:
    forwards, gradients, weights = ([Op(0, kind, i) for i in range(3)] for kind in ("F", "I", "W"))
    ops = turns(forwards, gradients, warm_up, weights, defer_by)
    assert sorted(ops) == sorted([*forwards, *gradients, *weights])
    waiting = [
        sum(1 if op.kind == "I" else -1 if op.kind == "W" else 0 for op in ops[:at]) for at in range(10)
    ]
    assert max(waiting) == min(defer_by + 1, 3)


@pytest.mark.parametrize("zero_bubble", [False, True])
def test_conforms_paired(zero_bubble: bool) -> None:
    check_builder(
        one_f_one_b,
        ranks=range(1, 7),
        microbatches=range(1, 14),
        placement=loop,
        peak_live=paired_peak,
        zero_bubble=zero_bubble,
        paired=True,
    )


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_each_forward_after_the_warm_up_is_beside_a_backward(ranks: int, microbatches: int) -> None:
    schedule = one_f_one_b(ranks, microbatches, paired=True)
    for rank, program in enumerate(schedule.programs):
        warm_up = min(2 * (ranks - 1 - rank) + 1, microbatches)
        assert all(op.kind == "F" for op in program[:warm_up])
        beside = {pair.forward.microbatch for pair in schedule.overlaps if pair.forward.stage == rank}
        assert beside == set(range(warm_up, microbatches))
        assert all(p.forward.microbatch - p.backward.microbatch == warm_up for p in schedule.overlaps
                   if p.forward.stage == rank)  # fmt: skip


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_pairs_one_after_the_other_take_no_longer_than_1f1b(ranks: int, microbatches: int) -> None:
    paired, plain = one_f_one_b(ranks, microbatches, paired=True), one_f_one_b(ranks, microbatches)
    assert simulate(paired).makespan == simulate(plain).makespan


def test_pairs_turn_by_turn() -> None:
    """The drawing in the docstring: warm-up and cool-down in columns of one op, pairs in columns of two."""
    assert str(one_f_one_b(3, 4, paired=True)).splitlines() == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 (1F3;1B0)OVERLAP_F_B 1B1 1B2 1B3",
        "2F0 (2F1;2B0)OVERLAP_F_B (2F2;2B1)OVERLAP_F_B (2F3;2B2)OVERLAP_F_B 2B3",
    ]


def test_half_of_each_op_spent_waiting_is_hidden_in_the_steady_phase() -> None:
    """F of 2 and B of 4, half of each an exchange: a pair takes 4 where the two take 6."""
    costs = Costs(forward=2, input_grad=2, weight_grad=2, exchange=[1, 1, 1, 1])
    paired, plain = (simulate(one_f_one_b(4, 64, paired=p), costs).makespan for p in (True, False))
    warm_up_and_drain = 7 * (2 + 4) + 6
    assert plain == 6 * (64 + 3)
    assert paired <= 64 * 4 + warm_up_and_drain + 6
