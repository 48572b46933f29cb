"""Plans of tensor parallelism that would not be exact are refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, ModelError
from penstock.parallel.tensor.plan import assigned, check
from support import zoo
from support.families import tiny_model
from support.planned_models import build
from support.refusals import refuses

WITHOUT_A_PLAN = {"gpt2", "opt", "gpt_oss"}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize("family", sorted(WITHOUT_A_PLAN))
def test_a_model_without_a_plan_is_refused(family: str) -> None:
    with refuses(ModelError, "plan for tensor parallelism names"):
        check(build(family), 2)


def test_a_plain_module_is_refused() -> None:
    with refuses(ModelError, "names nothing"):
        check(nn.Linear(4, 4), 2)


@pytest.mark.parametrize(
    ("changes", "tp", "value", "remedy"),
    [
        ({}, 3, "4 num_attention_heads", "1 or 2"),
        ({}, 4, "2 num_key_value_heads", "1 or 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 36, "intermediate_size": 60}, 4,
         "6 num_attention_heads", "1 or 2 or 3 or 6"),
        ({"intermediate_size": 50, **HEADS}, 4, "50 rows of", "1 or 2"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, 2, "1 num_attention_heads", "1"),
    ],
)  # fmt: skip
def test_sizes_that_tp_does_not_divide_are_refused(
    changes: dict[str, Any], tp: int, value: str, remedy: str
) -> None:
    """On the meta device: nothing is made for it."""
    with torch.device("meta"):
        model = build("llama", **changes)
    with refuses(ConfigError, value, "the same number of heads") as caught:
        check(model, tp)
    assert caught.value.value.startswith(f"tp={tp} ")
    assert caught.value.remedy == f"Take a tp of {remedy}"


def test_sizes_that_tp_divides_pass_on_the_meta_device() -> None:
    with torch.device("meta"):
        check(build("qwen3"), 2, sequence_parallel=True)


def test_an_unknown_style_is_refused() -> None:
    model = build("llama")
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp": "all_reduce"}
    with refuses(ModelError, "'all_reduce' in the plan of LlamaForCausalLM for model.layers.0.mlp"):
        check(model, 2)


def test_a_projection_with_its_own_forward_is_refused() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = build("llama")
    model.model.layers[1].self_attn.q_proj = Adapted(32, 32)
    with refuses(ModelError, "layers.1.self_attn.q_proj, a Adapted"):
        check(model, 2)


@pytest.mark.parametrize("family", ["gemma3n_text"])
def test_a_layer_that_mixes_sharded_outputs_is_refused(family: str) -> None:
    """Sparse by a mean over all of a projection's outputs: each rank's own mean would be another."""
    with refuses(ModelError, "model.layers.0.mlp, a Gemma3nTextMLP", "gate_proj, up_proj and down_proj"):
        check(zoo.tiny_model(family), 2)


def test_a_norm_of_heads_missing_in_the_plan_is_refused() -> None:
    model = build("qwen3")
    model.tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("q_norm")}
    with refuses(ModelError, "layers.0.self_attn.q_norm", "a sibling of projections"):
        check(model, 2)


def test_a_list_of_modules_in_a_layer_refuses_sequence_parallel() -> None:
    model = build("llama")
    model.model.layers[0].more = nn.ModuleList([nn.Linear(4, 4)])
    check(model, 2)
    with refuses(ModelError, "layers.0.more"):
        check(model, 2, sequence_parallel=True)


def test_what_would_see_a_part_of_a_matrix_is_refused() -> None:
    """0.5.0: hooks and parametrizations saw one rank's part of a matrix."""
    model = tiny_model("llama", layers=1)
    handle = model.model.layers[0].mlp.act_fn.register_forward_hook(
        lambda module, args, output: output.mean()
    )
    with refuses(ModelError, "a hook of model.layers.0.mlp.act_fn", "tensor parallelism"):
        check(model, 2)
    handle.remove()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    check(model, 2)  # it sees whole values
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    with refuses(ModelError, "whose weight is computed by a parametrization"):
        check(model, 2)


def test_three_modules_of_one_weight_are_sharded_alike() -> None:
    """0.5.0: one that the plan leaves whole kept the first whole, and the one in between was sharded."""
    model: Any = build("llama", tie_word_embeddings=True)
    model.add_module("extra", nn.Linear(32, model.config.vocab_size, bias=False))
    model.extra.weight = model.lm_head.weight
    tied = {"model.embed_tokens", "lm_head", "extra"}
    styles = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    model.tp_plan = {**model.tp_plan, **styles}
    assert tied.isdisjoint(assigned(model, 2))
    model.tp_plan = {**model.tp_plan, "extra": "colwise_gather_output"}
    assert tied <= assigned(model, 2).keys()
