"""Steps whose loss or gradients are not finite: they end the run, or are left out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.errors import RunError

IN_A_ROW = 10  # steps left out, after which weights and not batches are to blame
_CALMER = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or use model.dtype=float32"


@dataclass
class Skips:
    """How many steps were left out: in all, since the run began, and of the last ones.

    What is judged are the loss and the norm of the whole mesh, the same numbers on every rank. So all ranks
    judge alike, and need not tell each other.
    """

    mode: Literal["stop", "skip"]
    count: int = 0
    in_a_row: int = 0

    def leaves_out(self, step: int, **values: float) -> bool:
        """Whether `step`, whose loss and norm are these, must not reach the weights.

        Raises RunError in its place with "stop", and where it is the last of too many.
        """
        if not_finite(**values) is None:
            self.in_a_row = 0
            return False
        if self.mode == "stop":
            check_finite(step, **values)
        self.count += 1
        self.in_a_row += 1
        if self.in_a_row == IN_A_ROW:
            raise RunError(
                f"steps {step - IN_A_ROW + 1} to {step}: {not_finite(**values)} at the last",
                f"{IN_A_ROW} steps in a row were left out, which no batch explains",
                f"Go on from the last checkpoint with --resume. {_CALMER}",
            )
        return True


def not_finite(**values: float) -> str | None:
    """All of them in words, where one is not finite."""
    if all(math.isfinite(value) for value in values.values()):
        return None
    return ", ".join(f"{name}={value}" for name, value in values.items())


def check_finite(step: int, **values: float) -> None:
    """Before the optimizer spoils the weights with it. Raises RunError."""
    if (found := not_finite(**values)) is not None:
        raise RunError(
            f"step {step}: {found}",
            "these are finite numbers while a model trains",
            f"{_CALMER}. Single steps may be left out with train.nonfinite=skip",
        )
