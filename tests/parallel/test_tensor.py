"""Tensor parallelism beside one plain process: loss and every parameter's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, ModelError
from penstock.parallel.tensor.plan import check
from support import jobs_tensor as jobs
from support import zoo
from support.families import FAMILIES
from support.jobs_tensor import OTHERS, SINKS, build
from support.pool import Pool

WITHOUT_A_PLAN = {"gpt2", "opt", "gpt_oss"}
PLANNED = [family for family in FAMILIES if family not in WITHOUT_A_PLAN]
FLOAT32, FLOAT64 = torch.float32, torch.float64
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}

Case = tuple[str, int, torch.dtype, bool, dict[str, Any]]

EVERY_RUN: list[Case] = [
    ("llama", 2, FLOAT32, False, {}),
    ("llama", 4, FLOAT64, True, {**HEADS, "tied": True}),
    ("qwen2", 2, FLOAT64, False, {"tied": True}),  # biases of columns
    ("qwen3", 2, FLOAT64, False, {}),  # norms of each head
    ("qwen3", 2, FLOAT64, True, {}),
    ("gpt_neox", 2, FLOAT64, True, {}),  # fused projections, biases of rows, norms with biases
    ("phi3", 2, FLOAT64, False, {}),  # whole between columns and rows, and a padding row
    ("mixtral", 2, FLOAT64, True, {}),
    ("gpt_oss", 2, FLOAT32, False, {"plan": SINKS}),
    ("gemma3_text", 2, FLOAT32, True, {"tied": True}),
    ("deepseek_v3", 2, FLOAT64, False, {}),
]
SWEPT: list[Case] = [
    *((family, 2, dtype, sequence, {"tied": tied})
      for family in PLANNED for dtype in (FLOAT32, FLOAT64)
      for sequence in (False, True) for tied in (False, True)),
    *((family, 4, FLOAT64, sequence, HEADS) for family in PLANNED for sequence in (False, True)),
    *((family, 2, FLOAT64, sequence, {}) for family in OTHERS for sequence in (False, True)),
    ("deepseek_v3", 2, FLOAT64, True, {"q_lora_rank": None}),
    ("llama", 2, FLOAT64, True, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 2, FLOAT64, False, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 2, FLOAT64, False, {"vocab_size": 65, "tied": True}),
    ("gpt_oss", 2, FLOAT32, True, {"plan": SINKS}),
    ("gpt_oss", 2, FLOAT64, False, {"plan": SINKS}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tp", "dtype", "sequence", "changes"), EVERY_RUN, ids=str)
def test_equal_to_one_process(
    pool: Pool, family: str, tp: int, dtype: torch.dtype, sequence: bool, changes: dict[str, Any]
) -> None:
    pool.run(tp, jobs.exact, family, tp, dtype, sequence, changes)


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "tp", "dtype", "sequence", "changes"), SWEPT, ids=str)
def test_equal_to_one_process_in_every_case(
    pool: Pool, family: str, tp: int, dtype: torch.dtype, sequence: bool, changes: dict[str, Any]
) -> None:
    pool.run(tp, jobs.exact, family, tp, dtype, sequence, changes)


def test_what_is_shared_out(pool: Pool) -> None:
    """What the plan names, a tied weight under both of its names; norms are whole."""
    found = pool.run(2, jobs.exact, "llama", 2, FLOAT32, False, {"tied": True, "layers": 1})[0]
    projections = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert found == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.{name}.weight" for name in projections),
        "lm_head.weight",
    ]


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_tied_weights_that_stay_whole(pool: Pool, family: str) -> None:
    """The head is planned and the embedding is not; or both are, and their rows do not divide."""
    changes = {"tied": True, "layers": 1, **({"vocab_size": 65} if family == "llama" else {})}
    found = pool.run(2, jobs.exact, family, 2, FLOAT64, False, changes)[0]
    assert found
    assert not any("embed" in name or "lm_head" in name for name in found)


def test_experts_stay_whole(pool: Pool) -> None:
    found = pool.run(2, jobs.exact, "mixtral", 2, FLOAT64, False, {"layers": 1})[0]
    assert not any("experts" in name for name in found)
    assert "model.layers.0.self_attn.q_proj.weight" in found


def test_an_embedding_that_is_read_from_outside(pool: Pool) -> None:
    """0.5.0: gemma4 takes the padding token's row of it in its own forward, which met a DTensor there."""
    assert pool.run(2, jobs.verdict, "gemma4", False) == ["exact"] * 2


@pytest.mark.parametrize("sequence", [False, True])
def test_several_backwards_add_up(pool: Pool, sequence: bool) -> None:
    pool.run(2, jobs.accumulated, "qwen3", sequence)


@pytest.mark.parametrize("sequence", [False, True])
def test_stages_with_placeholders(pool: Pool, sequence: bool) -> None:
    """A stage leaves its forward by an exception, and holds a part of what the plan names."""
    pool.run(2, jobs.as_stages, "qwen3", sequence)


@pytest.mark.parametrize("sequence", [False, True])
def test_layers_that_are_run_again(pool: Pool, sequence: bool) -> None:
    pool.run(2, jobs.checkpointed, "qwen3", sequence)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_backward_in_halves(pool: Pool, sequence: bool) -> None:
    """The tape looks through DTensors, so that the weights' half waits."""
    assert min(pool.run(2, jobs.in_halves, "qwen3", sequence)) > 0


@pytest.mark.parametrize(
    ("family", "sequence", "tied", "late"),
    [("qwen3", False, False, False), ("qwen3", True, True, True)],
)
def test_fsdp_over_another_axis(pool: Pool, family: str, sequence: bool, tied: bool, late: bool) -> None:
    placements = pool.run(4, jobs.with_fsdp, family, sequence, tied, late)[0]
    assert all(len(each.split("), ")) == 2 for each in placements)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "mixtral", "olmo2"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_fsdp_over_another_axis_in_every_case(
    pool: Pool, family: str, sequence: bool, tied: bool, late: bool
) -> None:
    pool.run(4, jobs.with_fsdp, family, sequence, tied, late)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_type_is_exact_or_refused(pool: Pool, sequence: bool) -> None:
    """Or fails on every rank alike: no type has a gradient that is wrong."""
    told = {model_type: pool.run(2, jobs.verdict, model_type, sequence)
            for model_type in zoo.TYPES if model_type not in zoo.SKIPPED}  # fmt: skip
    assert {verdict for found in told.values() for verdict in found if verdict.startswith("differs")} == set()
    assert sum(found[0] == "exact" for found in told.values()) >= 90
    for model_type, (one, other) in told.items():
        assert one == other, model_type


# ---- what is refused


@pytest.mark.parametrize("family", sorted(WITHOUT_A_PLAN))
def test_a_model_without_a_plan(family: str) -> None:
    with pytest.raises(ModelError, match="plan for tensor parallelism names"):
        check(build(family), 2)


def test_a_module_that_is_no_model() -> None:
    with pytest.raises(ModelError, match="names nothing"):
        check(nn.Linear(4, 4), 2)


@pytest.mark.parametrize(
    ("changes", "tp", "value", "remedy"),
    [
        ({}, 3, "4 num_attention_heads", "1 or 2"),
        ({}, 4, "2 num_key_value_heads", "1 or 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 36, "intermediate_size": 60}, 4,
         "6 num_attention_heads", "1 or 2 or 3 or 6"),
        ({"intermediate_size": 50, **HEADS}, 4, "50 rows of", "1 or 2"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide(changes: dict[str, Any], tp: int, value: str, remedy: str) -> None:
    """On the meta device: nothing is made for it."""
    with torch.device("meta"):
        model = build("llama", **changes)
    with pytest.raises(ConfigError, match=f"tp={tp} .*{value}.* Take a tp of {remedy}$"):
        check(model, tp)


def test_a_size_that_divides_on_the_meta_device() -> None:
    with torch.device("meta"):
        check(build("qwen3"), 2, sequence_parallel=True)
        check(build("mixtral"), 1)


def test_a_style_that_is_not_understood() -> None:
    model = build("llama")
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp": "all_reduce"}
    with pytest.raises(
        ModelError, match=r"'all_reduce' in the plan of LlamaForCausalLM for model.layers.0.mlp"
    ):
        check(model, 2)


def test_a_projection_with_a_forward_of_its_own() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = build("llama")
    model.model.layers[1].self_attn.q_proj = Adapted(32, 32)
    with pytest.raises(ModelError, match=r"layers.1.self_attn.q_proj, a Adapted"):
        check(model, 2)


@pytest.mark.parametrize("family", ["gemma3n_text"])
def test_a_layer_that_mixes_what_ranks_share_out(family: str) -> None:
    """Sparse by a mean over all of a projection's outputs: each rank's own mean would be another."""
    with pytest.raises(ModelError, match=r"layers.0.mlp, a .*MLP: between gate_proj, up_proj and down_proj"):
        check(zoo.tiny_model(family), 2)


def test_a_norm_of_heads_that_the_plan_forgets() -> None:
    model = build("qwen3")
    model.tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("q_norm")}
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_norm, which .* does not name"):
        check(model, 2)


def test_a_part_without_a_forward_between_shared_tokens() -> None:
    model = build("llama")
    model.model.layers[0].more = nn.ModuleList([nn.Linear(4, 4)])
    check(model, 2)
    with pytest.raises(ModelError, match=r"layers.0.more"):
        check(model, 2, sequence_parallel=True)


def test_a_length_that_does_not_divide(pool: Pool) -> None:
    """On every rank alike."""
    for told in pool.run(2, jobs.refused_length):
        assert told.startswith("a sequence of 11 tokens with sequence_parallel over tp=2")
        assert "Pad to a length of 12" in told


def test_a_part_that_returns_its_tokens_elsewhere(pool: Pool) -> None:
    """llama4's mixtures give rows and tokens in one dimension: their second one is the width."""
    for told in pool.run(2, jobs.verdict, "llama4_text", True):
        assert told.startswith("fails: ModelError: what a Llama4TextMoe returns, of shape [24, 32]")


def test_ids_out_of_the_vocabulary(pool: Pool) -> None:
    """They are an error, as without tensor parallelism, and not zeros."""
    assert pool.run(2, jobs.out_of_the_vocabulary) == [[True, False], [False, True]]
