"""How much searching `seconds` are: counted work, so that the same call does the same on any machine."""

from __future__ import annotations

import time

_PER_SECOND = 4_000_000  # of the steps below, on one core of 2024
OP_TIMED = 1  # one op run once
OP_LISTED = 9  # one op chosen by list scheduling
OP_MODELLED = 300  # one op told to CP-SAT
CP_SAT_SECOND = 15_000_000  # one of CP-SAT's deterministic seconds
_PATIENCE = 4.0  # times as long as asked for, the search stops whatever it has done


class Budget:
    """`spent` of `total` steps. `cut_short`: the clock, not the count, ended it."""

    def __init__(self, seconds: float) -> None:
        self.total = seconds * _PER_SECOND
        self.spent = 0.0
        self.cut_short = False
        self._stop = time.monotonic() + _PATIENCE * seconds + 5.0

    def spend(self, steps: float) -> None:
        self.spent += steps

    def left(self, share: float = 1.0) -> float:
        """Steps until `share` of all are spent."""
        if self.wall_left <= 0:
            self.cut_short = True
        return 0.0 if self.cut_short else max(0.0, share * self.total - self.spent)

    @property
    def wall_left(self) -> float:
        """Seconds on the clock."""
        return self._stop - time.monotonic()
