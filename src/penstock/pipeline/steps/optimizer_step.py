"""The optimizer's step at the end of `pipe.step`: norm, clip, step; or none, depending on loss and norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.autograd.profiler import record_function
from torch.optim import LBFGS, Optimizer

from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.pipeline.split_model import SplitModel
from penstock.pipeline.steps.step import Step, StepPart


def optimizer_step(
    model: SplitModel, optimizer: Optimizer | Sequence[Optimizer] | None, max_norm: float, max_loss: float
) -> list[StepPart]:
    """The part for a step's optimizers; empty without one. Raises ConfigError for a limit without one."""
    if optimizer is None and max_loss != math.inf:
        remedy = "Give an optimizer, or compare the loss that step() returns"
        raise ConfigError(f"max_loss={max_loss} without an optimizer", "it limits when one steps", remedy)
    if optimizer is None and max_norm != math.inf:
        remedy = "Give an optimizer, or call clip_grad_norm_() after the step"
        raise ConfigError(f"max_norm={max_norm} without an optimizer", "it clips before one steps", remedy)
    if optimizer is None:
        return []
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return [OptimizerStep(model, optimizers, max_norm, max_loss)]


class OptimizerStep(StepPart):
    """Clips gradients and steps the optimizers in one call of `pipe.step`.

    Args:
        max_norm: of all gradients together
        max_loss: the largest loss with which the optimizers step
    """

    def __init__(
        self, model: SplitModel, optimizers: Sequence[Optimizer], max_norm: float, max_loss: float
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._max_norm, self._max_loss = float(max_norm), float(max_loss)
        self.facts = f", an optimizer, max_norm={self._max_norm}"
        if max_loss != math.inf:
            self.facts += f", max_loss={self._max_loss}"

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        ours = set(map(id, self._model.parameters()))
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            if isinstance(optimizer, LBFGS):
                rule = "it computes loss and gradients several times in one step"
                raise ConfigError(f"optimizer={name}", rule, "Take another one, AdamW for example")
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [parameter for parameter in trained if id(parameter) not in ours and parameter.numel()]
            if foreign:
                raise ConfigError(
                    f"optimizer={name} with a parameter of shape {list(foreign[0].shape)}",
                    "it is no parameter of this rank: model.parameters() are those of the model given to "
                    "build(), not of the pipeline",
                    "Make the optimizer over pipe.parameters()",
                )

    def end(self, step: Step) -> None:
        """Clip and step, unless loss or norm is not finite or the loss is too large. Collective."""
        norm, loss = self._model._norm(), step.result.loss
        if math.isfinite(norm) and math.isfinite(loss) and loss <= self._max_loss:
            with record_function("clip"):
                self._model._clip(norm, self._max_norm)
            for optimizer in self._optimizers:
                optimizer.step()
        step.result = step.result._replace(norm=norm)
