"""What a rank does, one op at a time, and the schedule that orders it.

An op is written as in PyTorch's schedule CSV: stage, kind, microbatch. ``2F0`` is stage 2, forward,
microbatch 0. The same text stands in logs, pictures, errors and profiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.errors import ConfigError
from penstock.schedule.placement import Placement

Kind = Literal["F", "B"]  # forward, whole backward

_TEXT = re.compile(r"\s*(\d+)([FB])(\d+)\s*")


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
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"op {text!r}",
                "an op is a stage, one of the kinds F and B, and a microbatch",
                "Write it like 2F0: stage 2, forward, microbatch 0",
            )
        stage, kind, microbatch = found.groups()
        return cls(int(stage), "F" if kind == "F" else "B", int(microbatch))

    def predecessors(self, stages: int) -> tuple[Op, ...]:
        """The ops whose results this one needs, in a pipeline of `stages` stages."""
        if self.kind == "F":
            return () if self.stage == 0 else (Op(self.stage - 1, "F", self.microbatch),)
        own_forward = Op(self.stage, "F", self.microbatch)
        if self.stage == stages - 1:
            return (own_forward,)
        return (own_forward, Op(self.stage + 1, "B", self.microbatch))


@dataclass(frozen=True)
class Schedule:
    """A placement and a program for every rank: compute ops only, frozen and inert.

    programs[r] is the ordered ops of rank r. A schedule without any backward is for inference.
    """

    name: str
    placement: Placement
    microbatches: int
    programs: tuple[tuple[Op, ...], ...]

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def trains(self) -> bool:
        """Whether the schedule holds backwards."""
        return any(op.kind == "B" for program in self.programs for op in program)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)
