"""The rows of batches: cut from one stream of tokens, or documents, alone or packed.

Rows knows the documents of each row, and reads them; CutRows are shorter ones, and FilledRows more.
BatchLayout makes batches of rows: StreamLayout one tensor, as all its rows have one length; DocumentLayout a
list of microbatches, each as long as its longest row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.batch.loss import IGNORED, Loss, counted_rows
from penstock.batch.packing import boundaries, positions
from penstock.batch.padding import Padding
from penstock.train.data.packing import Packing, Pieces
from penstock.train.data.store import Store, forget


@dataclass(frozen=True)
class Fill:
    """How full a batch is: its real tokens, and its slots, the positions for tokens.

    squares: the sum of the squared lengths of documents: attention works on pairs of a document's tokens
    images: the number of image tokens; only for a batch that was read
    """

    tokens: int = 0
    slots: int = 0
    squares: int = 0
    images: int = 0

    def __add__(self, other: Fill) -> Fill:
        return Fill(
            self.tokens + other.tokens,
            self.slots + other.slots,
            self.squares + other.squares,
            self.images + other.images,
        )

    @property
    def padding(self) -> float:
        """The share of the slots that hold no text."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


class Piece(NamedTuple):
    """A document, or a part of one: its ids and labels, int64; -100 where the loss does not count it.

    shown: the chat in JSON, from which its images are read; None without images
    row_label: the label of the whole document, if it has one
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    shown: bytes | None = None
    row_label: tuple[float, ...] | None = None

    def part(self, start: int, count: int) -> Piece:
        """`count` of its tokens, from `start` on, without images."""
        return Piece(self.ids[start : start + count], self.labels[start : start + count])


class Rows(Protocol):
    """Rows, by their numbers from 0."""

    def __len__(self) -> int: ...

    def lengths(self, row: int) -> Sequence[int]:
        """Tokens of each document of a row. Reads no token."""

    def read(self, row: int) -> list[Piece]:
        """The documents of a row."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of one store. packing: of `pieces`, which are parts of the store's tokens"""

    store: Store
    pieces: Pieces
    packing: Packing

    def __len__(self) -> int:
        return self.packing.size

    def lengths(self, row: int) -> Sequence[int]:
        lengths: list[int] = self.pieces.lengths[self.packing.row(row)].tolist()
        return lengths

    def read(self, row: int) -> list[Piece]:
        starts, lengths = (of[self.packing.row(row)].tolist() for of in self.pieces)
        return [
            Piece(*self.store.read(at, count), self.store.shown_at(at), self.store.row_label_at(at))
            for at, count in zip(starts, lengths, strict=True)
        ]

    def document(self, row: int) -> Piece:
        """The only document of a row, whole: the row may have less of it."""
        (start,) = self.pieces.starts[self.packing.row(row)].tolist()
        return Piece(*self.store.read(start, self.store.length_at(start)))


@dataclass(frozen=True)
class StoredRows:
    """The rows of several sources, numbered through in their order.

    references: by row, what a reference model makes of it, such as the log-probabilities of a pair's halves;
        None without such a model
    neighbours: by row, the one whose completion its prompt also gets; None where that is not needed
    """

    sources: tuple[SourceRows, ...]
    references: npt.NDArray[np.float64] | None = None
    neighbours: npt.NDArray[np.int64] | None = None

    @cached_property
    def starts(self) -> list[int]:
        """The number of each source's first row, and of all rows."""
        return [0, *accumulate(map(len, self.sources))]

    def __len__(self) -> int:
        return self.starts[-1]

    def lengths(self, row: int) -> Sequence[int]:
        source, own = self._of_source(row)
        return source.lengths(own)

    def read(self, row: int) -> list[Piece]:
        source, own = self._of_source(row)
        return source.read(own)

    def document(self, row: int) -> Piece:
        """As `SourceRows.document`."""
        source, own = self._of_source(row)
        return source.document(own)

    def _of_source(self, row: int) -> tuple[SourceRows, int]:
        """The source of a row, and the row's number there."""
        source = bisect_right(self.starts, row) - 1
        return self.sources[source], row - self.starts[source]

    def forget(self) -> None:
        """Unmap the pages that were read."""
        for source in self.sources:
            forget((source.store.tokens, source.store.labels, *source.pieces, *source.packing))


class HeldRows(list[list[Piece]]):
    """Rows in memory."""

    def lengths(self, row: int) -> Sequence[int]:
        return [len(piece.ids) for piece in self[row]]

    def read(self, row: int) -> list[Piece]:
        return self[row]


@dataclass(frozen=True)
class CutRows:
    """The first `longest` tokens of each row."""

    rows: Rows
    longest: int

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self, row: int) -> Sequence[int]:
        ends = [min(end, self.longest) for end in accumulate(self.rows.lengths(row), initial=0)]
        return [end - begin for begin, end in pairwise(ends) if begin < end]

    def read(self, row: int) -> list[Piece]:
        pieces = zip(self.rows.read(row), self.lengths(row), strict=False)  # some may be cut off whole
        return [piece.part(0, count) for piece, count in pieces]


@dataclass(frozen=True)
class FilledRows:
    """The rows, and further ones without end in which no token counts: a pipeline without a row needs one."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self, row: int) -> Sequence[int]:
        return self.rows.lengths(row % len(self))

    def read(self, row: int) -> list[Piece]:
        pieces = self.rows.read(row % len(self))
        if row < len(self):
            return pieces
        return [_ignored(piece) for piece in pieces]


def _ignored(piece: Piece) -> Piece:
    """The piece with no label that counts."""
    row_label = None if piece.row_label is None else (float(IGNORED),) * len(piece.row_label)
    return piece._replace(labels=np.full_like(piece.labels, IGNORED), row_label=row_label)


# ---- Batches of rows

Content = dict[str, Tensor] | list[dict[str, Any]]  # for Pipeline.step: one batch to split, or microbatches


def has_labels(content: Content, loss: Loss) -> bool:
    """Whether there is a label that the loss counts."""
    parts = [content] if isinstance(content, dict) else content
    return any(bool(counted_rows(loss, part).any()) for part in parts)


class BatchLayout(ABC):
    """How rows become a batch."""

    @property
    def ignores(self) -> bool:
        """Whether a row may stand in a batch with no label that counts."""
        return True

    def in_calls(self, calls: tuple[int, ...]) -> Self:
        """The layout with these numbers of microbatches, of each pipeline call."""
        return self

    def at_most(self, count: int) -> Self:
        """The layout with one call, of at most `count` microbatches."""
        return self

    @abstractmethod
    def deal(self, rows: Rows, chosen: Sequence[int], parts: int) -> list[list[int]]:
        """Divide the rows of one batch among the `parts` pipelines of a mesh."""

    @abstractmethod
    def content(self, rows: Rows, chosen: Sequence[int]) -> Content:
        """The batch of these rows."""

    def beside(self, rows: Rows, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Microbatches for a forward pass before the step, if its loss needs one."""
        return []

    @abstractmethod
    def fill(self, rows: Rows, chosen: Sequence[int]) -> Fill:
        """The fill of the batch of these rows, without its images. Reads no token."""

    def image_tokens(self, rows: Rows, chosen: Sequence[int]) -> int:
        """The number of image tokens in these rows."""
        return 0


@dataclass(frozen=True)
class StreamLayout(BatchLayout):
    """Rows of one length, each a piece of a stream. padding: of the pipeline, if any"""

    padding: Padding | None = None

    def deal(self, rows: Rows, chosen: Sequence[int], parts: int) -> list[list[int]]:
        return [part.tolist() for part in np.array_split(list(chosen), parts)]

    def content(self, rows: Rows, chosen: Sequence[int]) -> dict[str, Tensor]:
        """input_ids and labels, int64, (rows, sequence). Labels are not shifted: the loss does it."""
        pieces = [piece for row in chosen for piece in rows.read(row)]
        ids = torch.from_numpy(np.stack([piece.ids for piece in pieces]))
        labels = torch.from_numpy(np.stack([piece.labels for piece in pieces]))
        return {"input_ids": ids, "labels": labels}

    def fill(self, rows: Rows, chosen: Sequence[int]) -> Fill:
        (length,) = rows.lengths(chosen[0])
        padded = self.padding.lengths(length).full if self.padding else length
        return Fill(len(chosen) * length, len(chosen) * padded, len(chosen) * length**2)


@dataclass(frozen=True)
class DocumentLayout(BatchLayout):
    """Rows of one document or more, each row as long as its documents.

    Attributes:
        calls: microbatches of each pipeline call that a pipeline's part of a batch goes through, in order
        packed: whether any row of the run may have several documents
        padding: how the pipeline pads the microbatches of a call; None pads each one to its longest row
        flash: whether the model has a flash attention, which needs the bounds of documents
        longest: the most tokens of a document, also of padding at the end of a row
        images: makes the further entries of a microbatch of chats that show images, one chat a row
        image_token: the id of image tokens in these chats
    """

    calls: tuple[int, ...]
    packed: bool
    padding: Padding | None = None
    flash: bool = False
    longest: int | None = None
    images: Callable[[Sequence[Piece]], Mapping[str, Tensor]] | None = None
    image_token: int | None = None
    height: ClassVar[int] = 1  # rows of a batch that a row of the data becomes

    def in_calls(self, calls: tuple[int, ...]) -> Self:
        return replace(self, calls=calls)

    def at_most(self, count: int) -> Self:
        return replace(self, calls=(min(sum(self.calls), count),))

    def deal(self, rows: Rows, chosen: Sequence[int], parts: int) -> list[list[int]]:
        """Divide microbatches by length, back and forth, so that no pipeline has all the long ones."""
        order = [*range(parts), *reversed(range(parts))]
        dealt: list[list[int]] = [[] for _ in range(parts)]
        for index, group in enumerate(self.groups(rows, chosen, sum(self.calls) * parts)):
            dealt[order[index % len(order)]] += group
        return dealt

    def content(self, rows: Rows, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Microbatches, each as long as its longest row; the longest rows come first.

        Each has input_ids and labels, int64, (rows, sequence), and if rows are packed position_ids that
        restart in each document. Labels are -100 on padding and on each document's first token, which the
        document before must not predict. There is no attention_mask: with one, transformers would ignore the
        documents, and padding at the end of a row needs none, as no token attends to a later one.
        """
        groups = self.groups(rows, chosen, sum(self.calls))
        return [self._microbatch([rows.read(row) for row in group]) for group in groups]

    def image_tokens(self, rows: Rows, chosen: Sequence[int]) -> int:
        if self.image_token is None:
            return 0
        pieces = (piece for row in chosen for piece in rows.read(row))
        return sum(int((piece.ids == self.image_token).sum()) for piece in pieces)

    def fill(self, rows: Rows, chosen: Sequence[int]) -> Fill:
        lengths = {row: self._width(rows, row) for row in chosen}
        groups = self.groups(rows, chosen, sum(self.calls))
        longest = [max(lengths[row] for row in group) for group in groups]
        if self.padding is not None:  # the pipeline pads all microbatches of a call to one length
            for begin, end in pairwise(accumulate(self.calls, initial=0)):
                if of_call := longest[begin:end]:  # fewer rows than microbatches may leave a call without any
                    longest[begin:end] = [self.padding.lengths(max(of_call)).full] * len(of_call)
        slots = self.height * sum(len(group) * most for group, most in zip(groups, longest, strict=True))
        squares = sum(count**2 for row in chosen for count in rows.lengths(row))
        return Fill(sum(sum(rows.lengths(row)) for row in chosen), slots, squares)

    def _width(self, rows: Rows, row: int) -> int:
        """Tokens of a row in a batch, without padding."""
        return sum(rows.lengths(row))

    def groups(self, rows: Rows, chosen: Sequence[int], count: int) -> list[list[int]]:
        """The rows of each microbatch. Rows of similar length go together: padding is to the longest one."""
        by_length = sorted(chosen, key=lambda row: -self._width(rows, row))
        return [group.tolist() for group in np.array_split(by_length, min(count, len(by_length)))]

    def _pad(self, bounds: list[int], end: int) -> None:
        """Extend the last document of `bounds` to `end`, by padding: none may be empty.

        If it would get too long, documents of padding follow, so that positions stay within the model's.
        """
        longest = self.longest or end
        bounds[-1] = min(end, bounds[-2] + longest)
        while bounds[-1] < end:
            bounds.append(min(end, bounds[-1] + longest))

    def _microbatch(self, rows: Sequence[list[Piece]]) -> dict[str, Any]:
        length = max(sum(len(piece.ids) for piece in row) for row in rows)
        ids = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        bounds = [0]
        for at, row in enumerate(rows):
            for piece in row:
                begin, count = bounds[-1] - at * length, len(piece.ids)
                ids[at, begin : begin + count] = piece.ids
                labels[at, begin + 1 : begin + count] = piece.labels[1:]
                bounds.append(bounds[-1] + count)
            self._pad(bounds, (at + 1) * length)
        microbatch: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.packed:
            ends = torch.tensor(bounds, dtype=torch.int32)
            microbatch["position_ids"] = positions(ends).view(len(rows), length)
            if self.flash:  # transformers derives the bounds from positions only for a batch of one row
                microbatch |= boundaries(ends)
        if self.images is not None:
            microbatch |= self.images([row[0] for row in rows])
        return microbatch
