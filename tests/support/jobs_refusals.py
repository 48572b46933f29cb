"""Batches that some ranks refuse and others would take, run by the pool's workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock import Axes, Pipeline
from penstock.errors import BatchError, PenstockError
from support.jobs_axes import made, told
from support.jobs_mesh import batch, own_part

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
    torch.set_num_threads(1)
    pipe = made("llama", ranks, axes, options)
    good = own_part(batch(), *pipe.batch_part)
    found = {}
    for wrong in wrongs:
        call = WRONG[wrong] if dist.get_rank() in by else RIGHT.get(wrong, lambda pipe, good: pipe.step(good))
        words = told(lambda: call(pipe, good))  # noqa: B023
        pipe.zero_grad()
        found[wrong] = words, pipe.step(good).loss
    pipe.close()
    return found


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
    torch.set_num_threads(1)
    pipe = Pipeline.from_provider(
        lambda info: Declaring() if declared else Short(),
        ranks=2,
        schedule="1f1b",
        microbatches=2,
        timeout=30,
        axes=Axes(dp_shard=2),
        loss_fn=lambda output, part: output.square().mean(),
    )
    words = told(lambda: pipe.step({"x": torch.ones(4, 9 if pipe.batch_part[0] else 8)}))
    loss = pipe.step({"x": torch.ones(4, 8)}).loss
    pipe.close()
    return words, loss


def limits(ranks: int, axes: Axes) -> dict[str, float]:
    """By what it is for, the seconds after which each process group of several ranks breaks off."""
    before = set(dist.distributed_c10d._world.pg_map)
    pipe = made("mixtral", ranks, axes, {"timeout": 17.0})
    found = {}
    for group in set(dist.distributed_c10d._world.pg_map) - before:
        if dist.get_world_size(group) == 1:
            continue
        options = group._get_backend(torch.device("cpu")).options
        found[group.group_desc] = options._timeout.total_seconds()
    pipe.close()
    return found


def a_layer(pipe: Pipeline) -> nn.Module:
    """One of this process's."""
    parts = (part for module in pipe.modules.values() for part in module.modules())
    found: nn.Module = next(part for part in parts if isinstance(part, GradientCheckpointingLayer))
    return found


def raised(ranks: int, axes: Axes) -> str:
    """What each process says when the last one raises in the midst of a step, and lives on until all said."""
    torch.set_num_threads(1)
    pipe = made("llama", ranks, axes, {"timeout": 2.0})
    good = own_part(batch(), *pipe.batch_part)
    pipe.step(good)

    def give_up(*_: Any) -> None:
        raise ValueError("this layer gave up")

    if dist.get_rank() == dist.get_world_size() - 1:
        a_layer(pipe).register_forward_pre_hook(give_up)
    words = "no error"
    try:
        pipe.step(good)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, words)
    pipe.close()
    return words


def stalled(ranks: int, axes: Axes, reduces: bool) -> str:
    """What the others say when the last process stays away within a step, as weights are gathered or, where
    `reduces`, gradients are summed.
    """
    torch.set_num_threads(1)
    pipe = made("llama", ranks, axes, {"timeout": 2.0})
    good = own_part(batch(), *pipe.batch_part)
    pipe.step(good)
    store, last = dist.distributed_c10d._get_default_store(), dist.get_world_size() - 1

    def stay_away(*_: Any) -> None:
        store.wait([f"said-{rank}" for rank in range(last)])

    if dist.get_rank() == last and reduces:
        pipe.stages[0].shards.reduce = stay_away  # type: ignore[union-attr, method-assign]
    elif dist.get_rank() == last:
        a_layer(pipe).register_forward_pre_hook(stay_away)
    words = "no error"
    try:
        pipe.step(good)
    except PenstockError as error:
        words = f"{type(error).__name__}: {error}"
    finally:
        store.set(f"said-{dist.get_rank()}", "")
    pipe.close()
    return words
