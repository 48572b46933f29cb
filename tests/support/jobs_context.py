"""Jobs of the pool: whole models under context parallelism, compared with one plain process."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.batch.packing import metadata, refuse_packed
from penstock.errors import ModelError, PenstockError
from penstock.parallel.context.attention import Method, parallelize_attention
from penstock.parallel.context.check import check
from penstock.parallel.context.sequence import split
from support import zoo
from support.families import FLOAT32_INSIDE, ragged_batch, tiny_model
from support.reference import TOLERANCE, Gradients, assert_gradients, plain_step

Batch = dict[str, Any]
Case = tuple[str, str, Method]  # family, batch, how


def plain(rows: int = 3, length: int = 16) -> Batch:
    return {**ragged_batch(rows, length)}


def odd() -> Batch:
    """A length that no number of pieces divides, longer than most windows of the test families."""
    return plain(4, 19)


def right() -> Batch:
    batch = plain(4, 17)
    mask = torch.ones(4, 17, dtype=torch.int64)
    mask[0, 12:], mask[2, 5:] = 0, 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask}


def left() -> Batch:
    """The first valid tokens keep their labels, which are predicted from padding."""
    batch = plain(4, 17)
    mask = torch.ones(4, 17, dtype=torch.int64)
    mask[0, :3], mask[2, :9] = 0, 0
    batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {**batch, "attention_mask": mask, "position_ids": positions}


def packed() -> Batch:
    """Two rows of documents; the boundaries are not those of the cut."""
    rows = [metadata(lengths)["position_ids"] for lengths in ([3, 9, 1, 6], [11, 8])]
    positions = torch.cat(rows)
    batch = plain(2, 19)
    labels = batch["input_ids"].masked_fill(positions == 0, -100)
    return {**batch, "labels": labels, "position_ids": positions}


BATCHES: dict[str, Callable[[], Batch]] = {
    "plain": plain, "odd": odd, "right": right, "left": left, "packed": packed,
}  # fmt: skip


# scores of tiny models are tiny: a cap that bends them
HARDER = {"gemma2": {"attn_logit_softcapping": 0.002}}


def parallel_step(
    model: PreTrainedModel, batch: Mapping[str, Any], how: Method, checkpointed: bool = False
) -> tuple[float, Gradients]:
    """Loss and gradients, summed over the ranks, of a copy of the model that sees a part on each."""
    group = dist.group.WORLD
    assert group is not None
    copied = copy.deepcopy(model)
    if checkpointed:
        copied.gradient_checkpointing_enable({"use_reentrant": False})
    parallelize_attention(copied, group, how)
    part = split(batch, dist.get_rank(), dist.get_world_size())
    loss = _loss(copied, part, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = _summed(copied)
    whole = loss.detach()
    dist.all_reduce(whole)
    return float(whole), gradients


def _loss(model: PreTrainedModel, part: Batch, batch: Mapping[str, Any]) -> Tensor:
    """A rank's share of the mean over all valid tokens of `batch`."""
    labels = part["shift_labels"]
    logits = model(**part, use_cache=False).logits
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / int((batch["labels"][:, 1:] != -100).sum())


def _summed(model: PreTrainedModel) -> Gradients:
    gradients: Gradients = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(own)
        gradients[name] = own
    return gradients


def difference(
    model: PreTrainedModel,
    batch: Batch,
    how: Method,
    tolerance: float,
    checkpointed: bool = False,
) -> str | None:
    loss, expected = plain_step(model, batch)
    if math.isnan(loss):  # gemma2 in float64: transformers adds float64's least number to scores in float32
        return None
    found, gradients = parallel_step(model, batch, how, checkpointed)
    gradients = {name: gradient for name, gradient in gradients.items() if name in expected}
    try:
        assert abs(found - loss) <= tolerance * max(1.0, abs(loss)), f"loss {found} for {loss}"
        assert len(gradients) == len(expected)
        assert_gradients(gradients, expected, tolerance)
    except AssertionError as wrong:
        return str(wrong)
    return None


def equivalence(
    cases: Sequence[Case], dtype: torch.dtype = torch.float32, checkpointed: bool = False, **changes: Any
) -> list[str]:
    """What went wrong on this rank."""
    wrong = []
    for family, name, how in cases:
        bound = TOLERANCE[torch.float32 if family in FLOAT32_INSIDE else dtype]
        model = tiny_model(family, dtype, **{"layers": 2, **HARDER.get(family, {}), **changes})
        if name == "packed" and mixes(model):
            continue  # it is refused without a cut too (runtime/packed.py)
        try:
            found = difference(model, BATCHES[name](), how, bound, checkpointed=checkpointed)
        except PenstockError as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            wrong.append(f"{family} {name} {how} cp={dist.get_world_size()}: {found}")
    return wrong


def mixes(model: PreTrainedModel) -> bool:
    try:
        refuse_packed(model)
    except ModelError:
        return True
    return False


def two_models() -> list[str]:
    """Two copies attend in two ways, over microbatches of two shapes; backward after both forwards."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    model = tiny_model("qwen2", layers=2)
    batches = packed(), odd()
    hows: tuple[Method, ...] = ("ulysses", "ring")
    copies = [copy.deepcopy(model) for _ in hows]
    for copied, how in zip(copies, hows, strict=True):
        parallelize_attention(copied, group, how)
    losses = [_loss(copied, split(batch, rank, group.size()), batch)
              for copied, batch in zip(copies, batches, strict=True)]  # fmt: skip
    wrong = []
    for loss, copied, batch in zip(losses, copies, batches, strict=True):
        loss.backward()  # type: ignore[no-untyped-call]
        try:
            assert_gradients(_summed(copied), plain_step(model, batch)[1], TOLERANCE[torch.float32])
        except AssertionError as difference:
            wrong.append(str(difference))
    return wrong


def not_split() -> list[str]:
    """What a parallel model says of a microbatch that is not split."""
    group = dist.group.WORLD
    assert group is not None
    model = tiny_model("llama", layers=1)
    parallelize_attention(model, group, "ring")
    try:
        model(plain()["input_ids"], use_cache=False)
    except ModelError as error:
        return [str(error)]
    return []


def left_in_the_registry() -> set[str]:
    """Names of attention functions that stay registered after a parallel model is gone."""
    group, before = dist.group.WORLD, set(ALL_ATTENTION_FUNCTIONS)
    assert group is not None
    model = tiny_model("llama", layers=1)
    parallelize_attention(model, group, "ring")
    assert set(ALL_ATTENTION_FUNCTIONS) != before
    del model
    gc.collect()
    return set(ALL_ATTENTION_FUNCTIONS) - before


def every_type(types: Sequence[str], how: Method) -> dict[str, str]:
    """For each type of causal model: "exact", what it was refused with, or what was wrong."""
    found = {}
    for name in types:
        try:
            model = zoo.tiny_model(name)
            check(model, dist.get_world_size(), how)
        except PenstockError as error:
            found[name] = f"refused by check: {error.value}"
            continue
        try:
            batch = {**zoo.tiny_batch(name)}
            wrong = difference(model, batch, how, TOLERANCE[torch.float32])
            if wrong:  # gradients that nearly cancel are no better than their rounding; parts stay in float32
                wrong = difference(zoo.tiny_model(name, torch.float64), batch, how, TOLERANCE[torch.float32])
            found[name] = wrong or "exact"
        except PenstockError as error:
            found[name] = f"refused in the first forward: {error.value}"
        except Exception as error:
            found[name] = f"failed: {type(error).__name__}: {error}"
    return found
