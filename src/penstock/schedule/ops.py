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
from penstock.schedule.placement import Placement

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
