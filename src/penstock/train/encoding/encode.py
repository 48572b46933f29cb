"""From records to tokens: texts, chats, or tokens already; in this process or in several.

A worker process gets an Encoder. `encoded` runs it over a source, block by block, in the order of the
records.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from penstock.batch.loss import IGNORED
from penstock.errors import DataError, RunError
from penstock.train.config.data import KINDS, DataSection, SourceSection
from penstock.train.data.sources import MEND, TOKENS, DataSource, Record, RecordError, blaming
from penstock.train.encoding.chat import ChatEncoder, Encoded
from penstock.train.encoding.labels import LabelEncoder, LabelSpace, TagEncoder
from penstock.train.encoding.pairs import PairEncoder
from penstock.train.encoding.preference import PreferenceEncoder
from penstock.train.encoding.record import check_unicode, field_of, parsed, refuse_keys
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.encoding.unpaired import UnpairedEncoder

RecordKind = Literal[  # the content of records
    "text", "chat", "tokens", "preference", "unpaired", "pair", "classification", "token_classification",
    "masked",
]  # fmt: skip
EncodedRecords = list[tuple[str, Encoded | None]]  # records' names and tokens; None for a dropped one
# how records become documents, but for texts and tokens
_ENCODERS: dict[RecordKind, Callable[..., object]] = {
    "chat": ChatEncoder, "preference": PreferenceEncoder, "unpaired": UnpairedEncoder, "pair": PairEncoder,
    "classification": LabelEncoder, "token_classification": TagEncoder,
}  # fmt: skip
_COMPLETIONS = ("preference", "unpaired")  # kinds of records with whole completions
_RULES = 2  # the version of the rules below, a part of the cache's key: raise it when a rule changes
_AT_ONCE = 1000  # records in a block
_BLOCK_BYTES = 8 << 20  # of texts in a block, about
_ROW_BYTES = 1000  # of a row of a table, about
_LARGE = 64 << 20  # bytes of files from which on several processes tokenise
_MOST = 1 << 31  # all ids are below it
_WHOLE = TypeAdapter(list[int])
_MEND_TEXT = f"{MEND}; where all records are so, set data.text_field to the one that holds the text"


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of records. Raises DataError for chats with a tokenizer that cannot write them.

    Attributes:
        lines: whether a record's bytes are JSON, and not a text
        options: the keywords of the encoder of chats, completions, pairs or labels; for texts, of the
            tokenizer's `encode`; for tokens, of tokens_of
    """

    tokenizer: Tokenizer
    kind: RecordKind
    lines: bool
    text_field: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "chat":
            assert self._records

    @property
    def labelled(self) -> bool:
        """Whether some tokens may not count."""
        if self.kind == "chat":
            return bool(dict(self.options)["loss_on"] != "all")
        return self.kind not in ("text", "pair", "classification", "masked")

    @property
    def writes_ids(self) -> bool:
        """Whether all ids are the tokenizer's."""
        return self.kind in ("text", "chat", *_COMPLETIONS, "pair", "masked")

    @property
    def separator(self) -> int | None:
        """The id between two texts; None for chats, which their template ends, and for tokens."""
        return self.tokenizer.separator if self.kind == "text" else None

    @property
    def digest(self) -> tuple[object, ...]:
        """Everything that determines its tokens, besides the records."""
        tokenizer = self.kind != "tokens" and self.tokenizer.digest
        return _RULES, self.kind, self.text_field, self.options, tokenizer

    @cached_property
    def _records(self) -> Any:
        """The encoder of records of chats, completions, pairs or labels."""
        return _ENCODERS[self.kind](self.tokenizer, **dict(self.options))

    def encode(self, records: Sequence[Record]) -> EncodedRecords:
        """The tokens of each record. Raises DataError that names a wrong one."""
        match self.kind:
            case "text":
                return self._texts(records)
            case "masked":  # a blank text has special tokens, and nothing to mask
                documents = zip(records, self._texts(records), strict=True)
                return [
                    (name, encoded if self._text(record).strip() else None)
                    for record, (name, encoded) in documents
                ]
            case "preference" | "pair":
                return [document for record in records for document in self._pair(record)]
            case "unpaired":
                return self._completions(records)
            case "chat" | "classification" | "token_classification":
                return self._each(records, self._records.encode)
            case "tokens":
                ignored = dict(self.options).get("ignored", ())
                return self._each(records, partial(tokens_of, ignored=ignored))

    def _each(
        self, records: Sequence[Record], encode: Callable[[str, dict[str, Any]], Encoded | None]
    ) -> EncodedRecords:
        """The tokens of records that are one document each. encode: function of a record's name and fields"""
        return [(record.name, encode(record.name, self._row(record))) for record in records]

    def _texts(self, records: Sequence[Record]) -> EncodedRecords:
        names, texts = [record.name for record in records], [self._text(record) for record in records]
        ids = self.tokenizer.encode(names, texts, **dict(self.options))
        return [(name, Encoded(of_text)) for name, of_text in zip(names, ids, strict=True)]

    def _pair(self, record: Record) -> EncodedRecords:
        """The two documents of a record; one None for a pair that is dropped."""
        pair = self._records.encode(record.name, self._row(record))
        return [(record.name, None)] if pair is None else [(record.name, half) for half in pair]

    def _completions(self, records: Sequence[Record]) -> EncodedRecords:
        """The documents of completions; of pairs, as in TRL, first all chosen ones and then all others.

        So neighbours have different prompts.
        """
        of_records = [
            (record.name, self._records.encode(record.name, self._row(record))) for record in records
        ]
        first = [(name, documents[0]) for name, documents in of_records]
        return first + [(name, document) for name, documents in of_records for document in documents[1:]]

    def _row(self, record: Record) -> dict[str, Any]:
        """The fields of a record: of a chat in a table without None, of one in JSON with the nulls."""
        row = _row(record)
        is_table = self.kind in ("chat", *_COMPLETIONS) and not self.lines
        return _without_none(row) if is_table else row

    def _text(self, record: Record) -> bytes:
        if isinstance(record.content, bytes) and not self.lines:
            return record.content
        with blaming(f"data file {record.name}"):
            text = field_of(_row(record), self.text_field, _MEND_TEXT)
            if not isinstance(text, str):
                raise RecordError(f"{self.text_field} holds a {type(text).__name__} and no text", _MEND_TEXT)
            check_unicode(self.text_field, text)
            return text.encode("utf-8")


def make_encoder(
    section: DataSection, source: DataSource, tokenizer: Tokenizer, space: LabelSpace | None = None
) -> Encoder:
    """The encoder of one source. Reads its first record if only that shows the kind. Raises DataError.

    space: the labels of the model's head, which only records with such labels need
    """
    keys, kind = source.section, _kind_of(source)
    options = _options(kind, section, keys, space)
    return Encoder(tokenizer, kind, source.format == "jsonl", keys.text_field, options)


def _kind_of(source: DataSource) -> RecordKind:
    """The content of the source's records. Reads the first one if only that shows it."""
    kind = source.section.kind
    if kind in KINDS:
        return cast(RecordKind, kind)
    first = next(source.records(), None) if source.format not in ("text", "megatron") else None
    fields = _row(first) if first else {}
    return "tokens" if TOKENS[0] in fields and source.section.text_field not in fields else "text"


def _options(
    kind: RecordKind, section: DataSection, keys: SourceSection, space: LabelSpace | None
) -> tuple[tuple[str, Any], ...]:
    """`Encoder.options`. A part of the cache's key, so their order stays as it is."""
    ignored, drop = ("ignored", keys.ignored_fields), ("drop", section.unanswered == "drop")
    match kind:
        case "text":
            return ()
        case "masked":
            whole = section.packing == "stream" or section.overlong != "truncate"
            return ("special", True), ("longest", None if whole else section.sequence_length)
        case "tokens":
            return (ignored,)
        case "chat":
            return (
                ignored, ("form", keys.chat_form), ("field", keys.messages_field),
                ("loss_on", section.loss_on), drop, ("columns", keys.columns),
            )  # fmt: skip
        case "preference":
            return ignored, drop
        case "unpaired":
            return ignored, drop, ("label", keys.label_field)
        case "pair":
            return (
                ("fields", keys.pair_fields), ("longest", section.sequence_length),
                ("drop", section.overlong == "drop"), ignored,
            )  # fmt: skip
        case "classification" | "token_classification":
            return (
                ("space", space), ("text", keys.text_field), ("label", keys.label_field),
                ("longest", section.sequence_length), ("drop", section.overlong == "drop"),
            )  # fmt: skip


def _without_none(value: Any) -> Any:
    """A row of a table without None, at any depth: a table has None for keys that only other rows have.

    As TRL's remove_none_values: a template would write it into calls of tools, and into the tools.
    """
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _row(record: Record) -> dict[str, Any]:
    """The fields of a record; for JSONL, the object in its line. Raises DataError."""
    if isinstance(record.content, dict):
        return record.content
    with blaming(f"data file {record.name}"):
        row = parsed("it", record.content)
        if not isinstance(row, dict):
            raise RecordError(f"each line is a JSON object, and this is a {type(row).__name__}")
        return row


def tokens_of(name: str, row: Mapping[str, Any], ignored: Sequence[str] = ()) -> Encoded:
    """input_ids, and labels if there are some: each an id, or -100. Raises DataError.

    Other fields are refused, as a mask would say which tokens count, or which are padding.
    """
    with blaming(f"data file {name}"):
        ids = _numbers(TOKENS[0], field_of(row, TOKENS[0], "Take data.kind=text or chat, or tokenise it"))
        labels = ids if row.get(TOKENS[1]) is None else _numbers(TOKENS[1], row[TOKENS[1]])
        unread = {key for key, value in row.items() if value is not None} - {*TOKENS, *ignored}
        if "attention_mask" in unread and row["attention_mask"] == [1] * len(ids):  # which hides nothing
            unread.remove("attention_mask")
        refuse_keys(unread, (), ignored)
        if (unknown := ids[(ids < 0) | (ids >= _MOST)]).size:
            raise RecordError(f"token ids are 0 or more, and here is {unknown[0]}")
        if len(labels) != len(ids):
            rule = f"it has {len(labels)} labels for {len(ids)} tokens"
            raise RecordError(rule, "Give one for each, -100 where the loss is not to count it")
        if (unknown := labels[((labels < 0) & (labels != IGNORED)) | (labels >= _MOST)]).size:
            raise RecordError(f"a label is a token id, or {IGNORED}, and here is {unknown[0]}")
    return Encoded(ids.astype(np.uint32), labels.astype(np.int32))


def _numbers(field: str, content: object) -> npt.NDArray[np.int64]:
    try:
        whole = content if isinstance(content, np.ndarray) else _WHOLE.validate_python(content, strict=True)
        return np.asarray(whole, dtype=np.int64)
    except (ValidationError, OverflowError):
        rule = f"{field} is a list of whole numbers, and here is a {type(content).__name__} of something else"
        raise RecordError(rule) from None


def check_highest(value: str, highest: int, vocabulary: int, first: str = "") -> None:
    """Raise DataError if the vocabulary lacks the highest id. first: where that is, unless `value` says it"""
    if highest >= vocabulary:
        rule = f"it gives token id {highest} and the model has ids 0 to {vocabulary - 1} (vocab_size){first}"
        raise DataError(value, rule, f"Take the model's own tokenizer, or a vocab_size above {highest}")


# ---- Over a whole source


def encoded(
    encoder: Encoder, source: DataSource, workers: int | None
) -> Iterator[tuple[int, EncodedRecords]]:
    """The blocks of a source in order, each with the bytes of its records.

    Args:
        workers: processes that tokenise; 0: this one; None: one a core for large files

    Raises: DataError; RunError where a worker dies.
    """
    if workers is None:
        cores = len(os.sched_getaffinity(0))
        workers = cores if cores > 1 and source.size() >= _LARGE else 0
    blocks = _blocks(source.records())
    if not workers:
        for size, records in blocks:
            yield size, encoder.encode(records)
        return
    # spawned: a fork would copy the threads' locks of torch and of tokenizers
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,)) as pool:
        ahead: deque[tuple[int, Future[EncodedRecords]]] = deque()
        try:
            for size, records in blocks:
                ahead.append((size, pool.submit(_encode, records)))
                if len(ahead) > 2 * workers:  # at most so many blocks of the files are in memory
                    size, block = ahead.popleft()
                    yield size, block.result()
            for size, block in ahead:
                yield size, block.result()
        except BrokenProcessPool as error:
            rule = "a process that tokenises died, perhaps of too little memory"
            raise RunError(f"data.workers={workers}", rule, "Give fewer, or 0") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _blocks(records: Iterable[Record]) -> Iterator[tuple[int, list[Record]]]:
    block: list[Record] = []
    size = 0
    for record in records:
        block.append(record)
        size += len(record.content) if isinstance(record.content, bytes) else _ROW_BYTES
        if len(block) >= _AT_ONCE or size >= _BLOCK_BYTES:
            yield size, block
            block, size = [], 0
    if block:
        yield size, block


_worker: Encoder | None = None  # of a worker process: the encoder that it was started with


def _start_worker(encoder: Encoder) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = encoder


def _encode(records: list[Record]) -> EncodedRecords:
    assert _worker is not None
    return _worker.encode(records)
