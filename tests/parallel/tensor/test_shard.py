"""Tensor parallelism compared with one plain process: loss and every parameter's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import zoo
from support.families import FAMILIES
from support.mesh import later
from support.planned_models import OTHERS, SINKS
from support.pool import Pool
from support.sharded_matrices import exact, verdict

WITHOUT_A_PLAN = {"gpt2", "opt", "gpt_oss"}
PLANNED = [family for family in FAMILIES if family not in WITHOUT_A_PLAN]
FLOAT32, FLOAT64 = torch.float32, torch.float64
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
Case = tuple[str, int, torch.dtype, bool, dict[str, Any]]
EVERY_RUN: list[Case] = [
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


@pytest.mark.parametrize(
    ("family", "tp", "dtype", "sequence", "changes"),
    [*EVERY_RUN, *later(*SWEPT, mark=pytest.mark.sweep)],
    ids=str,
)
def test_equal_to_one_process(
    pool: Pool, family: str, tp: int, dtype: torch.dtype, sequence: bool, changes: dict[str, Any]
) -> None:
    pool.run(tp, exact, family, dtype, sequence, changes)


def test_the_planned_weights_are_sharded(pool: Pool) -> None:
    """What the plan names, a tied weight under both of its names; norms are whole."""
    found = pool.run(2, exact, "llama", FLOAT32, False, {"tied": True, "layers": 1})[0]
    projections = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert found == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.{name}.weight" for name in projections),
        "lm_head.weight",
    ]


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_tied_weights_stay_whole_where_one_end_is_not_planned(pool: Pool, family: str) -> None:
    """The head is planned and the embedding is not; or both are, and their rows do not divide."""
    changes = {"tied": True, "layers": 1, **({"vocab_size": 65} if family == "llama" else {})}
    found = pool.run(2, exact, family, FLOAT64, False, changes)[0]
    assert found
    assert not any("embed" in name or "lm_head" in name for name in found)


def test_experts_stay_whole(pool: Pool) -> None:
    found = pool.run(2, exact, "mixtral", FLOAT64, False, {"layers": 1})[0]
    assert not any("experts" in name for name in found)
    assert "model.layers.0.self_attn.q_proj.weight" in found


def test_an_embedding_may_be_read_by_another_module(pool: Pool) -> None:
    """0.5.0: gemma4 takes the padding token's row of it in its own forward, which met a DTensor there."""
    assert pool.run(2, verdict, "gemma4", False) == ["exact"] * 2


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_type_is_exact_or_refused(pool: Pool, sequence: bool) -> None:
    """Or fails on both ranks: no type has a gradient that is wrong."""
    found = {model_type: pool.run(2, verdict, model_type, sequence)
             for model_type in zoo.TYPES if model_type not in zoo.SKIPPED}  # fmt: skip
    assert {each for verdicts in found.values() for each in verdicts if each.startswith("differs")} == set()
    assert sum(one == "exact" for one, _ in found.values()) >= 90
    for model_type, (one, other) in found.items():
        assert one == other, model_type
