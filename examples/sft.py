"""Fine-tune a small model on chats, whose answers alone count, and ask it over its stages. Tokens are bytes.

python examples/sft.py                                    all ranks in one process
torchrun --nproc-per-node 2 examples/sft.py --ranks 2     a process for each rank
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import AutoPipeline

CHATS = {"What is a stage?": "A slice of layers.", "And a rank?": "One process.",
         "What is a step?": "A batch, there and back.", "The bubble?": "The time ranks wait."}  # fmt: skip
END, PAD, ASKED, LENGTH = 0, 1, 20, 50


def encoded(texts: list[str], length: int) -> Tensor:
    """Bytes, padded on the left: (rows, length)."""
    return torch.tensor([[PAD] * (length - len(text)) + [*text.encode()] for text in texts])


def batch() -> dict[str, Tensor]:
    ids = encoded([f"{question}\n{answer}\0" for question, answer in CHATS.items()], LENGTH)
    answers = torch.tensor([len(answer) + 1 for answer in CHATS.values()])
    asked = torch.arange(LENGTH) < LENGTH - answers[:, None]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.masked_fill(asked, -100)}


def main(ranks: int) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    pipe = AutoPipeline(ranks=ranks, microbatches=2).build(AutoModelForCausalLM.from_config(config))
    optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=3e-3), []
    for _ in range(60):
        losses.append(pipe.step(batch(), optimizer=optimizer).loss)
        optimizer.zero_grad()
    asked = encoded([f"{question}\n" for question in CHATS], ASKED)
    answered = pipe.generate(asked, attention_mask=(asked != PAD).long(), max_new_tokens=LENGTH - ASKED)
    if int(os.environ.get("RANK", 0)) == 0:  # every rank has the losses and the tokens
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        for question, row in zip(CHATS, answered[:, ASKED:].tolist(), strict=True):
            print(question, bytes(row).split(b"\0")[0].decode())
    pipe.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    main(parser.parse_args().ranks)
