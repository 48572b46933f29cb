"""A part of a stage: what one feature adds around the stage's ops.

    Switch            before_forward                                        does a forward run again later?
    Offload           before_forward, after_forward                         which tensors wait in host memory
    StageRNG          before_forward                                        seeds the generator
    StageRouting      before and after each forward and backward            records and replays choices
    StageShards       after_forward, after_backward, reduce, end_forwards   FSDP2

A feature is one file with a subclass, and one line in the list of parts that makes a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.batch.shapes import Microbatch
from penstock.schedule.ops import Kind


class Forward(NamedTuple):
    """How a forward runs.

    split: whether its backward is split into I and W
    recompute: whether the layers keep their inputs only, and run again in the backward
    offload: whether what autograd saves waits in host memory until the backward
    """

    split: bool = False
    recompute: bool = False
    offload: bool = False


WHOLE = Forward()


class StagePart:
    """What one feature does around the ops of a stage. Each method does nothing unless it is overridden.

    A step that fails between two of these calls ends with `reset`.

    Attributes:
        reduces: whether `reduce` sums gradients over the mesh, after the stage's last backward of a step
    """

    reduces = False

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return 0

    def begin_step(self) -> None:
        """The first op of a step with backwards comes next."""

    def before_forward(self, number: int, microbatch: Microbatch, how: Forward) -> None:
        """The forward of microbatch `number` comes next, and a backward of it follows later."""

    def after_forward(self) -> None:
        """The forward has ended, and on the last stage the loss is computed."""

    def before_inference(self, microbatch: Microbatch) -> None:
        """A forward comes next that no backward follows."""

    def after_inference(self) -> None:
        """That forward has ended."""

    def before_backward(self, number: int) -> None:
        """A backward of microbatch `number`, or a half of one, comes next."""

    def after_backward(self, number: int, kind: Kind) -> None:
        """It has ended. kind: B, I or W"""

    def reduce(self) -> None:
        """All backwards of the step have run: sum the gradients over the mesh. Collective."""

    def end_forwards(self) -> None:
        """All forwards of the step have run, and no backward will come."""

    def reset(self) -> None:
        """Forget a failed step."""


def overriding(parts: Sequence[StagePart], method: str) -> tuple[Callable[..., Any], ...]:
    """This method of each part that overrides it: an op calls no others, so they cost it nothing."""
    plain = getattr(StagePart, method)
    return tuple(getattr(part, method) for part in parts if getattr(type(part), method) is not plain)
