"""Layouts: the layers of each stage, in Megatron's notation, as a string or as lists of names.

    E    the embedding                     |       ends a stage
    t    one decoder layer                 (..)*n  the group n times; groups may stand in groups
    m    one multi-token-prediction layer  x*n     the symbol n times
    L    the head and the loss             commas and white space are ignored

``Et*3|(tt|)*29,m|L`` has 32 stages: embedding and 3 layers, 29 stages of 2 layers, the prediction layer, the
head. Stages are numbered in the order of the data. ``E`` comes first and ``L`` last; either may be left out
and is then added there. A stage may be empty: ``t||t``.

As lists, one for each stage, of the same symbols or of Megatron's names for them:
``[["embedding", "decoder"], ["decoder", "decoder", "loss"]]`` is ``Et|ttL``. They stand in the order of the
data: with several stages a rank, stage 0 of every rank, then stage 1 of every rank, as Megatron has it.

    layout = item {item}
    item   = (symbol | "(" item {item} ")") ["*" number]
    symbol = "E" | "t" | "m" | "L" | "|"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

from penstock.errors import PartitionError

LIMIT = 100_000  # symbols of an expanded layout; more is a mistake and would fill the memory
DEEPEST = 100  # nested groups: the parser recurses for each
LONGEST_PERIOD = 64  # stages of the longest group that `str` looks for

_MEANING = {
    "E": "the embedding",
    "t": "a layer",
    "m": "a multi-token-prediction layer",
    "L": "the head",
    "|": "the end of a stage",
}
_NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_IGNORED = frozenset(", \t\r\n")
_DIGITS = frozenset("0123456789")


@dataclass(frozen=True)
class Layout:
    """The symbols of each stage: ``("Ettt", "tt", "L")``.

    `str` gives a short layout string, the same for equal layouts.
    """

    stages: tuple[str, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"E[t|]*[m|]*L", "|".join(self.stages)):
            raise PartitionError(
                f"stages {self.stages}",
                "the first begins with E, the last ends with L, and between stand layers t, then any m",
                'Write them like ("Ett", "ttL")',
            )

    @classmethod
    def of(cls, counts: Sequence[int], prediction_layers: int = 0) -> Layout:
        """The layout with `counts[s]` layers on stage s, the last ones of which are `m`."""
        kinds = iter("t" * (sum(counts) - prediction_layers) + "m" * prediction_layers)
        written = ("".join(next(kinds) for _ in range(count)) for count in counts)
        return cls(tuple(("E" + "|".join(written) + "L").split("|")))

    @property
    def layers(self) -> tuple[range, ...]:
        """The decoder layers of each stage."""
        ends = [0]
        for stage in self.stages:
            ends.append(ends[-1] + stage.count("t"))
        return tuple(range(start, end) for start, end in pairwise(ends))

    @property
    def prediction_layers(self) -> int:
        """How many multi-token-prediction layers (``m``) there are."""
        return sum(stage.count("m") for stage in self.stages)

    @property
    def counts(self) -> list[int]:
        """How many layers each stage has, of both kinds."""
        return [stage.count("t") + stage.count("m") for stage in self.stages]

    def __str__(self) -> str:
        # without E, so that the first stage can be part of a repetition
        first, *others = self.stages
        written = [_written(stage) for stage in (first.removeprefix("E"), *others)]
        return "E" + _folded([f"{stage}|" for stage in written[:-1]]) + written[-1]


def _written(stage: str) -> str:
    runs = ((symbol, len(list(run))) for symbol, run in groupby(stage))
    return "".join(f"{symbol}*{times}" if times > 2 else symbol * times for symbol, times in runs)


def _folded(tokens: Sequence[str]) -> str:
    """The tokens in order, with repetitions as groups if that is shorter."""
    written = []
    at = 0
    while at < len(tokens):
        period, times = _repetition(tokens, at)
        body = _folded(tokens[at : at + period]) if times > 1 else tokens[at]
        if times > 1:
            body = f"{body}*{times}" if len(body) == 1 else f"({body})*{times}"
        written.append(body)
        at += period * times
    return "".join(written)


def _repetition(tokens: Sequence[str], at: int) -> tuple[int, int]:
    """The period and number of the repetition from `at` that saves most; (1, 1) if none saves anything."""
    best, saved = (1, 1), 0
    for period in range(1, min(LONGEST_PERIOD, (len(tokens) - at) // 2) + 1):
        body = tokens[at : at + period]
        times = 1
        while tokens[at + times * period : at + (times + 1) * period] == body:
            times += 1
        length = sum(map(len, body))
        marks = len(f"*{times}") + (2 if length > 1 else 0)
        if times > 1 and length * (times - 1) - marks > saved:
            best, saved = (period, times), length * (times - 1) - marks
    return best


def parse_layout(text: str) -> Layout:
    """Read a layout string, in the notation at the top of this module.

    Raises PartitionError, which points at the character.
    """
    symbols = _Parser(text).symbols()
    _check_order(symbols, partial(_error, text))
    return _layout(symbols)


def read_layout(layout: str | Sequence[Sequence[str]]) -> Layout:
    """Read a layout string, or the lists that the top of this module shows.

    Raises PartitionError, which points at the character, or names stage and entry.
    """
    return parse_layout(layout) if isinstance(layout, str) else _from_lists(layout)


def _from_lists(stages: Sequence[Sequence[str]]) -> Layout:
    symbols, shown = list[_Symbol](), list[str]()  # and how an error shows each

    def wrong(at: int, rule: str, remedy: str) -> PartitionError:
        return PartitionError(f"layout, {shown[at]}", rule, remedy)

    if not stages:
        remedy = "Write [[embedding, decoder, loss]]"
        raise PartitionError("layout=[]", "it has a list for each stage", remedy)
    for index, stage in enumerate(stages):
        if isinstance(stage, str) or not isinstance(stage, Sequence):
            rule, remedy = "a stage is a list of names", f"Write [{stage}], or the whole layout as a string"
            raise PartitionError(f"layout, stage {index}: {stage!r}", rule, remedy)
        if index:
            shown.append(f"stage {index - 1}: {stages[index - 1]}")
            symbols.append(_Symbol("|", len(symbols)))
        for entry, name in enumerate(stage):
            shown.append(f"stage {index}, entry {entry}: {name!r}")
            symbols.append(_Symbol(_symbol(name, partial(wrong, len(symbols))), len(symbols)))
    _check_order(symbols, wrong)
    return _layout(symbols)


def _symbol(name: object, wrong: Callable[[str, str], PartitionError]) -> str:
    """The symbol of a name in a list. wrong: makes the error of a rule and a remedy"""
    known = ", ".join(_NAMES)
    if isinstance(name, Sequence) and not isinstance(name, str):
        rule = "a list within a stage: Megatron's layouts list the stages one after the other"
        raise wrong(rule, "Write stage 0 of every rank, then stage 1 of every rank, one list a stage")
    plain = name.strip() if isinstance(name, str) else ""
    symbol = plain if plain in _MEANING and plain != "|" else _NAMES.get(plain.lower())
    if symbol is None:
        near = get_close_matches(plain.lower(), _NAMES, n=1)
        remedy = f"Did you mean {near[0]}?" if near else "Take one of these"
        raise wrong(f"a stage holds {known}, or their letters E, t, m, L", remedy)
    return symbol


def _layout(symbols: Sequence[_Symbol]) -> Layout:
    written = "".join(symbol.name for symbol in symbols)
    written = written if written.startswith("E") else f"E{written}"
    return Layout(tuple((written if written.endswith("L") else f"{written}L").split("|")))


class _Symbol(NamedTuple):
    name: str
    at: int  # where in the text it stands


class _Parser:
    """One method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def symbols(self) -> list[_Symbol]:
        symbols = self._items(0)
        if self._next() == ")":
            remedy = "Take the parenthesis away, or write the one that opens it"
            raise self._wrong("no group is open here", remedy)
        return symbols

    def _items(self, depth: int) -> list[_Symbol]:
        """All items up to the end, or to the parenthesis that closes the group."""
        symbols: list[_Symbol] = []
        while (character := self._next()) and character != ")":
            start = self._at
            symbols += self._repeated(self._item(depth), start)
            if len(symbols) > LIMIT:
                raise self._too_many(start)
        if not symbols:
            raise self._wrong(f"expected {_SYMBOLS}", "Write what the stages hold, such as Ett|ttL")
        return symbols

    def _item(self, depth: int) -> list[_Symbol]:
        character, at = self._next(), self._at
        self._at += 1
        if character == "(":
            if depth == DEEPEST:
                raise self._wrong(f"more than {DEEPEST} groups in one another", "Write it with fewer", at)
            symbols = self._items(depth + 1)
            if self._next() != ")":
                raise self._wrong("this group is never closed", "Write the ) that closes it", at)
            self._at += 1
            return symbols
        if character in _MEANING:
            return [_Symbol(character, at)]
        if character == "*":
            rule = "nothing stands before this * to be repeated"
            raise self._wrong(rule, "Write it like t*3 or (tt|)*3", at)
        if character in _DIGITS:
            raise self._wrong("a number without a * before it", "Write it like t*3 or (tt|)*3", at)
        other = next((known for known in _MEANING if known.lower() == character.lower()), None)
        remedy = f"Did you mean {other}?" if other else "Take one of these"
        raise self._wrong(f"unknown symbol {character!r}, expected {_SYMBOLS}", remedy, at)

    def _repeated(self, symbols: list[_Symbol], start: int) -> list[_Symbol]:
        """`symbols`, repeated if ``*n`` follows."""
        if self._next() != "*":
            return symbols
        self._at += 1
        self._next()
        at = self._at
        while self._at < len(self._text) and self._text[self._at] in _DIGITS:
            self._at += 1
        digits = self._text[at : self._at].lstrip("0")
        if self._at == at:
            raise self._wrong("expected how many times, a number", "Write it like t*3", at)
        if not digits:
            rule = "repeated 0 times, and at least once is expected"
            raise self._wrong(rule, "Leave it out, or give 1 or more", at)
        if len(digits) > len(str(LIMIT)) or int(digits) * len(symbols) > LIMIT:
            raise self._too_many(at)
        if self._next() == "*":
            rule = "repeated already, and expected a symbol"
            raise self._wrong(rule, f"Put {self._text[start : self._at].strip()} in parentheses")
        return symbols * int(digits)

    def _next(self) -> str:
        """The next character that is not ignored; empty at the end."""
        while self._at < len(self._text) and self._text[self._at] in _IGNORED:
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _too_many(self, at: int) -> PartitionError:
        return self._wrong(f"the layout grows beyond {LIMIT:,} symbols", "Repeat it less often", at)

    def _wrong(self, rule: str, remedy: str, at: int | None = None) -> PartitionError:
        return _error(self._text, self._at if at is None else at, rule, remedy)


_SYMBOLS = "E, t, m, L, | or ("


def _check_order(symbols: Sequence[_Symbol], error: Callable[[int, str, str], PartitionError]) -> None:
    """E first, then layers, then multi-token-prediction layers, L last. error: of a place, rule and remedy"""
    seen = ""
    for index, (name, at) in enumerate(symbols):
        if name in seen and name in "EL":
            raise error(at, f"a second {name}", f"A model has {_MEANING[name]} once: take one away")
        if name == "E" and index:
            raise error(at, "expected E, the embedding, before all else", "Move it to the front")
        if seen.endswith("L"):
            rule = f"{_MEANING[name]} after L, the head, and nothing is expected there"
            raise error(at, rule, "Move L to the end")
        if name == "t" and "m" in seen:
            rule = "a layer after m, and the multi-token-prediction layers are expected after all others"
            raise error(at, rule, "Move m behind the last t")
        if name not in seen or name == "L":
            seen += name


def _error(text: str, at: int, rule: str, remedy: str) -> PartitionError:
    """An error that shows the text with a caret below the character at index `at`."""
    if at == len(text):
        rule = f"{rule}, and here the layout ends"
    start, end = (max(0, at - 45), at + 45) if len(text) > 90 else (0, len(text))
    shown = "".join(character if character.isprintable() else " " for character in text[start:end])
    before, after = ("..." if start else ""), ("..." if end < len(text) else "")
    caret = " " * (len(before) + at - start) + "^"
    return PartitionError(
        f"layout, character {at + 1}", rule, f"{remedy}:\n  {before}{shown}{after}\n  {caret}"
    )
