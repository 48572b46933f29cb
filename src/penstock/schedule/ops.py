"""The vocabulary of schedules: ops, placements, programs, schedules, and violations of their rules.

An op is written as in PyTorch's schedule CSV: stage, kind, microbatch. ``2F0`` is stage 2, forward,
microbatch 0. Logs, pictures, errors and profiles all use this text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

from penstock.errors import ConfigError

# forward; whole backward; its two halves: input gradient and weight gradient
Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Which op needs which. Of one microbatch on one stage, an op needs the one in the slot before. From another
# stage, a forward takes the activations of the stage before, a backward the gradient of the stage behind.
SLOT: dict[Kind, int] = {"F": 0, "B": 1, "I": 1, "W": 2}
SOURCE: dict[Kind, int] = {"F": -1, "B": 1, "I": 1, "W": 0}  # 0: from no other stage

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
        """Read an op from its text. Raises ConfigError for text that is no op."""
        match = _OP.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"op {text!r}",
                "an op is a stage, one of the kinds F, B, I and W, and a microbatch",
                "Write it like 2F0: stage 2, forward, microbatch 0",
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


class Pair(NamedTuple):
    """A forward and the backward that follows it in the same program, meant to overlap."""

    forward: Op
    backward: Op

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @classmethod
    def parse(cls, text: str) -> Pair | None:
        """Read a pair from its text; None if the text has another form. Raises ConfigError for a bad op."""
        match = _PAIR.fullmatch(text)
        return None if match is None else cls(Op.parse(match[1]), Op.parse(match[2]))


@dataclass(frozen=True)
class Schedule:
    """A placement and one program per rank: compute ops only, frozen and inert.

    programs[r]: the ops of rank r in order. A schedule without backwards is for inference.
    overlaps: neighbours in a program that should run at the same time
    """

    name: str
    placement: Placement
    microbatches: int
    programs: tuple[tuple[Op, ...], ...]
    overlaps: frozenset[Pair] = field(default=frozenset())

    def __getstate__(self) -> dict[str, object]:
        """Leave out cached properties, which another process computes again if it needs them."""
        return {stored.name: getattr(self, stored.name) for stored in fields(self)}

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @cached_property
    def trains(self) -> bool:
        """Whether any program has a backward."""
        return any(op.kind in ("B", "I", "W") for program in self.programs for op in program)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose backward is split into I and W."""
        ops = (op for program in self.programs for op in program)
        return frozenset((op.stage, op.microbatch) for op in ops if op.kind == "I")

    def gradient(self, stage: int, microbatch: int) -> Op:
        """The op that computes the gradient of the stage's input: I if the backward is split, else B."""
        return Op(stage, "I" if (stage, microbatch) in self.split else "B", microbatch)

    def source(self, op: Op) -> Op | None:
        """The op of a neighbouring stage whose result `op` takes."""
        return self._neighbour(op, SOURCE[op.kind])

    def taker(self, op: Op) -> Op | None:
        """The op of a neighbouring stage that takes the result of `op`."""
        return self._neighbour(op, -SOURCE[op.kind])

    def _neighbour(self, op: Op, step: int) -> Op | None:
        stage, depth = op.stage + step, self.placement.depth
        if not step or stage // depth != op.stage // depth:  # beyond either end of its copy of the model
            return None
        return Op(stage, "F", op.microbatch) if op.kind == "F" else self.gradient(stage, op.microbatch)

    def predecessors(self, op: Op) -> tuple[Op, ...]:
        """The ops whose results `op` uses: of its own stage first, then of a neighbouring stage."""
        stage, kind, microbatch = op
        own = () if kind == "F" else (Op(stage, "I" if kind == "W" else "F", microbatch),)
        source = self.source(op)
        return own if source is None else (*own, source)

    def entries(self, rank: int) -> Iterator[Op | Pair]:
        """The program of `rank`, with each overlapped pair as one entry."""
        program = self.programs[rank]
        is_second = False
        for op, following in zip_longest(program, program[1:]):
            if is_second:
                is_second = False
            elif self.overlaps and (op, following) in self.overlaps:
                is_second = True
                yield Pair(op, following)
            else:
                yield op

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, self.entries(rank))) for rank in range(len(self.programs)))


@dataclass(frozen=True)
class Placement:
    """The map from stage to rank: `rank_of[s]` hosts stage s. Each rank hosts at least one stage.

    replicas: number of copies of the model in the pipeline. With two, stages s and s + depth hold the same
        slice of the model, and each microbatch goes through one of the copies.
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
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each stage of the model the ranks that host it, one for each copy."""
        return tuple(self.rank_of[stage :: self.depth] for stage in range(self.depth))

    @cached_property
    def ranks(self) -> int:
        return max(self.rank_of, default=-1) + 1

    @property
    def stages(self) -> int:
        """The number of stages, over all copies of the model."""
        return len(self.rank_of)

    @cached_property
    def depth(self) -> int:
        """The number of stages of one copy: those that a microbatch goes through."""
        return self.stages // self.replicas

    def is_first(self, stage: int) -> bool:
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        return stage % self.depth == self.depth - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in the order of the data."""
        return tuple(stage for stage, host in enumerate(self.rank_of) if host == rank)


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod `ranks`: the data visits every rank `stages_per_rank` times, in order."""
    return Placement(tuple(stage % ranks for stage in range(ranks * stages_per_rank)))


def wave(ranks: int, stages_per_rank: int = 2) -> Placement:
    """Out and back: the data turns at both ends. With two stages per rank this is a V."""
    out = tuple(range(ranks))
    laps = (out[::-1] if lap % 2 else out for lap in range(stages_per_rank))
    return Placement(tuple(rank for lap in laps for rank in lap))


def both_ways(ranks: int) -> Placement:
    """Two copies of the model: one runs from the first rank to the last, the other from last to first."""
    return Placement((*range(ranks), *reversed(range(ranks))), replicas=2)


@dataclass(frozen=True)
class Violation:
    """One broken rule. `position` counts the ops of the rank's program from 0; None: does not apply.

    missing: the predecessor that is missing or comes too late; cycle: the ops of a deadlock
    """

    rule: str
    rank: int | None = None
    position: int | None = None
    op: Op | None = None
    missing: Op | None = None
    cycle: tuple[Op, ...] = ()

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", position {self.position}"
        op = "" if self.op is None else str(self.op)
        return ": ".join(filter(None, (where, op, self.rule)))


MAX_STAGES = 4096  # no model has more layers to put into them; the longest pipelines have some hundred
_MAX_FORWARDS = 10_000_000  # some gigabytes; 64 ranks with 2 stages each and 1024 microbatches have 131,072


def check_size(ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
    """Raise ConfigError for a size that no schedule has, or whose schedule would fill the memory."""
    for name, count in (("ranks", ranks), ("microbatches", microbatches)):
        if type(count) is not int or count < 1:
            raise not_a_count(name, count)
    if ranks * stages_per_rank > MAX_STAGES:
        raise ConfigError(
            f"{ranks} ranks with {stages_per_rank} stages each",
            f"a pipeline has at most {MAX_STAGES:,} stages",
            "Give smaller numbers",
        )
    if ranks * stages_per_rank * microbatches > _MAX_FORWARDS:
        raise ConfigError(
            f"{ranks} ranks with {stages_per_rank} stages each and {microbatches} microbatches",
            f"a schedule of more than {_MAX_FORWARDS:,} forwards would fill the memory",
            "Give smaller numbers",
        )


def not_a_count(name: str, value: object) -> ConfigError:
    """The error for a value that is not a whole number of at least 1."""
    rule = "a schedule has a whole number of them, and at least one"
    return ConfigError(f"{name}={value!r}", rule, "Give 1 or more")


def check_numbers(schedule: Schedule, ranks: int | None, microbatches: int | None) -> Schedule:
    """Return `schedule`. Raises ConfigError if `ranks` or `microbatches` are set and differ from its own."""
    sizes = (("ranks", ranks, schedule.ranks), ("microbatches", microbatches, schedule.microbatches))
    for name, asked, actual in sizes:
        if asked not in (None, actual):
            remedy = f"Leave it out, or give {name}={actual}"
            raise ConfigError(f"{name}={asked}", f"the schedule given has {actual}", remedy)
    return schedule
