"""The configs of the seed documents: planned at their own sizes, and trained, shrunk, like one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from penstock import AutoPipeline
from penstock.cli.dry_run import memory
from penstock.models.source import sdpa_for_flash
from penstock.train.config.load import load_config
from penstock.train.model import inline_config
from penstock.train.preflight import dry_run
from support.families import ragged_batch

FOLDER = Path(__file__).parents[2] / "configs" / "seeds"
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 64, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
# billions of parameters, processes, and the layers of each stage
PLANNED: dict[str, tuple[float, int, list[int]]] = {
    "xorl_qwen3_8b_pp2": (8.19, 8, [18, 18]),
    "xorl_qwen3_30b_a3b_pp2_ep4_cp4_muon": (30.53, 8, []),
    "megatron_deepseek_v3_pp16_vpp2": (682.64, 128, [3, *[2] * 29, 1, 0]),
    "automodel_llama_70b_pp8": (70.55, 16, [5] * 16),
    "automodel_llama_8b_hellaswag_pp2": (8.03, 8, []),
    "automodel_mistral_123b_pp8": (122.61, 32, []),
}


def test_every_config_is_tested() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(PLANNED)
    assert all(re.match(r"# .*\n", file.read_text()) for file in FOLDER.glob("*.yaml"))


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLANNED)
def test_a_config_is_planned_at_its_own_size(name: str) -> None:
    billions, processes, layers = PLANNED[name]
    config = load_config(FOLDER / f"{name}.yaml")
    with sdpa_for_flash():
        planned = dry_run(config)
        model = planned.plan.source.model
        assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == billions
        assert config.pipeline.ranks * config.parallel.axes.ranks_per_stage == processes
        found = [len(stage.layers) for stage in planned.plan.stages]
        assert found == (layers or found)
        assert max(need.total for need in memory(planned)) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLANNED)
def test_a_config_trains_shrunk_like_one_process(name: str) -> None:
    """The same model type, layout and schedule, with every rank in this process."""
    tree: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    keys = {key: SMALL.get(key, value) for key, value in tree["model"]["config"].items()}
    if keys["model_type"] == "deepseek_v3":
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    elif "layers_per_stage" not in tree["pipeline"]:
        keys["num_hidden_layers"] = 2 * tree["pipeline"]["ranks"]
    model = inline_config(keys)
    model._experts_implementation = "eager"
    how = {**tree["pipeline"], "mtp_loss_scaling_factor": tree["model"].get("mtp_loss_scaling_factor")}
    pipe = AutoPipeline(**how, dtype=torch.float64, activation_checkpointing=True).build(model)
    one = {"ranks": 1, "microbatches": 1, "mtp_loss_scaling_factor": how["mtp_loss_scaling_factor"]}
    whole = AutoPipeline(**one, dtype=torch.float64).build(model).modules[0]
    batch = ragged_batch(rows=how["microbatches"])
    pipe.compare(whole, batch, tolerance=1e-10).raise_if_wrong()
