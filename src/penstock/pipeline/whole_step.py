"""A loss of all rows of a step at once: contrastive, with every other row as a negative. Two passes, exact.

forwards, no graph      rows -> vectors of all microbatches, on every rank
loss of these           d loss / d vector of each row
pipe.step               each microbatch's loss is the sum of (vector * its gradient), whose gradients are
                        those of the whole loss, by the chain rule (GradCache, arXiv 2101.06983)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.batch.loss import rows_per_group
from penstock.batch.shapes import Microbatch, logits_in
from penstock.errors import ConfigError, ModelError
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.steps.split_batch import BatchLike
from penstock.pipeline.steps.step import StepResult
from penstock.runtime.rng import dropouts

_GRADIENT = "gradient_of_rows"  # the entry of a microbatch: that of the loss by each row's vector


# Takes the last stage's output and its microbatch. Returns the vector of each row (rows, width).
VectorOf = Callable[[Any, Microbatch], Tensor]


def logits_of(output: Any, microbatch: Microbatch) -> Tensor:
    """The logits of each row, as a head for rows gives them (rows, num_labels)."""
    logits: Tensor = logits_in(output)
    return logits


class WholeStepLoss:
    """A loss over the vectors of all rows of a step. Give it to a pipeline as `loss_fn`, and call its `step`.

    Args:
        loss: of the vectors of all rows (rows, width), in the order of the batch; returns a tensor without
            dimensions. If it has a method `accuracy` of the same vectors, results have its value; if it has a
            number `rows_per_group`, so many rows next to each other stay in one microbatch
        vector_of: the vectors of a microbatch's rows from the last stage's output; by default, the logits of
            a model with a head for rows, whose num_labels is then their width
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], vector_of: VectorOf = logits_of) -> None:
        self._loss, self._vector_of = loss, vector_of
        self.rows_per_group = rows_per_group(loss)

    def weight(self, microbatch: Microbatch) -> int:
        """The number of rows."""
        return len(self._gradient(microbatch))

    def counted_rows(self, microbatch: Microbatch) -> Tensor:
        """Whether each row counts (rows,): all do."""
        return torch.ones(_rows(microbatch), dtype=torch.bool)

    def total(self, output: Any, microbatch: Microbatch) -> Tensor:
        """The sum of each row's vector times its gradient."""
        vectors = self._vector_of(output, microbatch)
        return (vectors * self._gradient(microbatch).to(vectors.device)).sum()

    def _gradient(self, microbatch: Microbatch) -> Tensor:
        gradient: Tensor | None = microbatch.get(_GRADIENT)
        if gradient is None:
            rule = "its rows are compared with those of the whole step, which one microbatch does not have"
            raise ConfigError("WholeStepLoss in pipe.step(batch)", rule, "Call loss.step(pipe, batch)")
        return gradient

    def step(
        self,
        pipe: Pipeline,
        batch: BatchLike,
        *,
        optimizer: Optimizer | None = None,
        max_norm: float = float("inf"),
    ) -> StepResult:
        """Add the gradients of the loss of all rows to each parameter's `.grad`. Collective.

        Args:
            pipe: built with this object as its `loss_fn`
            batch, optimizer, max_norm: as for `Pipeline.step`

        Returns that step's result, with the loss of all rows, and with rows as tokens.

        Raises the errors of `Pipeline.step`; ConfigError on a mesh that divides the batch; ModelError for a
        model with dropout, of which both passes would draw other values.
        """
        _check_parts(pipe)
        for module in pipe.modules.values():
            if module.training:
                check_dropout(module)
        parts: list[dict[str, Any]] = [dict(part) for part in pipe.microbatches(batch)]
        vectors = self._vectors(pipe, parts).requires_grad_()
        loss = self._loss(vectors)
        (gradient,) = torch.autograd.grad(loss, vectors)
        rows = [_rows(part) for part in parts]
        given = [{**part, _GRADIENT: of} for part, of in zip(parts, torch.split(gradient, rows), strict=True)]
        result = pipe.step(given, total_tokens=1, optimizer=optimizer, max_norm=max_norm)
        return result._replace(loss=float(loss.detach()), accuracy=self._accuracy(vectors.detach()))

    def evaluate(self, pipe: Pipeline, batch: BatchLike) -> StepResult:
        """Compute the loss of all rows, in evaluation mode, without gradients. Collective.

        Returns the loss, with rows as tokens. pipe, batch: as for `step`. Raises the errors of
        `Pipeline.evaluate`; ConfigError on a mesh that divides the batch.
        """
        _check_parts(pipe)
        vectors = self._vectors(pipe, [dict(part) for part in pipe.microbatches(batch)])
        return StepResult(float(self._loss(vectors)), len(vectors), 0.0, accuracy=self._accuracy(vectors))

    def linear(self, parts: Iterable[Microbatch]) -> list[dict[str, Any]]:
        """The microbatches with a gradient for each row, so that `Pipeline.step` takes them by themselves.

        Their loss is a sum over rows, to compare a split model with the whole one.
        """
        return [{**part, _GRADIENT: torch.linspace(-1, 1, _rows(part)).view(-1, 1)} for part in parts]

    def _accuracy(self, vectors: Tensor) -> float | None:
        accuracy: Callable[[Tensor], float] | None = getattr(self._loss, "accuracy", None)
        return None if accuracy is None else accuracy(vectors)

    def _vectors(self, pipe: Pipeline, parts: list[dict[str, Any]]) -> Tensor:
        """The vectors of all rows on every rank, without a graph."""
        unscored = [{**part, _GRADIENT: torch.zeros(_rows(part), 1)} for part in parts]

        def collect(output: Any, microbatch: int) -> Tensor:
            return self._vector_of(output, parts[microbatch])

        of_parts = pipe.evaluate(unscored, collect, everywhere=True).outputs
        return torch.cat([of_part.detach().to(pipe.device) for of_part in of_parts])


def _rows(microbatch: Mapping[str, Any]) -> int:
    return len(microbatch["input_ids"])


def _check_parts(pipe: Pipeline) -> None:
    """Raise ConfigError on a mesh that divides the batch."""
    if (parts := pipe.batch_part[1]) > 1:
        rule = f"each of {parts} parts of the mesh has rows that the others would be compared with"
        raise ConfigError(
            "WholeStepLoss with data-parallel parts", rule, "Leave out dp_replicate and dp_shard"
        )


def check_dropout(module: nn.Module) -> None:
    """Raise ModelError for dropout, of which two passes would draw other values."""
    for name, key, probability in dropouts(module):
        rule = f"{name} has {key}={probability}, and the two passes would draw other values"
        raise ModelError("WholeStepLoss with dropout", rule, "Set it to 0 in the model's config")
