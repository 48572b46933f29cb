"""Loss and every parameter's gradient under context parallelism are those of one plain process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.batch.packing import refuse_packed
from penstock.errors import ModelError
from penstock.parallel.context.attention import Method
from support.families import FAMILIES, FLOAT32_INSIDE, tiny_model
from support.mixtures import differences, gathered, none_wrong
from support.pool import Pool
from support.reference import TOLERANCE, plain_step
from support.sequences import BATCHES, odd, packed, plain
from support.split_sequences import HOW, differing, loss_of, parallel

Case = tuple[str, str, Method]  # family, batch, method
# scores of tiny models are tiny: a cap that bends them
HARDER: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": 0.002}}


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
