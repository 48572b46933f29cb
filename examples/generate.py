"""Train a small model over a pipeline, and let it generate: rows that count on from where their prompts end.

python examples/generate.py                                    all ranks in one process
torchrun --nproc-per-node 2 examples/generate.py --ranks 2     a process for each rank
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import AutoPipeline

NUMBERS, PAD, LENGTH = 20, 20, 8
PROMPTS = [[3, 4, 5], [9], [17, 18]]


def main(ranks: int, steps: int) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=NUMBERS + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, pad_token_id=PAD,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    pipe = AutoPipeline(ranks=ranks, schedule="1f1b", microbatches=4).build(model)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-2)
    for _ in range(steps):
        rows = (torch.randint(NUMBERS, (16, 1)) + torch.arange(LENGTH)) % NUMBERS  # the same on every rank
        loss = pipe.step({"input_ids": rows, "labels": rows}, optimizer=optimizer).loss
        optimizer.zero_grad()

    longest = max(map(len, PROMPTS))  # a prompt is padded on the left
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    tokens = pipe.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=6)
    drawn = pipe.generate(
        ids, attention_mask=(ids != PAD).long(), max_new_tokens=6, do_sample=True, temperature=3.0, seed=1
    )
    if int(os.environ.get("RANK", 0)) == 0:  # every rank has the tokens
        print(f"loss {loss:.3f}")
        for prompt, greedy, sampled in zip(PROMPTS, tokens, drawn, strict=True):
            print(f"{prompt} goes on {greedy[longest:].tolist()}, or hot {sampled[longest:].tolist()}")
    pipe.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    main(given.ranks, given.steps)
