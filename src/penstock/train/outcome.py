"""What a finished run tells: where things lie, how well the bubble was predicted, and a sample."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from penstock.schedule import Costs, Schedule, render, simulate
from penstock.train.config import OutputSection, TrainConfig
from penstock.train.loop import Outcome


def tell(outcome: Outcome, schedule: Schedule, config: TrainConfig, output: Path) -> None:
    """Draw the last step's timeline into `output` and print the summary. On process 0 alone."""
    measured = outcome.timeline
    predicted = simulate(schedule, Costs.measured(measured))
    picture = output / "timeline.svg"
    render(measured, picture, predicted=predicted)
    print(f"checkpoint  {outcome.checkpoint}")
    print(f"metrics     {output / 'metrics.jsonl'}")
    print(f"timeline    {picture}")
    if outcome.fill.padding:
        print(f"padding     {outcome.fill.padding:.1%} of the tokens, over all steps")
    if outcome.skipped:
        print(f"skipped     {outcome.skipped} steps, whose loss or gradients were not finite")
    print(
        f"bubble of the last step  predicted {predicted.bubble:.1%}  measured {measured.bubble:.1%}",
        flush=True,
    )
    if config.output.sample_prompt is not None:
        text = sample(outcome.checkpoint, config.output, config.train.seed)
        print(f"sample from the checkpoint, by plain transformers:\n{text}", flush=True)


def sample(checkpoint: Path, section: OutputSection, seed: int) -> str:
    """The prompt and what the saved model makes of it: plain `generate`, at a low temperature."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    logging.disable_progress_bar()  # "Loading weights", in the middle of the summary
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    logging.enable_progress_bar()
    encoded = tokenizer(section.sample_prompt, return_tensors="pt")
    torch.manual_seed(seed)
    made = model.generate(
        input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"],
        max_new_tokens=section.sample_tokens, do_sample=True, temperature=0.6, pad_token_id=0,
    )  # fmt: skip
    return str(tokenizer.decode(made[0], skip_special_tokens=True))
