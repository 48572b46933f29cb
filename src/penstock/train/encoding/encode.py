"""From records to tokens: texts, chats, or what is tokenised already; in this process or in several.

Encoder is what a worker process gets. `encoded` runs it over a source, block by block, in the order of the
records.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from multiprocessing import get_context
from typing import Any, Literal, assert_never

import numpy as np

from penstock.batch.loss import IGNORED
from penstock.errors import DataError, RunError
from penstock.reading import parse_json
from penstock.train.config.sections import DataSection
from penstock.train.data.sources import TOKENS, Record, Source
from penstock.train.encoding.chat import ChatEncoder, Encoded
from penstock.train.encoding.record import Columns, check_unicode, refuse_keys
from penstock.train.encoding.tokenizer import HuggingFace, Tokenizer

Kind = Literal["text", "chat", "tokens"]  # what records hold
Block = list[tuple[str, Encoded | None]]  # the names of records and their tokens; None for a dropped one
_RULES = 1  # by which records become tokens: change it with them, and no cache gives tokens by older ones
_AT_ONCE = 1000  # records in a block
_BLOCK_BYTES = 8 << 20  # of texts in a block, about
_LARGE = 64 << 20  # bytes of files from which on several processes tokenise
_MOST = 1 << 31  # ids are below
_MEND = "Mend it, or remove it"
_MEND_TEXT = f"{_MEND}; where all records are so, set data.text_field to the one that holds the text"


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of records.

    Attributes:
        lines: whether a record's bytes are JSON, and not a text
        options: of chats, the keywords of ChatEncoder; of tokens, those of tokens_of
    """

    tokenizer: Tokenizer
    kind: Kind
    lines: bool
    text_field: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def labelled(self) -> bool:
        """Whether some tokens may not count."""
        return self.kind == "tokens" or (self.kind == "chat" and dict(self.options)["loss_on"] != "all")

    @property
    def separator(self) -> int | None:
        """The id between two documents: chats end by their template, and tokens as they were written."""
        return self.tokenizer.separator if self.kind == "text" else None

    @property
    def digest(self) -> tuple[object, ...]:
        """What its tokens follow from, other than the records."""
        return (
            _RULES,
            self.kind,
            self.text_field,
            self.options,
            self.kind != "tokens" and self.tokenizer.digest,
        )

    @cached_property
    def _chats(self) -> ChatEncoder:
        assert isinstance(self.tokenizer, HuggingFace)
        return ChatEncoder(self.tokenizer, **dict(self.options))

    def check(self) -> None:
        """Raise DataError where the tokenizer cannot write chats and is to."""
        if self.kind == "chat":
            assert self._chats

    def encode(self, records: Sequence[Record]) -> Block:
        """The tokens of each record. Raises DataError that names a wrong one."""
        made: Callable[[str, dict[str, Any]], Encoded | None]
        match self.kind:
            case "text":
                return self._texts(records)
            case "chat":
                made = self._chats.encode
            case "tokens":
                made = partial(tokens_of, ignored=dict(self.options).get("ignored", ()))
            case unknown:
                assert_never(unknown)
        return [(record.name, made(record.name, self._row(record))) for record in records]

    def _texts(self, records: Sequence[Record]) -> Block:
        names = [record.name for record in records]
        texts = [
            self._field(record) if self.lines or isinstance(record.content, dict) else record.content
            for record in records
        ]
        ids = self.tokenizer.encode(names, texts)
        return [(name, Encoded(each)) for name, each in zip(names, ids, strict=True)]

    def _row(self, record: Record) -> dict[str, Any]:
        if not isinstance(record.content, dict):
            return parsed(record.name, record.content)
        return _without_none(record.content) if self.kind == "chat" else record.content

    def _field(self, record: Record) -> bytes:
        row, field = self._row(record), self.text_field
        value = f"data file {record.name}"
        if field not in row:
            rule = f"it has no field {field!r}, only {', '.join(map(repr, row)) or 'none'}"
            raise DataError(value, rule, _MEND_TEXT)
        if not isinstance(row[field], str):
            rule = f"{field} holds a {type(row[field]).__name__} and no text"
            raise DataError(value, rule, _MEND_TEXT)
        check_unicode(record.name, field, row[field])
        encoded: bytes = row[field].encode("utf-8")
        return encoded


def make_encoder(section: DataSection, source: Source, tokenizer: Tokenizer) -> Encoder:
    """The encoder of one source. Reads its first record where only that shows the kind. Raises DataError."""
    kind, keys = _kind_of(source), source.section
    options: tuple[tuple[str, Any], ...] = (("ignored", keys.ignored_fields),) if kind != "text" else ()
    if kind == "chat":
        options += (
            ("form", keys.chat_form), ("field", keys.messages_field), ("loss_on", section.loss_on),
            ("drop", section.unanswered == "drop"),
        )  # fmt: skip
        if keys.columns is not None:
            options += (("columns", Columns(**keys.columns.model_dump())),)
    encoder = Encoder(tokenizer, kind, source.format == "jsonl", keys.text_field, options)
    encoder.check()
    return encoder


def _kind_of(source: Source) -> Kind:
    match source.section.kind:
        case "chat" | "tokens" as kind:
            return kind
        case "dummy":
            return "tokens"
        case "auto" | "text" | "jsonl" | "parquet" | "dataset" | "megatron":
            first = next(source.records(), None) if source.format not in ("text", "megatron") else None
            found = _fields(first) if first else set()
            return "tokens" if TOKENS[0] in found and source.section.text_field not in found else "text"
        case unknown:
            assert_never(unknown)


def _fields(record: Record) -> set[str]:
    content = record.content
    return set(content if isinstance(content, dict) else parsed(record.name, content))


def _without_none(value: Any) -> Any:
    """A row of a table without the None that stands, at any depth, for what other rows have and it lacks.

    As TRL's remove_none_values: a template would write it into calls of tools, and into the tools.
    """
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def parsed(name: str, line: bytes) -> dict[str, Any]:
    """The object in a line of JSONL. Raises DataError."""
    try:
        row = parse_json(line)
    except ValueError as error:  # json's own, and Unicode's
        raise DataError(f"data file {name}", f"it is not JSON: {error}", _MEND) from None
    if not isinstance(row, dict):
        rule = f"each line is a JSON object, and this is a {type(row).__name__}"
        raise DataError(f"data file {name}", rule, _MEND)
    return row


def tokens_of(name: str, row: Mapping[str, Any], ignored: Sequence[str] = ()) -> Encoded:
    """input_ids, and labels where there are some: each an id, or -100. Raises DataError.

    A mask says which tokens count, or which are padding, and so is no field to pass over without a word.
    """
    value = f"data file {name}"
    if TOKENS[0] not in row:
        rule = f"it has no field 'input_ids', only {', '.join(map(repr, row)) or 'none'}"
        raise DataError(value, rule, "Take data.kind=text or chat, or tokenise it")
    ids, labels = (_numbers(value, field, row.get(field)) for field in TOKENS)
    assert ids is not None
    unread = {key for key, content in row.items() if content is not None and key not in (*TOKENS, *ignored)}
    if "attention_mask" in unread and row["attention_mask"] == [1] * len(ids):  # which hides nothing
        unread.remove("attention_mask")
    refuse_keys(name, unread, (), ignored)
    if ids.size and (ids.min() < 0 or ids.max() >= _MOST):
        rule = f"token ids are 0 or more, and here is {ids[(ids < 0) | (ids >= _MOST)][0]}"
        raise DataError(value, rule, _MEND)
    if labels is None:
        return Encoded(ids.astype(np.uint32), ids.astype(np.int32))
    if len(labels) != len(ids):
        rule = f"it has {len(labels)} labels for {len(ids)} tokens"
        raise DataError(value, rule, "Give one for each, -100 where the loss is not to count it")
    wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels >= _MOST)]
    if wrong.size:
        rule = f"a label is a token id, or {IGNORED}, and here is {wrong[0]}"
        raise DataError(value, rule, _MEND)
    return Encoded(ids.astype(np.uint32), labels.astype(np.int32))


def _numbers(value: str, field: str, found: object) -> Any:
    if found is None and field != TOKENS[0]:
        return None
    whole = isinstance(found, np.ndarray) or (
        isinstance(found, list) and all(type(number) is int for number in found)
    )
    try:
        numbers = np.asarray(found if whole else "none", dtype=np.int64)
    except (ValueError, OverflowError):
        numbers = np.empty((0, 0), np.int64)
    if numbers.ndim != 1:
        rule = f"{field} is a list of whole numbers, and here is a {type(found).__name__} of something else"
        raise DataError(value, rule, _MEND)
    return numbers


# ---- Over a whole source


def encoded(encoder: Encoder, source: Source, workers: int | None) -> Iterator[tuple[int, Block]]:
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
        ahead: deque[tuple[int, Future[Block]]] = deque()
        try:
            for size, records in blocks:
                ahead.append((size, pool.submit(_encode, records)))
                if len(ahead) > 2 * workers:  # no more of the files than that lies in memory
                    yield _next(ahead)
            while ahead:
                yield _next(ahead)
        except BrokenProcessPool as error:
            rule = "a process that tokenises died, perhaps of too little memory"
            raise RunError(f"data.workers={workers}", rule, "Give fewer, or 0") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _next(ahead: deque[tuple[int, Future[Block]]]) -> tuple[int, Block]:
    size, block = ahead.popleft()
    return size, block.result()


def _blocks(records: Iterator[Record]) -> Iterator[tuple[int, list[Record]]]:
    while block := list(islice(records, 1)):
        size = _bytes(block[0])
        while len(block) < _AT_ONCE and size < _BLOCK_BYTES and (record := next(records, None)):
            block.append(record)
            size += _bytes(record)
        yield size, block


def _bytes(record: Record) -> int:
    """Exact where it matters: texts and lines may be long."""
    return len(record.content) if isinstance(record.content, bytes) else 1000


_worker: Encoder | None = None  # of a worker process: what it was started with


def _start_worker(encoder: Encoder) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = encoder


def _encode(records: list[Record]) -> Block:
    assert _worker is not None
    return _worker.encode(records)
