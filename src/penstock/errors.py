"""Typed errors: each says the value that was met, the rule that it breaks, and what to do.

`InputError` and its children are the user's to mend and end a command with exit code 2;
`RunError` and its children are failures of a run under way and end it with exit code 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.schedule.verify import Violation


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose.

    value: what was met, named as the user named it, e.g. ``pipeline.ranks=9``
    rule: the rule that the value breaks
    remedy: what to change
    """

    exit_code = 1

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
    """A schedule that would hang, leave work out or hold too much; `violations` lists every reason."""

    def __init__(self, name: str, violations: Sequence[Violation]) -> None:
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
    """Layers that cannot be dealt out to the stages asked for."""


class BatchError(InputError):
    """A batch that cannot be split, or that differs between the ranks of one pipeline."""


class ShapeError(InputError):
    """A tensor on its way to another stage has another shape or dtype than the receiver expects."""


class DataError(InputError):
    """A data file that is missing, empty, unreadable or too short."""


class CheckpointError(InputError):
    """A checkpoint that is incomplete or altered, or does not fit the model."""


class ModelError(InputError):
    """A model that cannot be cut into a chain of stages."""


class WorldSizeError(InputError):
    """The number of processes started does not fit the pipeline."""


class EquivalenceError(InputError):
    """The split model and the whole one disagree, so training would be wrong."""


class RunError(PenstockError):
    """A run under way failed."""


class PeerLostError(RunError):
    """Another rank died or failed while this one waited for it."""


class StalledPeerError(RunError):
    """Another rank stayed silent past the timeout."""
