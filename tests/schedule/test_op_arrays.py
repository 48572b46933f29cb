"""What is looked up in arrays, against one op at a time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings

from penstock.schedule import Schedule, build, verify
from support.programs import valid


@settings(max_examples=60, deadline=None)
@given(valid())
def test_the_arrays_and_the_schedule_have_the_same_dependencies(schedule: Schedule) -> None:
    arrays = verify(schedule).arrays
    for at, op in enumerate(arrays.ops):
        needed = [int(column[at]) for column in (arrays.own, arrays.source) if column[at] >= 0]
        assert tuple(arrays.ops[other] for other in needed) == schedule.predecessors(op)
        source = schedule.source(op)
        assert source is None or schedule.taker(source) == op
        hosts = schedule.placement.rank_of
        assert arrays.crosses[at] == (source is not None and hosts[source.stage] != hosts[op.stage])
    taken = {schedule.source(op) for op in arrays.ops} - {None}
    assert taken == {op for op in arrays.ops if schedule.taker(op) is not None}


def test_as_many_ops_wait_as_ranks_not_as_microbatches() -> None:
    """The order is found in long stretches: the ranks of 1F1B alternate by rounds, not by single ops."""
    proof = verify(build("interleaved_1f1b", ranks=8, microbatches=64, stages_per_rank=2))
    arrays, order = proof.arrays, proof.order
    switches = sum(arrays.rank[one] != arrays.rank[other] for one, other in pairwise(order))
    assert sorted(order) == list(range(len(order)))
    assert switches < len(order) / 2
