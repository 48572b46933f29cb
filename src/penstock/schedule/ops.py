"""What a rank does, one op at a time, and the schedule that orders it.

An op is written as in PyTorch's schedule CSV: stage, kind, microbatch. ``2F0`` is stage 2, forward,
microbatch 0. The same text stands in logs, pictures, errors and profiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from penstock.errors import ConfigError

# forward, whole backward, its two halves: input gradient, weight gradient
Kind = Literal["F", "B", "I", "W"]

_OP = re.compile(r"\s*(\d{1,9})([FBIW])(\d{1,9})\s*", re.ASCII)
_PAIR = re.compile(r"\s*\(([^;()]*);([^;()]*)\)\s*OVERLAP_F_B\s*")


class Op(NamedTuple):
    """One computation: `kind` of microbatch `microbatch` on stage `stage`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """The op that `text` stands for. Raises ConfigError where it stands for none."""
        found = _OP.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"op {text!r}",
                "an op is a stage, one of the kinds F, B, I and W, and a microbatch",
                "Write it like 2F0: stage 2, forward, microbatch 0",
            )
        stage, kind, microbatch = found.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


class Pair(NamedTuple):
    """A forward and, next in the same program, a backward that is to overlap with it."""

    forward: Op
    backward: Op

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @classmethod
    def parse(cls, text: str) -> Pair | None:
        """The pair that `text` stands for, None where it is not written like one. Raises ConfigError."""
        found = _PAIR.fullmatch(text)
        return None if found is None else cls(Op.parse(found[1]), Op.parse(found[2]))


@dataclass(frozen=True)
class Schedule:
    """A placement and a program for every rank: compute ops only, frozen and inert.

    programs[r] is the ordered ops of rank r. A schedule without any backward is for inference.
    overlaps: which neighbours in a program are to run side by side
    """

    name: str
    placement: Placement
    microbatches: int
    programs: tuple[tuple[Op, ...], ...]
    overlaps: frozenset[Pair] = field(default=frozenset())

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @cached_property
    def trains(self) -> bool:
        """Whether the schedule holds backwards."""
        return any(op.kind in ("B", "I", "W") for program in self.programs for op in program)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) whose backward is split in I and W."""
        return frozenset((op.stage, op.microbatch) for program in self.programs for op in program
                         if op.kind == "I")  # fmt: skip

    def gradient(self, stage: int, microbatch: int) -> Op:
        """The op that computes the gradient of a stage's input: B, or I where the backward is split."""
        return Op(stage, "I" if (stage, microbatch) in self.split else "B", microbatch)

    def predecessors(self, op: Op) -> tuple[Op, ...]:
        """The ops whose results `op` needs."""
        stage, kind, microbatch = op
        if kind == "F":
            return () if self.placement.is_first(stage) else (Op(stage - 1, "F", microbatch),)
        if kind == "W":
            return (Op(stage, "I", microbatch),)
        own_forward = Op(stage, "F", microbatch)
        if self.placement.is_last(stage):
            return (own_forward,)
        return (own_forward, self.gradient(stage + 1, microbatch))

    def entries(self, rank: int) -> Iterator[Op | Pair]:
        """The program of `rank`, overlapped neighbours together."""
        program = self.programs[rank]
        at = 0
        while at < len(program):
            pair = Pair(*program[at : at + 2]) if self.overlaps and at + 1 < len(program) else None
            if pair is not None and pair in self.overlaps:
                yield pair
                at += 2
            else:
                yield program[at]
                at += 1

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, self.entries(rank))) for rank in range(len(self.programs)))


# ---- Which rank hosts which stage.


@dataclass(frozen=True)
class Placement:
    """The map from stage to rank: `rank_of[s]` hosts stage s. Every rank hosts at least one stage.

    replicas: how many copies of the model run side by side. With two, stage s and stage s + depth hold the
        same slice of the model, and each microbatch goes through one of the copies.
    """

    rank_of: tuple[int, ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.ranks <= self.stages or set(self.rank_of) != set(range(self.ranks)):
            raise ConfigError(
                f"placement {list(self.rank_of)}",
                "each rank from 0 to the highest one hosts at least one stage",
                "Number the ranks from 0 without a gap",
            )
        if self.replicas < 1 or self.stages % self.replicas:
            raise ConfigError(
                f"placement of {self.stages} stages with replicas={self.replicas}",
                "every copy of the model has the same number of stages",
                "Give a number of replicas that divides the stages",
            )

    @cached_property
    def ranks(self) -> int:
        return max(self.rank_of, default=-1) + 1

    @property
    def stages(self) -> int:
        """All stages, each copy's counted."""
        return len(self.rank_of)

    @cached_property
    def depth(self) -> int:
        """The stages that one microbatch goes through."""
        return self.stages // self.replicas

    def is_first(self, stage: int) -> bool:
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        return stage % self.depth == self.depth - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` hosts, in the data's order."""
        return tuple(stage for stage, host in enumerate(self.rank_of) if host == rank)


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod `ranks`: the data runs round the ranks `stages_per_rank` times."""
    return Placement(tuple(stage % ranks for stage in range(ranks * stages_per_rank)))


def wave(ranks: int, stages_per_rank: int = 2) -> Placement:
    """Out and back: the data turns round at both ends. With two stages a rank it draws a V."""
    out = tuple(range(ranks))
    return Placement(tuple(r for lap in range(stages_per_rank) for r in (out[::-1] if lap % 2 else out)))


def both_ways(ranks: int) -> Placement:
    """Two copies of the model: one from the first rank to the last, the other back."""
    return Placement((*range(ranks), *reversed(range(ranks))), replicas=2)


# ---- What a schedule breaks.


@dataclass(frozen=True)
class Violation:
    """One broken rule. `position` counts ops in the rank's program from 0; what does not apply is None."""

    rule: str
    rank: int | None = None
    position: int | None = None
    op: Op | None = None
    missing: Op | None = None
    cycle: tuple[Op, ...] = ()

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", position {self.position}"
        what = "" if self.op is None else f"{self.op}"
        return ": ".join(part for part in (where, what, self.rule) if part)


# ---- The numbers of ranks and microbatches that a schedule may have.


_MOST_FORWARDS = 10_000_000  # some gigabytes; 64 ranks with 2 stages each and 1024 microbatches have 131,072


def check_size(ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
    """Raise ConfigError for numbers that no schedule can have, or one that would fill the memory."""
    for name, number in (("ranks", ranks), ("microbatches", microbatches)):
        if type(number) is not int or number < 1:
            raise no_count(name, number)
    if ranks * stages_per_rank * microbatches > _MOST_FORWARDS:
        raise ConfigError(
            f"{ranks} ranks with {stages_per_rank} stages each and {microbatches} microbatches",
            f"a schedule of more than {_MOST_FORWARDS:,} forwards would fill the memory",
            "Give smaller numbers",
        )


def no_count(name: str, number: object) -> ConfigError:
    rule = "a schedule has a whole number of them, and at least one"
    return ConfigError(f"{name}={number!r}", rule, "Give 1 or more")


def check_numbers(schedule: Schedule, ranks: int | None, microbatches: int | None) -> Schedule:
    """`schedule`, which brings numbers of its own. Raises ConfigError where others are given."""
    own_numbers = (
        ("ranks", ranks, schedule.ranks),
        ("microbatches", microbatches, schedule.microbatches),
    )
    for name, given, own in own_numbers:
        if given not in (None, own):
            raise ConfigError(
                f"{name}={given}", f"the schedule given has {own}", f"Leave it out, or give {name}={own}"
            )
    return schedule
