"""A sample at the end of a run: plain transformers loads the saved model, which continues a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from penstock.errors import ConfigError
from penstock.models.model_folder import config_of
from penstock.models.source import auto_class
from penstock.train.config.sections import OutputSection
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.model import positions
from penstock.train.part import RunPart


class Sample(RunPart):
    """Prints a sample from the last checkpoint (output.sample_prompt)."""

    def summary(self) -> Iterator[str]:
        config, checkpoint = self.run.config, self.run.checkpoint
        if config.output.sample_prompt is not None and checkpoint is not None:
            trusted = config.model.trust_remote_code
            text = sample(checkpoint, config.output, config.train.seed, trusted=trusted)
            yield f"sample from the checkpoint, by plain transformers:\n{text}"


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

    It ends at the model's last position, as a table of positions has no row for more.

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
    output = model.generate(
        input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"],
        max_new_tokens=count, do_sample=True, temperature=0.6, pad_token_id=0,
    )  # fmt: skip
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
