"""The work of a model, beside the shapes of its matrices and what a step holds."""

from __future__ import annotations

from penstock.planner.work import ModelWork, OpWork, PartBytes, PartWork


def part(flops: float) -> PartWork:
    ops = (OpWork("matmul", "bfloat16", flops, 1.0),)
    return PartWork(ops, ops, ops, ops, PartBytes(0, 0, 0, 0, 0, 0, 0), 0)


def test_a_stage_has_the_embedding_where_it_begins_and_the_head_where_it_ends() -> None:
    dense, sparse, embedding, head = map(part, (1, 2, 3, 4))
    model = ModelWork((dense, sparse), (0, 1, 1), embedding, head)
    assert model.parts(range(1)) == (embedding, dense)
    assert model.parts(range(1, 2)) == (sparse,)
    assert model.parts(range(2, 3)) == (sparse, head)
    assert model.parts(range(3)) == (embedding, dense, sparse, sparse, head)
