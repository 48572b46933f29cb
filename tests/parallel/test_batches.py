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
from support.mesh import batch, build_pipe, error_of, model_of, own_part, same_on_all
from support.pool import Pool
from support.reference import plain_step


def refused_batches(
    family: str, ranks: int, axes: Axes, wrongs: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    """By what was wrong in the batch, what the step and the evaluation said; the loss of a good one after."""
    pipe = build_pipe(family, ranks, axes, options)
    part, _ = pipe.batch_part
    good = own_part(batch(), *pipe.batch_part)
    found: dict[str, Any] = {}
    for wrong in wrongs:
        given: Any = dict(good)
        if wrong == "few rows" and part:
            given = {name: value[:1] for name, value in good.items()}
        if wrong == "short" and part == 0:
            given = {name: value[:, :3] for name, value in good.items()}
        if wrong == "other data" and dist.get_rank() == dist.get_world_size() - 1:
            given["input_ids"] = (good["input_ids"] + 1) % 64
        if wrong == "list":
            halves = [{name: value[at::2] for name, value in good.items()} for at in range(2)]
            given = halves[: 2 if part else 1]
        found[wrong] = [error_of(lambda: pipe.step(given))]  # noqa: B023
        if wrong != "few rows":  # an evaluation makes fewer microbatches of it
            found[wrong].append(error_of(lambda: pipe.evaluate(given)))  # noqa: B023
        pipe.zero_grad()
        found[wrong].append(pipe.step(good).loss)
        if wrong == "few rows":
            found[wrong].append(pipe.evaluate(given).loss)
    pipe.close()
    return found


BATCHES: list[tuple[str, int, Axes, dict[str, Any], dict[str, str]]] = [
    ("llama", 2, Axes(dp_shard=2), {}, {
        "few rows": "BatchError: a batch of 1 rows, given to process 1, 3: .* Give 2 rows or more",
        "list": "BatchError: a list of 1 microbatches, given to process 0, 2: ",
        "other data": r"BatchError: process 1: .*; process 3: .* pipe.batch_part names",
    }),
    ("llama", 1, Axes(dp_shard=2, cp=2), {}, {
        "short": "BatchError: a microbatch of 3 tokens a row, given to process 0, 1: over cp=2 .* 4 tokens",
        "few rows": "BatchError: a batch of 1 rows, given to process 2, 3: ",
        "other data": "BatchError: process 2: .*; process 3: .* pipe.batch_part names",
    }),
    ("llama", 2, Axes(tp=2), {"shapes": "padded"}, {
        "other data": "BatchError: process 0: .*; process 1: .*; process 2: .*; process 3: ",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("family", "ranks", "axes", "options", "wrongs"), BATCHES)
def test_batches_are_refused_on_every_rank_alike(
    pool: Pool, family: str, ranks: int, axes: Axes, options: dict[str, Any], wrongs: dict[str, str]
) -> None:
    """And the next one is taken."""
    found = same_on_all(pool.run(4, refused_batches, family, ranks, axes, list(wrongs), options))
    expected = plain_step(model_of(family), batch())[0]
    for wrong, message in wrongs.items():
        words, *more = found[wrong]
        assert re.match(message, words), words
        if wrong == "few rows":
            assert more[0] == pytest.approx(expected, rel=1e-10)
        else:
            assert more[0].startswith("BatchError"), more
            assert more[1] == pytest.approx(expected, rel=1e-10)


Wrong = Callable[[Pipeline, dict[str, Tensor]], Any]  # what a rank does where it is to be refused


def unlabelled(good: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": good["input_ids"]}


WRONG: dict[str, Wrong] = {
    "labels": lambda pipe, good: pipe.step(unlabelled(good)),
    "labels of outputs": lambda pipe, good: pipe.evaluate(unlabelled(good), outputs=True),
    "outputs": lambda pipe, good: pipe.evaluate(good, outputs=lambda *_: {1, 2}, everywhere=True),
    "twice": lambda pipe, good: pipe.step(good, labels=good["labels"]),
    "nothing": lambda pipe, good: pipe.step(None),  # type: ignore[arg-type]
    "nothing to evaluate": lambda pipe, good: pipe.evaluate(None, outputs=True),  # type: ignore[call-overload]
    "a list to evaluate": lambda pipe, good: pipe.evaluate([good] * 3),
    "forbidden": lambda pipe, good: pipe.step({**good, "use_cache": True}),
    "longer labels": lambda pipe, good: pipe.step({**good, "labels": good["labels"].repeat(1, 2)}),
    "flat labels": lambda pipe, good: pipe.step({**good, "labels": good["labels"][:, 0]}),
    "no rows": lambda pipe, good: pipe.step([good, {name: value[:0] for name, value in good.items()}]),
    "few rows": lambda pipe, good: pipe.step({name: value[:1] for name, value in good.items()}),
    "odd length": lambda pipe, good: pipe.step({name: value[:, :7] for name, value in good.items()}),
    "split": lambda pipe, good: pipe.microbatches({**good, "more": good["labels"][:1]}),
    "other order": lambda pipe, good: pipe.step({name: value.flip(0) for name, value in good.items()}),
    "other mask": lambda pipe, good: pipe.step({**good, "attention_mask": torch.ones_like(good["labels"])}),
}
RIGHT: dict[str, Wrong] = {
    "labels of outputs": lambda pipe, good: pipe.evaluate(good, outputs=True),
    "outputs": lambda pipe, good: pipe.evaluate(good, outputs=lambda *_: 1, everywhere=True),
    "nothing to evaluate": lambda pipe, good: pipe.evaluate(good, outputs=True),
    "a list to evaluate": lambda pipe, good: pipe.evaluate(good),
    "split": lambda pipe, good: pipe.microbatches(good),
}


def refused(
    ranks: int, axes: Axes | None, wrongs: list[str], by: list[int], options: dict[str, Any]
) -> dict[str, tuple[str, float]]:
    """By what is wrong on the processes `by` alone: the error, and the loss of a good batch after it."""
    pipe = build_pipe("llama", ranks, axes, options)
    good = own_part(batch(), *pipe.batch_part)
    found = {}
    for wrong in wrongs:
        call = WRONG[wrong] if dist.get_rank() in by else RIGHT.get(wrong, lambda pipe, good: pipe.step(good))
        words = error_of(lambda: call(pipe, good))  # noqa: B023
        pipe.zero_grad()
        found[wrong] = words, pipe.step(good).loss
    pipe.close()
    return found


PARTS = {  # on the second part of the batch, of pp=2 x dp_shard=2
    "labels": r"BatchError: a batch of \['input_ids'\], given to process 1, 3: the next-token loss reads",
    "labels of outputs": "BatchError: labels for some parts of a batch, and none given to process 1, 3: ",
    "outputs": r"ShapeError: a result that cannot be sent \(.*\), given to process 1, 3: ",
    "a list to evaluate": "BatchError: a list of 3 microbatches, given to process 1, 3: ",
    "longer labels": r"BatchError: labels of shape \[2, 24\], given to process 1, 3: .*\[2, 12\]",
    "flat labels": r"BatchError: labels of shape \[2\], given to process 1, 3: ",
    "no rows": "BatchError: microbatch 1, given to process 1, 3: it has no rows",
}
PROCESS = {  # on process 3 alone, which has the second part as process 1 has
    "twice": "BatchError: labels as an argument, given to process 3: the batch has it as well",
    "nothing": "BatchError: a batch given as NoneType, given to process 3: ",
    "nothing to evaluate": "BatchError: a batch given as NoneType, given to process 3: ",
    "forbidden": "BatchError: 'use_cache' in a batch, given to process 3: ",
    "labels of outputs": "BatchError: labels for some parts of a batch, and none given to process 3: ",
    "split": "BatchError: .*more: 1, given to process 3: all tensors of a batch have the same length",
    "other mask": r"BatchError: process 1: .*; process 3: .*attention_mask int64\[4, 12\].* pipe.batch_part",
}
ALONE = {  # on rank 1 of a pipeline that is all there is
    "few rows": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \(a batch of 1 rows: ",
    "forbidden": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \('use_cache' in a batch: ",
    "nothing": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \(a batch given as NoneType",
    "labels of outputs": "BatchError: rank 0: .* labels int64.*; rank 1: ",
    "other order": "BatchError: rank 0: .*; rank 1: .* all ranks of a pipeline step on the same batch",
}
PADDED = {
    "few rows": "BatchError: a batch of 1 rows, given to rank 1: it is to be split into 2 microbatches",
    "nothing": "BatchError: a batch given as NoneType, given to rank 1: ",
    "forbidden": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \('use_cache' in a batch: ",
}


def check(found: list[Any], messages: dict[str, str]) -> None:
    """Of all ranks, which tell the same, and go on."""
    for wrong, message in messages.items():
        words = {told[wrong][0] for told in found}
        assert len(words) == 1, (wrong, words)
        assert re.match(message, words.pop()), found[0][wrong]
    losses = {loss for told in found for _, loss in told.values()}
    assert max(losses) - min(losses) < 1e-12


@pytest.mark.parametrize(("messages", "by"), [(PARTS, [1, 3]), (PROCESS, [3])])
def test_wrong_batches_on_some_ranks_of_a_mesh(pool: Pool, messages: dict[str, str], by: list[int]) -> None:
    check(pool.run(4, refused, 2, Axes(dp_shard=2), [*messages], by, {}), messages)


@pytest.mark.parametrize(("messages", "shapes"), [(ALONE, "inferred"), (PADDED, "padded")])
def test_wrong_batches_on_one_rank_of_a_pipeline(pool: Pool, messages: dict[str, str], shapes: str) -> None:
    check(pool.run(2, refused, 2, None, [*messages], [1], {"shapes": shapes}), messages)


@pytest.mark.parametrize("axes", [Axes(cp=2), Axes(tp=2)])
def test_cp_and_tp_ranks_with_other_data_are_refused(pool: Pool, axes: Axes) -> None:
    """On ranks of cp and of tp: rows in another order, which have the same sum, or one more entry."""
    words = "BatchError: process 0: .*; process 3: .* all ranks of pp, cp and tp step on the same part"
    messages = {"other order": words, "other mask": words}
    check(pool.run(4, refused, 2, axes, [*messages], [3], {}), messages)


def test_a_length_that_sequence_parallel_refuses_on_one_part(pool: Pool) -> None:
    """Found in the forward, they would leave the other part of the batch waiting for its weights."""
    messages = {"odd length": "BatchError: a sequence of 7 tokens with .* tp=2, given to process 2, 3: "}
    options = {"sequence_parallel": True}
    check(pool.run(4, refused, 1, Axes(dp_shard=2, tp=2), [*messages], [2, 3], options), messages)


class Short(nn.Module):
    """A stage of one's own that takes rows of up to 8 numbers, which tells when its edges are asked for."""

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


def refused_edges(declared: bool) -> tuple[str, float]:
    """What a step says where the second part of the batch alone has rows that are too long."""
    pipe = Pipeline.from_provider(
        lambda info: Declaring() if declared else Short(),
        ranks=2,
        schedule="1f1b",
        microbatches=2,
        timeout=30,
        axes=Axes(dp_shard=2),
        loss_fn=lambda output, part: output.square().mean(),
    )
    words = error_of(lambda: pipe.step({"x": torch.ones(4, 9 if pipe.batch_part[0] else 8)}))
    loss = pipe.step({"x": torch.ones(4, 8)}).loss
    pipe.close()
    return words, loss


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (False, "BatchError: rows of 9, given to process 1, 3: they hold 8 numbers at most. Cut them"),
        (
            True,
            "ModelError: the shapes that stages 0 and 1 declare .*, given to process 1, 3: .*a declared row",
        ),
    ],
)
def test_a_shape_error_of_one_part_is_raised_by_all(pool: Pool, declared: bool, message: str) -> None:
    found = pool.run(4, refused_edges, declared)
    assert all(told == found[0] for told in found)
    assert re.match(message, found[0][0]), found[0]
    assert found[0][1] == 1.0
