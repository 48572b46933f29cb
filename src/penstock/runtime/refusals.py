"""What some ranks have to say against what they were given, told to all of them.

A rank that refuses alone leaves the others waiting for it. So where ranks are about to exchange something
each tells first whether it refuses, and in what words where any does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock import errors
from penstock.errors import BatchError, InputError

Words = Sequence[str] | None  # kind, value, rule and remedy; None where there is nothing to say


def in_words(refusal: InputError | None) -> Words:
    """As JSON can hold it."""
    if refusal is None:
        return None
    return [type(refusal).__name__, refusal.value, refusal.rule, refusal.remedy]


def first_refusal(told: Mapping[int, Words], who: str) -> InputError | None:
    """The first of those told, and to which ranks that was given, where it was not all. None: nobody refuses.

    who: what the numbers are of, "rank" or "process"
    """
    refusals = {rank: words for rank, words in told.items() if words is not None}
    if not refusals:
        return None
    first = next(iter(refusals.values()))
    by = [str(rank) for rank, words in refusals.items() if words == first]
    kind, value, rule, remedy = first
    where = "" if len(by) == len(told) else f", given to {who} {', '.join(by)}"
    made: type[InputError] = getattr(errors, kind, BatchError)
    return made(f"{value}{where}", rule, remedy)
