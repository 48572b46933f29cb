"""A classifier of rows, on two pipeline ranks in this process: is the first number larger than the second?

The pipeline trains the model's own loss, `model(**batch).loss` of the whole batch, without a loss_fn.

    python examples/classify.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from penstock import AutoPipeline

NUMBERS, LENGTH, ROWS, PAD = 16, 6, 32, 0


def rows() -> dict[str, Tensor]:
    """Rows of 2 to 6 numbers, padded, each with its class: whether its first number is the larger one."""
    ids = torch.randint(1, NUMBERS, (ROWS, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = (ids[:, 0] > ids[:, 1]).long()
    return {"input_ids": ids.where(mask == 1, PAD), "attention_mask": mask, "labels": labels}


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=NUMBERS, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=LENGTH, id2label={0: "not", 1: "larger"}, pad_token_id=PAD,
    )  # fmt: skip
    pipe = AutoPipeline(ranks=2, microbatches=4).build(BertForSequenceClassification(config))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(1, 101):
        optimizer.zero_grad()
        result = pipe.step(rows(), optimizer=optimizer)
        if step % 10 == 0:
            print(f"step {step:3d}  loss {result.loss:.4f}  accuracy {result.accuracy:.2f}")
    unseen = pipe.evaluate(rows())
    print(f"{unseen.accuracy:.0%} of the unseen rows are right")


if __name__ == "__main__":
    main()
