"""Facts that must be the same on all ranks, as text by name, and the differences between ranks.

Ranks that differ in schedule, microbatches, split or axes would disagree on messages and groups, and hang or
train on nonsense. So they compare these facts first (penstock.runtime.ranks).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

import torch

from penstock.schedule import Schedule

Facts = Mapping[str, str]  # by name


def number_of(facts: Facts) -> int:
    """A hash of the facts that fits into a float64."""
    return int(digest(json.dumps(sorted(facts.items()))), 16)


def differences(by_rank: Sequence[Facts | None]) -> list[str]:
    """A line for each fact on which the ranks differ: ``microbatches: 4 on rank 0, 1; 8 on rank 2``.

    by_rank: None for a rank to leave out
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
    return ", ".join(text for run in shown for text in run)


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
    except PackageNotFoundError:  # run from source
        return "not installed"


def facts_of_process() -> dict[str, str]:
    """The versions of Python, torch and penstock in this process."""
    major, minor, _ = platform.python_version_tuple()
    return {"penstock": version_of_penstock(), "torch": torch.__version__, "python": f"{major}.{minor}"}


def flat(name: str, value: Any) -> dict[str, str]:
    """A nested value, such as a model's config, as facts: ``{"config.rope.base": "10000"}``."""
    if not isinstance(value, Mapping):
        return {name: str(value)}
    return {key: text for inner, part in value.items() for key, text in flat(f"{name}.{inner}", part).items()}


def named(function: object) -> str:
    """Where a loss function, or the class of an object, was defined; an address would differ by rank."""
    shown = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(shown, '__module__', '?')}.{getattr(shown, '__qualname__', '?')}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
