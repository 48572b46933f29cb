"""Multiply-adds of F, I and W, beside what a stage computes when it runs all three."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.models.activation_checkpointing import SavePolicy
from penstock.models.split.counting import Counting, ProductCounts, attention_flops
from penstock.models.split.multiply_adds import works_of_ops
from penstock.models.tracing.chain import find_chain
from penstock.private import FakeTensorMode
from support import zoo
from support.families import tiny_config


class Products(nn.Module):
    """Products of activations with a weight, with a frozen one, and with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.frozen.requires_grad_(False)
        self.experts = nn.Parameter(torch.empty(4, 8, 16))


@pytest.fixture
def products() -> Products:
    return Products()


def counted(model: Products, how: str, saved: SavePolicy | None = None) -> ProductCounts:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        hidden = torch.empty(5, 8)
        counting = Counting(model, saved)
        with counting:
            if how == "experts":  # those that a token goes to, as transformers takes them
                torch.bmm(hidden[:, None], model.experts[torch.zeros(5, dtype=torch.long)])
            elif how == "scores":
                hidden @ hidden.t()
            elif how == "positions":
                torch.arange(5.0)[:, None].expand(5, 8) @ hidden.t()
            else:
                getattr(model, how)(hidden)
    return counting.total


@pytest.mark.parametrize(("how", "expected"), [
    ("trained", (640, 640, 640)), ("frozen", (640, 640, 0)), ("experts", (640, 640, 640)),
    ("scores", (200, 400, 0)), ("positions", (200, 200, 0)),
])  # fmt: skip
def test_a_product_costs_as_much_again_for_each_factor_that_has_a_gradient(
    products: Products, how: str, expected: tuple[int, int, int]
) -> None:
    """1.0 assumed I = W = F of all: attention has no W, nor has a frozen weight."""
    assert counted(products, how)[:3] == expected


def test_what_is_kept_of_a_checkpointed_layer_does_not_run_again(products: Products) -> None:
    assert counted(products, "trained").again == 640
    assert counted(products, "trained", SavePolicy(("matmul",))).again == 0


def test_fused_attention_counts_the_causal_half_and_each_width() -> None:
    """Multi-head latent attention has values of another width than its queries and keys."""
    query, value = torch.empty(1, 2, 8, 6, device="meta"), torch.empty(1, 2, 8, 4, device="meta")
    pairs = 2 * 8 * 8  # of all heads; a product over a width is two FLOPs a pair and entry, half are masked
    expected = pairs * (6 + 4), pairs * (3 * 6 + 2 * 4)
    assert attention_flops(query, query, value) == expected
    # both query heads share one of a key: the formulas of torch 2.11 refuse it
    assert attention_flops(query, query[:, :1], value[:, :1]) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_linear_layer_costs_the_same_three_times_and_attention_has_no_w(family: str) -> None:
    config = tiny_config(family) if family != "deepseek_v3" else zoo.tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for layer in works_of_ops(model, find_chain(model))[:-2]:
        assert layer.forward.token == layer.input_grad.token == layer.weight_grad.token > 0
        assert layer.weight_grad.square == 0
        assert 2 <= layer.input_grad.square / layer.forward.square <= 8 / 3
        assert layer.again == layer.forward


def test_an_adapter_leaves_no_w_to_the_weights_beneath_it() -> None:
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(tiny_config("llama"))
        made = AutoModelForCausalLM.from_config(tiny_config("llama"))
        adapted = get_peft_model(made, LoraConfig(r=4, target_modules=["q_proj"])).base_model.model
    whole, (layer, *_, embedding, head) = (works_of_ops(m, find_chain(m)) for m in (plain, adapted))
    width = 32
    more = 4 * (width + width)  # of both matrices of the adapter
    assert layer.forward.token == whole[0].forward.token + more
    assert layer.input_grad.token == whole[0].input_grad.token + more
    assert layer.weight_grad.token == more
    assert embedding.input_grad.token == head.weight_grad.token == 0 < head.input_grad.token
