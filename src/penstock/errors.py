"""Typed errors: each gives the value that was found, the rule that it breaks, and the remedy.

The user can fix an `InputError`; a command then ends with exit code 2. A `RunError` is the failure of a
running job; the command ends with exit code 1, as for a `DifferenceError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "AlteredError",
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DifferenceError",
    "EquivalenceError",
    "FolderInUseError",
    "HandshakeError",
    "HubError",
    "InputError",
    "ModelError",
    "PartitionError",
    "PeerError",
    "PeerLostError",
    "PenstockError",
    "RunError",
    "ScheduleError",
    "ShapeError",
    "StalledPeerError",
    "UnfitError",
    "WorldSizeError",
]


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose.

    value: the value that was found, named as the user named it, e.g. ``pipeline.ranks=9``
    rule: the rule that the value breaks
    remedy: what to change
    names_rank: whether the message names the failing rank, so that a report need not
    """

    exit_code = 1
    names_rank = False

    def __init__(self, value: str, rule: str, remedy: str) -> None:
        super().__init__(value, rule, remedy)
        self.value, self.rule, self.remedy = value, rule, remedy

    def __str__(self) -> str:
        return f"{self.value}: {self.rule}. {self.remedy}"


class InputError(PenstockError):
    """Something that the user gave is wrong."""

    exit_code = 2


class ConfigError(InputError):
    """An option or a key of a config file: unknown, of the wrong type, or out of range."""


class ScheduleError(InputError):
    """A schedule that would hang, leave work out or hold too many activations.

    violations: every reason, each a penstock.schedule.Violation
    """

    def __init__(self, name: str, violations: Sequence[Any]) -> None:
        self.name, self.violations = name, tuple(violations)
        shown = "".join(f"\n  {violation}" for violation in self.violations[:20])
        more = "" if len(self.violations) <= 20 else f"\n  and {len(self.violations) - 20} more"
        super().__init__(
            f"schedule {name!r}",
            f"it breaks {len(self.violations)} rule(s):{shown}{more}",
            "\nMend the programs listed, or build a schedule by name with penstock.schedule.build",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.name, self.violations))


class PartitionError(InputError):
    """Layers that cannot be divided among the requested stages."""


class BatchError(InputError):
    """A batch that cannot be split, or that differs between the ranks of one pipeline."""


class ShapeError(InputError):
    """A tensor on its way to another stage has another shape or dtype than the receiver expects."""


class DataError(InputError):
    """A data file that is missing, empty, unreadable or too short."""


class CheckpointError(InputError):
    """A checkpoint that is incomplete or altered, or does not fit the model."""


class AlteredError(CheckpointError):
    """A file whose contents are not those that were written."""


class UnfitError(CheckpointError):
    """A readable checkpoint of another model or optimizer."""


class FolderInUseError(InputError):
    """An output folder that another run writes into."""


class ModelError(InputError):
    """A model that cannot be cut into a chain of stages."""


class HubError(InputError):
    """A model of the Hub that cannot be fetched: no network, no such name or revision, no access."""


class WorldSizeError(InputError):
    """The number of processes started does not fit the pipeline."""


class HandshakeError(InputError):
    """The ranks of one pipeline were started on different things."""


class EquivalenceError(InputError):
    """The split model and the whole one disagree, so training would be wrong."""


class DifferenceError(EquivalenceError):
    """The split model and the whole one disagree, and nothing that the user gave is to blame: exit code 1.

    report: the whole comparison, a penstock.pipeline.Report
    """

    exit_code = 1

    def __init__(self, report: Any, remedy: str | None = None) -> None:
        self.report = report
        problems = report.problems()
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        remedy = remedy or (
            "Compare with the very weights that the pipeline was built from; if they are equal, do not train"
        )
        rule = "the split model gives the loss and the gradients of the whole one"
        super().__init__("; ".join(problems[:5]) + more, rule, remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.report, self.remedy))


class RunError(PenstockError):
    """A run under way failed."""


class PeerError(RunError):
    """A wait for another rank that failed.

    rank: the rank that waited; None without a watch
    op: the op whose result it waited for, or words
    peer: the rank that it waited for; None for all others
    waited: seconds
    last_ops: the last ops (penstock.schedule.Op) that this rank completed
    peer_report: the last report of the rank that caused the failure
    reports: the last report of every other rank that sent one
    timeline: this rank's part of the step so far, a penstock.schedule.Timeline
    """

    names_rank = True
    rank: int | None = None
    op: str = ""
    peer: int | None = None
    waited: float = 0.0
    last_ops: tuple[Any, ...] = ()
    peer_report: str = ""
    timeline: Any = None

    def __init__(self, value: str, rule: str, remedy: str) -> None:
        super().__init__(value, rule, remedy)
        self.reports: Mapping[int, str] = {}

    @property
    def brief(self) -> str:
        """The message without the last reports of the ranks."""
        return super().__str__()

    def __str__(self) -> str:
        account = account_of(self)
        this_rank = "" if account is None else f"rank {self.rank} {account}"
        return "\n  ".join(filter(None, (self.brief, self.peer_report, this_rank)))


class PeerLostError(PeerError):
    """Another rank died or failed while this one waited for it."""


class StalledPeerError(PeerError):
    """Another rank stayed silent past the timeout."""


class FailurePoint(NamedTuple):
    """What a rank was doing when it failed.

    where: e.g. ``in 2F3, steady phase``; done: e.g. ``5 of 12 ops done, the last 2F1 2F2 2B0``
    trace: the file with its timeline so far, or why there is none
    """

    where: str
    done: str = ""
    trace: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, self))


def give_account(error: BaseException, account: FailurePoint) -> None:
    """Attach `account` to `error`, of any type; whoever reports the error reads it with `account_of`."""
    error.penstock_account = account  # type: ignore[attr-defined]


def account_of(error: BaseException) -> FailurePoint | None:
    account: FailurePoint | None = getattr(error, "penstock_account", None)
    return account
