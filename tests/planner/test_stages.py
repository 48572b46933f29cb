"""Stages of parts that are made up, added by hand."""

from __future__ import annotations

import pytest

from penstock.parallel.axes import Axes
from penstock.planner.communication import all_reduce, groups
from penstock.planner.roofline import op_seconds
from penstock.planner.stages import Parts
from penstock.planner.tracing import Measurement
from penstock.planner.traffic import Collective, Traffic
from penstock.planner.work import ModelWork, OpWork, PartBytes, PartWork
from support.planning import cluster

HOST = cluster()
ACROSS = groups(2, Axes(tp=2), HOST)
SENT = Collective("tp", "all_reduce", 1e6)


def part(size: float, nbytes: PartBytes, layer: bool) -> PartWork:
    def op(times: float) -> tuple[OpWork, ...]:
        return (OpWork("matmul", "bfloat16", size * times, 1e3),)

    return PartWork(op(1), op(2), op(1.5), op(1.75), op(1) if layer else (), nbytes)


LAYER = part(1e12, PartBytes(10, 4, 13, 15, 2, 16, 1), layer=True)
EMBEDDING = part(1e9, PartBytes(3, 1, 4, 5, 3, 5, 1), layer=False)
HEAD = part(2e12, PartBytes(5, 2, 30, 40, 5, 40, 0), layer=False)
WORK = ModelWork((LAYER,), (0, 0, 0), EMBEDDING, HEAD)
PARTS = Parts.of(Measurement(WORK, 7), Traffic(((SENT, SENT._replace(backward=True)),), (), ()), ACROSS, HOST)


def test_an_op_takes_its_parts_and_their_collectives() -> None:
    first, last = PARTS.stages([range(2), range(2, 3)])
    once = all_reduce(1e6, ACROSS["tp"], HOST)
    layer, embedding, head = (op_seconds(work.forward[0], HOST.device) for work in (LAYER, EMBEDDING, HEAD))
    assert first.forward == pytest.approx(embedding + 2 * (layer + once))
    assert last.forward == pytest.approx(layer + once + head)
    assert first.recomputed == pytest.approx(2 * (layer + once))
    assert first.input_grad > first.weight_grad > first.forward
    assert first.within(0.5) == {"tp": pytest.approx(2 * 2 * once + 0.5 * 2 * once)}
    assert [len(stage.layers) for stage in (first, last)] == [2, 1]


def test_a_whole_backward_adds_to_the_gradients_of_all_microbatches_but_the_first() -> None:
    stage = PARTS.stages([range(2), range(2, 3)])[1]
    added = sum(
        op_seconds(part.whole_grad[0], HOST.device) - op_seconds(part.weight_grad[0], HOST.device)
        for part in (LAYER, HEAD)
    )
    assert added > 0
    assert stage.grad_of(splits=True, microbatches=4) == stage.weight_grad
    assert stage.grad_of(splits=False, microbatches=4) == pytest.approx(stage.weight_grad + added * 3 / 4)
    assert stage.grad_of(splits=False, microbatches=1) == stage.weight_grad


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_of_overlapped_collectives_and_the_products_of_a_part_the_longer_counts(factor: float) -> None:
    """Half as long as the products of F, I and W, the collectives are hidden; thrice as long, a third is."""
    works = [LAYER.forward, LAYER.input_grad, LAYER.weight_grad]
    products = sum(op_seconds(ops[0], HOST.device) for ops in works)
    bandwidth = 1e9 / (all_reduce(2e9, ACROSS["tp"], HOST) - all_reduce(1e9, ACROSS["tp"], HOST))
    latency = all_reduce(1e9, ACROSS["tp"], HOST) - 1e9 / bandwidth
    once = SENT._replace(nbytes=(factor * products / 2 - latency) * bandwidth)
    sent = Traffic(((once, once._replace(backward=True)),), (), ())
    plain, overlapped = (
        Parts.of(Measurement(WORK, 7), sent, ACROSS, HOST, axes).kinds[0] for axes in ((), ("tp",))
    )
    assert plain.total(False) == pytest.approx((1 + factor) * products)
    assert overlapped.total(False) == pytest.approx(max(1.0, factor) * products)
    assert Parts.of(Measurement(WORK, 7), sent, ACROSS, HOST, ("cp", "ep")).kinds[0] == plain


def test_a_split_counts_what_runs_again() -> None:
    kept, again = PARTS.layer_costs(False), PARTS.layer_costs(True)
    assert again.embedding == kept.embedding
    assert again.layers[0] == pytest.approx(kept.layers[0] + PARTS.kinds[0].recomputed)
    assert PARTS.whole(False) == pytest.approx(sum(kept.layers) + kept.embedding + kept.head)


def test_a_stage_holds_what_its_parts_keep_and_the_peak_of_one() -> None:
    first, last = (stage.nbytes(False, split=True) for stage in PARTS.stages([range(2), range(2, 3)]))
    assert (first.activation, first.for_weight, first.sent) == (3 + 10 + 10, 1 + 4 + 4, 1)
    assert first.forward_peak == 3 + 10 + 13  # the second layer's forward
    assert first.backward_peak == 3 + 10 + 15  # the second layer's backward: nothing waits for W yet
    assert (last.forward_peak, last.backward_peak) == (10 + 30, 10 + 40)
    again = PARTS.stages([range(2), range(2, 3)])[0]
    split = again.nbytes(True, split=True)
    assert (split.activation, split.backward_peak) == (3 + 2 + 2, 3 + 16 + 4)  # the first layer's
    whole = again.nbytes(True, split=False, shared=100)
    assert (whole.activation, whole.backward_peak, whole.for_weight) == (107, 100 + 3 + 2 + 16, 0)
