"""Losses that rise far above those before them (train.spike): such a step is skipped, or the run goes back.

    step                 50    51    52    53 = a spike        51    52 ...
    rows                 ...   0-7   8-15  16-23               24-31 32-39
    checkpoint of step   50                        goes back to 50

A run that goes back leaves out the rows of all steps since its checkpoint. With the same ones it would come
to the same weights, bit for bit, and to the same loss. Which steps are spikes follows from the losses of the
steps before. A checkpoint holds them, so that a resumed run decides as the undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

from penstock.errors import RunError
from penstock.train.config.sections import SpikeSection

REWINDS = 3  # in a row, to one checkpoint, after which the weights and not the rows are to blame


class Seen(NamedTuple):
    """What the steps up to now leave for the next ones. A checkpoint holds it.

    losses: the last ones that reached the weights, at most `window` of them; none without train.spike
    left_out: the run's rows that no step trains on, each as first and end
    """

    losses: tuple[float, ...] = ()
    left_out: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, losses: Iterable[float] = (), left_out: Iterable[Iterable[int]] = ()) -> Self:
        """From JSON."""
        return cls(tuple(losses), tuple((first, end) for first, end in left_out))

    def is_possible(self) -> bool:
        """Whether a run can have seen this."""
        places = [place for each in self.left_out for place in each]
        return (
            all(type(loss) in (int, float) and math.isfinite(loss) for loss in self.losses)
            and all(type(place) is int and place >= 0 for place in places)
            and places == sorted(places)
        )

    @property
    def rows(self) -> int:
        """How many rows were left out."""
        return sum(end - first for first, end in self.left_out)


NOTHING_SEEN = Seen()


class Spikes:
    """Finds the spikes of a run, the same ones on every rank, as the loss is.

    Attributes:
        seen: of the steps up to now
        checkpoint: the last one of the run; None before the first
        rewinding: whether the last step makes the run go back to it
    """

    def __init__(self, section: SpikeSection | None, seen: Seen, checkpoint: Path | None) -> None:
        self._section, self.seen, self.checkpoint = section, seen, checkpoint
        self.rewinding = False
        self._rewinds = 0  # to this checkpoint

    @property
    def limit(self) -> float:
        """The largest loss that is no spike."""
        section, losses = self._section, self.seen.losses
        if section is None or len(losses) < section.window:
            return math.inf
        middle = median(losses[-section.window :])
        return section.factor * middle if middle > 0 else math.inf

    def judge(self, loss: float, rose: bool) -> str:
        """Why a step with this finite loss must not reach the weights; empty where it may: then it counts.

        rose: whether the loss is above `limit`
        """
        section = self._section
        if section is None:
            return ""
        if not rose:
            self.seen = self.seen._replace(losses=(*self.seen.losses, loss)[-section.window :])
            return ""
        self.rewinding = section.then == "rewind" and self.checkpoint is not None
        return self._words(loss, section.window)

    def _words(self, loss: float, window: int) -> str:
        middle = median(self.seen.losses[-window:])
        return f"loss={loss:.4g} is {loss / middle:.3g} times the median of the last {window}, {middle:.4g}"

    def saved(self, checkpoint: Path) -> None:
        """From now on the run would go back to this one."""
        self.checkpoint, self._rewinds = checkpoint, 0

    def went_back(self, step: int, state: dict[str, Any], rows: tuple[int, int]) -> None:
        """The run is at its last checkpoint again.

        Args:
            step: that it comes from
            state: of the checkpoint
            rows: first and end of those that it leaves out

        Raises RunError where it has come back too often.
        """
        self._rewinds += 1
        if self._rewinds > REWINDS:
            raise RunError(
                f"step {step}: the loss rose again",
                f"the run has gone back to step {state['step']} {REWINDS} times in a row, each time on to "
                "other rows, which therefore are not to blame",
                "Go on from an older checkpoint with --resume PATH and a lower optimizer.learning_rate, or "
                "raise train.spike.factor",
            )
        losses: tuple[float, ...] = state["seen"].losses
        self.seen = Seen(losses, (*self.seen.left_out, rows))
        self.rewinding = False
