"""The learning rate of each step: a linear warm-up, then a schedule under transformers' name for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Self

from pydantic import model_validator

from penstock.options import Count, Natural
from penstock.train.config.values import Fraction, Section

_BELONGS = {
    "cycles": "cosine_with_restarts",
    "decay_steps": "warmup_stable_decay",
    "decay_type": "warmup_stable_decay",
}  # keys of one schedule alone


class RateKeys(Section):
    """How the learning rates change over a run. All of them rise and fall together."""

    # From the end of the warm-up to the last step. cosine and linear fall; cosine_with_restarts falls from
    # the top `cycles` times; warmup_stable_decay is constant and falls in the last decay_steps
    schedule: Literal["cosine", "linear", "cosine_with_restarts", "warmup_stable_decay", "constant"] = (
        "cosine"
    )
    # in which the rate rises, from 0 at the first step to the learning rate at the one after the warm-up
    warmup_steps: Natural = 0
    warmup_ratio: Fraction | None = (
        None  # in place of warmup_steps: so large a share of all steps, rounded up
    )
    # of the learning rate, which a step after the last would have; constant ignores it
    final_fraction: Fraction = 0.1
    cycles: Count | None = None  # of cosine_with_restarts
    decay_steps: Count | None = None  # of warmup_stable_decay
    decay_type: Literal["cosine", "linear", "1-sqrt"] | None = None  # of warmup_stable_decay; none: cosine

    @model_validator(mode="after")
    def fits_its_schedule(self) -> Self:
        if self.warmup_ratio is not None and self.warmup_steps:
            rule = f"warmup_ratio={self.warmup_ratio} and warmup_steps={self.warmup_steps} are two warm-ups"
            raise ValueError(f"{rule}; leave one of them out")
        for key, schedule in _BELONGS.items():
            value = getattr(self, key)
            if value is None and self.schedule == schedule and key != "decay_type":
                raise ValueError(f"schedule={schedule} has no default of {key}; give {key}, 1 or more")
            if value is not None and self.schedule != schedule:
                rule = f"{key}={value} belongs to schedule={schedule}, and here schedule={self.schedule}"
                raise ValueError(f"{rule}; leave one of them out")
        return self

    def warmup(self, steps: int) -> int:
        """The steps of the warm-up of a run of `steps` steps; as transformers rounds a ratio."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(steps * self.warmup_ratio)

    def check_steps(self, steps: int) -> None:
        """Raise ValueError if warm-up and decay do not fit into a run of so many steps."""
        decay, warmup = self.decay_steps or 0, self.warmup(steps)
        if warmup + decay <= steps:
            return
        said = f"optimizer.warmup_steps={warmup}"
        if self.warmup_ratio is not None:
            said = f"optimizer.warmup_ratio={self.warmup_ratio}, of {warmup} steps,"
        if not decay:
            rule = f"{said} is more than train.steps={steps}"
            raise ValueError(f"{rule}; the warm-up must end within the run")
        raise ValueError(
            f"{said} and optimizer.decay_steps={decay} are more than "
            f"train.steps={steps} together; both must fit into the run"
        )


def learning_rate(keys: RateKeys, full: float, steps: int, step: int) -> float:
    """The rate of step `step` of 1 to `steps`, as transformers' schedulers have it in its Trainer.

    The first step has the rate of position 0: 0 with a warm-up, else `full`. A step after the last would have
    `final_fraction` of the full rate, except with the constant schedule.
    """
    position, warmup = step - 1, keys.warmup(steps)
    if position < warmup:
        return full * position / warmup
    falls_from = warmup if keys.decay_steps is None else steps - keys.decay_steps
    progress = max(0.0, (position - falls_from) / max(1, steps - falls_from))
    shape = keys.schedule if keys.decay_steps is None else keys.decay_type or "cosine"
    share = _SHARES[shape](progress, keys.cycles or 1)
    return full * (keys.final_fraction + (1 - keys.final_fraction) * share)


def _cosine(progress: float, cycles: int) -> float:
    within = 1.0 if progress >= 1 else cycles * progress % 1
    return (1 + math.cos(math.pi * within)) / 2


# the share of the rate above the final one, by the progress from 0 to 1
_SHARES: dict[str, Callable[[float, int], float]] = {
    "cosine": _cosine,
    "cosine_with_restarts": _cosine,
    "linear": lambda progress, _: 1 - progress,
    "1-sqrt": lambda progress, _: 1 - math.sqrt(progress),
    "constant": lambda *_: 1.0,
}
