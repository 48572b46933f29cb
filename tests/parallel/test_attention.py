"""Loss and every parameter's gradient under context parallelism are those of one plain process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.errors import ConfigError, InputError, ModelError
from penstock.parallel.context.attention import Method
from penstock.parallel.context.check import check
from support import jobs_context, zoo
from support.families import FAMILIES, tiny_model
from support.jobs_context import BATCHES, Case
from support.pool import Pool

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


def none_wrong(found: list[list[str]]) -> None:
    assert not any(found), "\n".join(line for lines in found for line in lines)


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.parallel)])
def test_gradients_are_those_of_one_process(pool: Pool, ranks: int, cases: list[Case]) -> None:
    none_wrong(pool.run(ranks, jobs_context.equivalence, cases))


@pytest.mark.parallel
def test_the_same_in_float64(pool: Pool) -> None:
    cases: list[Case] = [
        ("llama", "packed", "ring"),
        ("qwen3", "left", "ulysses"),
        ("mistral", "odd", "ring"),
    ]
    none_wrong(pool.run(2, jobs_context.equivalence, cases, torch.float64))


def test_the_same_under_activation_checkpointing(pool: Pool) -> None:
    cases: list[Case] = [("llama", "packed", how) for how in HOW]
    none_wrong(pool.run(2, jobs_context.equivalence, cases, torch.float32, True))


@pytest.mark.parallel
def test_two_models_in_one_process_do_not_mix(pool: Pool) -> None:
    none_wrong(pool.run(2, jobs_context.two_models))


def test_a_microbatch_that_is_not_split_is_refused(pool: Pool) -> None:
    for (refused,) in pool.run(2, jobs_context.not_split):
        assert refused.startswith("a forward of 3 rows of 16 tokens: a microbatch is split first")


def test_a_model_that_is_gone_leaves_no_function_in_the_registry(pool: Pool) -> None:
    assert pool.run(2, jobs_context.left_in_the_registry) == [set()] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(pool: Pool, family: str, how: Method, ranks: int) -> None:
    cases: list[Case] = [(family, name, how) for name in BATCHES]
    none_wrong(pool.run(ranks, jobs_context.equivalence, cases))
    none_wrong(pool.run(ranks, jobs_context.equivalence, cases, torch.float64))


@pytest.mark.sweep
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("first", range(0, len(zoo.TYPES), 10))
def test_every_type_is_exact_or_refused(pool: Pool, first: int, how: Method) -> None:
    types = [name for name in zoo.TYPES[first : first + 10] if name not in zoo.SKIPPED]
    for found in pool.run(2, jobs_context.every_type, types, how):
        wrong = {name: told for name, told in found.items() if not told.startswith(("exact", "refused"))}
        assert not wrong


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
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    make, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        check(make(), 4, "ulysses")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_without_values(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family, layers=2)
    before = model.config._attn_implementation
    for how in HOW:
        check(model, 4, how)
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks
