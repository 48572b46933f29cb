"""Whether all ranks of a mesh were started on the same thing, asked once, before anything else is exchanged.

Ranks that differ in schedule, microbatches, split or axes would soon disagree on which messages and groups
there are, and hang or train on nonsense. So each tells a few facts, as text by name, in collectives that are
the same whatever the facts are: first a digest of them all, and the facts themselves where they differ.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from penstock import errors
from penstock.batch.microbatches import checksum
from penstock.errors import BatchError, HandshakeError, InputError
from penstock.runtime.transport.groups import Processes
from penstock.schedule import Schedule

# ---- What some ranks have to say against what they were given, told to all of them.
#
# A rank that refuses alone leaves the others waiting for it. So where ranks are about to exchange
# something each tells first whether it refuses, and in what words where any does.


Words = Sequence[str] | None  # kind, value, rule and remedy; None where there is nothing to say


def in_words(refusal: InputError | None) -> Words:
    """As JSON can hold it."""
    if refusal is None:
        return None
    return [type(refusal).__name__, refusal.value, refusal.rule, refusal.remedy]


def first_error(told: Mapping[int, Words], who: str) -> InputError | None:
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


Facts = Mapping[str, str]  # by name


def shake_hands(processes: Processes, facts: Facts) -> None:
    """Raise HandshakeError on every rank where any two ranks' `facts` differ. Collective."""
    if len(set(processes.gather(digest(json.dumps(sorted(facts.items())))))) == 1:
        return
    told = differences(processes.gather(dict(facts)))
    raise HandshakeError(
        "ranks that were started on different things",
        "all ranks of a pipeline run the same" + "".join(f"\n  {line}" for line in told),
        "\nStart every rank with the same versions, config and arguments",
    )


def compare_values(
    processes: Processes, place: int, values: Mapping[str, Tensor], shared: Collection[str]
) -> None:
    """Raise HandshakeError on every process where two that begin with the same weights of a model have other
    values in them: e.g. a model that each made at random. Collective.

    place: which part of the model this process has; values: those of that part
    shared: the names that stand in several parts: a tied weight, or all where the model has two copies
    """
    own = {name: f"{int(checksum(value.detach())) % (1 << 64):016x}" for name, value in values.items()}
    in_parts = {name: own[name] for name in sorted(own.keys() & set(shared))}
    told = processes.gather([place, digest(json.dumps(sorted(own.items()))), in_parts])
    found: set[tuple[int | str, str]] = {(part, text) for part, text, _ in told}
    found |= {pair for *_, pairs in told for pair in pairs.items()}
    if len(found) == len({key for key, _ in found}):
        return
    everyone = processes.gather(own)
    lines: list[str] = []
    for name in sorted({name for of in everyone for name in of}):
        lines += differences([{name: of[name]} if name in of else None for of in everyone])
    more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise HandshakeError(
        "ranks that were given models with other values",
        "those that hold copies or shards of one weight begin with the same"
        + "".join(f"\n  sum of {line}" for line in lines[:5])
        + more,
        "\nSeed every rank alike before the model is made, or give its config or folder",
    )


def differences(told: Sequence[Facts | None]) -> list[str]:
    """A line for each fact on which the ranks differ: ``microbatches: 4 on rank 0, 1; 8 on rank 2``.

    told: by rank; None of one that is not asked
    """
    names = dict.fromkeys(name for facts in told for name in facts or ())
    lines = []
    for name in names:
        values = {rank: facts.get(name, "nothing") for rank, facts in enumerate(told) if facts is not None}
        by_value = {value: [r for r, own in values.items() if own == value] for value in values.values()}
        if len(by_value) > 1:
            groups = (f"{value} on rank {_ranks(ranks)}" for value, ranks in by_value.items())
            lines.append(f"{name}: {'; '.join(groups)}")
    return lines


def facts_of_schedule(schedule: Schedule) -> dict[str, str]:
    return {
        "schedule": schedule.name,
        "ranks": str(schedule.ranks),
        "stages": str(schedule.stages),
        "microbatches": str(schedule.microbatches),
        "placement of stages": " ".join(map(str, schedule.placement.rank_of)),
        "order of ops": digest(str(schedule)),
    }


def facts_of_process() -> dict[str, str]:
    """What runs here."""
    major, minor, _ = platform.python_version_tuple()
    return {"penstock": _own_version(), "torch": torch.__version__, "python": f"{major}.{minor}"}


def flat(name: str, value: Any) -> dict[str, str]:
    """A nested value, such as a model's config, as facts: ``{"config.rope.base": "10000"}``."""
    if not isinstance(value, Mapping):
        return {name: str(value)}
    return {key: text for inner, held in value.items() for key, text in flat(f"{name}.{inner}", held).items()}


def named(function: object) -> str:
    """A loss function, or an object of a class: where it was defined; its memory address would differ."""
    shown = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(shown, '__module__', '?')}.{getattr(shown, '__qualname__', '?')}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _own_version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # run from its source
        return "not installed"


def _ranks(ranks: Sequence[int]) -> str:
    """Runs of neighbours from three on as ``2-5``."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda placed: placed[1] - placed[0])
    ]
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return ", ".join(part for run in parts for part in run)
