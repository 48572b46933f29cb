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
from support.mixtures import differences, gathered, none_wrong, valid
from support.pool import Pool
from support.reference import TOLERANCE, plain_step
from support.sequences import BATCHES, Batch, odd, packed, plain

Case = tuple[str, str, Method]  # family, batch, method
# scores of tiny models are tiny: a cap that bends them
HARDER: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": 0.002}}


def loss_of(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    """This rank's share of the mean over all valid tokens of `batch`, by a parallel model."""
    part = split(batch, dist.get_rank(), dist.get_world_size())
    logits = model(**part, use_cache=False).logits
    labels = part["shift_labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return total / valid(batch)


def parallel(model: PreTrainedModel, method: Method) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    group = dist.group.WORLD
    assert group is not None
    parallelize_attention(copied, group, method)
    return copied


def differing(
    label: str, model: PreTrainedModel, batch: Batch, method: Method, tolerance: float, again: bool = False
) -> list[str]:
    """Where a parallel copy of the model differs from it. again: layers run again in the backward"""
    loss, expected = plain_step(model, batch)
    if math.isnan(loss):  # gemma2 in float64: transformers adds float64's least number to scores in float32
        return []
    copied = parallel(model, method)
    if again:
        copied.gradient_checkpointing_enable({"use_reentrant": False})
    own = loss_of(copied, batch)
    own.backward()  # type: ignore[no-untyped-call]
    return differences(label, own, loss, gathered(copied), expected, tolerance)


def equivalence(cases: Sequence[Case], dtype: torch.dtype = torch.float32, again: bool = False) -> list[str]:
    """What went wrong on this rank."""
    wrong = []
    for family, name, method in cases:
        bound = TOLERANCE[torch.float32 if family in FLOAT32_INSIDE else dtype]
        model = tiny_model(family, dtype, layers=2, **HARDER.get(family, {}))
        if name == "packed" and mixes(model):
            continue  # it is refused without a split too
        label = f"{family} {name} {method} cp={dist.get_world_size()}"
        wrong += differing(label, model, BATCHES[name](), method, bound, again)
    return wrong


def mixes(model: PreTrainedModel) -> bool:
    try:
        refuse_packed(model)
    except ModelError:
        return True
    return False


def two_models() -> list[str]:
    """Two copies attend in two ways, over microbatches of two shapes; backward after both forwards."""
    model = tiny_model("qwen2", layers=2)
    copies, batches = [parallel(model, method) for method in HOW], (odd(), packed())
    losses = [loss_of(copied, batch) for copied, batch in zip(copies, batches, strict=True)]
    wrong = []
    for loss, copied, batch in zip(losses, copies, batches, strict=True):
        loss.backward()  # type: ignore[no-untyped-call]
        expected_loss, expected = plain_step(model, batch)
        wrong += differences("two models", loss, expected_loss, gathered(copied), expected, 1e-5)
    return wrong


def not_split() -> str:
    """The error of a parallel model for a microbatch that is not split."""
    model = parallel(tiny_model("llama", layers=1), "ring")
    with pytest.raises(ModelError) as refused:
        model(plain()["input_ids"], use_cache=False)
    return str(refused.value)


def left_in_the_registry() -> set[str]:
    """Names of attention functions that stay registered after a parallel model is gone."""
    before = set(ALL_ATTENTION_FUNCTIONS)
    model = parallel(tiny_model("llama", layers=1), "ring")
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
            wrong = differing(name, model, batch, method, 1e-5)
            if wrong:  # gradients that nearly cancel are no better than their rounding; parts stay in float32
                wrong = differing(name, zoo.tiny_model(name, torch.float64), batch, method, 1e-5)
            found[name] = "".join(wrong) or "exact"
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
