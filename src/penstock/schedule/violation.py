"""What a schedule breaks."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.ops import Op


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
