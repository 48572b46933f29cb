"""FLOPs of a Llama layer by hand, and what recomputation runs again."""

from __future__ import annotations

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.work import OpWork
from support.planning import LENGTH, workload

TOKENS = 2 * LENGTH
LINEAR = 2 * TOKENS * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)  # q, o; k, v; gate, up, down
ATTENTION = 2 * 4 * LENGTH * LENGTH * 64 // 2  # rows, two products, half of the pairs


def flops(ops: tuple[OpWork, ...], kind: str) -> float:
    return sum(op.flops * op.calls for op in ops if op.kind == kind)


def test_a_layer_has_the_flops_of_its_products() -> None:
    (layer,) = workload().work(Candidate(rows=2, length=LENGTH)).kinds
    assert flops(layer.forward, "matmul") == flops(layer.input_grad, "matmul") == LINEAR
    assert flops(layer.weight_grad, "matmul") == LINEAR
    assert flops(layer.forward, "attention") == ATTENTION
    assert flops(layer.input_grad, "attention") == 2.5 * ATTENTION
    assert flops(layer.weight_grad, "attention") == 0
    assert {op.dtype for op in layer.forward if op.flops} == {"bfloat16"}


def test_tp_and_cp_share_the_work() -> None:
    for axes in (Axes(tp=2), Axes(cp=2)):
        (layer,) = workload().work(Candidate(axes=axes, rows=2, length=LENGTH)).kinds
        assert flops(layer.forward, "matmul") == LINEAR / 2
        assert flops(layer.forward, "attention") == ATTENTION / 2


def test_recomputation_runs_the_forward_again_or_all_but_products() -> None:
    (full,) = workload().work(Candidate(rows=2, length=LENGTH, recomputed="full")).kinds
    (part,) = workload().work(Candidate(rows=2, length=LENGTH, recomputed="selective")).kinds
    assert flops(full.recomputed, "matmul") >= LINEAR * 0.8  # torch stops where all that was saved is there
    assert part.recomputed == tuple(op for op in full.forward if op.kind == "other")
    kept = full.nbytes
    assert kept.recomputed_activation < part.nbytes.recomputed_activation < kept.activation
    assert kept.recomputed_activation == TOKENS * 64 * 4 + LENGTH * 8  # its input, in float32, and positions
