"""penstock merge: an adapter that PEFT wrote, and what the command says to a wrong folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline, save_checkpoint
from penstock.train.state import FRESH
from support import tiny, zoo
from support.adapted import adapted, logits, lora
from support.command import Command

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # files have them one by one

HEAD_AND_ROWS: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [5, 9]}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("family", "options", "model"),
    [
        ("llama", {"use_dora": True}, {}),
        pytest.param(
            "gpt2",
            {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
            {},
            marks=pytest.mark.sweep,
        ),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, {}),
        ("llama", HEAD_AND_ROWS, TIED),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_of_pefts_own_is_merged(
    family: str, options: dict[str, Any], model: dict[str, Any], tmp_path: Path, penstock: Command
) -> None:
    """A tied head with an update lost its trained rows, as it does in the merge of PEFT 0.21."""
    zoo.tiny_model(family, **model).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft = adapted(base, lora(**options))
    peft.save_pretrained(tmp_path / "adapter")
    code, out, _ = penstock("merge", tmp_path / "adapter", "--out", tmp_path / "merged")
    assert code == 0
    assert out == f"{tmp_path / 'merged'} holds the base model with {tmp_path / 'adapter'}\n"
    ids = zoo.tiny_batch(family)["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, ids), logits(peft, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 28 LoRA tensor")  # of the shape of a bias
def test_what_peft_cannot_merge_is_refused(tmp_path: Path, penstock: Command) -> None:
    """PEFT raises a RuntimeError for a bias of an update on a layer without one."""
    base = zoo.tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    adapted(base, lora(lora_bias=True)).save_pretrained(tmp_path / "adapter")
    code, _, err = penstock(
        "merge", tmp_path / "adapter", "--out", tmp_path / "merged", "--base", tmp_path / "base"
    )
    assert code == 2
    assert "merging q_proj: PEFT refuses it" in err
    assert not (tmp_path / "merged").exists()


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, penstock: Command) -> None:
    code, _, err = penstock("merge", tmp_path, "--out", tmp_path / "merged")
    assert code == 2
    assert "it holds no adapter_config.json, and no checkpoint with one. Give a run's folder" in err
    assert not (tmp_path / "merged").exists()


def test_what_is_merged_is_not_replaced(
    tmp_path: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: --out of a run's checkpoint replaced its adapter and optimizer, exit code 0: any folder that
    penstock wrote could be replaced. --out=~/merged made a folder of the name ~.
    """
    AutoPipeline(ranks=2, microbatches=2).build(zoo.tiny_model("llama")).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted(base, lora()).save_pretrained(tmp_path / "adapter")
    (tmp_path / "link").symlink_to("base")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "state.json").write_text("{}")
    files = sorted(tmp_path.rglob("*"))
    for out, rule in (
        ("base", f"it is or lies in {tmp_path / 'base'}, which is merged"),
        ("link", f"it is or lies in {tmp_path / 'base'}, which is merged"),
        ("adapter/merged", f"it is or lies in {tmp_path / 'adapter'}, which is merged"),
        ("checkpoint", "it is a checkpoint that a run can go on from"),
    ):
        code, _, err = penstock("merge", tmp_path / "adapter", "--out", tmp_path / out)
        assert code == 2
        assert f"--out {tmp_path / out}: {rule}, and would be replaced or changed. Name another folder" in err
        assert sorted(tmp_path.rglob("*")) == files
    monkeypatch.setenv("HOME", str(tmp_path))
    assert penstock("merge", tmp_path / "adapter", "--out=~/merged")[0] == 0
    assert (tmp_path / "merged" / "config.json").exists()


def test_what_was_edited_since_it_was_written_is_not_merged(tmp_path: Path, penstock: Command) -> None:
    """0.5.0: an altered adapter or base, and a base of another config, were merged, exit code 0: lengths
    and samples of weights were compared. A damaged checkpoint was "no checkpoint", or an older one came.
    """
    base, checkpoint, out = tmp_path / "base", tmp_path / "run/checkpoints/step-00000001", tmp_path / "merged"
    pipe = AutoPipeline(ranks=2, microbatches=2)
    pipe.build(zoo.tiny_model("llama")).save_pretrained(base)
    tuned = replace(pipe, adapter=lora()).build(base)
    state = FRESH.after(1, "mine", tiny.config(tmp_path), {"digest": "", "position": 4})
    save_checkpoint(checkpoint, tuned, torch.optim.AdamW(tuned.parameters()), state)

    def merged(folder: Path = tmp_path / "run") -> str:
        code, _, err = penstock("merge", folder, "--out", out)
        assert (code == 0) == out.exists()
        assert code in (0, 2)
        return err

    for path in (checkpoint / "adapter_model.safetensors", next(base.glob("*.safetensors"))):
        content = path.read_bytes()
        tensor = max(load(content).values(), key=Tensor.numel)  # its ends are in the fingerprint
        middle = content.index(tensor.numpy().tobytes()) + tensor.nbytes // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        for folder in (checkpoint, tmp_path / "run"):
            assert f"{path.name}: its contents differ from what was written (sha256)" in merged(folder)
        path.write_bytes(content)
    (base / "manifest.json").unlink()  # as of a model from elsewhere
    edited = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**edited, "rms_norm_eps": 0.1}))
    assert "model config rms_norm_eps=1e-06: the model has 0.1" in merged()
    (base / "config.json").write_text(json.dumps(edited))
    assert merged() == ""
    shutil.rmtree(out)
    shutil.copytree(checkpoint, checkpoint.with_name("step-00000002"))
    assert (
        f"passed over checkpoint {checkpoint.with_name('step-00000002')}: its state is of step 1" in merged()
    )


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: a traceback of OSError: the write of the command had no reader of its errors."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    zoo.tiny_model("llama").save_pretrained(tmp_path / "base")
    adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora()).save_pretrained(
        tmp_path / "adapter"
    )
    monkeypatch.setattr("penstock.models.weights.saved.FileLayout.write", full)
    code, _, err = penstock("merge", tmp_path / "adapter", "--out", tmp_path / "out")
    assert code == 1
    rule = "it cannot be written (No space left on device). Make room on that disk, or name another folder"
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"penstock: error: --out {tmp_path / 'out'}: {rule}"
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}
