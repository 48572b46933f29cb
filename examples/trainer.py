"""transformers' Trainer over two pipeline ranks: arguments, callbacks, evaluation, and the best weights.

A small random model learns to continue a number upwards.

    python examples/trainer.py --out /tmp/trainer                       # both ranks in one process
    torchrun --nproc-per-node 2 examples/trainer.py --out /tmp/trainer
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import EarlyStoppingCallback, LlamaConfig, TrainingArguments

from penstock import AutoPipeline
from penstock.integrations import PipelineTrainer

NUMBERS, LENGTH = 32, 8


def rows(first: range) -> list[dict[str, Tensor]]:
    """A row of LENGTH numbers, upwards from each of `first`."""
    ids = [torch.arange(number, number + LENGTH) % NUMBERS for number in first]
    return [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' Trainer over two pipeline ranks")
    parser.add_argument("--out", default="trainer-out", help="folder of checkpoints and of the model")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    options = parser.parse_args()
    args = TrainingArguments(
        options.out, per_device_train_batch_size=8, num_train_epochs=20, learning_rate=1e-2, warmup_steps=5,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, load_best_model_at_end=True,
        metric_for_best_model="loss", logging_steps=10, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    config = LlamaConfig(vocab_size=NUMBERS, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    pipe = AutoPipeline(ranks=2, schedule="1f1b", microbatches=4).build(config)
    trainer = PipelineTrainer(
        pipe, args, train_dataset=rows(range(0, NUMBERS, 2)), eval_dataset=rows(range(1, NUMBERS, 2)),
        callbacks=[EarlyStoppingCallback(3)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()  # a folder for from_pretrained
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"best weights of {trainer.state.best_model_checkpoint}: evaluation loss {loss:.4f}")
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
