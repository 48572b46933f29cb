"""The data of a run: rows to train on, and rows held out.

    sources --> encode --> store --> rows --> sampler --> batches
    records     tokens     a file    packing  by weights   of a step

Records are tokenised once, into files that all ranks map (store.py); the tokens of each row are listed in
files too (row_files.py), and a rank reads the rows that it needs (batches.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.batch.padding import Padding
from penstock.errors import ConfigError, DataError
from penstock.train.config.data import KINDS, DataSection, SourceSection
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data
from penstock.train.data.layout import layout_of
from penstock.train.data.masking import Masking
from penstock.train.data.row_files import open_rows, write_rows
from penstock.train.data.rows import SourceRows, StoredRows
from penstock.train.data.sampler import Mixture, Sampler
from penstock.train.data.sources import DataSource, digest_of, open_source
from penstock.train.data.store import Cache, Store, open_store, write_megatron, write_store
from penstock.train.data.streaming import RowStream, Streamed, StreamOptions
from penstock.train.encoding.encode import EncodedRecords, Encoder, check_highest, encoded, make_encoder
from penstock.train.encoding.images import Processor
from penstock.train.encoding.labels import LabelSpace
from penstock.train.encoding.tokenizer import Tokenizer, open_tokenizer, read_template
from penstock.train.model import tokenizer_folder
from penstock.train.sizes import StepSizes


def tokenizer_of(config: TrainConfig) -> Tokenizer:
    """The tokenizer that the config names, or the model's. Raises DataError, HubError."""
    section = config.data
    chat = any(source.kind in KINDS and KINDS[source.kind].messages for source in section.sources)
    name, trusted = tokenizer_folder(config), config.model.trust_remote_code
    if section.images is not None:
        return Processor(name, read_template(section.chat_template), section.images, trusted)
    return open_tokenizer(name, chat, section.chat_template, trusted=trusted)


def load_data(
    config: TrainConfig,
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    padding: Padding | None = None,
    flash: bool = False,
    parts: int = 1,
    space: LabelSpace | None = None,
) -> Data:
    """Find, tokenise and pack the data that the config names. At least one row is held out.

    One process of a machine tokenises, and the others wait for it.

    Args:
        vocabulary: the model's number of token ids
        padding: how the pipeline pads a step's microbatches, if it does
        flash: whether the model has a flash attention
        parts: the number of pipelines, each with a part of the batch
        space: the labels of the model's head, for records with such labels

    Raises: DataError, ConfigError.
    """
    section, seed = config.data, config.train.seed
    load = _Loader(section, tokenizer, vocabulary, Cache.at(section.cache),
                   seed if section.holds_out_at_random else None, space)  # fmt: skip
    data = Data(
        StoredRows(()),
        StoredRows(_validation(section, load)),
        layout_of(config, tokenizer, padding, flash, space),
        StepSizes.of(config, parts),
        parts=parts,
        masking=_masking(config, tokenizer, vocabulary),
    )
    return _stored(config, load, data) if section.streaming is None else _streamed(config, load, data)


def _validation(section: DataSection, load: _Loader) -> tuple[SourceRows, ...]:
    """The rows of data.validation, if the config has it. Raises DataError."""
    if section.validation is None:
        return ()
    rows = load.rows(section.validation, 1.0)[1]
    if not len(rows):
        remedy = _too_long(section, rows) or "Give more of it, or lower data.sequence_length"
        value = section.validation.named
        raise DataError(value, "it gives no row to evaluate on", remedy)
    return (rows,)


def _stored(config: TrainConfig, load: _Loader, data: Data) -> Data:
    """`data` with rows to train on, and with held-out ones if it has none. Raises DataError, ConfigError."""
    section, seed = config.data, config.train.seed
    share, least = section.held_out, -(-config.train.batch_size // len(section.sources))
    if data.held_out:
        share, least = 0.0, 0
    splits = [load.rows(source, share, least) for source in section.sources]
    rows = StoredRows(tuple(trained for trained, _ in splits))
    held_out = data.held_out or StoredRows(tuple(rest for _, rest in splits))
    _check_size(config, splits, rows, held_out)
    counts = tuple(map(len, rows.sources))
    limits = tuple(source.epochs and source.epochs * count
                   for source, count in zip(section.sources, counts, strict=True))  # fmt: skip
    facts = [trained.store.facts for trained in rows.sources]
    known = tuple(
        {"path": source.path, "digest": of.digest, "documents": of.documents, "tokens": of.tokens}
        for source, of in zip(section.sources, facts, strict=True)
    )
    whole = digest_of("".join(of.digest for of in facts))
    if load.seed is not None:  # other rows to train on than where the end is held out
        whole = digest_of(repr((whole, load.seed, share, least)))
    sampler = Sampler(Mixture(_weights(section), limits), counts, seed)
    data = replace(data, rows=rows, held_out=held_out, sampler=sampler, digest=whole, known=known)
    data.check(data.steps_of(config.train))
    return data


def _masking(config: TrainConfig, tokenizer: Tokenizer, vocabulary: int) -> Masking | None:
    """None where no token is masked. Raises DataError as `Masking.of`."""
    probability = config.data.masked_share
    if probability is None:
        return None
    return Masking.of(tokenizer_folder(config), tokenizer, vocabulary, probability, config.train.seed)


def _weights(section: DataSection) -> tuple[float, ...]:
    return tuple(source.weight for source in section.sources)


def _check_size(
    config: TrainConfig, splits: Sequence[tuple[SourceRows, SourceRows]], rows: StoredRows, rest: StoredRows
) -> None:
    """Raise DataError for too few rows to train on, or held out, and for a source without a row."""
    section, size, loss = config.data, config.train.batch_size, config.train.loss
    if loss is not None and len(rest) < loss.least_rows and len(rest):
        remedy = f"Hold out {loss.least_rows} or more: data.validation, or data.held_out"
        raise DataError(f"{len(rest)} held-out row", loss.few, remedy)
    for source, (trained, own) in zip(section.sources, splits, strict=True):
        few = len(rows) < size or not len(rest)
        if not few and (len(trained) or not source.weight):
            continue
        most = "" if section.packing == "stream" else "at most "
        raise DataError(
            f"{source.named} of {trained.store.facts.tokens} tokens",
            f"it gives {len(trained) + len(own)} rows of {most}{section.sequence_length}, and a batch of "
            f"{size} to train on and a row held out need more",
            _too_long(section, trained)
            or "Give more text, or lower train.batch_size, data.sequence_length or data.held_out",
        )


def _too_long(section: DataSection, rows: SourceRows) -> str:
    """The remedy if documents were left out for their length: a shorter row would lose more. Else empty."""
    longest, lengths, kept = section.longest_document, rows.store.lengths, len(rows.pieces.lengths)
    if section.packing == "stream" or section.overlong == "cut" or kept == len(lengths):
        return ""
    key = "sequence_length" if section.document_length is None else "document_length"
    return (
        f"Raise data.{key}: {len(lengths) - kept} of its {len(lengths)} documents are left out, as "
        f"data.overlong={section.overlong} with {longest} tokens leaves them nothing that the loss counts; "
        f"the longest has {lengths.max()}"
    )


def _streamed(config: TrainConfig, load: _Loader, data: Data) -> Data:
    """`data` with a stream. Raises DataError, ConfigError."""
    section = config.data
    assert section.streaming is not None
    sources = [load.open(source) for source in section.sources]
    options = StreamOptions(
        section.sequence_length, section.packing, section.overlong, section.streaming.buffer,
        config.train.seed, load.vocabulary, section.longest_document,
    )  # fmt: skip
    stream = RowStream(sources, Mixture(_weights(section), (None,) * len(sources)), options)
    stream.take(0, config.train.batch_size)  # raises its errors now, before the model is built
    is_cut = any(size.length < data.sizes.full.length for _, size in data.sizes.phases)
    if some := next((source for source, encoder in sources if is_cut and encoder.labelled), None):
        raise ConfigError(
            "train.ramp with sequence_length, and data.streaming",
            f"the loss counts some tokens of {some.section.path} only, and rows that are cut may have none; "
            "a stream detects that only in the step",
            "Leave data.streaming out, or give a ramp of batch_size alone",
        )
    known, read = [], []
    for source, encoder in sources:
        contents, sizes = load.cache.digest(source), [file.stat().st_size for file in source.contents()]
        path, count = source.section.path, len(sizes)
        known.append({"path": path, "digest": contents, "files": count, "bytes": sum(sizes)})
        read.append((contents, encoder.digest))
    whole = digest_of(repr((read, options, _weights(section))))
    return replace(data, stream=stream, digest=whole, known=tuple(known))


@dataclass(frozen=True)
class _Loader:
    """Makes the rows of sources."""

    section: DataSection
    tokenizer: Tokenizer
    vocabulary: int
    cache: Cache
    seed: int | None  # by which documents are held out; None: those at the end
    space: LabelSpace | None = None  # the labels of the model's head

    def open(self, source: SourceSection) -> Streamed:
        """Raises DataError."""
        opened = open_source(source)
        return opened, make_encoder(self.section, opened, self.tokenizer, self.space)

    def rows(self, section: SourceSection, share: float, least: int = 0) -> tuple[SourceRows, SourceRows]:
        """The rows to train on, and those held out: a share of them, `least` or more. Raises DataError."""
        store, keys = self.store(section), self.section
        parts = (store.facts.digest, keys.sequence_length, keys.packing, keys.overlong, share, least,
                 keys.longest_document, self.seed, keys.first_label)  # fmt: skip
        return self.cache.entry(
            ("pairs" if keys.has_pairs else "split rows", parts),
            lambda folder: write_rows(folder, store, keys, share, least, self.seed),
            lambda folder: open_rows(folder, store),
        )

    def store(self, section: SourceSection) -> Store:
        """The tokens of one source, tokenised now unless they are in the cache. Raises DataError."""
        source, encoder = self.open(section)
        value, contents = section.named, self.cache.digest(source)
        key: tuple[object, ...] = ("tokens", source.format, contents, encoder.digest)
        write: Callable[[Path, DataSource], None] = partial(self._tokenise, encoder)
        if source.format == "megatron":
            key = ("megatron", *(str(file.absolute()) for file in source.files), contents)
            write = write_megatron

        def build(folder: Path) -> None:
            write(folder, source)
            if self.cache.digest(source) != contents:  # the entry must not have the digest of other contents
                raise DataError(value, "it changed while it was read", "Start again once it is whole")

        store = self.cache.entry(key, build, open_store)
        if store.facts.tokens == 0:
            raise DataError(value, "it holds no text", "Give a file with text in it")
        blamed, first = f"data file {store.facts.at}", ""
        if source.format != "megatron" and encoder.kind != "tokens":
            blamed = f"{value} with data.tokenizer={self.section.tokenizer}"
            first = f", first in {store.facts.at}"
        check_highest(blamed, store.facts.highest, self.vocabulary, first)
        return store

    def _tokenise(self, encoder: Encoder, folder: Path, source: DataSource) -> None:
        whole = np.dtype(np.uint32)  # of ids that a record may have itself
        dtype = np.min_scalar_type(self.tokenizer.count - 1) if encoder.writes_ids else whole
        blocks = _shown(source, encoded(encoder, source, self.section.workers))
        write_store(folder, blocks, dtype, encoder.labelled, encoder.separator)


def _shown(source: DataSource, blocks: Iterator[tuple[int, EncodedRecords]]) -> Iterator[EncodedRecords]:
    """The blocks, with a progress bar over the bytes of the source if stderr is a terminal."""
    console, size = Console(stderr=True), source.size()
    if not console.is_terminal:  # rich would end even a disabled bar with an empty line, in older versions
        yield from (block for _, block in blocks)
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task, done = bar.add_task(f"tokenising {source.section.path}", total=size), 0
        for count, block in blocks:
            yield block
            done += count
            bar.update(task, completed=min(done, size))
