"""Where each op of a schedule stands, whether it belongs there or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from penstock.schedule.ops import Kind, Op, Schedule
from penstock.schedule.order import NOTHING, Numbers
from penstock.schedule.violation import Violation

_KINDS: tuple[Kind, ...] = get_args(Kind)


class Standing:
    """The rank and position of each op, by its number (order.py); rank NOTHING where no program holds it.

    programs: those of the ranks, in numbers
    violations: ops that do not exist, stand astray, or stand twice
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.numbers = schedule, Numbers(schedule)
        self.programs: list[list[int]] = []
        self.rank_at, self.position_at = [NOTHING] * self.numbers.count, [0] * self.numbers.count
        self.violations = list(self._read())

    def op(self, number: int) -> Op:
        """The op of this number that the schedule holds, or else should hold."""
        stage, microbatch, slot = self.numbers.places(number)
        if slot == 1:
            return Op(stage, "I" if self.is_split(stage, microbatch) else "B", microbatch)
        return Op(stage, "W" if slot else "F", microbatch)

    def is_split(self, stage: int, microbatch: int) -> bool:
        """Also where W stands and neither B nor I does."""
        if (stage, microbatch) in self.schedule.split:
            return True
        forward = stage * self.numbers.row + 3 * microbatch
        return self.rank_at[forward + 2] != NOTHING and self.rank_at[forward + 1] == NOTHING

    def copies_used(self, microbatch: int) -> list[int]:
        """The copies of the model that hold an op of this microbatch; the first where none does."""
        depth, row = self.schedule.placement.depth, self.numbers.row
        found = {
            stage // depth
            for stage in range(self.schedule.stages)
            for slot in range(3)
            if self.rank_at[stage * row + 3 * microbatch + slot] != NOTHING
        }
        return sorted(found) or [0]

    def _read(self) -> Iterator[Violation]:
        hosts = self.schedule.placement.rank_of
        astray: list[tuple[int, int, int]] = []
        for rank, program in enumerate(self.schedule.programs):
            row: list[int] = []
            for position, op in enumerate(program):
                if unknown := self._unknown(op):
                    yield Violation(unknown, rank, position, op)
                    continue
                number = self.numbers.of(op)
                if hosts[op.stage] != rank:
                    yield Violation(
                        f"stage {op.stage} is placed on rank {hosts[op.stage]}", rank, position, op
                    )
                    astray.append((number, rank, position))
                elif self.rank_at[number] != NOTHING:
                    yield Violation(self._again(op, number), rank, position, op)
                else:
                    self.rank_at[number], self.position_at[number] = rank, position
                row.append(number)
            self.programs.append(row if len(row) == len(program) else self._gaps(program))
        for number, rank, position in astray:
            if self.rank_at[number] == NOTHING:
                self.rank_at[number], self.position_at[number] = rank, position

    def _unknown(self, op: Op) -> str:
        """Why this is no op of the schedule; empty where it is one."""
        if not 0 <= op.stage < len(self.schedule.placement.rank_of):
            return f"there are only stages 0 to {self.schedule.stages - 1}"
        if op.kind not in _KINDS:
            return f"there are only the kinds {', '.join(_KINDS[:-1])} and {_KINDS[-1]}"
        if not 0 <= op.microbatch < self.schedule.microbatches:
            return f"there are only microbatches 0 to {self.schedule.microbatches - 1}"
        return ""

    def _again(self, op: Op, number: int) -> str:
        """What is wrong with an op whose place is taken."""
        position = self.position_at[number]
        other = self.schedule.programs[self.rank_at[number]][position]
        if other == op:
            return f"it stands already at position {position}"
        return f"a backward is whole or split, and {other} stands at position {position}"

    def _gaps(self, program: tuple[Op, ...]) -> list[int]:
        """As numbers, with NOTHING for what is no op, so that positions stay right."""
        return [NOTHING if self._unknown(op) else self.numbers.of(op) for op in program]
