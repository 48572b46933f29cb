"""The rows that a run trains on, and those that it is measured on.

All documents become one line of tokens, cut into rows of `sequence_length`. The last rows are held out.
Which rows a step trains on is a pure function of the step, so a resumed run needs no state, and every rank
reads the same batch without asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.train.config import TrainConfig
from penstock.train.documents import Document, documents
from penstock.train.tokenizer import Ids, Tokenizer

_AT_ONCE = 1000  # documents encoded together, which fast tokenizers like


@dataclass(frozen=True)
class Rows:
    """tokens: (rows, sequence); the last `held_out` rows are never trained on. Order follows from `seed`."""

    tokens: Ids
    held_out: int
    batch_size: int
    seed: int

    def batch(self, step: int) -> dict[str, Tensor]:
        """What step `step`, from 1, trains on: input_ids and labels, int64, (batch_size, sequence).

        Labels equal the inputs: the loss itself shifts them by one. Every row is seen once an epoch, in an
        order of its own; a batch may reach from one epoch into the next.
        """
        count = len(self.tokens) - self.held_out
        first = (step - 1) * self.batch_size
        rows = [
            _order(self.seed, at // count, count)[at % count] for at in range(first, first + self.batch_size)
        ]
        return _as_batch(self.tokens[rows])

    def held_out_batches(self, count: int) -> list[dict[str, Tensor]]:
        """At most `count` batches, spread evenly over the held-out rows."""
        held = self.tokens[len(self.tokens) - self.held_out :]
        rows = min(count, len(held) // self.batch_size) * self.batch_size
        spread = held[np.linspace(0, len(held) - 1, rows).round().astype(int)]
        return [_as_batch(spread[at : at + self.batch_size]) for at in range(0, rows, self.batch_size)]


def load_rows(config: TrainConfig, tokenizer: Tokenizer, vocabulary: int) -> Rows:
    """Read everything that the config names; `vocabulary` is the model's number of token ids.

    At least one whole batch is held out. Raises DataError.
    """
    section, size = config.data, config.train.batch_size
    tokens = _join(documents(section), tokenizer)
    value = f"data.path={section.path}"
    if len(tokens) == 0:
        raise DataError(value, "it holds no text", "Give a file with text in it")
    if (highest := int(tokens.max())) >= vocabulary:
        raise DataError(
            f"{value} with data.tokenizer={section.tokenizer}",
            f"it gives token id {highest} and the model has ids 0 to {vocabulary - 1} (vocab_size)",
            f"Take the model's own tokenizer, or a vocab_size above {highest}",
        )
    count = len(tokens) // section.sequence_length
    held_out = max(size, round(count * section.held_out))
    if count - held_out < size:
        raise DataError(
            f"{value} of {len(tokens)} tokens",
            f"it gives {count} rows of {section.sequence_length}, and a batch of {size} to train on and one "
            "held out need more",
            "Give more text, or lower train.batch_size, data.sequence_length or data.held_out",
        )
    rows = tokens[: count * section.sequence_length].reshape(count, section.sequence_length)
    return Rows(rows, held_out, size, config.train.seed)


def _join(found: Iterator[Document], tokenizer: Tokenizer) -> Ids:
    """One array of all documents' ids, with the tokenizer's separator after each but the last."""
    pieces: list[Ids] = []
    while batch := list(islice(found, _AT_ONCE)):
        for ids in tokenizer.encode([name for name, _ in batch], [text for _, text in batch]):
            if pieces and tokenizer.separator is not None:
                pieces.append(np.asarray([tokenizer.separator], dtype=ids.dtype))
            pieces.append(ids)
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)


@lru_cache(maxsize=2)  # a batch touches two epochs at most
def _order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _as_batch(rows: Ids) -> dict[str, Tensor]:
    ids = torch.from_numpy(rows.astype(np.int64))
    return {"input_ids": ids, "labels": ids.clone()}
