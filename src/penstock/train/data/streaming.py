"""Rows that are read and tokenised while training, mixed by a buffer.

    records --> buffer, of which a random one is taken --> tokens --> rows

The position of a reader is small: the number of the next record, of those in the buffer, and of those that
are tokenised and not wholly in rows. So a checkpoint holds numbers of records, and a resumed run reads these
again: its rows are those of a run without a stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.train.data.rows import HeldRows, Piece
from penstock.train.data.sampler import Mixture
from penstock.train.data.sources import DataSource, Record
from penstock.train.encoding.encode import Encoder, check_highest

Streamed = tuple[DataSource, Encoder]  # a source, and how its records become tokens
Position = dict[str, Any]  # JSON: rows taken, and of each source what `SourceReader.position` says


class StreamOptions(NamedTuple):
    """How readers make rows, see the keys of the section data.

    vocabulary: all ids are below it; longest: the most tokens of a document
    """

    length: int
    packing: str
    overlong: str
    buffer: int
    seed: int
    vocabulary: int
    longest: int


@dataclass
class _Document:
    """A document that is not wholly in rows. taken: its tokens that are"""

    index: int
    piece: Piece
    taken: int = 0

    @property
    def left(self) -> int:
        return len(self.piece.ids) - self.taken


class SourceReader:
    """The rows of one source, without end.

    Args:
        index: of the source, for its random numbers
        options: length, packing, overlong, buffer, seed and vocabulary
        position: where another reader was; None for the beginning
    """

    def __init__(
        self, streamed: Streamed, index: int, options: StreamOptions, position: Mapping[str, Any] | None
    ) -> None:
        self._source, self._encoder = streamed
        self._seed, self._options = (options.seed, index), options
        start = position or {"draws": 0, "next": 0, "buffer": [], "open": []}
        self._count: int | None = None  # records of an epoch, once one has ended
        self._draws: int = start["draws"]
        self._next: int = start["next"]
        wanted = {*start["buffer"], *(record for record, _ in start["open"])}
        records = self._find(wanted)
        self._buffer = [(record, records[record]) for record in start["buffer"]]
        self._open = deque(self._document(record, records[record], taken) for record, taken in start["open"])
        self._records = self._read()

    def position(self) -> dict[str, Any]:
        """The position from which another reader can go on, in numbers of records and tokens."""
        return {
            "draws": self._draws,
            "next": self._next,
            "buffer": [index for index, _ in self._buffer],
            "open": [(document.index, document.taken) for document in self._open],
        }

    def row(self) -> list[Piece]:
        """The next row. Raises DataError."""
        drawn = self._draws
        while True:
            row = self._stream_row() if self._options.packing == "stream" else self._document_row()
            if any((piece.labels[1:] != IGNORED).any() for piece in row):
                return row
            self._stop_if_barren(drawn)

    def _find(self, wanted: set[int]) -> dict[int, Record]:
        if not wanted:
            return {}
        first, last = min(wanted), max(wanted)
        read = islice(enumerate(self._source.records(first), start=first), last - first + 1)
        records = {index: record for index, record in read if index in wanted}
        if last not in records:
            rule = f"the checkpoint names its record {last}, and it has fewer"
            remedy = "Give the files that the run began with, or start without --resume"
            raise DataError(self._source.section.named, rule, remedy)
        return records

    def _read(self) -> Iterator[tuple[int, Record]]:
        """Records with their numbers, epoch after epoch."""
        while True:
            for index, record in enumerate(self._source.records(self._next), start=self._next):
                self._next = index + 1
                yield index, record
            self._count, self._next = self._next, 0
            self._stop_if_barren(self._draws)

    def _stop_if_barren(self, drawn: int) -> None:
        """Raise DataError if an epoch or more of draws since `drawn` gave no row."""
        if self._count is None or (self._count and self._draws - drawn <= self._count + self._options.buffer):
            return
        rule, remedy = "it holds no text", "Give a file with text in it"
        if self._count:
            longest = self._options.longest
            rule = f"none of its records has a token that counts within a document of {longest} tokens"
            remedy = "Raise data.sequence_length, or give a file with more in it"
        raise DataError(self._source.section.named, rule, remedy)

    def _draw(self) -> tuple[int, Record]:
        while len(self._buffer) < self._options.buffer:
            self._buffer.append(next(self._records))
        drawn_at = int(np.random.default_rng((*self._seed, self._draws)).integers(len(self._buffer)))
        self._draws += 1
        drawn, last = self._buffer[drawn_at], self._buffer.pop()
        if drawn_at < len(self._buffer):
            self._buffer[drawn_at] = last
        return drawn

    def _pull(self) -> None:
        """Tokenise one more record, and open it."""
        drawn = self._draws
        while True:
            index, record = self._draw()
            document = self._document(index, record)
            if document.left:
                self._open.append(document)
                return
            self._stop_if_barren(drawn)

    def _document(self, index: int, record: Record, taken: int = 0) -> _Document:
        ((name, encoded),) = self._encoder.encode([record])
        if encoded is None or not len(encoded.ids):
            return _Document(index, Piece(np.empty(0, np.int64), np.empty(0, np.int64)))
        ids = encoded.ids.astype(np.int64)
        labels = ids if encoded.labels is None else encoded.labels.astype(np.int64)
        check_highest(f"data file {name}", max(ids.max(), labels.max()), self._options.vocabulary)
        if self._options.packing == "stream":
            if (separator := self._encoder.separator) is not None:
                ids, labels = (np.append(part, separator) for part in (ids, labels))
        elif len(ids) > self._options.longest and self._options.overlong != "cut":
            keep = self._options.longest if self._options.overlong == "truncate" else 0
            ids, labels = ids[:keep], labels[:keep]
        return _Document(index, Piece(ids, labels), taken)

    def _stream_row(self) -> list[Piece]:
        while sum(document.left for document in self._open) < self._options.length:
            self._pull()
        pieces, missing = [], self._options.length
        while missing:
            pieces.append(self._take(missing))
            missing -= len(pieces[-1].ids)
        ids, labels, *_ = zip(*pieces, strict=True)
        return [Piece(np.concatenate(ids), np.concatenate(labels))]

    def _document_row(self) -> list[Piece]:
        """As many pieces as fit, in order, none longer than `longest`; only one with packing none."""
        row: list[Piece] = []
        free = self._options.length
        while True:
            if not self._open:
                self._pull()
            size = min(self._open[0].left, self._options.longest)
            if row and (size > free or self._options.packing == "none"):
                return row
            piece = self._take(size)
            if size > 1:  # nothing predicts the only token of a piece of one
                row.append(piece)
                free -= size

    def _take(self, most: int) -> Piece:
        """The next tokens of the first open document, at most `most`."""
        document = self._open[0]
        piece = document.piece.part(document.taken, min(most, document.left))
        document.taken += len(piece.ids)
        if not document.left:
            self._open.popleft()
        return piece


class RowStream:
    """The rows of several sources, by weights. Rows are read in order; to go back reads from the start again.

    Args:
        start: where to begin; None for the beginning
    """

    def __init__(
        self,
        sources: Sequence[Streamed],
        mixture: Mixture,
        options: StreamOptions,
        start: Position | None = None,
    ) -> None:
        self._sources, self._mixture, self._options = tuple(sources), mixture, options
        self.start: Position = start or {"rows": 0, "sources": [None] * len(sources)}
        self._taken = -1
        self._readers: list[SourceReader] = []

    def at(self, start: Position) -> RowStream:
        """The same stream from a position on."""
        return RowStream(self._sources, self._mixture, self._options, start)

    def take(self, first: int, count: int) -> tuple[HeldRows, Position]:
        """The run's rows `first` to `first + count`, and the position after them. Raises DataError."""
        if self._taken != first:
            self._taken = self.start["rows"]
            starts = enumerate(self.start["sources"])
            self._readers = [SourceReader(self._sources[n], n, self._options, start) for n, start in starts]
        skipped = first - self._taken
        in_turn = self._mixture.rows(self._taken, skipped + count)
        rows = [self._readers[source].row() for source, _ in in_turn][skipped:]
        self._taken = first + count
        positions = [reader.position() for reader in self._readers]
        return HeldRows(rows), {"rows": self._taken, "sources": positions}
