"""Compare a split model with the whole one on one batch: loss, weights and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, isnan
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.batch.loss import UNPAD, Loss, total_of, weight_of
from penstock.batch.padding import ROUTED
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, DifferenceError
from penstock.models.adapters import unwrap
from penstock.models.huggingface.own_loss import own_mean
from penstock.models.huggingface.stages import outcome
from penstock.models.stage import ProvidedCall
from penstock.parallel.reductions import Reductions
from penstock.pipeline.split_model import SplitModel
from penstock.pipeline.steps.split_batch import BatchLike, RefusedBatch, as_list
from penstock.pipeline.steps.step import StepResult
from penstock.private import tree_map_only
from penstock.runtime.sharded_weights import full_tensor as gathered
from penstock.runtime.stage import autocasting, evaluating, without_gradients

# the largest difference that passes, relative to the tensor's largest entry
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}

ParameterPlace = tuple[str, int, int]  # a parameter's name, its stage, and that stage's rank


@dataclass(frozen=True)
class Compared:
    """One tensor of the split model, compared with the whole model's.

    difference, size: of the two tensors, and of the whole model's, by Report.measure
    tolerance: the largest difference that passes
    remark: the fault, if it is more than a difference
    """

    kind: Literal["weight", "gradient"]
    name: str
    stage: int
    rank: int
    difference: float
    size: float
    tolerance: float
    remark: str = ""

    @property
    def excess(self) -> float:
        """Difference / tolerance: above 1 is wrong; infinite where either is not a number."""
        if self.difference == 0:
            return 0.0
        share = self.difference / self.tolerance if self.tolerance else inf
        return share if share == share else inf

    @property
    def wrong(self) -> bool:
        return self.excess > 1

    def describe(self, measure: str) -> str:
        """One line of text."""
        where = f"on stage {self.stage} of rank {self.rank}"
        if self.remark:
            return f"{self.kind} {self.name} {where}: {self.remark}"
        if self.kind == "weight" and isnan(self.size):
            return f"weight {self.name} {where}: it has NaN, in the whole model as well"
        before = "before any step, " if self.kind == "weight" else ""
        difference = f"{before}by {self.difference:.3g} {where}"
        return f"{self.kind} {self.name}: it differs {difference}, and its {measure} is {self.size:.3g}"


@dataclass(frozen=True)
class Report:
    """The result of a comparison; the same on every rank.

    losses: of the split model and of the whole one; None where weights differ, which are then compared alone
    tensors: the compared tensors, the worst first
    tolerance: the largest difference that passes, relative to the tensor's size
    measure: of tensors and differences: "largest entry" or "norm"
    note: why the whole model's loss is not the one that its own forward returns; empty where it is
    """

    losses: tuple[float, float] | None
    tensors: tuple[Compared, ...]
    tolerance: float
    measure: str = "largest entry"
    note: str = ""

    @classmethod
    def of(
        cls,
        losses: tuple[float, float] | None,
        tensors: Sequence[Compared],
        tolerance: float,
        measure: str = "largest entry",
    ) -> Self:
        ordered = sorted(tensors, key=lambda compared: -compared.excess)
        return cls(losses, tuple(ordered), tolerance, measure)

    @property
    def wrong(self) -> tuple[Compared, ...]:
        """The tensors that differ, the worst first."""
        return tuple(compared for compared in self.tensors if compared.wrong)

    @property
    def loss_differs(self) -> bool:
        if self.losses is None:
            return False
        split, whole = self.losses
        close = abs(split - whole) <= self.tolerance * max(1.0, abs(whole))
        return not (close and isfinite(whole))  # a NaN is close to no number

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.loss_differs

    @property
    def largest(self) -> float:
        """The largest difference of a gradient, relative to its size."""
        return self.tensors[0].excess * self.tolerance if self.tensors else 0.0

    def problems(self) -> list[str]:
        """One line for each difference: the loss, then the tensors, the worst first."""
        loss = []
        if self.loss_differs and self.losses:
            loss.append(f"loss: {self.losses[0]} split, {self.losses[1]} whole")
        return loss + [compared.describe(self.measure) for compared in self.wrong]

    def raise_if_wrong(self, remedy: str | None = None) -> None:
        """Raise DifferenceError unless all passed."""
        if self.passed:
            return
        if any(compared.kind == "weight" and isnan(compared.size) for compared in self.tensors):
            remedy = "Take a model with finite weights: the whole model has NaN"
        raise DifferenceError(self, remedy)


def compare(
    pipe: SplitModel,
    step: Callable[[BatchLike], StepResult],
    split: Callable[[BatchLike], list[Microbatch]],
    model: nn.Module,
    batch: BatchLike,
    loss: Loss,
    tolerance: float | None = None,
    autocast: torch.dtype | None = None,
) -> Report:
    """Pipeline.compare, with `step`, `split` and `autocast` of the pipeline. Collective."""
    model = unwrap(model)
    whole = dict(model.named_parameters(remove_duplicate=False))
    if tolerance is None:
        tolerance = TOLERANCE.get(next(iter(whole.values())).dtype, 1e-5)
    placed = list(placed_parameters(pipe))
    weights = [compared_weight(where, gathered(p), whole.get(where[0]), entries) for where, p in placed]
    weights = _of_all_processes(pipe, [weight for weight in weights if weight.wrong])
    if weights:
        return Report.of(None, weights, tolerance)
    if any(ROUTED in part for part in as_list(batch)):
        rule = "the whole model's own routers choose the experts"
        batch = RefusedBatch(BatchError(f"{ROUTED} in a comparison", rule, "Compare on a batch without them"))
    with without_gradients([*(p for _, p in placed), *whole.values()]):
        with evaluating(model, *pipe.modules.values()):
            split_loss = step(batch).loss
            microbatches = split(batch)
            expected = whole_backward(model, microbatches, loss, pipe.reductions, autocast)
        largest = max((largest_entry(p.grad) for p in whole.values() if p.grad is not None), default=0.0)
        gradients = [
            compared_gradient(
                where,
                None if p.grad is None else gathered(p.grad),
                whole[where[0]].grad,
                entries,
                tolerance,
                rounding=0.0 if p.grad is None else torch.finfo(p.dtype).eps * largest,
            )
            for where, p in placed
        ]
    report = Report.of((split_loss, expected), _of_all_processes(pipe, gradients), tolerance)
    return replace(report, note=not_own(loss, microbatches))


def placed_parameters(pipe: SplitModel) -> Iterator[tuple[ParameterPlace, nn.Parameter]]:
    """This process's parameters with name, stage and rank; a name occurs once for each copy."""
    for stage in pipe.stages:
        for name, parameter in stage.module.named_parameters():
            yield (name, stage.index, pipe.info[stage.index].rank), parameter


def _of_all_processes(pipe: SplitModel, compared: Sequence[Compared]) -> list[Compared]:
    """The comparisons of all processes. Collective."""
    everyone = pipe.processes.gather([asdict(ours) for ours in compared])
    return [Compared(**fields) for part in everyone for fields in part]


def whole_backward(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    loss: Loss,
    reductions: Reductions | None = None,
    autocast: torch.dtype | None = None,
) -> float:
    """Add the whole model's gradients to `.grad` and return its loss, one microbatch after the other.

    Where autograd leaves a choice, it adds in the order of the pipeline, so that models that round inside (a
    norm in float32 under float64 weights) round in the same way.

    Args:
        reductions: sum over the parts of a batch on a mesh; the call is then collective
        autocast: the dtype of torch.autocast in each forward; None for none
    """
    reductions = reductions or Reductions()
    weight = reductions.sum_tokens(sum(weight_of(loss, microbatch) for microbatch in microbatches))
    device = next(model.parameters()).device
    total = 0.0
    for index, microbatch in enumerate(microbatches):
        microbatch = tree_map_only(Tensor, lambda tensor: tensor.to(device), dict(microbatch))
        with autocasting(autocast, device):
            share = _total(model, loss, microbatch, index) / weight
        share.backward()  # type: ignore[no-untyped-call]
        total += float(share.detach())
    parameters = list(model.parameters())
    # a vision tower has no gradient where a part of the batch has no image
    has_gradient = [float(parameter.grad is not None) for parameter in parameters]
    flags = torch.tensor(has_gradient, dtype=torch.float64, device=device)
    for parameter, somewhere in zip(parameters, reductions.sum_over_batch(flags).tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            reductions.sum_over_batch(parameter.grad)
    return float(reductions.sum_over_batch(torch.tensor([total], dtype=torch.float64, device=device)))


def _total(model: nn.Module, loss: Loss, microbatch: Microbatch, index: int) -> Tensor:
    """The whole model's loss, summed over the valid items of a microbatch.

    A pipeline without a loss_fn is compared with the loss that the model's own forward computes.
    """
    if not isinstance(model, PreTrainedModel):
        return total_of(loss, ProvidedCall(model)((), microbatch), microbatch, index)
    # the model's mean over no item is NaN
    if not_own(loss, [microbatch]) == "" and (items := loss.weight(microbatch)):
        return own_mean(model, microbatch) * items
    inputs = {name: value for name, value in microbatch.items() if name not in ("labels", UNPAD)}
    return total_of(loss, outcome(model, model(**inputs, use_cache=False)), microbatch, index)


def not_own(loss: Loss, microbatches: Sequence[Microbatch]) -> str:
    """Why the whole model's loss is `loss` of its outputs; empty where its own forward returns the loss."""
    if not getattr(loss, "of_model", False):
        return "the pipeline has a loss of its own, which was applied to both models' outputs"
    if any("shift_labels" in microbatch for microbatch in microbatches):
        return "the batch has shift_labels: the pipeline's loss was applied to both models' logits"
    return ""


# ---- one tensor of both models, whole or as a digest of it (penstock.train.check.digests)

PairMeasure = Callable[
    [Any, Any], tuple[float, float]
]  # the difference of two tensors, and the second's size


def entries(split: Tensor, whole: Tensor) -> tuple[float, float]:
    """The largest entry of the difference and of `whole`."""
    split, whole = split.detach().cpu(), gathered(whole).detach().cpu()
    largest = largest_entry(whole)
    return (0.0 if torch.equal(split, whole) else largest_entry(split - whole) or inf), largest


def largest_entry(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def compared_weight(
    where: ParameterPlace, split: Any, whole: Any | None, measured: PairMeasure, digits: float = 0.0
) -> Compared:
    """Compare a weight before any step. digits: the share of its size that may differ"""
    if whole is None:
        return Compared("weight", *where, inf, 0.0, 0.0, "the whole model has no weight of that name")
    if isinstance(split, Tensor) and split.shape != whole.shape:
        remark = f"its shape is {list(split.shape)}, and {list(whole.shape)} in the whole model"
        return Compared("weight", *where, inf, 0.0, 0.0, remark)
    difference, size = measured(split, whole)
    return Compared("weight", *where, difference, size, digits * size)


def compared_gradient(
    where: ParameterPlace,
    split: Any | None,
    whole: Any | None,
    measured: PairMeasure,
    tolerance: float,
    *,
    rounding: float,
    room: float = 0.0,
) -> Compared:
    """Compare a gradient, which may be None in both models.

    A gradient smaller than the rounding error of the largest one would be zero without rounding (as of a bias
    that softmax cancels); in the split model it need only be as small.

    Args:
        tolerance: the largest difference that passes, relative to the gradient's size
        rounding: rounding error of the largest gradient
        room: a difference that passes in any case
    """
    if split is None and whole is None:
        return Compared("gradient", *where, 0.0, 0.0, 0.0)
    if split is None or whole is None:
        return Compared("gradient", *where, inf, 0.0, 0.0, "only one of the two has it")
    difference, size = measured(split, whole)
    passes = max(tolerance * size, rounding if size <= rounding else 0.0, room)
    return Compared("gradient", *where, difference, size, passes)
