"""penstock merge: an adapter that PEFT wrote, and what the command says to a wrong folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import zoo
from support.adapted import adapted, logits, lora
from support.command import Command

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # files have them one by one


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"use_dora": True}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ],
)
def test_an_adapter_of_pefts_own_is_merged(
    family: str, options: dict[str, Any], tmp_path: Path, penstock: Command
) -> None:
    zoo.tiny_model(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft = adapted(base, lora(**options))
    peft.save_pretrained(tmp_path / "adapter")
    code, out, _ = penstock("merge", tmp_path / "adapter", "--out", tmp_path / "merged")
    assert code == 0
    assert out == f"{tmp_path / 'merged'} holds the base model with {tmp_path / 'adapter'}\n"
    ids = zoo.tiny_batch(family)["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, ids), logits(peft, ids), rtol=1e-4, atol=1e-5)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, penstock: Command) -> None:
    code, _, err = penstock("merge", tmp_path, "--out", tmp_path / "merged")
    assert code == 2
    assert "it holds no adapter_config.json, and no checkpoint with one. Give a run's folder" in err
    assert not (tmp_path / "merged").exists()
