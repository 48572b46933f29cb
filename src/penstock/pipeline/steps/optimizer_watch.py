"""Does an optimizer train the pipeline, or the model that it was built from?

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
    """Warns once where optimizers step and none of them trains the pipeline.

    Until one does, or `close`, a hook of torch shows it the steps of all optimizers.
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
        """Not within a hook: torch goes through them then."""
        self._done = True
        self._parameters.clear()
        self._handle.remove()

    def stepped(self, optimizer: Optimizer) -> None:
        """Any optimizer of this process has stepped."""
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(id(parameter) in self._ids for parameter in stepped):
            self._done = True
        else:
            self._others = bool(self._versions)

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Looks at the gradients of earlier steps, before any part takes them away."""
        if self._done:
            self.close()
        elif self._others and self._versions == self._now() and any(map(_is_trained, self._parameters)):
            self.close()
            warnings.warn(
                "An optimizer has stepped, and the pipeline's parameters did not change although their "
                "gradients are not zero. An optimizer over model.parameters() trains the model that was "
                "given to build(), not the pipeline. Make it over pipe.parameters().",
                stacklevel=6,  # of the call of step()
            )

    def end(self, step: Step) -> None:
        if not self._done:
            self._versions, self._others = self._now(), False

    def _now(self) -> list[int]:
        return [local_shard(parameter)._version for parameter in self._parameters]


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(local_shard(parameter.grad).any())
