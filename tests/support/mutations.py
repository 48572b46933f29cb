"""Mutations of what people hand in, for the fuzzers of the readers.

A case is a number: it seeds the random choices, so that a failure names the case that shows it again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

# cases of each fuzzer: the first in `make test`, all in `make sweep`
CASES = [
    pytest.param(range(100), id="first"),
    pytest.param(range(100, 2000), id="more", marks=[pytest.mark.sweep, pytest.mark.timeout(1800)]),
]

# values that a person or another program may leave in a JSON file
ODD_VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 1e308, float("inf"), float("nan"), 0.5, "", "0",
    "null", "none", " ", "a" * 5000, "\ud800", "\x00", "../../etc/passwd", "/etc/passwd", "{{ 1 }}", [], {},
    [[]], [None], {"": None}, [0] * 300, {"a": {"a": {"a": {}}}},
)  # fmt: skip


@contextmanager
def seeded(number: int) -> Iterator[random.Random]:
    """The random choices of one case; a failure within it is noted with its number."""
    try:
        yield random.Random(number)
    except BaseException as error:
        error.add_note(f"in case {number}")
        raise


def mutated_bytes(choices: random.Random, content: bytes) -> bytes:
    """`content` with one damage: bits flipped, cut short, bytes put in, taken out, doubled or zeroed."""
    if not content:
        return choices.randbytes(choices.randint(1, 64))
    changed = bytearray(content)
    at = choices.randrange(len(content))
    to = min(len(content), at + choices.choice((1, 1, 4, 8, 64)))
    match choices.randrange(6):
        case 0:
            for _ in range(choices.choice((1, 2, 8))):
                changed[choices.randrange(len(changed))] ^= 1 << choices.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            changed[at:at] = choices.randbytes(to - at)
        case 3:
            del changed[at:to]
        case 4:
            changed[at:at] = changed[at:to]
        case _:
            changed[at:to] = bytes(to - at)
    return bytes(changed)


def mutated_json(choices: random.Random, value: Any) -> Any:
    """A copy of a JSON value with one edit somewhere: odd, removed, renamed, doubled or swapped."""
    value = copy.deepcopy(value)
    parents = [inner for inner in _walk(value) if isinstance(inner, dict | list) and inner]
    if not parents or choices.random() < 0.05:
        return choices.choice(ODD_VALUES)
    parent = choices.choice(parents)
    keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
    key, other = choices.choice(keys), choices.choice(keys)
    match choices.randrange(5):
        case 0 | 1:
            parent[key] = choices.choice(ODD_VALUES)
        case 2:
            del parent[key]
        case 3:
            parent[key], parent[other] = parent[other], parent[key]
        case _:
            if isinstance(parent, dict):
                parent[f"{key}{choices.choice(('s', '_', ' ', '.weight'))}"] = parent.pop(key)
            else:
                parent.insert(key, copy.deepcopy(parent[other]))
    return value


def _walk(value: Any) -> Iterator[Any]:
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inner:
        yield from _walk(part)
