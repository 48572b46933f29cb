"""The whole model that a split one is checked against: how it is made, and how near the two have to be."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from penstock.batch.loss import Loss
from penstock.models.source import Source
from penstock.models.weights import files as weights
from penstock.models.weights import initial
from penstock.parallel.mesh import Axes
from penstock.pipeline.compare import TOLERANCE

TOKENS = 64  # of each row that the two are compared on, at most
_ROUNDS = 4.0  # how often what is narrower than the model may round, in units of that dtype's tolerance


@dataclass(frozen=True)
class Whole:
    """How process 0 makes the whole model, and how far the split one may be from it.

    source: the model on the meta device, and the files with its values, if any; seed: of initial values
    narrow: the narrowest that the split one rounds to beside its own dtype: activations on their way, spread
        weights and their gradients; None where it does not
    axes: those beside the pipeline, without -1
    """

    source: Source
    seed: int
    loss: Loss
    narrow: torch.dtype | None = None
    axes: Axes = field(default_factory=Axes)

    def make(self, device: torch.device) -> PreTrainedModel:
        """By itself, and not by cutting: the cuts are what is to be checked."""
        model: PreTrainedModel = copy.deepcopy(self.source.model)
        ties = weights.tied_names(self.source.model)
        if self.source.files:
            weights.load(model, self.source.files, ties)
        initial.initialise(model, self.source.model, ties, self.seed)
        model.to(device)
        return model

    @property
    def bytes(self) -> int:
        """Of its weights and as many of their gradients."""
        total: int = sum(p.numel() * p.itemsize for p in self.source.model.parameters())
        return 2 * total

    @property
    def reorders(self) -> bool:
        """Whether the split one adds up in another order."""
        return (self.axes.cp, self.axes.ep, self.axes.tp) != (1, 1, 1)

    @property
    def tokens(self) -> int:
        """Of a row, at most: the ranks of cp and tp can share out so many evenly."""
        shared = 2 * self.axes.cp * self.axes.tp
        return max(TOKENS // shared, 1) * shared

    @property
    def tolerance(self) -> float:
        """Relative to a gradient's norm."""
        own = TOLERANCE.get(self.source.model.dtype, 1e-5)
        if self.narrow is None or torch.finfo(self.narrow).eps <= torch.finfo(self.source.model.dtype).eps:
            return own
        return max(own, _ROUNDS * TOLERANCE[self.narrow])


def narrowest(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The one that rounds most; None where all are."""
    return max((dtype for dtype in dtypes if dtype), key=lambda dtype: torch.finfo(dtype).eps, default=None)
