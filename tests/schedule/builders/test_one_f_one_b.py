import pytest

from penstock.schedule import Costs, Op, simulate, verify
from penstock.schedule.builders.one_f_one_b import one_f_one_b, turns


def test_zero_bubble_defers_no_weight_gradient() -> None:
    """Each W follows its I, so that not even a part of an activation outlives its place in 1F1B."""
    assert verify(one_f_one_b(4, 9, zero_bubble=True)).peak_deferred == (1, 1, 1, 1)


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


def test_each_forward_after_the_warm_up_overlaps_a_backward() -> None:
    for ranks in range(1, 9):
        for microbatches in (1, ranks, 2 * ranks, 2 * ranks + 1, 17):
            schedule = one_f_one_b(ranks, microbatches, paired=True)
            for rank, program in enumerate(schedule.programs):
                warm_up = min(2 * (ranks - 1 - rank) + 1, microbatches)
                assert all(op.kind == "F" for op in program[:warm_up])
                pairs = {(forward.microbatch, backward.microbatch) for forward, backward in schedule.overlaps
                         if forward.stage == rank}  # fmt: skip
                assert pairs == {(i, i - warm_up) for i in range(warm_up, microbatches)}


def test_half_of_each_op_spent_waiting_is_hidden_in_the_steady_phase() -> None:
    """F of 2 and B of 4, half of each an exchange: a pair takes 4 where the two take 6."""
    costs = Costs(forward=2, input_grad=2, weight_grad=2, exchange=[1, 1, 1, 1])
    paired, plain = (simulate(one_f_one_b(4, 64, paired=p), costs).makespan for p in (True, False))
    warm_up_and_drain = 7 * (2 + 4) + 6
    assert plain == 6 * (64 + 3)
    assert paired <= 64 * 4 + warm_up_and_drain + 6
