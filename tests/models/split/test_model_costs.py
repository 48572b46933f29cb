"""One table of F, I, W and what runs again: for splits, bubbles, and which microbatches run again."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock import AutoPipeline
from penstock.models.split.counting import ProductCounts
from penstock.models.split.model_costs import ModelCosts, model_costs
from penstock.models.tracing.chain import find_chain
from penstock.schedule import simulate
from support.families import tiny_config

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
}  # fmt: skip


@cache
def qwen3() -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **QWEN3_8B))


def costs_of(model: PreTrainedModel, sequence: int = 4096, **options: Any) -> ModelCosts:
    return model_costs(model, find_chain(model), sequence, **options)


def test_a_chunked_head_costs_a_forward_more_and_has_no_w() -> None:
    """1.0 counted three forwards of it, so that the last stage of Qwen3-8B at P=4 had too many layers."""
    plain, chunked, liger = (costs_of(qwen3(), chunked=how).head for how in (False, True, "liger"))
    product = 4096 * 4096 * 151_936
    assert plain == ProductCounts(product, product, product)
    assert chunked == ProductCounts(product, 3 * product)
    assert liger == ProductCounts(3 * product)
    assert costs_of(qwen3(), 64, chunked=True).head == ProductCounts(
        *[64 * 4096 * 151_936] * 3
    )  # they stay whole
    together = costs_of(qwen3(), 64, chunked=True, together=64 * 64).head
    assert together.input_grad == 3 * together.forward


def test_the_split_of_a_chunked_head_is_the_best() -> None:
    split = {}
    for chunked in (True, False):
        auto = AutoPipeline(ranks=4, microbatches=8, sequence_length=4096, chunked_loss=chunked)
        plan = auto.build_plan(qwen3())
        split[chunked] = [len(stage.layers) for stage in plan.stages]
        durations = auto.account(plan).durations((1, 4096))
        columns = (durations[name] for name in ("forward", "input_grad", "weight_grad"))
        times = [sum(column) for column in zip(*columns, strict=True)]
        assert max(times) == pytest.approx(least(costs_of(qwen3(), chunked=chunked), 4))
    assert split[True][-1] < split[False][-1]


def least(costs: ModelCosts, stages: int) -> float:
    """What the slowest stage of the best split takes, of all splits whose layers are alike."""
    step = costs.of_step()
    layer, count = step.layers[0], len(step.layers)
    return min(
        max(step.embedding + first * layer, -(-(count - first - last) // (stages - 2)) * layer,
            last * layer + step.head)
        for first in range(count)
        for last in range(count - first)
    )  # fmt: skip


@pytest.mark.parametrize(("name", "bubble"), [
    ("1f1b", 0.190), ("zb_v", 0.055), ("v_half", 0.214), ("v_min", 0.400),
])  # fmt: skip
def test_the_bubble_counts_what_runs_again(name: str, bubble: float) -> None:
    """1.0 said 3.8 % for zb_v, 9.6 % for v_half and 13.3 % for v_min, whatever ran again."""
    config = AutoConfig.for_model(
        "llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=64, num_attention_heads=16,
        vocab_size=64,
    )  # fmt: skip
    auto = AutoPipeline(
        ranks=16, schedule=name, microbatches=64, sequence_length=64, activation_checkpointing="full"
    )
    plan = auto.build_plan(config)
    timeline = simulate(plan.schedule, auto.account(plan).timed((1, 64)))
    assert timeline.bubble == pytest.approx(bubble, abs=0.003)


def test_a_step_counts_what_runs_again_and_a_forward_alone_nothing_more() -> None:
    costs = ModelCosts([ProductCounts(1, 2, 3, 4)], ProductCounts(10), ProductCounts(5, 5, 5), [True] * 3)
    assert costs.of_step().layers == [6]
    assert costs.of_step(0.5).layers == [8]
    assert costs.of_step(0.5, trains=False) == costs.of_step(trains=False)
    assert costs.of_step(trains=False).layers == [1]
    assert (costs.of_step().embedding, costs.of_step().head) == (10, 15)


def test_no_backward_reaches_the_stages_before_the_first_that_trains() -> None:
    layer = ProductCounts(1, 2, 0)
    costs = ModelCosts(
        [layer] * 3, ProductCounts(0.5), ProductCounts(2, 2), [False, True, False, False, False]
    )
    first, second, last = costs.of_stages([range(1), range(1, 2), range(2, 3)])
    assert first == ProductCounts(1.5)
    assert second == layer
    assert last == ProductCounts(3, 4)


def test_selective_checkpointing_runs_no_product_again() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    full, selective, second = (
        costs_of(model, 64, **options).layers
        for options in ({}, {"save": ("matmul", "attention")}, {"every": 2})
    )
    assert [layer.again for layer in full] == [layer.forward for layer in full]
    assert [layer.again for layer in selective] == [0] * 4
    assert [bool(layer.again) for layer in second] == [True, False, True, False]
