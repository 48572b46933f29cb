"""A part of a stage: what one feature adds around the stage's ops.

    Switch            before_forward                                        whether a forward runs again later
    Offload           before_forward, after_forward                         which tensors move to host memory
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
    offload: whether the tensors that autograd saves move to host memory until the backward
    """

    split: bool = False
    recompute: bool = False
    offload: bool = False


WHOLE = Forward()


class StagePart:
    """What one feature does around the ops of a stage. Methods do nothing unless they are overridden.

    After a step that fails between two of these calls, `reset` is called.

    Attributes:
        reduces: whether `reduce` sums gradients over the mesh, after the stage's last backward of a step
    """

    reduces = False

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return 0

    def begin_step(self) -> None:
        """Called before the first op of a step with backwards."""

    def before_forward(self, index: int, microbatch: Microbatch, how: Forward) -> None:
        """Called before the forward of microbatch `index`, if its backward follows later."""

    def after_forward(self) -> None:
        """Called after that forward, and on the last stage after the loss."""

    def before_inference(self, microbatch: Microbatch) -> None:
        """Called before a forward without a backward."""

    def after_inference(self) -> None:
        """Called after a forward without a backward."""

    def before_backward(self, index: int) -> None:
        """Called before a backward of microbatch `index`, whole or half."""

    def after_backward(self, index: int, kind: Kind) -> None:
        """Called after that backward. kind: B, I or W"""

    def reduce(self) -> None:
        """Sum the gradients over the mesh, after all backwards of the step. Collective."""

    def end_forwards(self) -> None:
        """Called after the forwards of a step without backwards."""

    def reset(self) -> None:
        """Forget a failed step."""


def overriding(parts: Sequence[StagePart], method: str) -> tuple[Callable[..., Any], ...]:
    """This method of each part that overrides it, so that an op does not call empty ones."""
    plain = getattr(StagePart, method)
    return tuple(getattr(part, method) for part in parts if getattr(type(part), method) is not plain)
