"""The state of a run in a checkpoint, besides weights and optimizer state: state.json.

All random numbers follow from the step, and the learning rate from the step less the skipped ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from penstock.checkpoint.contents import STATE
from penstock.errors import CheckpointError
from penstock.models.weights.folder import UNREADABLE, check_contents
from penstock.reading import read_json
from penstock.runtime.health.agreement import version_of_penstock
from penstock.train.config.sections import TrainConfig
from penstock.train.config.training import EarlyStopSection
from penstock.train.settings import mesh_of

UNNAMED = "unnamed"  # the run of a checkpoint of versions up to 0.5.0
_LATER = ("run", "skipped", "data", "mesh", "unevaluated")  # entries that an older version did not write
_REMEDY = "Give a checkpoint that penstock train wrote"


class BestEvaluation(NamedTuple):
    """The best evaluation so far. A checkpoint holds it, so that a resumed run stops early at the same step.

    loss: the lowest held-out loss; None before the first evaluation
    step: of that evaluation
    since: the number of evaluations since then, none of which was better
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
        """Why the run ends here, in words; empty if it goes on."""
        if section is None or self.since < section.patience:
            return ""
        return (
            f"{self.since} evaluations in a row did not lower the held-out loss by more than "
            f"{section.min_delta:g} from {self.loss:.4f}, of step {self.step}"
        )


class Seen(NamedTuple):
    """The record of past steps by which spikes are detected. A checkpoint holds it.

    losses: of the last steps that changed the weights, at most `window` of them; none without train.spike
    left_out: the run's rows that no step trains on, as ranges: first and end
    """

    losses: tuple[float, ...] = ()
    left_out: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, losses: Iterable[float] = (), left_out: Iterable[Iterable[int]] = ()) -> Self:
        """From JSON."""
        return cls(tuple(losses), tuple((first, end) for first, end in left_out))

    def is_possible(self) -> bool:
        """Whether a run can have this record."""
        bounds = [bound for ends in self.left_out for bound in ends]
        return (
            all(type(loss) in (int, float) and math.isfinite(loss) for loss in self.losses)
            and all(type(bound) is int and bound >= 0 for bound in bounds)
            and bounds == sorted(bounds)
        )

    @property
    def rows(self) -> int:
        """The number of rows that were left out."""
        return sum(end - first for first, end in self.left_out)


Ranking = tuple[tuple[float, int], ...]  # scores by KeepSection.score and their steps, the lowest first


def ranked(ranking: Ranking, step: int, score: float, count: int) -> Ranking:
    """The best `count` evaluations after that of `step`; of two equal ones the earlier is better."""
    return tuple(sorted((*ranking, (score, step)))[:count])


class RunState(NamedTuple):
    """The state of a run after a step. Without arguments it is that of a fresh start.

    Attributes:
        run: the identity of the run; empty for a fresh start
        skipped: the steps up to `step` that changed no weight
        data: the position in the data, by `Data.state`; None in versions up to 0.5.0, where it follows from
            the step
        best: of the evaluations up to `step`
        seen: of the losses up to `step`
        ranking: of the evaluations after a step: the best ones, whose checkpoints stay
        unevaluated: whether a signal cut the evaluation after `step` short
        mesh: the size of each axis; None in older versions
        config: the run's whole config at that step
        versions: of penstock and torch
    """

    step: int = 0
    run: str = ""
    skipped: int = 0
    data: dict[str, Any] | None = None
    best: BestEvaluation = BestEvaluation()
    seen: Seen = Seen()
    ranking: Ranking = ()
    unevaluated: bool = False
    mesh: dict[str, int] | None = None
    config: dict[str, Any] = {}  # noqa: RUF012  no instance changes it
    versions: dict[str, str] = {}  # noqa: RUF012

    @classmethod
    def of(cls, entries: Any, name: str) -> Self:
        """The state from JSON; entries that an older version did not write are those of a fresh start.

        name: of the checkpoint, for the error. Raises CheckpointError for JSON that is no state, and for a
        value that no run has.
        """
        try:
            known = {"run": UNNAMED, **{key: entries[key] for key in ("step", "config", "versions")}}
            known |= {key: entries[key] for key in _LATER if key in entries}
            best, seen = BestEvaluation(*entries.get("best", ())), Seen.of(*entries.get("seen", ()))
            ranking = tuple((loss, at) for loss, at in entries.get("ranking", ()))
            state = cls(**known, best=best, seen=seen, ranking=ranking)
            wrong = next((key for key, fits in state._fits().items() if not fits), None)
        except UNREADABLE as error:
            rule = "a run goes on from its step and config, and they cannot be read"
            raise CheckpointError(name, rule, _REMEDY) from error
        if wrong is not None:
            value = f"{name}: {wrong}={getattr(state, wrong)!r}"
            raise CheckpointError(value, "no run has such a value", _REMEDY)
        return state

    def after(self, step: int, run: str | None, config: TrainConfig, data: dict[str, Any]) -> dict[str, Any]:
        """The state after `step` in JSON, as `read_state` reads it.

        Args:
            run: the identity of the run; None on processes whose state is not written
            data: what `Data.state` says
        """
        versions = {"penstock": version_of_penstock(), "torch": torch.__version__}
        written, mesh = config.model_dump(mode="json"), mesh_of(config)
        state = self._replace(step=step, data=data, mesh=mesh, config=written, versions=versions)
        return {**state._asdict(), "run": run}

    def _fits(self) -> dict[str, bool]:
        """Whether each value is one that a run can have."""
        step, best, data, mesh = self.step, self.best, self.data, self.mesh
        loss = best.loss is None or (type(best.loss) in (int, float) and math.isfinite(best.loss))
        counts = type(best.step) is type(best.since) is int and 0 <= best.step <= step and best.since >= 0
        return {
            "step": type(step) is int and step >= 0,
            "run": isinstance(self.run, str),
            "skipped": type(self.skipped) is int and 0 <= self.skipped <= step,
            "data": data is None or (isinstance(data, dict) and {"digest", "position"} <= data.keys()),
            "best": loss and counts,
            "mesh": mesh is None
            or (isinstance(mesh, dict) and all(type(size) is int and size > 0 for size in mesh.values())),
            "seen": self.seen.is_possible(),
            "unevaluated": type(self.unevaluated) is bool,
            "ranking": all(
                type(loss) in (int, float) and math.isfinite(loss) and type(at) is int and 0 < at <= step
                for loss, at in self.ranking
            ),
            "config": isinstance(self.config, dict),
            "versions": isinstance(self.versions, dict),
        }


FRESH = RunState()


def read_state(path: Path) -> RunState:
    """The state in a complete checkpoint.

    Raises AlteredError if it is not what was written; CheckpointError for a value that no run has.
    """
    check_contents(path, STATE)
    entries: Any = None
    with suppress(*UNREADABLE):
        entries = read_json(path / STATE)
    return RunState.of(entries, f"checkpoint {path}: {STATE}")
