"""The data of a run: rows to train on, and rows held out.

Documents become rows: cut from one stream of tokens, or each alone or packed (penstock.train.data.packing).
The last ones are held out. The rows of a step are a pure function of the step, so a resumed run needs no
state, and every rank knows the whole batch, which is the same on any mesh, and takes its pipeline's part.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from penstock.batch.padding import Padding
from penstock.errors import DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.data.documents import Document, documents
from penstock.train.data.packing import PACKINGS, Numbers, Pieces, cut
from penstock.train.data.rows import Content, DocumentRows, Fill, Rows, StreamRows
from penstock.train.data.tokenizer import Ids, Tokenizer

_AT_ONCE = 1000  # documents; fast tokenizers encode many in parallel
_SAMPLED = 100  # steps, from which the padding of a run is estimated


class Batch(NamedTuple):
    """A pipeline's part of a step's batch, and the fill of the whole batch."""

    content: Content
    fill: Fill


@dataclass(frozen=True)
class Data:
    """The batches of a run, in an order that follows from `seed`.

    Attributes:
        rows, held_out: to train on, and to evaluate on
        batch_size: rows of a whole batch
        part, parts: batches hold this part, from 0, of so many
    """

    rows: Rows
    held_out: Rows
    batch_size: int
    seed: int
    part: int = 0
    parts: int = 1

    def of(self, part: int) -> Data:
        """The same batches, with another part of each."""
        return replace(self, part=part)

    def batch(self, step: int) -> Batch:
        """The batch of step `step`, from 1.

        An epoch takes every row once, in an order of its own; a batch may reach into the next epoch.
        """
        return self._part(self.rows, self._chosen(step))

    def batches(self, steps: range, device: torch.device) -> Generator[Batch]:
        """The batches of `steps`. A thread makes the next one while the caller works with one.

        Close the generator to end the thread. An error is raised when its batch is asked for.

        Args:
            steps: one or more
            device: where the step runs. Tensors for a GPU are pinned, so that no copy to it waits
        """
        make = self.batch if device.type == "cpu" else self._pinned_batch
        begin = device, torch.get_num_threads()
        with ThreadPoolExecutor(1, "penstock-data", _begin_thread, begin) as thread:
            ahead = thread.submit(make, steps[0])
            for step in steps[1:]:
                batch, ahead = ahead.result(), thread.submit(make, step)
                yield batch
            yield ahead.result()

    def held_out_batches(self, count: int) -> list[Batch]:
        """At most `count` batches, spread evenly over the held-out rows."""
        held, size = len(self.held_out), self.batch_size
        rows = min(count, held // size) * size
        spread = np.linspace(0, held - 1, rows).round().astype(int).tolist()
        return [self._part(self.held_out, spread[at : at + size]) for at in range(0, rows, size)]

    def expected(self, steps: int) -> Fill:
        """The fill of the first batches of a run of `steps` steps."""
        sampled = range(1, min(steps, _SAMPLED) + 1)
        return sum((self._fill(self.rows, self._chosen(step)) for step in sampled), Fill())

    def _part(self, rows: Rows, chosen: list[int]) -> Batch:
        return Batch(rows.content(rows.deal(chosen, self.parts)[self.part]), self._fill(rows, chosen))

    def _pinned_batch(self, step: int) -> Batch:
        batch = self.batch(step)
        return batch._replace(content=tree_map_only(Tensor, Tensor.pin_memory, batch.content))

    def _fill(self, rows: Rows, chosen: list[int]) -> Fill:
        return sum((rows.fill(part) for part in rows.deal(chosen, self.parts)), Fill())

    def _chosen(self, step: int) -> list[int]:
        first, count = (step - 1) * self.batch_size, len(self.rows)
        places = range(first, first + self.batch_size)
        return [int(_order(self.seed, place // count, count)[place % count]) for place in places]


def _begin_thread(device: torch.device, threads: int) -> None:
    """torch keeps the number of threads and the current GPU for each thread."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else pinning takes memory of the first GPU


@lru_cache(maxsize=2)  # a batch touches two epochs at most
def _order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def load_data(
    config: TrainConfig,
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    padding: Padding | None = None,
    flash: bool = False,
    parts: int = 1,
) -> Data:
    """Read everything that the config names. At least one whole batch is held out.

    Args:
        vocabulary: the model's number of token ids
        padding: how the pipeline pads a step's microbatches, if it does
        flash: whether the model has a flash attention
        parts: how many pipelines each work on a part of a batch

    Raises: DataError.
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
    size = config.train.batch_size
    if min(len(rows), len(held_out)) < size:
        most = "" if section.packing == "stream" else "at most "
        raise DataError(
            f"{value} of {len(text.tokens)} tokens",
            f"it gives {len(rows) + len(held_out)} rows of {most}{section.sequence_length}, and a batch of "
            f"{size} to train on and one held out need more",
            "Give more text, or lower train.batch_size, data.sequence_length or data.held_out",
        )
    return Data(rows, held_out, size, config.train.seed, parts=parts)


class _Text(NamedTuple):
    """tokens: of all documents end to end, with a separator after each; lengths: of each, with it"""

    tokens: Ids
    lengths: Numbers


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


def _stream_rows(config: TrainConfig, text: _Text, padding: Padding | None) -> tuple[Rows, Rows]:
    length = config.data.sequence_length
    count = len(text.tokens) // length
    trained = max(count - max(config.train.batch_size, round(count * config.data.held_out)), 0)
    rows = text.tokens[: count * length].reshape(count, length)
    return StreamRows(rows[:trained], padding), StreamRows(rows[trained:], padding)


def _document_rows(
    config: TrainConfig, text: _Text, padding: Padding | None, flash: bool
) -> tuple[Rows, Rows]:
    """The last documents are held out, and packed separately: best_fit's last rows hold the shortest ones."""
    section, size = config.data, config.train.batch_size
    pieces = cut(text.lengths, section.sequence_length)

    def rows(first: int, end: int) -> DocumentRows:
        chosen = Pieces(pieces.starts[first:end], pieces.lengths[first:end])
        packing = PACKINGS[section.packing](chosen.lengths, section.sequence_length)
        return DocumentRows(text.tokens, chosen, packing, config.pipeline.microbatches, padding, flash)

    count = len(pieces.lengths)
    ends = np.cumsum(pieces.lengths)
    share = (1 - section.held_out) * (ends[-1] if count else 0)
    held = max(count - int(np.searchsorted(ends, share, side="right")), min(size, count))
    held_out = rows(count - held, count)
    while len(held_out) < size and held < count:  # a row may take many documents
        held = min(count, max(held + 1, held * size // len(held_out)))
        held_out = rows(count - held, count)
    return rows(0, count - held), held_out
