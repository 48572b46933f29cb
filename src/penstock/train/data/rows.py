"""The rows that batches are made of: cut from one stream of tokens, or documents, alone or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.batch.loss import IGNORED
from penstock.batch.packing import boundaries, positions
from penstock.batch.padding import Padding
from penstock.train.data.packing import Numbers, Packing, Pieces
from penstock.train.data.tokenizer import Ids


@dataclass(frozen=True)
class Fill:
    """How much of a batch is text: its real tokens, and its slots for tokens."""

    tokens: int = 0
    slots: int = 0

    def __add__(self, other: Fill) -> Fill:
        return Fill(self.tokens + other.tokens, self.slots + other.slots)

    @property
    def padding(self) -> float:
        """The share of the slots that hold no text."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


Content = dict[str, Tensor] | list[dict[str, Any]]  # for Pipeline.step: one batch to split, or microbatches


@dataclass(frozen=True)
class StreamRows:
    """Rows of one stream of tokens. tokens: (rows, sequence); padding: the pipeline's, if any"""

    tokens: Ids
    padding: Padding | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def deal(self, chosen: Sequence[int], parts: int) -> list[list[int]]:
        """Divide the rows of one batch among the `parts` pipelines of a mesh."""
        return [part.tolist() for part in np.array_split(list(chosen), parts)]

    def content(self, chosen: Sequence[int]) -> dict[str, Tensor]:
        """input_ids and labels, int64, (rows, sequence). Labels equal the inputs: the loss shifts them."""
        ids = torch.from_numpy(self.tokens[list(chosen)].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def fill(self, chosen: Sequence[int]) -> Fill:
        """The fill of that content, found without making it."""
        length = self.tokens.shape[1]
        padded = self.padding.lengths(length).full if self.padding else length
        return Fill(len(chosen) * length, len(chosen) * padded)


@dataclass(frozen=True)
class DocumentRows:
    """Rows of one document or more, each row as long as its documents.

    Attributes:
        tokens: all documents end to end
        pieces: the parts of them that `packing` puts into rows
        microbatches: how many a pipeline's part of a batch becomes
        padding: how the pipeline will pad them; None pads each microbatch to its longest row
        flash: whether the model has a flash attention, which wants the bounds of documents
    """

    tokens: Ids
    pieces: Pieces
    packing: Packing
    microbatches: int
    padding: Padding | None = None
    flash: bool = False

    def __len__(self) -> int:
        return len(self.packing)

    @cached_property
    def lengths(self) -> Numbers:
        """Tokens in each row."""
        return np.array([self.pieces.lengths[row].sum() for row in self.packing], dtype=np.int64)

    @cached_property
    def packed(self) -> bool:
        """Whether any row has several documents."""
        return any(len(row) > 1 for row in self.packing)

    def deal(self, chosen: Sequence[int], parts: int) -> list[list[int]]:
        """Divide microbatches by length, back and forth, so that no pipeline has all the long ones."""
        order = [*range(parts), *reversed(range(parts))]
        dealt: list[list[int]] = [[] for _ in range(parts)]
        for number, group in enumerate(self._groups(chosen, self.microbatches * parts)):
            dealt[order[number % len(order)]] += group
        return dealt

    def content(self, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Microbatches, each as long as its longest row; the longest rows come first.

        Each has input_ids and labels, int64, (rows, sequence), and where rows are packed position_ids that
        restart in each document. Labels are -100 on padding and on each document's first token, which the
        document before must not predict. There is no attention_mask: it would hide the documents from
        transformers, and padding at the end of a row needs none, as no token attends to a later one.
        """
        return [self._microbatch(group) for group in self._groups(chosen, self.microbatches)]

    def fill(self, chosen: Sequence[int]) -> Fill:
        lengths = [self.lengths[group] for group in self._groups(chosen, self.microbatches)]
        longest = [int(group.max()) for group in lengths]
        if self.padding is not None:  # the pipeline pads all microbatches of a step to one length
            longest = [self.padding.lengths(max(longest)).full] * len(longest)
        slots = sum(len(group) * most for group, most in zip(lengths, longest, strict=True))
        return Fill(int(sum(group.sum() for group in lengths)), slots)

    def _groups(self, chosen: Sequence[int], count: int) -> list[list[int]]:
        """The rows of each microbatch. Rows of similar length go together: they are padded to the longest."""
        by_length = sorted(chosen, key=lambda row: -int(self.lengths[row]))
        return [group.tolist() for group in np.array_split(by_length, min(count, len(by_length)))]

    def _microbatch(self, rows: list[int]) -> dict[str, Any]:
        length = int(self.lengths[rows].max())
        ids = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        bounds = [0]
        for at, row in enumerate(rows):
            for piece in self.packing[row]:
                start, count = int(self.pieces.starts[piece]), int(self.pieces.lengths[piece])
                begin = bounds[-1] - at * length
                ids[at, begin : begin + count] = self.tokens[start : start + count]
                labels[at, begin + 1 : begin + count] = ids[at, begin + 1 : begin + count]
                bounds.append(bounds[-1] + count)
            bounds[-1] = (at + 1) * length  # padding counts to the last document: none may be empty
        microbatch: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.packed:
            ends = torch.tensor(bounds, dtype=torch.int32)
            microbatch["position_ids"] = positions(ends).view(len(rows), length)
            if self.flash:  # transformers derives the bounds from positions only for a batch of one row
                microbatch |= boundaries(ends)
        return microbatch


Rows = StreamRows | DocumentRows
