"""The work of a model, beside the shapes of its matrices and what a step holds."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig

from penstock import AutoPipeline
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.split.counting import ProductCounts
from penstock.models.split.model_costs import model_costs
from penstock.parallel.axes import Axes
from penstock.parallel.mesh_plan import ParallelOptions
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.planner.work import ModelWork, OpWork, PartBytes, PartWork, model_work
from support import zoo
from support.covering import some
from support.families import tiny_config


def part(flops: float) -> PartWork:
    ops = (OpWork("matmul", "bfloat16", flops, 1.0),)
    return PartWork(ops, ops, ops, ops, ops, PartBytes(0, 0, 0, 0, 0, 0, 0))


def test_a_stage_has_the_embedding_where_it_begins_and_the_head_where_it_ends() -> None:
    dense, sparse, embedding, head = map(part, (1, 2, 3, 4))
    model = ModelWork((dense, sparse), (0, 1, 1), embedding, head)
    assert model.parts(range(1)) == (embedding, dense)
    assert model.parts(range(1, 2)) == (sparse,)
    assert model.parts(range(2, 3)) == (sparse, head)
    assert model.parts(range(3)) == (embedding, dense, sparse, sparse, head)


def plan_of(config: PretrainedConfig) -> BuildPlan:
    return AutoPipeline(ranks=1, microbatches=1).build_plan(config)


def flops(ops: tuple[OpWork, ...]) -> float:
    return sum(op.calls * op.flops for op in ops)


def passes(work: PartWork) -> ProductCounts:
    ops = work.forward, work.input_grad, work.weight_grad, work.recomputed
    return ProductCounts(*(flops(of_pass) / 2 for of_pass in ops))


@pytest.mark.parametrize("family", some(("llama", "gpt2", "mixtral", "deepseek_v3"), "gpt2", "mixtral"))
def test_what_a_part_computes_is_what_its_costs_say(family: str) -> None:
    """The table is counted in a forward of short rows; here F, I and W run, on rows as they are."""
    config = zoo.tiny_config(family) if family == "deepseek_v3" else tiny_config(family)
    plan, length = plan_of(config), 64
    work = model_work(plan, (1, length))
    costs = model_costs(plan.source.model, plan.chain, length, chunked=True)
    for layer, expected in enumerate(costs.layers):
        assert passes(work.parts(range(layer, layer + 1))[layer == 0]) == pytest.approx(expected)
    assert passes(work.head) == pytest.approx(costs.head)
    assert passes(work.embedding) == pytest.approx(costs.embedding)


LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "dtype": "bfloat16"}


@cache
def llama(*changes: tuple[str, Any]) -> ModelWork:
    return model_work(plan_of(tiny_config("llama", **LLAMA)), (2, 32), **dict(changes))


def products(ops: tuple[OpWork, ...]) -> list[OpWork]:
    return [op for op in ops if op.kind == "matmul"]


def test_a_product_reads_its_factors_and_writes_its_result() -> None:
    """Gate and up projection are alike."""
    tokens, width, inner = 2 * 32, 64, 160
    made = [op for op in products(llama().kinds[0].forward) if op.flops == 2 * tokens * width * inner]
    assert {op.dtype for op in made} == {"bfloat16"}
    assert sum(op.calls for op in made) == 3
    assert {op.nbytes for op in made} == {2 * (tokens * width + width * inner + tokens * inner)}


def test_a_lookup_reads_the_rows_of_its_tokens_alone() -> None:
    tokens, width = 2 * 32, 64
    read = max(op.nbytes for op in llama().embedding.forward)
    assert read == 2 * (2 * tokens * width) + 8 * tokens  # bfloat16, and the ids


def test_attention_is_one_op_without_w() -> None:
    (layer,) = llama().kinds
    kinds = [[op.kind for op in ops] for ops in layer[:3]]
    assert [names.count("attention") for names in kinds] == [1, 1, 0]
    assert all(names.count("other") > 0 for names in kinds[:2])


def test_axes_shard_the_work() -> None:
    whole, half, pieces = (
        llama(*changes) for changes in ((), (("axes", Axes(tp=2)),), (("axes", Axes(cp=2)),))
    )
    for sharded in (half, pieces):
        assert flops(sharded.kinds[0].forward) == flops(whole.kinds[0].forward) / 2
    assert pieces.kinds[0].nbytes.sent == whole.kinds[0].nbytes.sent / 2


def test_a_first_run_has_the_ops_of_later_ones() -> None:
    """Under tp the first microbatch with a shape of weights had more ops in W, each of whole weights.

    torch finds the shape of a DTensor's result by an op on whole tensors, once for a shape. One row a
    microbatch was then predicted to take up to 30 % too long.
    """
    width, inner = 88, 168  # of no other model in the tests, so that torch has not seen the shapes
    config = tiny_config("llama", hidden_size=width, intermediate_size=inner, dtype="bfloat16")
    first, again = (model_work(plan_of(config), (2, 32), axes=Axes(tp=2)) for _ in range(2))
    assert first == again
    (layer,) = first.kinds
    added = sorted(op.nbytes for op in layer.weight_grad if op.kind == "other")
    assert added[-1] == 3 * 2 * width * inner / 2  # reads two, writes one, of bfloat16, the half of a matrix


def test_ranks_of_ep_share_the_gradients_of_experts() -> None:
    """W wrote and added the gradients of all ranks' experts: with 64 ranks it took four times as long."""
    plan = plan_of(tiny_config("mixtral", num_local_experts=8))
    whole, shared = (
        model_work(plan, (2, 32), axes=axes).kinds[0] for axes in (Axes(), Axes(dp_shard=4, ep=4))
    )
    config = plan.source.model.config
    inner, width = config.intermediate_size, config.hidden_size
    gradients = 4 * 8 * 3 * inner * width  # gate, up and down of eight experts, in float32
    written, added = 1, 3  # a product writes them once; to add them reads two and writes one
    assert bytes_of(whole.weight_grad) - bytes_of(shared.weight_grad) == (written + added) * gradients * 3 / 4
    assert flops(whole.weight_grad) == flops(shared.weight_grad)


def test_a_whole_backward_adds_each_gradient_by_an_op_of_its_own() -> None:
    """In float32 W adds within its products; in bfloat16 both round the product first."""
    config = tiny_config("llama", num_hidden_layers=1)
    layer = model_work(plan_of(config), (2, 32)).kinds[0]
    gradients = [4 * math.prod(shape) for shape in matrices(config)]
    added = [op for op in layer.whole_grad for _ in range(int(op.calls)) if op.kind == "other"]
    assert sorted(op.nbytes for op in added) == sorted(3 * nbytes for nbytes in gradients)
    assert bytes_of(layer.whole_grad) - bytes_of(layer.weight_grad) == 2 * sum(gradients)
    assert flops(layer.whole_grad) == flops(layer.weight_grad)
    half = llama().kinds[0]
    assert half.whole_grad == half.weight_grad


def matrices(config: PretrainedConfig) -> list[tuple[int, ...]]:
    """The shapes of those of a layer of Llama."""
    model = AutoModelForCausalLM.from_config(config)
    return [tuple(weight.shape) for weight in model.model.layers[0].parameters() if weight.dim() == 2]


def bytes_of(ops: tuple[OpWork, ...]) -> float:
    return sum(op.calls * op.nbytes for op in ops)


def test_a_layer_that_runs_again_holds_its_input() -> None:
    nbytes = llama().kinds[0].nbytes
    assert nbytes.activation > 3 * nbytes.recomputed_activation >= 3 * nbytes.sent
    selective = llama(("checkpointing", Checkpointing(save=("matmul", "attention")))).kinds[0]
    assert flops(selective.recomputed) == 0 < len(selective.recomputed)
    assert nbytes.recomputed_activation < selective.nbytes.recomputed_activation < nbytes.activation


def test_products_under_autocast_are_in_its_dtype() -> None:
    plan = plan_of(tiny_config("llama"))
    work = model_work(plan, (2, 32), options=ParallelOptions(autocast=torch.bfloat16))
    assert {op.dtype for op in products(work.kinds[0].forward)} == {"bfloat16"}
    assert {op.dtype for op in products(model_work(plan, (2, 32)).kinds[0].forward)} == {"float32"}


@pytest.mark.sweep
def test_a_model_of_671_b_parameters() -> None:
    """DeepSeek-V3 on the meta device: 37 B of its parameters work on a token."""
    plan = plan_of(DeepseekV3Config(dtype="bfloat16"))
    assert sum(parameter.numel() for parameter in plan.source.model.parameters()) == 671_026_404_352
    parts = model_work(plan, (1, 4096)).parts(range(61))
    attention = sum(op.flops for part in parts for op in part.forward if op.kind == "attention")
    active = (sum(flops(part.forward) for part in parts) - attention) / 2 / 4096
    assert active == pytest.approx(37e9, rel=0.03)
