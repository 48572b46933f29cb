"""A classifier of texts, on two pipeline ranks in this process: an encoder with a head for rows.

A small random model learns which of two numbers a row has more of. The folder that it writes is one of
transformers: AutoModelForSequenceClassification.from_pretrained(folder) opens it, with the names of labels.

    python examples/classify.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from penstock import AutoPipeline

ROWS, LENGTH, NAMES = 32, 9, ["more ones", "more twos"]


def rows() -> dict[str, Tensor]:
    """Rows of ones and twos, and the number of each row's label."""
    ids = torch.randint(1, 3, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ((ids == 2).sum(1) > LENGTH // 2).long()}


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=3, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        id2label=dict(enumerate(NAMES)), label2id={name: number for number, name in enumerate(NAMES)},
        hidden_dropout_prob=0.0,
    )  # fmt: skip
    pipe = AutoPipeline(ranks=2, microbatches=4).build(BertForSequenceClassification(config))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for step in range(1, 41):
        optimizer.zero_grad()
        result = pipe.step(rows(), optimizer=optimizer)  # the model's own loss: a mean over all rows
        if step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}")
    batch = rows()
    logits = pipe.evaluate(batch, outputs=True, everywhere=True).outputs
    print(f"accuracy {(logits.argmax(1) == batch['labels']).float().mean():.2f}")
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        saved = AutoModelForSequenceClassification.from_pretrained(folder)
    again = saved(batch["input_ids"]).logits
    print(f"saved with {list(saved.config.id2label.values())}, same logits: {torch.allclose(again, logits)}")


if __name__ == "__main__":
    main()
