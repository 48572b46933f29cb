"""The rows of a source in files: which tokens each row has, and which rows are held out.

    starts, lengths                  of each piece: a document, or a part of one
    trained, trained_bounds          the pieces of the rows to train on, and where each row ends
    held_out, held_out_bounds        of the rows to evaluate on

The arrays are mapped as the tokens are (store.py), so that the memory of a rank does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.batch.loss import IGNORED
from penstock.train.config.data import DataSection
from penstock.train.data.packing import PACKINGS, SHORTEST, Numbers, Packing, Pieces, cut, one_each
from penstock.train.data.pairs import pair_each, whole_pairs
from penstock.train.data.rows import SourceRows
from penstock.train.data.store import Store, forget, mapped

_APART = 1 << 31  # of a seed: apart from those of an order of rows (epoch and source)
_FORGOTTEN = 1 << 14  # pieces after which the pages of labels that were read are unmapped
_ARRAYS = ("starts", "lengths", "trained", "trained_bounds", "held_out", "held_out_bounds")


def write_rows(
    folder: Path, store: Store, section: DataSection, share: float, least: int, seed: int | None
) -> None:
    """Write the pieces of the store's documents, and the pieces of each row.

    Args:
        share: of the rows, or of the tokens of documents, to hold out
        least: the fewest rows to hold out; of data too small for it, a tenth of the rows, or one
        seed: of the documents that are held out; None for those at the end
    """
    pieces, pack, together = _pieces(store, section), _packer(section), 2 if section.has_pairs else 1
    count = len(pieces.lengths)
    order = np.arange(count) if seed is None else _shuffled(store, pieces, seed)

    def packed(first: int, end: int) -> Packing:
        chosen = np.sort(order[first:end])  # rows are packed in the order of the data
        made = pack(pieces.lengths[chosen], section.sequence_length)
        return made._replace(pieces=chosen[made.pieces])

    if 2 * least > count:
        least = max(1, count // 10)
    if section.packing == "stream":
        left_out = min(count, max(least, round(count * share)))
    else:
        ends = np.cumsum(pieces.lengths[order])
        kept = (1 - share) * (ends[-1] if count else 0)
        left_out = max(count - int(np.searchsorted(ends, kept, side="right")), min(least, count))
    left_out += left_out % together
    held_out = packed(count - left_out, count)
    while held_out.size < least and left_out < count:  # a row may hold many documents
        left_out = min(count, max(left_out + 1, left_out * least // max(held_out.size, 1)))
        left_out += left_out % together
        held_out = packed(count - left_out, count)
    for name, array in zip(_ARRAYS, (*pieces, *packed(0, count - left_out), *held_out), strict=True):
        array.tofile(folder / name)


def open_rows(folder: Path, store: Store) -> tuple[SourceRows, SourceRows]:
    """The rows to train on, and those held out."""
    starts, lengths, *packings = (mapped(folder / name, np.int64) for name in _ARRAYS)
    pieces = Pieces(starts, lengths)
    trained, held_out = (SourceRows(store, pieces, Packing(*packings[at : at + 2])) for at in (0, 2))
    return trained, held_out


def _pieces(store: Store, section: DataSection) -> Pieces:
    """The documents, or their parts, that have a label that counts."""
    length, longest, first = section.sequence_length, section.longest_document, section.first_label
    if section.has_pairs:
        return whole_pairs(store, longest, section.overlong, first)
    if section.packing == "stream":
        starts = np.arange(0, len(store.tokens) - length + 1, length)
        pieces = Pieces(starts, np.full(len(starts), length))
    else:
        pieces = cut(np.asarray(store.lengths), longest, section.overlong, SHORTEST if first else 1)
    return _that_count(store, pieces, first)


def _packer(section: DataSection) -> Callable[[Numbers, int], Packing]:
    """The function that puts pieces into rows."""
    if section.has_pairs:
        return pair_each
    return one_each if section.packing == "stream" else PACKINGS[section.packing]


def _shuffled(store: Store, pieces: Pieces, seed: int) -> Numbers:
    """The pieces in a random order of their documents: the pieces of a document stay together."""
    starts = np.cumsum(store.lengths) - store.lengths
    documents = np.searchsorted(starts, pieces.starts, side="right") - 1
    place = np.random.default_rng((seed, _APART)).permutation(len(starts))
    return np.argsort(place[documents], kind="stable")


def _that_count(store: Store, pieces: Pieces, first: int) -> Pieces:
    """The pieces that have a label that counts, from their token `first` on."""
    if store.labels is None:
        return pieces
    kept = np.zeros(len(pieces.starts), dtype=np.bool_)
    for piece, (start, length) in enumerate(zip(*pieces, strict=True)):
        kept[piece] = (store.labels[start + first : start + length] != IGNORED).any()
        if piece % _FORGOTTEN == 0:
            forget([store.labels])
    return Pieces(pieces.starts[kept], pieces.lengths[kept])
