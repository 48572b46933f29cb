"""A batch that only some ranks refuse: one typed error on all ranks, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Axes, Pipeline
from penstock.errors import BatchError
from support.covering import every
from support.mesh import batch, build_pipe, error_of, model_of, own_part, same_on_all
from support.pool import Pool
from support.reference import plain_step

Batch = dict[str, Tensor]
Call = Callable[[Pipeline, Batch], Any]


def cut(good: Batch, rows: slice = slice(None), tokens: slice = slice(None)) -> Batch:
    return {name: value[rows, tokens] for name, value in good.items()}


def halves(good: Batch) -> list[Batch]:
    return [cut(good, slice(at, None, 2)) for at in range(2)]


def unlabelled(good: Batch) -> Batch:
    return {"input_ids": good["input_ids"]}


def other(good: Batch) -> Batch:
    return {**good, "input_ids": (good["input_ids"] + 1) % 64}


# what a rank does that is to be refused, and in RIGHT what the others do meanwhile
WRONG: dict[str, Call] = {
    "labels": lambda pipe, good: pipe.step(unlabelled(good)),
    "labels of outputs": lambda pipe, good: pipe.evaluate(unlabelled(good), outputs=True),
    "outputs": lambda pipe, good: pipe.evaluate(good, outputs=lambda *_: {1, 2}, everywhere=True),
    "twice": lambda pipe, good: pipe.step(good, labels=good["labels"]),
    "nothing": lambda pipe, good: pipe.step(None),  # type: ignore[arg-type]
    "nothing to evaluate": lambda pipe, good: pipe.evaluate(None, outputs=True),  # type: ignore[call-overload]
    "a list": lambda pipe, good: pipe.step(halves(good)[:1]),
    "a list to evaluate": lambda pipe, good: pipe.evaluate([good] * 3),
    "forbidden": lambda pipe, good: pipe.step({**good, "use_cache": True}),
    "longer labels": lambda pipe, good: pipe.step({**good, "labels": good["labels"].repeat(1, 2)}),
    "flat labels": lambda pipe, good: pipe.step({**good, "labels": good["labels"][:, 0]}),
    "no rows": lambda pipe, good: pipe.step([good, cut(good, slice(0))]),
    "few rows": lambda pipe, good: pipe.step(cut(good, slice(1))),
    "few rows to evaluate": lambda pipe, good: pipe.evaluate(cut(good, slice(1))),
    "short": lambda pipe, good: pipe.step(cut(good, tokens=slice(3))),
    "short to evaluate": lambda pipe, good: pipe.evaluate(cut(good, tokens=slice(3))),
    "odd length": lambda pipe, good: pipe.step(cut(good, tokens=slice(7))),
    "split": lambda pipe, good: pipe.microbatches({**good, "position_ids": good["labels"][:1]}),
    "other data": lambda pipe, good: pipe.step(other(good)),
    "other data to evaluate": lambda pipe, good: pipe.evaluate(other(good)),
    "other order": lambda pipe, good: pipe.step({name: v.flip(0) for name, v in good.items()}),
    "other mask": lambda pipe, good: pipe.step({**good, "attention_mask": torch.ones_like(good["labels"])}),
}
RIGHT: dict[str, Call] = {
    "labels of outputs": lambda pipe, good: pipe.evaluate(good, outputs=True),
    "outputs": lambda pipe, good: pipe.evaluate(good, outputs=lambda *_: 1, everywhere=True),
    "nothing to evaluate": lambda pipe, good: pipe.evaluate(good, outputs=True),
    "a list": lambda pipe, good: pipe.step(halves(good)),
    "a list to evaluate": lambda pipe, good: pipe.evaluate(good),
    "few rows to evaluate": lambda pipe, good: pipe.evaluate(good),
    "short to evaluate": lambda pipe, good: pipe.evaluate(good),
    "split": lambda pipe, good: pipe.microbatches(good),
    "other data to evaluate": lambda pipe, good: pipe.evaluate(good),
}


def refused(
    ranks: int, axes: Axes | None, wrongs: list[tuple[str, tuple[int, ...]]], options: dict[str, Any]
) -> list[tuple[str, float]]:
    """For each call that the named processes alone get wrong: the error, and a good batch's loss after it."""
    pipe = build_pipe("llama", ranks, axes, options)
    good = own_part(batch(), *pipe.batch_part)
    found = []
    for wrong, by in wrongs:
        call = WRONG[wrong] if dist.get_rank() in by else RIGHT.get(wrong, lambda pipe, good: pipe.step(good))
        words = error_of(lambda: call(pipe, good))  # noqa: B023
        pipe.zero_grad()
        found.append((words, pipe.step(good).loss))
    pipe.close()
    return found


Table = dict[tuple[str, tuple[int, ...]], str]  # what is wrong, on which processes: the error on all of them
SECOND, LAST = (1, 3), (3,)  # the processes of the second part of the batch, and the last one alone
OF_PARTS: Table = {
    ("few rows", SECOND): "BatchError: a batch of 1 rows, given to process 1, 3: .* Give 2 rows or more",
    ("few rows to evaluate", SECOND): "accepted",  # in fewer microbatches
    ("a list", (0, 2)): "BatchError: microbatches: 1 on rank 0, 2; 2 on rank 1, 3: all parts",
    ("a list to evaluate", SECOND): "BatchError: a list of 3 microbatches, given to process 1, 3: ",
    (
        "labels",
        SECOND,
    ): r"BatchError: a batch of \['input_ids'\], given to process 1, 3: the loss reads",
    ("labels of outputs", SECOND): "BatchError: labels: given on rank 0, 2; none on rank 1, 3: ",
    ("labels of outputs", LAST): "BatchError: labels: given on rank 0-2; none on rank 3: ",
    ("outputs", SECOND): r"ShapeError: a result that cannot be sent \(.*\), on process 3: ",
    ("longer labels", SECOND): r"BatchError: labels of shape \[2, 24\], given to process 1, 3: .*\[2, 12\]",
    ("flat labels", SECOND): r"BatchError: labels of shape \[2\], given to process 1, 3: ",
    ("no rows", SECOND): "BatchError: microbatch 1, given to process 1, 3: it has no rows",
    ("twice", LAST): "BatchError: labels as an argument, given to process 3: the batch has it as well",
    ("nothing", LAST): "BatchError: a batch given as NoneType, given to process 3: ",
    ("nothing to evaluate", LAST): "BatchError: a batch given as NoneType, given to process 3: ",
    ("forbidden", LAST): "BatchError: 'use_cache' in a batch, given to process 3: ",
    (
        "split",
        LAST,
    ): "BatchError: .*position_ids: 1, on process 3: all tensors of a batch have the same length",
    ("other data", LAST): r"BatchError: process 1: .*; process 3: .* pipe.batch_part names",
    ("other data to evaluate", LAST): r"BatchError: process 1: .*; process 3: .* pipe.batch_part names",
    (
        "other mask",
        LAST,
    ): r"BatchError: process 1: .*; process 3: .*attention_mask int64\[4, 12\].* pipe.batch",
}
OF_CP: Table = {
    (
        "short",
        (0, 1),
    ): "BatchError: a microbatch of 3 tokens a row, given to process 0, 1: over cp=2 .* 4 tok",
    ("short to evaluate", (0, 1)): "BatchError: a microbatch of 3 tokens a row, given to process 0, 1: ",
    ("few rows", (2, 3)): "BatchError: a batch of 1 rows, given to process 2, 3: ",
    # rows in another order have the same sum
    ("other order", LAST): "BatchError: process 2: .*; process 3: .* all ranks of pp, cp and tp step on the",
    ("other mask", LAST): "BatchError: process 2: .*; process 3: .* all ranks of pp, cp and tp step on the",
}
OF_TP: Table = {
    (
        "other order",
        LAST,
    ): "BatchError: process 0: .*; process 1: .*; process 2: .*; process 3: .* pp, cp and",
    ("other mask", LAST): "BatchError: process 0: .*; process 1: .*; process 2: .*; process 3: ",
}
# found in the forward, it would leave the other part of the batch waiting for its weights
OF_SEQUENCE: Table = {
    ("odd length", (2, 3)): "BatchError: a sequence of 7 tokens with .* tp=2, given to process 2, 3: ",
}
ALONE: Table = {  # a pipeline that is all there is
    (
        "few rows",
        (1,),
    ): r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \(a batch of 1 rows: ",
    ("forbidden", (1,)): r"BatchError: rank 0: .*; rank 1: it refuses its batch \('use_cache' in a batch: ",
    ("nothing", (1,)): r"BatchError: rank 0: .*; rank 1: it refuses its batch \(a batch given as NoneType",
    ("labels of outputs", (1,)): "BatchError: rank 0: .* labels int64.*; rank 1: ",
    (
        "other order",
        (1,),
    ): "BatchError: rank 0: .*; rank 1: .* all ranks of a pipeline step on the same batch",
}
PADDED: Table = {
    ("few rows", (1,)): "BatchError: a batch of 1 rows, on process 1: it is to be split into 2 microbatch",
    ("nothing", (1,)): "BatchError: a batch given as NoneType, on process 1: ",
    ("forbidden", (1,)): "BatchError: 'use_cache' in a batch, on process 1: ",
}


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "axes", "options", "table"), every(3, [
    (2, Axes(dp_shard=2), {}, OF_PARTS),
    (1, Axes(dp_shard=2, cp=2), {}, OF_CP),
    (2, Axes(tp=2), {"shapes": "padded"}, OF_TP),
    (1, Axes(dp_shard=2, tp=2), {"sequence_parallel": True}, OF_SEQUENCE),
    (2, None, {}, ALONE),
    (2, None, {"shapes": "padded"}, PADDED),
]))  # fmt: skip
def test_a_wrong_batch_on_some_ranks_is_refused_on_all_and_the_next_is_taken(
    pool: Pool, ranks: int, axes: Axes | None, options: dict[str, Any], table: Table
) -> None:
    world = ranks * (1 if axes is None else axes.ranks_per_stage)
    expected = plain_step(model_of("llama"), batch())[0]
    everyone = pool.run(world, refused, ranks, axes, [*table], options)
    for wrong, message, *found in zip(table, table.values(), *everyone, strict=True):
        words = same_on_all([words for words, _ in found])
        assert re.match(message, words), (wrong, words)
        assert [loss for _, loss in found] == [pytest.approx(expected, rel=1e-10)] * world


class Short(nn.Module):
    """A stage that takes rows of up to 8 numbers, and says so when its edges are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > 8:
            raise BatchError(f"rows of {x.shape[-1]}", "they hold 8 numbers at most", "Cut them")
        return x * self.weight


class Declaring(Short):
    """The same, which says by arithmetic what goes over its edges."""

    def infer_outputs(self, microbatch: Any) -> Tensor:
        if microbatch["x"].shape[-1] > 8:
            raise BatchError("a declared row", "it holds 8 numbers at most", "Cut it")
        return torch.empty_like(microbatch["x"])

    infer_inputs = infer_outputs


def refused_edges(stages: list[type[nn.Module]]) -> list[tuple[str, float]]:
    """What a step says where the second part of the batch alone has rows that are too long."""
    found = []
    for stage in stages:
        pipe = Pipeline.from_provider(
            lambda info: stage(), ranks=2, schedule="1f1b", microbatches=2, timeout=30,  # noqa: B023
            axes=Axes(dp_shard=2), loss_fn=lambda output, part: output.square().mean(),
        )  # fmt: skip
        words = error_of(lambda: pipe.step({"x": torch.ones(4, 9 if pipe.batch_part[0] else 8)}))  # noqa: B023
        found.append((words, pipe.step({"x": torch.ones(4, 8)}).loss))
        pipe.close()
    return found


def test_a_shape_error_of_one_part_is_raised_by_all(pool: Pool) -> None:
    (short, loss), (declared, other_loss) = same_on_all(pool.run(4, refused_edges, [Short, Declaring]))
    assert loss == other_loss == 1.0
    assert short.startswith(
        "BatchError: rows of 9, given to process 1, 3: they hold 8 numbers at most. Cut them"
    )
    assert re.match(
        "ModelError: the shapes that stages 0 and 1 declare .*, on process 1, 3: .*a declared row",
        declared,
    )
