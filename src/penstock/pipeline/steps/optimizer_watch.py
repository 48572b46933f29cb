"""Check that an optimizer trains the pipeline, not the model that the pipeline was built from.

    pipe = AutoPipeline(...).build(model)
    optimizer = AdamW(model.parameters())      # should be pipe.parameters()

The pipeline has copies of the model's weights, so this optimizer finds no gradient and changes nothing,
without an error.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.batch.shapes import Microbatch
from penstock.pipeline.steps.step import Step, StepPart
from penstock.runtime.sharded_weights import local_shard


class OptimizerWatch(StepPart):
    """Warns once if optimizers step but none of them trains the pipeline.

    A torch hook calls it after each optimizer's step, until an optimizer trains the pipeline, or `close`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._ids = set(map(id, self._parameters))
        self._versions: list[int] = []  # after the last step
        self._others = False  # whether an optimizer without our parameters has stepped since
        self._done = False
        watch = weakref.ref(self)

        def on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (alive := watch()) is not None:
                alive.stepped(optimizer)

        self._handle = register_optimizer_step_post_hook(on_step)

    def close(self) -> None:
        """Remove the hook. Do not call this inside a hook, while torch iterates over its hooks."""
        self._done = True
        self._parameters.clear()
        self._handle.remove()

    def stepped(self, optimizer: Optimizer) -> None:
        """Called after a step of any optimizer of this process."""
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(id(parameter) in self._ids for parameter in stepped):
            self._done = True
        else:
            self._others = bool(self._versions)

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Check the gradients of earlier steps, before another part sets them aside."""
        if self._done:
            self.close()
        elif self._others and self._versions == self._now() and any(map(_is_trained, self._parameters)):
            self.close()
            warnings.warn(
                "An optimizer has stepped, and the pipeline's parameters did not change although their "
                "gradients are not zero. An optimizer over model.parameters() trains the model that was "
                "given to build(), not the pipeline. Make it over pipe.parameters().",
                stacklevel=6,  # the caller of step()
            )

    def end(self, step: Step) -> None:
        if not self._done:
            self._versions, self._others = self._now(), False

    def _now(self) -> list[int]:
        return [local_shard(parameter)._version for parameter in self._parameters]


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(local_shard(parameter.grad).any())
