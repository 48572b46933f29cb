"""The optimizer's step at the end of `pipe.step`: norm, clip, step; or nothing, as loss and norm say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import LBFGS, Optimizer

from penstock.errors import ConfigError
from penstock.pipeline.split_model import SplitModel


def optimizer_error(
    optimizers: Sequence[Optimizer], parameters: Iterable[nn.Parameter]
) -> ConfigError | None:
    """The error of optimizers that `pipe.step` cannot step. parameters: this process's"""
    ours = set(map(id, parameters))
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            rule = "it computes loss and gradients several times in one step"
            return ConfigError(f"optimizer={name}", rule, "Take another one, AdamW for example")
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = [parameter for parameter in held if id(parameter) not in ours and parameter.numel()]
        if foreign:
            return ConfigError(
                f"optimizer={name} with a parameter of shape {list(foreign[0].shape)}",
                "it is none of this rank's: model.parameters() are those of the model that was given to "
                "build(), not of the pipeline",
                "Make the optimizer over pipe.parameters()",
            )
    return None


class OptimizerStep:
    """What the optimizers do in one call of `pipe.step`.

    Args:
        max_norm: of all gradients together
        max_loss: the largest loss with which they step
    """

    def __init__(
        self, model: SplitModel, optimizers: Sequence[Optimizer], max_norm: float, max_loss: float
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self.max_norm, self.max_loss = float(max_norm), float(max_loss)

    def finish(self, loss: float) -> float:
        """Clip and step, or do neither where a number is not finite or the loss is too large. Collective.

        Returns the norm before.
        """
        norm = self._model._norm()
        if math.isfinite(norm) and math.isfinite(loss) and loss <= self.max_loss:
            with record_function("clip"):
                self._model._clip(norm, self.max_norm)
            for optimizer in self._optimizers:
                optimizer.step()
        return norm
