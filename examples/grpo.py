"""Group relative policy optimization on two pipeline ranks in this process: generate, reward, learn.

A small random model learns to write even numbers. It samples eight completions of each prompt over its
stages, and a function rewards the share of even tokens: those above the mean of their group become likelier.

    python examples/grpo.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig

from penstock import AutoPipeline
from penstock.batch.grpo import GRPO
from penstock.train.rollouts import rollouts

NUMBERS, GROUP, NEW = 16, 8, 6


def share_of_even(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completions]


def main() -> None:
    torch.set_num_threads(1)  # so small a model gains nothing by more
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=NUMBERS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, eos_token_id=None)  # fmt: skip
    loss = GRPO(epsilon=0.2)
    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=loss).build(config)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(1, 15):
        prompts = torch.randint(NUMBERS, (4, 3)).tolist()
        made = rollouts(pipe, prompts, share_of_even, group=GROUP, max_new_tokens=NEW, seed=step)
        old = pipe.logprobs(made.batch, by_token=True)
        for _ in range(2):  # the second time the ratio is no longer 1
            optimizer.zero_grad()
            pipe.step(made.batch, old_logps=old, optimizer=optimizer)
        clipped = loss.metrics()["clip_ratio/region_mean"]
        print(f"step {step:2d}  reward {made.rewards.mean():.3f}  clipped {clipped:.2f}")


if __name__ == "__main__":
    main()
