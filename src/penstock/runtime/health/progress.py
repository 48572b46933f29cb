"""How far a rank is in its program, in the words that errors and summaries use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import Account
from penstock.schedule import Op

_SHOWN = 3  # ops named as the last ones done


class Progress(NamedTuple):
    """One rank in one step. Made by reading two attributes, so that another thread may at any time.

    program: what the rank does in a step; done: these ops so far; current: the one it is in. On CUDA an op
    counts as done when its kernels have been launched.
    """

    program: Sequence[Op]
    done: Sequence[Op]
    current: Op | None

    @property
    def last_ops(self) -> tuple[Op, ...]:
        return tuple(self.done[-_SHOWN:])

    @property
    def over(self) -> bool:
        return len(self.done) >= len(self.program)

    @property
    def phase(self) -> str:
        """Warm-up until the first backward, drain after the last forward, steady in between."""
        backwards = [place for place, op in enumerate(self.program) if op.kind != "F"]
        forwards = [place for place, op in enumerate(self.program) if op.kind == "F"]
        if self.over or not backwards:
            return ""
        if len(self.done) < backwards[0]:
            return "warm-up"
        return "drain" if not forwards or len(self.done) > forwards[-1] else "steady phase"


def account(progress: Progress | None, waiting: str = "") -> Account:
    """In words. progress: None before the first step; waiting: as in ``waiting for 2B0 from rank 2``"""
    if progress is None:
        return Account(f"{waiting or 'at work'}, before the first step")
    if progress.current is not None:
        doing = f"in {progress.current}"
    elif waiting:
        doing = waiting
    else:
        doing = "between steps" if progress.over else f"before {progress.program[len(progress.done)]}"
    last = " ".join(map(str, progress.last_ops))
    done = f"{len(progress.done)} of {len(progress.program)} ops done" + (
        f", the last {last}" if last else ""
    )
    return Account(", ".join(filter(None, (doing, progress.phase))), done)
