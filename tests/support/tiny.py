"""A model and a text that train in a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.train.config.sections import TrainConfig

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2_WITH_DROPOUT = {
    "model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def tree(folder: Path, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config's tree; the text is written into `folder`, where the output goes too."""
    (folder / "text").write_bytes(bytes(range(32, 127)) * 8)
    return {
        "model": {"config": model or QWEN3},
        "data": {"path": str(folder / "text"), "tokenizer": "bytes", "sequence_length": 16},
        # by its multiply-adds the head of so small a model weighs more than all layers, and one rank had none
        "pipeline": {"ranks": 2, "microbatches": 2, "head_weight": 1},
        "train": {
            "steps": 4, "batch_size": 4, "evaluate_every": 2, "log_every": 1, "device": "cpu",
            "check": "off",  # tests/train/check has it on
        },
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "output": {"folder": str(folder / "out")},
    }  # fmt: skip


def config(
    folder: Path, model: dict[str, Any] | None = None, keys: Mapping[str, Any] | None = None, **train: Any
) -> TrainConfig:
    """The config of a tiny run.

    keys: of any section, such as {"pipeline.schedule": "zb_v"}; train: of the section train
    """
    made = tree(folder, model)
    made["train"] |= train
    for name, value in (keys or {}).items():
        *sections, key = name.split(".")
        section = made
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = value
    return TrainConfig.model_validate(made)


def config_file(folder: Path, **sections: dict[str, Any]) -> Path:
    made = tree(folder)
    for name, keys in sections.items():
        made[name] |= keys
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(made))
    return file


def save_model(folder: Path, seed: int = 0, **keys: Any) -> Any:
    """Save QWEN3 with these keys and random weights into `folder`; the model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**QWEN3, **keys}))
    model.save_pretrained(folder)
    return model


def write_documents(folder: Path, count: int = 80) -> dict[str, Any]:
    """Write documents of 2 to 24 letters in place of the text; the keys that name them."""
    texts = (bytes(range(33, 35 + number % 23)).decode() for number in range(count))
    (folder / "documents").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return {"data.path": str(folder / "documents"), "data.kind": "jsonl", "data.packing": "best_fit"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of the run of `tree(folder)`."""
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def held_out_losses(folder: Path) -> list[float]:
    """Those of the run of `tree(folder)`, in order."""
    return [row["held_out_loss"] for row in metrics(folder) if "held_out_loss" in row]


def checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint of the run of `tree(folder)`."""
    return folder / "out" / "checkpoints" / f"step-{step:08d}"


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by its file and name."""
    return {f"{file.name} {key}": value for file in sorted(checkpoint.glob("*.safetensors"))
            for key, value in load_file(file).items()}  # fmt: skip


def assert_same_tensors(first: Path, second: Path) -> None:
    """Two checkpoints hold the same tensors, bit for bit."""
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
