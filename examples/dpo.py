"""Direct preference optimization of a LoRA adapter, on two pipeline ranks in this process.

A small random model learns to continue a number upwards, and not downwards. The reference model is the base
model inside the adapter: the same stages, run once without it.

    python examples/dpo.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from penstock import AutoPipeline
from penstock.batch.preferences import DPO

NUMBERS, PROMPT, COMPLETION, PAIRS = 32, 3, 4, 12


def pairs() -> dict[str, Tensor]:
    """Rows of a prompt and a completion: chosen and rejected in turn, so that a pair stays together."""
    first = torch.randint(COMPLETION, NUMBERS - PROMPT - COMPLETION, (PAIRS, 1)).repeat_interleave(2, 0)
    prompt = first + torch.arange(PROMPT)
    step = torch.tensor([1, -1]).repeat(PAIRS)[:, None]
    ids = torch.cat([prompt, prompt[:, -1:] + step * torch.arange(1, COMPLETION + 1)], 1)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(ids.shape[1]) < PROMPT, -100)}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=NUMBERS, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    adapter = LoraConfig(target_modules="all-linear", r=8, task_type="CAUSAL_LM")
    loss = DPO(beta=0.1)
    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=loss).build(
        get_peft_model(LlamaForCausalLM(config), adapter)
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(1, 13):
        batch = pairs()
        reference = pipe.logprobs(batch, adapters=False)
        optimizer.zero_grad()
        result = pipe.step(batch, reference_logps=reference, optimizer=optimizer)
        metrics = loss.metrics()
        print(f"step {step:2d}  loss {result.loss:.4f}  margin {metrics['rewards/margins']:+.3f}  "
              f"accuracy {metrics['rewards/accuracies']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
