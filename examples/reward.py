"""A reward model on two pipeline ranks in this process: rows that count upwards score higher.

python examples/reward.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

from penstock import AutoPipeline
from penstock.batch.preferences import Reward

NUMBERS, LENGTH, PAIRS, PAD = 33, 6, 16, 0


def pairs() -> dict[str, Tensor]:
    """Rows that count up and down in turn: the first of two is the chosen one, and a pair stays together."""
    first = torch.randint(LENGTH, NUMBERS - LENGTH, (PAIRS, 1)).repeat_interleave(2, 0)
    return {"input_ids": first + torch.tensor([1, -1]).repeat(PAIRS)[:, None] * torch.arange(LENGTH)}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=NUMBERS, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                         num_attention_heads=2, num_labels=1, pad_token_id=PAD)  # fmt: skip
    loss = Reward()
    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=loss).build(LlamaForSequenceClassification(config))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(1, 21):
        optimizer.zero_grad()
        result, metrics = pipe.step(pairs(), optimizer=optimizer), loss.metrics()
        if step % 5 == 0:
            print(f"step {step:2d}  loss {result.loss:.4f}  accuracy {metrics['rewards/accuracies']:.2f}")
    scores = pipe.evaluate(pairs(), outputs=True, everywhere=True).outputs[:, 0]
    right = (scores[::2] > scores[1::2]).float().mean()
    print(f"{right:.0%} of the unseen pairs are in order")


if __name__ == "__main__":
    main()
