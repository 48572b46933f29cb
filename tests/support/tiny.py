"""A model and a text that train in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

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
        "pipeline": {"ranks": 2, "microbatches": 2},
        "train": {
            "steps": 4,
            "batch_size": 4,
            "evaluate_every": 2,
            "log_every": 1,
            "device": "cpu",
            "check": "off",
        },  # tests/train/test_check.py has it on
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "output": {"folder": str(folder / "out")},
    }


def config(folder: Path, model: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    made = tree(folder, model)
    made["train"] |= train
    return TrainConfig.model_validate(made)


def config_file(folder: Path, **sections: dict[str, Any]) -> Path:
    made = tree(folder)
    for name, keys in sections.items():
        made[name] |= keys
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(made))
    return file
