"""Samples while a run goes on, and at its end: the pipeline continues a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig

from penstock.errors import ConfigError
from penstock.train.config.output import OutputSection
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.model import positions
from penstock.train.part import Run, RunPart, TrainStep

_CHOICE: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "pad_token_id": 0}


class Sample(RunPart):
    """Continues output.sample_prompt every output.sample_every steps, and after the last one.

    It ends at the model's last position, as a table of positions has no row for more.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer, prompt: str) -> None:
        super().__init__(run)
        self._tokenizer, self._prompt = tokenizer, tokenizer.prompt(prompt)
        self._text = ""  # the last sample

    @contextmanager
    def training(self) -> Iterator[None]:
        """Raise what a pipeline that cannot generate raises, before the first step."""
        self._continued(1)
        yield

    def after(self, step: TrainStep) -> None:
        every = self.run.config.output.sample_every
        if (step.ended and not step.stopped) or (every and step.number % every == 0):
            self._sample(step)

    def summary(self) -> Iterator[str]:
        if self._text:
            yield f"sample by the trained model:\n{self._text}"

    def _sample(self, step: TrainStep) -> None:
        """Write and show a sample; the summary shows the last one. Collective."""
        run, started, count = self.run, time.perf_counter(), self.run.config.output.sample_tokens
        longest = positions(run.pipe.config)
        if longest is not None:
            count = min(count, longest - len(self._prompt) + 1)  # the last one is not read again
        self._text = self._tokenizer.decode(self._continued(count))
        run.log.write({"step": step.number, "sample": self._text, "seconds": time.perf_counter() - started})
        if not step.ended:
            run.display.say(f"step {step.number}/{run.config.train.last}  sample: {self._text}")

    def _continued(self, count: int) -> list[int]:
        """The prompt, and up to `count` tokens after it. Collective."""
        pipe, seed = self.run.pipe, self.run.config.train.seed
        ids = torch.tensor([self._prompt])
        made = pipe.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, seed=seed, **_CHOICE
        )
        return [int(token) for token in made[0]]


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
