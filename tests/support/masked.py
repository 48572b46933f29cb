"""A tokenizer with a mask token, a small masked language model for it, and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import BertTokenizerFast

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghij",
    *(f"##{letter}" for letter in "abcdefghij"),
]
MASK = 4
BERT = {
    "model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
    "architectures": ["BertForMaskedLM"],
}  # fmt: skip


def save_tokenizer(folder: Path, **options: Any) -> str:
    """Save a tokenizer of the letters a to j into `folder / "tokenizer"`, and return its path."""
    made = BertTokenizerFast(vocab={word: at for at, word in enumerate(WORDS)}, **options)
    made.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def write_texts(folder: Path, count: int = 60) -> str:
    """Texts of letters in the order of the alphabet, of several lengths, and two blank ones."""
    texts = [" ".join("abcdefghij"[(at + place) % 10] for place in range(3 + at % 13)) for at in range(count)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "", " \n"]))
    return str(folder / "texts.jsonl")
