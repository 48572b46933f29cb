"""When evaluations no longer improve, a run ends early (train.early_stop)."""

from __future__ import annotations

from typing import NamedTuple, Self

from penstock.train.config.sections import EarlyStopSection


class BestEvaluation(NamedTuple):
    """The best evaluation so far. A checkpoint holds it, so that a resumed run ends where the whole one does.

    loss: the lowest held-out loss; None before the first evaluation
    step: that it is of
    since: evaluations in a row, up to now, that were no better
    """

    loss: float | None = None
    step: int = 0
    since: int = 0

    def after(self, step: int, loss: float, section: EarlyStopSection | None) -> Self:
        """The best one after the evaluation of `step`."""
        least = 0.0 if section is None else section.min_delta
        if self.loss is None or loss < self.loss - least:
            return type(self)(loss, step)
        return self._replace(since=self.since + 1)

    def ends(self, section: EarlyStopSection | None) -> str:
        """Why the run ends here, in words; empty where it goes on."""
        if section is None or self.since < section.patience:
            return ""
        return (
            f"{self.since} evaluations in a row did not lower the held-out loss by more than "
            f"{section.min_delta:g} from {self.loss:.4f}, of step {self.step}"
        )


NONE_YET = BestEvaluation()
