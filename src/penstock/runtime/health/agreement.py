"""Agreement: all ranks run the same thing, start with the same values, and raise the same errors.

Ranks that differ in schedule, microbatches, split or axes would soon disagree on which messages and groups
there are, and hang or train on nonsense. So each rank gathers a few facts, as text by name, in collectives
that are the same whatever the facts are: first a digest of all facts, and the facts themselves only if they
differ.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from penstock import errors
from penstock.batch.microbatches import checksums
from penstock.errors import BatchError, HandshakeError, InputError
from penstock.runtime.transport.groups import Processes
from penstock.schedule import Schedule

HandshakeFacts = Mapping[str, str]  # by name
Words = Sequence[str] | None  # an error's type, value, rule and remedy; None: no error

# ---- The same errors: a rank that raises alone would leave the others waiting. So before ranks communicate,
# they exchange their errors, as text.


def in_words(error: InputError | None) -> Words:
    """The error in a form that JSON can hold; of a type that takes more than words, the nearest base."""
    if error is None:
        return None
    kind = next(base for base in type(error).__mro__ if "__init__" not in vars(base))
    return [kind.__name__, error.value, error.rule, error.remedy]


def first_error(by_rank: Mapping[int, Words], who: str) -> InputError | None:
    """The first error, with the ranks that have the same one unless all do; None where no rank has one.

    who: what stands before their numbers, such as "given to process"
    """
    error_words = {rank: words for rank, words in by_rank.items() if words is not None}
    if not error_words:
        return None
    first = next(iter(error_words.values()))
    ranks = [str(rank) for rank, words in error_words.items() if words == first]
    kind, value, rule, remedy = first
    where = "" if len(ranks) == len(by_rank) else f", {who} {', '.join(ranks)}"
    error: type[InputError] = getattr(errors, kind, BatchError)
    return error(f"{value}{where}", rule, remedy)


@contextmanager
def shared_errors(processes: Processes) -> Iterator[None]:
    """Raise the InputError of one process's block on all of them. Collective."""
    own: InputError | None = None
    try:
        yield
    except InputError as error:
        if processes.count == 1:
            raise
        own = error
    first = first_error(dict(enumerate(processes.gather(in_words(own)))), "on process")
    if first is not None:
        raise first from own


# ---- The same facts


def shake_hands(processes: Processes, facts: HandshakeFacts) -> None:
    """Raise HandshakeError on every rank where any two ranks' `facts` differ. Collective."""
    if len(set(processes.gather(digest(json.dumps(sorted(facts.items())))))) == 1:
        return
    lines = differences(processes.gather(dict(facts)))
    raise HandshakeError(
        "ranks that were started on different things",
        "all ranks of a pipeline run the same" + "".join(f"\n  {line}" for line in lines),
        "\nStart every rank with the same versions, config and arguments",
    )


def differences(by_rank: Sequence[HandshakeFacts | None]) -> list[str]:
    """A line for each fact on which the ranks differ: ``microbatches: 4 on rank 0, 1; 8 on rank 2``.

    by_rank: None for a rank that does not count
    """
    names = dict.fromkeys(name for facts in by_rank for name in facts or ())
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, facts in enumerate(by_rank):
            if facts is not None:
                ranks_of.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            groups = (f"{value} on rank {_ranks(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"{name}: {'; '.join(groups)}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    """Runs of three or more neighbours as ``2-5``."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda placed: placed[1] - placed[0])
    ]
    shown = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return ", ".join(each for run in shown for each in run)


def facts_of_schedule(schedule: Schedule) -> dict[str, str]:
    return {
        "schedule": schedule.name,
        "ranks": str(schedule.ranks),
        "stages": str(schedule.stages),
        "microbatches": str(schedule.microbatches),
        "placement of stages": " ".join(map(str, schedule.placement.rank_of)),
        "order of ops": digest(str(schedule)),
    }


@cache
def version_of_penstock() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # run from its source
        return "not installed"


def facts_of_process() -> dict[str, str]:
    """The versions that run here."""
    major, minor, _ = platform.python_version_tuple()
    return {"penstock": version_of_penstock(), "torch": torch.__version__, "python": f"{major}.{minor}"}


def flat(name: str, value: Any) -> dict[str, str]:
    """A nested value, such as a model's config, as facts: ``{"config.rope.base": "10000"}``."""
    if not isinstance(value, Mapping):
        return {name: str(value)}
    return {key: text for inner, held in value.items() for key, text in flat(f"{name}.{inner}", held).items()}


def named(function: object) -> str:
    """Where a loss function, or the class of an object, was defined; an address would differ by rank."""
    shown = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(shown, '__module__', '?')}.{getattr(shown, '__qualname__', '?')}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- The same values


def compare_values(
    processes: Processes, part: int, values: Mapping[str, Tensor], shared: Collection[str]
) -> None:
    """Raise HandshakeError on every process where copies or shards of one weight have different values.

    For example, each process may have made its model at random. Collective.

    Args:
        part: which part of the model this process has.
        values: the weights of that part, by name.
        shared: the names that occur in several parts: a tied weight, or all where there are two copies of
            the model.
    """
    sums = {name: f"{checksums([value])[0]:08x}" for name, value in values.items()}
    in_parts = {name: sums[name] for name in sorted(sums.keys() & set(shared))}
    gathered = processes.gather([part, digest(json.dumps(sorted(sums.items()))), in_parts])
    distinct_sums: set[tuple[int | str, str]] = {(part, text) for part, text, _ in gathered}
    distinct_sums |= {pair for *_, pairs in gathered for pair in pairs.items()}
    if len(distinct_sums) == len({key for key, _ in distinct_sums}):
        return
    everyone = processes.gather(sums)
    lines: list[str] = []
    for name in sorted({name for each in everyone for name in each}):
        lines += differences([{name: each[name]} if name in each else None for each in everyone])
    more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise HandshakeError(
        "ranks that were given models with other values",
        "copies and shards of one weight begin with the same values"
        + "".join(f"\n  sum of {line}" for line in lines[:5])
        + more,
        "\nGive every rank the same seed before the model is made, or give its config or folder",
    )
