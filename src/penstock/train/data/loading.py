"""What a run trains on, and what it is measured on.

Documents become rows: cut from one stream of tokens, or each alone or packed (penstock.train.data.packing).
The last are held out. Which rows a step trains on is a pure function of the step, so a resumed run needs no
state, and every rank knows the whole batch without asking: on any mesh it is the same, and where several
pipelines work side by side each takes its part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.batch.padding import Padding
from penstock.errors import DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.data.documents import Document, documents
from penstock.train.data.packing import PACKINGS, Numbers, Pieces, cut
from penstock.train.data.rows import Batch, DocumentRows, Fill, Rows, StreamRows
from penstock.train.data.tokenizer import Ids, Tokenizer

_AT_ONCE = 1000  # documents encoded together, which fast tokenizers like
_LOOKED_AT = 100  # steps whose padding stands for the run's


@dataclass(frozen=True)
class Data:
    """Order follows from `seed`; rows that are held out are never trained on.

    part, parts: which part of each batch is made here, from 0, of how many. What is told of its fill is of
        the whole batch.
    """

    rows: Rows
    held_out: Rows
    batch_size: int
    seed: int
    part: int = 0
    parts: int = 1

    def of(self, part: int) -> Data:
        """The same batches, and another part of each."""
        return replace(self, part=part)

    def batch(self, step: int) -> Batch:
        """What step `step`, from 1, trains on here.

        Every row is seen once an epoch, in an order of its own; a batch may reach from one epoch into the
        next.
        """
        return self._own(self.rows, self._chosen(step))

    def held_out_batches(self, count: int) -> list[Batch]:
        """At most `count` batches, spread evenly over the held-out rows."""
        held, size = len(self.held_out), self.batch_size
        rows = min(count, held // size) * size
        spread = np.linspace(0, held - 1, rows).round().astype(int).tolist()
        return [self._own(self.held_out, spread[at : at + size]) for at in range(0, rows, size)]

    def expected(self, steps: int) -> Fill:
        """How much of the batches is text, over the first of `steps` steps."""
        looked_at = range(1, min(steps, _LOOKED_AT) + 1)
        return sum((self._fill(self.rows, self._chosen(step)) for step in looked_at), Fill())

    def _own(self, rows: Rows, chosen: list[int]) -> Batch:
        own = rows.deal(chosen, self.parts)[self.part]
        return Batch(rows.batch(own).content, self._fill(rows, chosen))

    def _fill(self, rows: Rows, chosen: list[int]) -> Fill:
        return sum((rows.fill(part) for part in rows.deal(chosen, self.parts)), Fill())

    def _chosen(self, step: int) -> list[int]:
        first, count = (step - 1) * self.batch_size, len(self.rows)
        span = range(first, first + self.batch_size)
        return [int(_order(self.seed, at // count, count)[at % count]) for at in span]


def load_data(
    config: TrainConfig,
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    padding: Padding | None = None,
    flash: bool = False,
    parts: int = 1,
) -> Data:
    """Read everything that the config names; `vocabulary` is the model's number of token ids.

    padding: what the pipeline does to a step's microbatches, if anything; flash: whether the model's
    attention is a flash attention; parts: how many pipelines each work on a part of a batch.
    At least one whole batch is held out. Raises DataError.
    """
    section = config.data
    text = _join(documents(section), tokenizer)
    value = f"data.path={section.path}"
    if len(text.tokens) == 0:
        raise DataError(value, "it holds no text", "Give a file with text in it")
    if (highest := int(text.tokens.max())) >= vocabulary:
        raise DataError(
            f"{value} with data.tokenizer={section.tokenizer}",
            f"it gives token id {highest} and the model has ids 0 to {vocabulary - 1} (vocab_size)",
            f"Take the model's own tokenizer, or a vocab_size above {highest}",
        )
    if section.packing == "stream":
        rows, held_out = _stream_rows(config, text, padding)
    else:
        rows, held_out = _document_rows(config, text, padding, flash)
    return Data(rows, held_out, config.train.batch_size, config.train.seed, parts=parts)


class _Text(NamedTuple):
    """tokens: of all documents end to end, each with the separator after it; lengths: of each, with it"""

    tokens: Ids
    lengths: Numbers


def _stream_rows(config: TrainConfig, text: _Text, padding: Padding | None) -> tuple[Rows, Rows]:
    section, size = config.data, config.train.batch_size
    count = len(text.tokens) // section.sequence_length
    held_out = max(size, round(count * section.held_out))
    if count - held_out < size:
        raise _too_little(config, text, count)
    rows = text.tokens[: count * section.sequence_length].reshape(count, section.sequence_length)
    return StreamRows(rows[: count - held_out], padding), StreamRows(rows[count - held_out :], padding)


def _document_rows(
    config: TrainConfig, text: _Text, padding: Padding | None, flash: bool
) -> tuple[Rows, Rows]:
    """The last documents are held out, and packed by themselves: best_fit's last rows hold the shortest."""
    section, size = config.data, config.train.batch_size
    pieces = cut(text.lengths, section.sequence_length)

    def rows(first: int, end: int) -> DocumentRows:
        own = Pieces(pieces.starts[first:end], pieces.lengths[first:end])
        packing = PACKINGS[section.packing](own.lengths, section.sequence_length)
        microbatches = config.pipeline.microbatches
        return DocumentRows(text.tokens, own, packing, microbatches, padding, flash)

    count = len(pieces.lengths)
    ends = np.cumsum(pieces.lengths)
    share = (1 - section.held_out) * (ends[-1] if count else 0)
    held = max(count - int(np.searchsorted(ends, share, side="right")), min(size, count))
    held_out = rows(count - held, count)
    while len(held_out) < size and held < count:  # a row may take many documents
        held = min(count, max(held + 1, held * size // len(held_out)))
        held_out = rows(count - held, count)
    trained = rows(0, count - held)
    if min(len(trained), len(held_out)) < size:
        raise _too_little(config, text, len(trained) + len(held_out))
    return trained, held_out


def _too_little(config: TrainConfig, text: _Text, rows: int) -> DataError:
    section, size = config.data, config.train.batch_size
    most = "" if section.packing == "stream" else "at most "
    return DataError(
        f"data.path={section.path} of {len(text.tokens)} tokens",
        f"it gives {rows} rows of {most}{section.sequence_length}, and a batch of {size} to train on and one "
        "held out need more",
        "Give more text, or lower train.batch_size, data.sequence_length or data.held_out",
    )


def _join(found: Iterator[Document], tokenizer: Tokenizer) -> _Text:
    """All documents' ids, with the tokenizer's separator after each but the last."""
    pieces: list[Ids] = []
    lengths: list[int] = []
    while batch := list(islice(found, _AT_ONCE)):
        for ids in tokenizer.encode([name for name, _ in batch], [text for _, text in batch]):
            if lengths and tokenizer.separator is not None:
                pieces.append(np.asarray([tokenizer.separator], dtype=ids.dtype))
                lengths[-1] += 1
            pieces.append(ids)
            lengths.append(len(ids))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)
    return _Text(tokens, np.array(lengths, dtype=np.int64))


@lru_cache(maxsize=2)  # a batch touches two epochs at most
def _order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)
