"""What a finished run reports: where things lie, how well the bubble was predicted, and a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from penstock.errors import ConfigError
from penstock.models.model_folder import config_of
from penstock.models.source import auto_class
from penstock.schedule import Costs, Schedule, Timeline, render, simulate
from penstock.train.config.sections import OutputSection, TrainConfig
from penstock.train.data.rows import Fill
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.model import positions
from penstock.train.records.metrics import writable
from penstock.train.records.record import write_timeline
from penstock.train.spikes import NOTHING_SEEN, Seen


@dataclass(frozen=True)
class Outcome:
    """What a run leaves.

    Attributes:
        step: the last one
        checkpoint, timeline: of that step
        fill: of all batches
        skipped: number of skipped steps
        ended: when and why the run ended
        stopped: whether a signal asked for it
        seen: its losses, and the rows that it left out
    """

    step: int
    checkpoint: Path
    timeline: Timeline
    fill: Fill
    skipped: int
    ended: str
    stopped: bool = False
    seen: Seen = NOTHING_SEEN


def report_outcome(
    outcome: Outcome,
    schedule: Schedule,
    config: TrainConfig,
    trackers: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> None:
    """Write the last step's timeline into the output folder and print a summary. On process 0 only.

    Args:
        trackers: a line for each
        hosts: a line for each, on the time of its slowest rank and its prediction
    """
    measured, output = outcome.timeline, config.output.path
    print(f"ended       {outcome.ended}")
    if outcome.stopped:  # there may be no time for more
        print(f"checkpoint  {outcome.checkpoint}: --resume goes on from it", flush=True)
        return
    predicted = simulate(schedule, Costs.measured(measured))
    picture = output / "timeline.svg"
    with writable(picture):
        render(measured, picture, predicted=predicted)
    write_timeline(output, outcome.step, measured, predicted)
    print(f"checkpoint  {outcome.checkpoint}")
    print(f"metrics     {output / 'metrics.jsonl'}")
    print(f"timeline    {picture}")
    for line in trackers:
        print(line)
    if outcome.fill.padding:
        print(f"padding     {outcome.fill.padding:.1%} of the tokens, over all steps")
    if outcome.skipped:
        spikes = "" if config.train.spike is None else ", or whose loss rose too far"
        print(f"skipped     {outcome.skipped} steps, whose loss or gradients were not finite{spikes}")
    if outcome.seen.left_out:
        count = len(outcome.seen.left_out)
        times = "once" if count == 1 else f"{count} times"
        print(f"left out    {outcome.seen.rows} rows: after a spike of the loss the run went back, {times}")
    shares = f"predicted {predicted.bubble:.1%}  measured {measured.bubble:.1%}"
    host = measured.host_share
    limit = "" if host is None else f"  the host is the limit: {host:.1%}"
    print(f"bubble of the last step  {shares}{limit}", flush=True)
    if hosts:
        print("hosts, by the time of the slowest rank over its prediction:")
        print("\n".join(f"  {line}" for line in hosts), flush=True)
    if config.output.sample_prompt is not None:
        trusted = config.model.trust_remote_code
        text = sample(outcome.checkpoint, config.output, config.train.seed, trusted=trusted)
        print(f"sample from the checkpoint, by plain transformers:\n{text}", flush=True)


def check_prompt(section: OutputSection, tokenizer: Tokenizer, model: PretrainedConfig) -> None:
    """Raise ConfigError for a prompt that no model with this config can continue."""
    if section.sample_prompt is None:
        return
    value, ids = f"output.sample_prompt={section.sample_prompt!r}", tokenizer.prompt(section.sample_prompt)
    longest, vocabulary = positions(model), model.get_text_config().vocab_size
    if not ids:
        raise ConfigError(value, "it gives no token to go on from", "Write some text, or leave it out")
    if longest is not None and len(ids) > longest:
        rule = f"it is {len(ids)} tokens, and the model takes {longest} positions (max_position_embeddings)"
        raise ConfigError("output.sample_prompt", rule, "Shorten it")
    if max(ids) >= vocabulary:
        rule = f"it gives token id {max(ids)} and the model has ids 0 to {vocabulary - 1} (vocab_size)"
        raise ConfigError(value, rule, f"Write other text, or take a vocab_size above {max(ids)}")


def sample(checkpoint: Path, section: OutputSection, seed: int, *, trusted: bool = False) -> str:
    """The prompt and its continuation by the saved model: transformers' `generate` at a low temperature.

    It ends where the model's positions end, as a model with a table of positions has no row for more.

    Args:
        trusted: whether Python code in the checkpoint may run
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trusted)
    logging.disable_progress_bar()  # "Loading weights" in the middle of the summary
    kind = auto_class(config_of(checkpoint, trusted))
    model = kind.from_pretrained(checkpoint, trust_remote_code=trusted)
    logging.enable_progress_bar()
    encoded = tokenizer(section.sample_prompt, return_tensors="pt")
    count, longest = section.sample_tokens, positions(model.config)
    if longest is not None:
        count = min(count, longest - encoded["input_ids"].shape[1] + 1)  # the last one is not read again
    torch.manual_seed(seed)
    made = model.generate(
        input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"],
        max_new_tokens=count, do_sample=True, temperature=0.6, pad_token_id=0,
    )  # fmt: skip
    return str(tokenizer.decode(made[0], skip_special_tokens=True))
