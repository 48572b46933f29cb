<<<<<<< HEAD
"""A classifier of texts, on two pipeline ranks in this process: an encoder with a head for rows.

A small random model learns which of two numbers a row has more of. The folder that it writes is one of
transformers: AutoModelForSequenceClassification.from_pretrained(folder) opens it, with the names of labels.
=======
"""A classifier of rows, on two pipeline ranks in this process: is the first number larger than the second?

The pipeline trains the model's own loss, `model(**batch).loss` of the whole batch, without a loss_fn.
>>>>>>> heads2

    python examples/classify.py
"""

from __future__ import annotations

<<<<<<< HEAD
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
=======
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
>>>>>>> heads2


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
<<<<<<< HEAD
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
=======
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
>>>>>>> heads2


if __name__ == "__main__":
    main()
