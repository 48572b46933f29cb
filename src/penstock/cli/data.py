"""``penstock data show``: the tokens that the loss counts. Totals first, then rows in colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from rich.console import Console, RenderableType
from rich.text import Text

from penstock.batch.loss import IGNORED
from penstock.cli.shared import echo, table
from penstock.train.config.data import DataSection
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data
from penstock.train.data.loading import load_data, tokenizer_of
from penstock.train.data.rows import Piece, SourceRows
from penstock.train.encoding.labels import LabelSpace
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.model import config_in

_COUNTED, _OTHER = "bold green", "dim"


def show(config: TrainConfig, rows: int) -> None:
    """Print totals of each source, and the first `rows` rows of the run. Raises DataError, ConfigError."""
    model = config_in(config.model)
    tokenizer = tokenizer_of(config)
    vocabulary, space = int(model.get_text_config().vocab_size), LabelSpace.of(model)
    data = load_data(config, tokenizer, vocabulary, space=space)
    console = Console(highlight=False)
    echo(totals(config, data))
    first, names = config.data.first_label, space.names if config.data.labels == "tokens" else ()
    for index, row in enumerate(first_rows(data, rows)):
        console.print(f"\nrow {index}: {summary(row, space, config.data)}", style="bold")
        for piece in row:
            if config.data.labels == "rows":  # the label is that of the whole text, and no token has one
                shown = Text(tokenizer.decode(piece.ids.tolist()))
            else:
                shown = coloured(piece, tokenizer, console.is_terminal, first, names)
            console.print(shown, soft_wrap=True)


def summary(row: Sequence[Piece], space: LabelSpace, section: DataSection) -> str:
    """The tokens of a row, its label, and how many tokens count."""
    label, said = row[0].row_label, f"{sum(len(piece.ids) for piece in row)} tokens"
    if section.labels == "rows" and label is not None:
        return f"{said}, label {space.shown(label)}"
    said += "" if label is None else f", {'desirable' if label == (1.0,) else 'undesirable'}"
    return f"{said}, the loss counts {sum(int(in_loss(piece, section.first_label).sum()) for piece in row)}"


def totals(config: TrainConfig, data: Data) -> RenderableType:
    """A table with a line for each source; for a stream only its digest, as it is read while training."""
    if data.stream is not None:
        return f"read while training; digest {data.digest}"
    heads = ("source", "documents", "tokens", "counted", "dropped", "median", "longest", "overlong", "rows",
             "held out")  # fmt: skip
    held_out = data.held_out.sources if config.data.validation is None else [None] * len(data.rows.sources)
    cells, share = [], config.data.masked_share or 1.0
    for section, trained, rest in zip(config.data.sources, data.rows.sources, held_out, strict=True):
        facts, lengths = trained.store.facts, trained.store.lengths
        cells.append((
            section.path, f"{facts.documents:,}", f"{facts.tokens:,}",
            f"{share * facts.counted / facts.tokens:.1%}", f"{facts.dropped:,}", f"{np.median(lengths):.0f}",
            f"{lengths.max()}", f"{int((lengths > config.data.longest_document).sum()):,}",
            f"{len(trained):,}", _count(rest),
        ))  # fmt: skip
    return table(heads, cells, left=["source"])


def _count(rows: SourceRows | None) -> str:
    return "-" if rows is None else f"{len(rows):,}"


def first_rows(data: Data, count: int) -> Iterator[list[Piece]]:
    """The first rows of the training data."""
    rows, chosen, _ = data.take(0, count)
    seen = data.seen(rows, 1)
    return (seen.read(row) for row in chosen)


def in_loss(piece: Piece, first: int = 1) -> npt.NDArray[np.bool_]:
    """Whether the loss counts each token, from `first` on: nothing predicts the one at 0."""
    counted: npt.NDArray[np.bool_] = piece.labels != IGNORED
    counted[:first] = False
    return counted


def coloured(
    piece: Piece, tokenizer: Tokenizer, colours: bool, first: int = 1, names: Sequence[str] = ()
) -> Text:
    """The text of a document; counted tokens are green, or between [[ and ]] without colours.

    first: see `in_loss`; names: of the classes of tokens, which then follow their tokens
    """
    text = Text()
    counts = in_loss(piece, first).tolist()
    tags = [names[label] if counted and names else counted
            for label, counted in zip(piece.labels.tolist(), counts, strict=True)]  # fmt: skip
    pairs = zip(piece.ids.tolist(), tags, strict=True)
    for counted, run in groupby(pairs, key=lambda pair: pair[1]):
        shown = tokenizer.decode([token for token, _ in run])
        shown += f" {counted}" if isinstance(counted, str) else ""
        marked = f"[[{shown}]]" if counted and not colours else shown
        text.append(marked, style=_COUNTED if counted else _OTHER)
    return text
