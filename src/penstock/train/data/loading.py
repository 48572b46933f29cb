"""The data of a run: rows to train on, and rows held out.

    sources --> encode --> store --> rows --> sampler --> batches
    records     tokens     a file    packing  by weights   of a step

Records are tokenised once, into files that all ranks map (penstock.train.data.store); the tokens of each row
are listed in files too. So the memory of a rank does not grow with the data, and it reads the rows that it
needs. The number of rows before a step determines its rows; in a stream, the position does
(penstock.train.data.streaming). Every rank knows the whole batch, which is the same on any mesh, and reads
its pipeline's part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from penstock.batch.loss import IGNORED
from penstock.batch.padding import Padding
from penstock.batch.placement import Up, send_ahead
from penstock.errors import CheckpointError, ConfigError, DataError
from penstock.private import tree_map_only
from penstock.runtime.device.copies import CudaCopies
from penstock.train.config.data import DataSection, SourceSection
from penstock.train.config.sections import TrainConfig
from penstock.train.config.training import TrainSection
from penstock.train.data.changes import Known, changes
from penstock.train.data.labelled import LabelledLayout
from penstock.train.data.masking import HELD_OUT, MaskedRows, Masking
from penstock.train.data.packing import PACKINGS, SHORTEST, Packing, Pieces, cut, one_each
from penstock.train.data.pairs import HeadPairs, PairLayout, pair_each, whole_pairs
from penstock.train.data.rows import (
    BatchLayout,
    Content,
    CutRows,
    DocumentLayout,
    Fill,
    FilledRows,
    Rows,
    SourceRows,
    StoredRows,
    StreamLayout,
)
from penstock.train.data.sampler import Mixture, Sampler
from penstock.train.data.sources import DataSource, digest_of, open_source
from penstock.train.data.store import (
    Cache,
    Store,
    forget,
    mapped,
    open_store,
    write_megatron,
    write_store,
)
from penstock.train.data.streaming import Position, RowStream, Streamed, StreamOptions
from penstock.train.data.unpaired import UnpairedLayout
from penstock.train.encoding.encode import EncodedRecords, Encoder, check_highest, encoded, make_encoder
from penstock.train.encoding.images import Processor
from penstock.train.encoding.labels import LabelSpace
from penstock.train.encoding.tokenizer import Tokenizer, open_tokenizer, read_template
from penstock.train.model import tokenizer_folder
from penstock.train.sizes import StepSizes

_SAMPLED = 100  # steps from which the padding of a run is estimated
_APART = 1 << 31  # of a seed: apart from those of an order of rows (epoch and source)
_FORGOTTEN = 1 << 14  # pieces after which the pages of labels that were read are unmapped
_AS_BEFORE = "Give the data that the run began with, or start without --resume"


class LoadedBatch(NamedTuple):
    """A pipeline's part of a step's batch, the fill of the whole batch, and a stream's position after it.

    beside: microbatches for a forward pass before the step
    """

    content: Content
    fill: Fill
    position: Position | None = None
    beside: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Data:
    """The batches of a run.

    Attributes:
        rows, held_out: to train on, none for a stream, and to evaluate on
        layout: how rows become a batch
        sizes: the size of each step; a batch to evaluate on has the full one
        sampler: which rows a step has
        digest: of all tokens, labels and lengths to train on; for a stream, of files, tokenizer and options
        part, parts: batches hold this part, from 0, of so many
        stream: replaces `rows`
        done: the number of steps before the start
        taken: the number of rows of these steps, which may have had other sizes
        known: the entry of each source in a checkpoint
        masking: of tokens, for masked language modelling
    """

    rows: StoredRows
    held_out: StoredRows
    layout: BatchLayout
    sizes: StepSizes
    sampler: Sampler | None = None
    digest: str = ""
    part: int = 0
    parts: int = 1
    stream: RowStream | None = None
    done: int = 0
    taken: int = 0
    known: tuple[Known, ...] = ()
    masking: Masking | None = None

    def of(self, part: int) -> Data:
        """The same batches, with another part of each."""
        return replace(self, part=part)

    def at(self, done: int, state: Mapping[str, Any] | None, steps: int, *, accept: bool = False) -> Data:
        """Go on after `done` of `steps` steps, with the row after their last one.

        Args:
            state: the result of `state` after these steps; None for a checkpoint without it
            accept: whether the data may have changed since; a stream may not

        Raises: CheckpointError if the data has changed, or the position is none of this stream; what `check`
            raises.
        """
        if not done:
            return self
        state, change, stream = state or {}, self.change(state), self.stream
        position, planned = state.get("position"), self.sizes.rows_before(done + 1)
        if stream is not None:
            value = "the checkpoint's position in the data"
            if position is None:
                rule = "data.streaming goes on from a position, and the checkpoint was written without one"
                raise CheckpointError(value, rule, "Leave data.streaming out, or start without --resume")
            if change:
                rule = f"it is numbers of records, and the records have changed: {change}"
                raise CheckpointError(value, rule, _AS_BEFORE)
            stream, state = stream.at(position), position
        elif change and not accept:
            rule = f"it is not the data of the checkpoint, and all later batches would be others: {change}"
            accepting = "set data.changed=accept, and the next steps take the rows of this data"
            raise CheckpointError("the data of a resumed run", rule, f"{_AS_BEFORE}; or {accepting}")
        taken: int = state.get("rows", planned)
        resumed = replace(self, stream=stream, done=done, taken=taken)
        if taken != planned:  # else `load_data` has checked it
            resumed.check(steps)
        return resumed

    def without(self, done: int, step: int, position: Position | None, steps: int) -> tuple[Data, range]:
        """The data after step `done`, from the row after those of `step` on; and the rows left out.

        Args:
            position: of the batch of `step`
            steps: of the run

        Raises: ConfigError if too few rows are left; DataError.
        """
        stream = None if self.stream is None or position is None else self.stream.at(position)
        left_out = range(self._first(done + 1), self._first(step + 1))
        remaining = replace(self, stream=stream, done=done, taken=left_out.stop)
        remaining.check(steps)
        return remaining, left_out

    def change(self, state: Mapping[str, Any] | None) -> str:
        """How this data differs from that of `state`, in words; empty if it does not.

        A checkpoint of version 0.5.0 or before has no state to compare with.
        """
        if state is None or state.get("digest") == self.digest:
            return ""
        differences = changes(state.get("sources"), self.known)
        followed = (
            "its tokenizer, its order or its options" if self.stream else "its order or its held-out rows"
        )
        return (
            "; ".join(differences)
            or f"{followed} changed, or its contents (digest {self.digest}, not {state.get('digest')})"
        )

    def state(self, step: int, position: Position | None) -> dict[str, Any]:
        """The state after `step`, from which `at` goes on, in JSON. position: of its batch"""
        reached = {"rows": self._first(step + 1), "position": position}
        return {"digest": self.digest, **reached, "sources": list(self.known)}

    def first_epoch(self) -> Iterator[Sequence[int]]:
        """The rows of each step of a run from its beginning on, until as many are taken as an epoch has."""
        fresh = replace(self, done=0, taken=0)
        for step in range(1, self.sizes.steps_of(self.epoch) + 1):
            yield fresh.take(fresh._first(step), self.sizes.at(step).rows)[1]

    def rows_until(self, step: int) -> Sequence[int]:
        """The stored rows of all steps up to `step`, in order."""
        return self.take(0, self._first(step + 1))[1]

    def _first(self, step: int) -> int:
        """The number of the run's rows before `step`."""
        return self.taken + self.sizes.rows_before(step) - self.sizes.rows_before(self.done + 1)

    @property
    def epoch(self) -> int:
        """The rows of an epoch: those of all sources that any row is taken from; 0 for a stream."""
        if self.sampler is None:
            return 0
        weights = self.sampler.mixture.weights
        return sum(count for count, weight in zip(self.sampler.counts, weights, strict=True) if weight)

    def epochs_after(self, step: int) -> float | None:
        """The epochs that are done after `step`; None for a stream, which does not know."""
        return self._first(step + 1) / self.epoch if self.epoch else None

    def steps_of(self, section: TrainSection) -> int:
        """The steps of the run: of its `epochs` the fewest that take all their rows."""
        if section.epochs is None:
            return section.last
        return self.sizes.steps_of(ceil(Fraction(str(section.epochs)) * self.epoch))

    def batch(self, step: int) -> LoadedBatch:
        """The batch of step `step`, from 1."""
        rows, chosen, position = self.take(self._first(step), self.sizes.at(step).rows)
        batch = self._part(*self._sized(rows, step), chosen)
        self.rows.forget()
        return batch._replace(position=position)

    def take(self, first: int, count: int) -> tuple[Rows, Sequence[int], Position | None]:
        """The run's rows `first`, from 0, to `first + count`: all rows, the indices of these, the position.

        position: in the stream after these rows; None for stored rows
        """
        if self.stream is not None:
            rows, position = self.stream.take(first, count)
            return rows, range(count), position
        assert self.sampler is not None
        return self.rows, self.sampler.rows(first, count), None

    def batches(self, steps: range, device: torch.device) -> Generator[LoadedBatch]:
        """The batches of `steps`. A thread makes the next one while the caller works with one.

        Close the generator to end the thread. An error is raised in place of its batch.

        Args:
            steps: one or more
            device: where the step runs. A GPU gets copies of the next batch while it runs a step
        """
        make = self.batch if device.type == "cpu" else partial(self._sent_batch, CudaCopies(device).up)
        begin = device, torch.get_num_threads()
        with ThreadPoolExecutor(1, "penstock-data", _begin_thread, begin) as thread:
            ahead = thread.submit(make, steps[0])
            for step in steps[1:]:
                batch, ahead = ahead.result(), thread.submit(make, step)
                yield batch
            yield ahead.result()

    def held_out_batches(self, count: int) -> list[LoadedBatch]:
        """At most `count` batches of the full size or smaller, spread evenly over the held-out rows.

        All held-out rows where they fit. No batch has more than one row more than another.
        """
        spread = self.held_out_rows(count)
        batches = np.array_split(np.asarray(spread), -(-len(spread) // self.sizes.full.rows))
        return [self._held_out(batch.tolist()) for batch in batches]

    def held_out_rows(self, count: int) -> Sequence[int]:
        """The rows of at most `count` held-out batches."""
        available = len(self.held_out)
        rows = min(count * self.sizes.full.rows, available)
        spread: list[int] = np.linspace(0, available - 1, rows).round().astype(int).tolist()
        return spread

    def _held_out(self, chosen: list[int]) -> LoadedBatch:
        """A batch of these rows, in equally many microbatches on each part of the mesh.

        If there are fewer rows than parts, rows in which no token counts follow, so the loss stays theirs.
        """
        rows = self.seen(self.held_out, HELD_OUT)
        layout, missing = self.layout, self.parts - len(chosen)
        if missing > 0:
            if isinstance(layout, DocumentLayout) and not layout.ignores:
                raise _too_few(len(chosen), "pairs" if isinstance(layout, PairLayout) else "rows", self.parts)
            rows = FilledRows(rows)
            chosen = [*chosen, *range(len(rows), len(rows) + missing)]
        if isinstance(layout, DocumentLayout):
            layout = replace(layout, calls=(min(sum(layout.calls), len(chosen) // self.parts),))
        return self._part(layout, rows, chosen)

    def expected(self, steps: int) -> Fill:
        """The fill of the first batches of a run of `steps` steps; for a stream, of the held-out ones.

        Images are not counted, as that would read tokens.
        """
        if self.stream is not None:
            return sum((batch.fill for batch in self.held_out_batches(1)), Fill())
        sampled = range(self.done + 1, min(steps, self.done + _SAMPLED) + 1)
        dealt = (self._dealt(*self._sized(self.rows, step), self._chosen(step)) for step in sampled)
        return sum((fill for _, fill in dealt), Fill())

    def check(self, steps: int) -> None:
        """Raise ConfigError if the rows end before step `steps`, and DataError for a step of a ramp whose cut
        rows have no token that counts."""
        if self.sampler is None:
            return
        total, needed = self.sampler.mixture.total, self._first(steps + 1)
        if total is not None and total < needed:
            done, size = f"{self.taken} rows are taken, and " if self.done else "", self.sizes.full.rows
            raise ConfigError(
                f"data.mixture of {total} rows in all epochs",
                f"{done}train.steps={steps} batches of {size} take {needed}",
                f"Set train.steps to {self.done + max(total - self.taken, 0) // size} or less, or leave "
                "epochs out of one of them",
            )
        if all(source.store.labels is None for source in self.rows.sources):
            return
        last = max((until for until, _ in self.sizes.phases), default=0)
        for step in range(self.done + 1, min(last, steps) + 1):
            _, rows = self._sized(self.rows, step)
            pieces = (piece for row in self._chosen(step) for piece in rows.read(row))
            if isinstance(rows, CutRows) and not any((piece.labels[1:] != IGNORED).any() for piece in pieces):
                raise DataError(
                    f"train.ramp with sequence_length={rows.longest}",
                    f"the rows of step {step}, cut to so many tokens, have none that the loss counts",
                    "Give a larger sequence_length, or a ramp of batch_size alone",
                )
        self.rows.forget()

    def _sized(self, rows: Rows, step: int) -> tuple[BatchLayout, Rows]:
        """The layout and the rows for the size of the step."""
        size, layout = self.sizes.at(step), self.layout
        if isinstance(layout, DocumentLayout):
            layout = replace(layout, calls=size.calls)
        rows = CutRows(rows, size.length) if size.length < self.sizes.full.length else rows
        return layout, self.seen(rows, step)

    def seen(self, rows: Rows, step: int) -> Rows:
        """The rows as `step` sees them: with masks, where tokens are masked."""
        return rows if self.masking is None else MaskedRows(rows, self.masking, step)

    def _part(self, layout: BatchLayout, rows: Rows, chosen: Sequence[int]) -> LoadedBatch:
        dealt, fill = self._dealt(layout, rows, chosen)
        if isinstance(layout, DocumentLayout) and layout.image_token is not None:
            pieces = (piece for row in chosen for piece in rows.read(row))
            fill = replace(fill, images=sum(int((piece.ids == layout.image_token).sum()) for piece in pieces))
        mine = dealt[self.part]
        return LoadedBatch(layout.content(rows, mine), fill, beside=layout.beside(rows, mine))

    def _sent_batch(self, up: Up, step: int) -> LoadedBatch:
        batch = self.batch(step)
        batch = batch._replace(content=tree_map_only(Tensor, Tensor.pin_memory, batch.content))
        send_ahead(batch.content, up)
        return batch

    def _dealt(self, layout: BatchLayout, rows: Rows, chosen: Sequence[int]) -> tuple[list[list[int]], Fill]:
        """The rows of each pipeline, and the fill of them all, without images."""
        dealt = layout.deal(rows, chosen, self.parts)
        return dealt, sum((layout.fill(rows, part) for part in dealt), Fill())

    def _chosen(self, step: int) -> Sequence[int]:
        return self.take(self._first(step), self.sizes.at(step).rows)[1]


def _begin_thread(device: torch.device, threads: int) -> None:
    """torch keeps the number of threads and the current GPU for each thread."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else pinning takes memory of the first GPU


# ---- From a config


def tokenizer_of(config: TrainConfig) -> Tokenizer:
    """The tokenizer that the config names, or the model's. Raises DataError, HubError."""
    section = config.data
    chat = any(source.kind in ("chat", "preference", "unpaired") for source in section.sources)
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
    section, size = config.data, config.train.batch_size
    layout = _layout(config, tokenizer, padding, flash, space)
    seed = config.train.seed if section.holds_out_at_random else None
    load = _Loader(section, tokenizer, vocabulary, Cache.at(section.cache), seed, space)
    share, least, held_out = section.held_out, -(-size // len(section.sources)), []
    if section.validation is not None:
        share, least, held_out = 0.0, 0, [load.rows(section.validation, 1.0)[1]]
        if not len(held_out[0]):
            rule = "it gives no row to evaluate on"
            value = f"data.validation.path={section.validation.path}"
            remedy = "Give more of it, or lower data.sequence_length"
            raise DataError(value, rule, _too_long(section, held_out[0]) or remedy)
    data = Data(StoredRows(()), StoredRows(tuple(held_out)), layout, StepSizes.of(config, parts), parts=parts,
                masking=_masking(config, tokenizer, vocabulary))  # fmt: skip
    if section.streaming is not None:
        return _streamed(config, load, data)
    splits = [load.rows(source, share, least) for source in section.sources]
    rows = StoredRows(tuple(trained for trained, _ in splits))
    evaluated = data.held_out if held_out else StoredRows(tuple(rest for _, rest in splits))
    _check_size(config, splits, rows, evaluated)
    if section.compared == "unpaired" and len(evaluated) == 1:
        rule = "the KL term of KTO pairs each prompt with the completion of another row"
        raise DataError("one held-out row", rule, "Hold out two or more: data.validation, or data.held_out")
    counts = tuple(map(len, rows.sources))
    limits = tuple(source.epochs and source.epochs * count
                   for source, count in zip(section.sources, counts, strict=True))  # fmt: skip
    sampler = Sampler(Mixture(_weights(section), limits), counts, config.train.seed)
    facts = [trained.store.facts for trained in rows.sources]
    known = tuple(
        {"path": source.path, "digest": of.digest, "documents": of.documents, "tokens": of.tokens}
        for source, of in zip(section.sources, facts, strict=True)
    )
    whole = digest_of("".join(of.digest for of in facts))
    if seed is not None:  # other rows to train on than where the end is held out
        whole = digest_of(repr((whole, seed, share, least)))
    data = replace(data, rows=rows, held_out=evaluated, sampler=sampler, digest=whole, known=known)
    data.check(data.steps_of(config.train))
    return data


def _layout(
    config: TrainConfig, tokenizer: Tokenizer, padding: Padding | None, flash: bool, space: LabelSpace | None
) -> BatchLayout:
    """How rows become microbatches. Raises ConfigError as `_pad_of`."""
    section = config.data
    if section.packing == "stream":
        return StreamLayout(padding)
    calls = (config.pipeline.microbatches * config.train.accumulate,)
    if section.compared is not None:
        return _compared(config, space, calls, padding)
    if section.labels != "next tokens":
        assert space is not None
        return _labelled(section, space, calls)
    packed = section.packing in ("sequential", "best_fit")
    seen = (tokenizer.entries, tokenizer.image_token) if isinstance(tokenizer, Processor) else ()
    return DocumentLayout(calls, packed, padding, flash, section.longest_document, *seen)


def _masking(config: TrainConfig, tokenizer: Tokenizer, vocabulary: int) -> Masking | None:
    """None where no token is masked. Raises DataError as `Masking.of`."""
    probability = config.data.masked_share
    if probability is None:
        return None
    return Masking.of(tokenizer_folder(config), tokenizer, vocabulary, probability, config.train.seed)


def _compared(
    config: TrainConfig, space: LabelSpace | None, calls: tuple[int, ...], padding: Padding | None
) -> BatchLayout:
    """Raises ConfigError as `_pad_of`."""
    loss, longest = config.train.loss, config.data.longest_document
    if loss is not None and loss.kind in ("reward", "contrastive"):
        assert space is not None
        return HeadPairs(calls, False, longest=longest, pad=_pad_of(space, f"train.loss={loss.kind}"))
    make = PairLayout if config.data.has_pairs else UnpairedLayout
    return make(calls, False, padding, longest=longest, refers=loss is not None and loss.refers)


def _labelled(section: DataSection, space: LabelSpace, calls: tuple[int, ...]) -> LabelledLayout:
    """Raises ConfigError as `_pad_of`."""
    if section.labels == "rows":
        pad = _pad_of(space, f"data.kind={section.kind}")
        return LabelledLayout(calls, False, pad=pad, problem=space.problem)
    return LabelledLayout(calls, False, pad=space.pad or 0)


def _pad_of(space: LabelSpace, key: str) -> int:
    """Raises ConfigError for a head over rows that does not know which tokens are padding."""
    if space.pad is None:
        raise ConfigError(
            "a model without pad_token_id",
            f"{key} pads rows, and a head may look for the last token before padding",
            "Set pad_token_id in the model's config, to an id that no text has",
        )
    return space.pad


def _weights(section: DataSection) -> tuple[float, ...]:
    return tuple(source.weight for source in section.sources)


def _check_size(
    config: TrainConfig, splits: Sequence[tuple[SourceRows, SourceRows]], rows: StoredRows, rest: StoredRows
) -> None:
    """Raise DataError if there is no batch to train on, or no row held out, or a source has no row."""
    section, size = config.data, config.train.batch_size
    for source, (trained, own) in zip(section.sources, splits, strict=True):
        few = len(rows) < size or not len(rest)
        if not few and (len(trained) or not source.weight):
            continue
        most = "" if section.packing == "stream" else "at most "
        raise DataError(
            f"data.path={source.path} of {trained.store.facts.tokens} tokens",
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
        starts, lengths, *packings = self.cache.entry(
            ("pairs" if keys.has_pairs else "split rows", parts),
            lambda folder: _write_rows(folder, store, keys, share, least, self.seed),
            lambda folder: [mapped(folder / name, np.int64) for name in _ARRAYS],
        )
        pieces = Pieces(starts, lengths)
        trained, held_out = (Packing(*packings[at : at + 2]) for at in (0, 2))
        return SourceRows(store, pieces, trained), SourceRows(store, pieces, held_out)

    def store(self, section: SourceSection) -> Store:
        """The tokens of one source, tokenised now unless they are in the cache. Raises DataError."""
        source, encoder = self.open(section)
        value, contents = f"data.path={section.path}", self.cache.digest(source)
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


# ---- The tokens of each row: arrays in files, mapped as the tokens are

_ARRAYS = ("starts", "lengths", "trained", "trained_bounds", "held_out", "held_out_bounds")


def _write_rows(
    folder: Path, store: Store, section: DataSection, share: float, least: int, seed: int | None
) -> None:
    """Write the pieces of the store's documents, and the pieces of each row.

    Args:
        share: of the rows, or of the tokens of documents, to hold out
        least: the fewest rows to hold out; of data too small for it, a tenth of the rows, or one
        seed: of the documents that are held out; None for those at the end
    """
    length, stream, longest = section.sequence_length, section.packing == "stream", section.longest_document
    if stream:
        starts = np.arange(0, len(store.tokens) - length + 1, length)
        pieces = Pieces(starts, np.full(len(starts), length))
    elif section.has_pairs:
        pieces = whole_pairs(store, longest, section.overlong, section.first_label)
    else:
        shortest = SHORTEST if section.first_label else 1
        pieces = cut(np.asarray(store.lengths), longest, section.overlong, shortest)
    pieces = pieces if section.has_pairs else _that_count(store, pieces, section.first_label)
    count, together = len(pieces.lengths), 2 if section.has_pairs else 1
    pack = pair_each if section.has_pairs else one_each if stream else PACKINGS[section.packing]

    order = np.arange(count) if seed is None else _shuffled(store, pieces, seed)
    if 2 * least > count:
        least = max(1, count // 10)

    def packed(first: int, end: int) -> Packing:
        chosen = np.sort(order[first:end])  # rows are packed in the order of the data
        made = pack(pieces.lengths[chosen], length)
        return made._replace(pieces=chosen[made.pieces])

    if stream:
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


def _too_few(count: int, of: str, parts: int) -> DataError:
    return DataError(
        f"{count} held-out {of} on a mesh of {parts} pipelines",
        "each pipeline evaluates at least one, and none can stand in for a missing one",
        "Give data.validation more, or a larger data.held_out",
    )


def _shuffled(store: Store, pieces: Pieces, seed: int) -> npt.NDArray[np.int64]:
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
