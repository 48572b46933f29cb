"""Loss and every parameter's gradient under context parallelism are those of one plain process."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.batch.packing import refuse_packed
from penstock.errors import ConfigError, InputError, ModelError, PenstockError
from penstock.parallel.context.attention import Method, parallelize_attention
from penstock.parallel.context.check import check
from penstock.parallel.context.sequence import split
from support import zoo
from support.families import FAMILIES, FLOAT32_INSIDE, tiny_model
from support.mixtures import none_wrong
from support.pool import Pool
from support.reference import TOLERANCE, Gradients, assert_gradients, plain_step
from support.sequences import BATCHES, Batch, odd, packed, plain

Case = tuple[str, str, Method]  # family, batch, method
# scores of tiny models are tiny: a cap that bends them
HARDER = {"gemma2": {"attn_logit_softcapping": 0.002}}


def parallel_step(
    model: PreTrainedModel, batch: Mapping[str, Any], method: Method, checkpointed: bool = False
) -> tuple[float, Gradients]:
    """Loss and gradients, summed over the ranks, of a copy of the model that sees a part on each."""
    group = dist.group.WORLD
    assert group is not None
    copied = copy.deepcopy(model)
    if checkpointed:
        copied.gradient_checkpointing_enable({"use_reentrant": False})
    parallelize_attention(copied, group, method)
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


def difference_of(
    model: PreTrainedModel, batch: Batch, method: Method, tolerance: float, checkpointed: bool = False
) -> str | None:
    loss, expected = plain_step(model, batch)
    if math.isnan(loss):  # gemma2 in float64: transformers adds float64's least number to scores in float32
        return None
    found, gradients = parallel_step(model, batch, method, checkpointed)
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
    for family, name, method in cases:
        bound = TOLERANCE[torch.float32 if family in FLOAT32_INSIDE else dtype]
        model = tiny_model(family, dtype, **{"layers": 2, **HARDER.get(family, {}), **changes})
        if name == "packed" and mixes(model):
            continue  # it is refused without a cut too (runtime/packed.py)
        try:
            found = difference_of(model, BATCHES[name](), method, bound, checkpointed=checkpointed)
        except PenstockError as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            wrong.append(f"{family} {name} {method} cp={dist.get_world_size()}: {found}")
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
    for copied, method in zip(copies, hows, strict=True):
        parallelize_attention(copied, group, method)
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


def not_split() -> str:
    """What a parallel model says of a microbatch that is not split."""
    group = dist.group.WORLD
    assert group is not None
    model = tiny_model("llama", layers=1)
    parallelize_attention(model, group, "ring")
    with pytest.raises(ModelError) as refused:
        model(plain()["input_ids"], use_cache=False)
    return str(refused.value)


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


def every_type(types: Sequence[str], method: Method) -> dict[str, str]:
    """For each type of causal model: "exact", what it was refused with, or what was wrong."""
    found = {}
    for name in types:
        try:
            model = zoo.tiny_model(name)
            check(model, dist.get_world_size(), method)
        except PenstockError as error:
            found[name] = f"refused by check: {error.value}"
            continue
        try:
            batch = {**zoo.tiny_batch(name)}
            wrong = difference_of(model, batch, method, TOLERANCE[torch.float32])
            if wrong:  # gradients that nearly cancel are no better than their rounding; parts stay in float32
                wrong = difference_of(
                    zoo.tiny_model(name, torch.float64), batch, method, TOLERANCE[torch.float32]
                )
            found[name] = wrong or "exact"
        except PenstockError as error:
            found[name] = f"refused in the first forward: {error.value}"
        except Exception as error:
            found[name] = f"failed: {type(error).__name__}: {error}"
    return found


HOW: tuple[Method, ...] = ("ring", "ulysses")
# each way of attending, and what makes it hard: windows, softcap, sinks, learned positions, experts, a query
# that no key is left for, documents, a length that no number of pieces divides
TWO: list[Case] = [
    ("llama", "packed", "ring"), ("llama", "packed", "ulysses"), ("llama", "left", "ring"),
    ("gemma2", "odd", "ulysses"), ("gemma2", "left", "ring"), ("gpt_oss", "left", "ulysses"),
    ("mistral", "packed", "ring"), ("gpt2", "right", "ulysses"), ("mixtral", "odd", "ring"),
]  # fmt: skip
FOUR: list[Case] = [
    ("llama", "odd", "ring"), ("llama", "left", "ulysses"), ("gemma2", "odd", "ring"),
    ("gemma2", "left", "ulysses"), ("gpt_oss", "left", "ring"), ("gpt_oss", "odd", "ulysses"),
    ("mistral", "plain", "ring"), ("opt", "right", "ring"), ("cohere2", "packed", "ulysses"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.parallel)])
def test_gradients_are_those_of_one_process(pool: Pool, ranks: int, cases: list[Case]) -> None:
    none_wrong(pool.run(ranks, equivalence, cases))


@pytest.mark.parallel
def test_the_same_in_float64(pool: Pool) -> None:
    cases: list[Case] = [
        ("llama", "packed", "ring"),
        ("qwen3", "left", "ulysses"),
        ("mistral", "odd", "ring"),
    ]
    none_wrong(pool.run(2, equivalence, cases, torch.float64))


def test_the_same_under_activation_checkpointing(pool: Pool) -> None:
    cases: list[Case] = [("llama", "packed", method) for method in HOW]
    none_wrong(pool.run(2, equivalence, cases, torch.float32, True))


@pytest.mark.parallel
def test_two_models_in_one_process_do_not_mix(pool: Pool) -> None:
    none_wrong(pool.run(2, two_models))


def test_a_microbatch_that_is_not_split_is_refused(pool: Pool) -> None:
    for refused in pool.run(2, not_split):
        assert refused.startswith("a forward of 3 rows of 16 tokens: a microbatch is split first")


def test_a_model_that_is_gone_leaves_no_function_in_the_registry(pool: Pool) -> None:
    assert pool.run(2, left_in_the_registry) == [set()] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", HOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(pool: Pool, family: str, method: Method, ranks: int) -> None:
    cases: list[Case] = [(family, name, method) for name in BATCHES]
    none_wrong(pool.run(ranks, equivalence, cases))
    none_wrong(pool.run(ranks, equivalence, cases, torch.float64))


@pytest.mark.sweep
@pytest.mark.parametrize("method", HOW)
@pytest.mark.parametrize("first", range(0, len(zoo.TYPES), 10))
def test_every_type_is_exact_or_refused(pool: Pool, first: int, method: Method) -> None:
    types = [name for name in zoo.TYPES[first : first + 10] if name not in zoo.SKIPPED]
    for found in pool.run(2, every_type, types, method):
        assert not {name: how for name, how in found.items() if not how.startswith(("exact", "refused"))}


def _tiny(family: str = "llama", **changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: tiny_model(family, layers=1, **changes)


def _zoo(name: str) -> Callable[[], PreTrainedModel]:
    return lambda: zoo.tiny_model(name)


def _by_flex() -> PreTrainedModel:
    model = tiny_model("llama", layers=1)
    model.config._attn_implementation_internal = "flex_attention"
    return model


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
WIDE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], type[InputError], str]] = {
    "a state": (_zoo("mamba"), ModelError, "its state runs over the sequence"),
    "convolutions": (_zoo("lfm2"), ModelError, "'conv'"),
    "an indexer": (_zoo("deepseek_v32"), ModelError, "'indexed_attention'"),
    "alibi": (_zoo("bloom"), ModelError, "no position_ids"),
    "attention of its own": (_zoo("gptj"), ModelError, "no attention of transformers' registry"),
    "positions of its own": (_zoo("roberta"), ModelError, "count positions"),
    "rules of its own": (_zoo("gemma4_unified"), ModelError, "rules of the model's own"),
    "positions in attention": (_zoo("llama4_text"), ModelError, "arange"),
    "turns by the longest": (_tiny(rope_parameters=ROPE), ModelError, "longest position"),
    "dropout": (_tiny(attention_dropout=0.1), ConfigError, "attention_dropout=0.1"),
    "routers' loss": (_tiny(output_router_logits=True), ConfigError, "router"),
    "heads": (_tiny(hidden_size=48, num_attention_heads=6), ConfigError, "6 attention heads"),
    "key heads": (_tiny(**WIDE), ConfigError, "3 key"),
    "flex": (_by_flex, ConfigError, "flex_attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_not_be_exact_are_refused(name: str) -> None:
    make, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        check(make(), 4, "ulysses")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_without_values(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family, layers=2)
    before = model.config._attn_implementation
    for method in HOW:
        check(model, 4, method)
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks
