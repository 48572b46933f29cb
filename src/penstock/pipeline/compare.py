"""The split model beside the whole one, on one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from penstock.batch.loss import Loss
from penstock.batch.padding import ROUTED
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, DifferenceError
from penstock.models.huggingface.stages import outcome
from penstock.models.stage import ProvidedCall
from penstock.parallel.reductions import Reductions
from penstock.pipeline.built import StageFacts
from penstock.pipeline.split_batch import BatchLike, RefusedBatch
from penstock.pipeline.step import StepResult
from penstock.runtime.sharded_weights import whole as gathered
from penstock.runtime.stage import Stage, evaluating, gradients_aside
from penstock.runtime.transport.groups import Processes

# largest difference, relative to the largest entry of the tensor compared
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Compared:
    """A tensor of the split model beside the whole one's.

    difference: how much they differ; size: of the whole one's; both as Report.measure says
    tolerance: the largest difference that passes
    remark: what is wrong, where it is more than a difference
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
        """The difference over the tolerance: above 1 is wrong, and so is what is no number."""
        if self.difference == 0:
            return 0.0
        share = self.difference / self.tolerance if self.tolerance else inf
        return share if share == share else inf

    @property
    def wrong(self) -> bool:
        return self.excess > 1


@dataclass(frozen=True)
class Report:
    """What a comparison found; the same on every rank.

    losses: of the split model and of the whole one; None where unequal weights left nothing to compare
    tensors: all that were compared, the worst first
    tolerance: the largest difference that passes, relative to the tensor's size
    measure: by what tensors and differences are measured: "largest entry" or "norm"
    """

    losses: tuple[float, float] | None
    tensors: tuple[Compared, ...]
    tolerance: float
    measure: str = "largest entry"

    @classmethod
    def of(
        cls,
        losses: tuple[float, float] | None,
        tensors: Sequence[Compared],
        tolerance: float,
        measure: str = "largest entry",
    ) -> Self:
        ordered = sorted(tensors, key=lambda each: -each.excess)
        return cls(losses, tuple(ordered), tolerance, measure)

    @property
    def wrong(self) -> tuple[Compared, ...]:
        """The tensors that differ, the worst first."""
        return tuple(each for each in self.tensors if each.wrong)

    @property
    def loss_differs(self) -> bool:
        if self.losses is None:
            return False
        split, whole = self.losses
        close = abs(split - whole) <= self.tolerance * max(1.0, abs(whole))
        return not (close and isfinite(whole))  # what is no number is close to nothing

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.loss_differs

    @property
    def largest(self) -> float:
        """The largest difference of a gradient, relative to its size."""
        return self.tensors[0].excess * self.tolerance if self.tensors else 0.0

    def problems(self) -> list[str]:
        """All that differs, in words: the loss, then the tensors, the worst first."""
        told = []
        if self.loss_differs and self.losses:
            told.append(f"loss: {self.losses[0]} split, {self.losses[1]} whole")
        return told + [self.describe(each) for each in self.wrong]

    def describe(self, each: Compared) -> str:
        where = f"on stage {each.stage} of rank {each.rank}"
        if each.remark:
            return f"{each.kind} {each.name} {where}: {each.remark}"
        before = "before any step, " if each.kind == "weight" else ""
        by = f"{before}by {each.difference:.3g} {where}"
        return f"{each.kind} {each.name}: it differs {by}, and its {self.measure} is {each.size:.3g}"

    def raise_if_wrong(self, remedy: str | None = None) -> None:
        """Raise DifferenceError unless all that was compared is equal."""
        if not self.passed:
            raise DifferenceError(self, remedy)


class Comparable(Protocol):
    """A Pipeline, as far as a comparison needs it."""

    @property
    def stages(self) -> tuple[Stage, ...]: ...
    @property
    def modules(self) -> Mapping[int, nn.Module]: ...
    @property
    def info(self) -> tuple[StageFacts, ...]: ...
    @property
    def processes(self) -> Processes: ...
    @property
    def reductions(self) -> Reductions: ...
    def step(self, batch: BatchLike) -> StepResult: ...
    def microbatches(self, batch: BatchLike) -> list[Microbatch]: ...


def compare(
    pipe: Comparable, model: nn.Module, batch: BatchLike, loss: Loss, tolerance: float | None = None
) -> Report:
    """Loss and every gradient of `pipe` beside those of `model`, in evaluation mode.

    Where weights differ to begin with, nothing but them is compared. The gradients of both are put back as
    they were. tolerance: relative to each gradient's largest entry; None takes the dtype's. Collective.
    """
    whole = dict(model.named_parameters(remove_duplicate=False))
    if tolerance is None:
        tolerance = TOLERANCE.get(next(iter(whole.values())).dtype, 1e-5)
    own = list(placed_parameters(pipe))
    weights = [_weight(at, gathered(p), whole.get(at[0])) for at, p in own]
    weights = everywhere(pipe, [each for each in weights if each.wrong])
    if weights:
        return Report.of(None, weights, tolerance)
    if any(ROUTED in part for part in ([batch] if isinstance(batch, Mapping) else batch)):
        rule = "the whole model's own routers choose, and are told nothing"
        batch = RefusedBatch(BatchError(f"{ROUTED} in a comparison", rule, "Compare on a batch without them"))
    with gradients_aside([*(p for _, p in own), *whole.values()]):
        with evaluating(model, *pipe.modules.values()):
            found = pipe.step(batch).loss
            expected = whole_gradients(model, pipe.microbatches(batch), loss, pipe.reductions)
        largest = max((float(p.grad.abs().max()) for p in whole.values() if p.grad is not None), default=0.0)
        gradients = [_gradient(at, _gathered(p.grad), whole[at[0]].grad, tolerance, largest) for at, p in own]
    return Report.of((found, expected), everywhere(pipe, gradients), tolerance)


# the name of a parameter, its stage, and that stage's rank
Place = tuple[str, int, int]


def placed_parameters(pipe: Comparable) -> Iterator[tuple[Place, nn.Parameter]]:
    """This process's, with their places. A name stands several times where there are several copies."""
    for stage in pipe.stages:
        for name, parameter in stage.module.named_parameters():
            yield (name, stage.index, pipe.info[stage.index].rank), parameter


def everywhere(pipe: Comparable, found: Sequence[Compared]) -> list[Compared]:
    """What all processes found, on every one of them. Collective."""
    told = pipe.processes.gather([asdict(each) for each in found])
    return [Compared(**each) for part in told for each in part]


def _gathered(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gathered(gradient)


def whole_gradients(
    model: nn.Module, microbatches: Sequence[Microbatch], loss: Loss, reductions: Reductions
) -> float:
    """As `whole_backward`, of all parts of the batch: each pipeline of a mesh has one. Collective."""
    weight = reductions.sum_tokens(sum(loss.weight(microbatch) for microbatch in microbatches))
    total = torch.tensor([whole_backward(model, microbatches, loss, weight)], dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.grad is not None:
            reductions.sum_over_batch(parameter.grad)
    return float(reductions.sum_over_batch(total.to(next(model.parameters()).device)))


def whole_backward(
    model: nn.Module, microbatches: Sequence[Microbatch], loss: Loss, weight: int | None = None
) -> float:
    """Loss and gradients of the whole model in this process, one microbatch after the other.

    The same sums as the pipeline's, in the same order where autograd leaves a choice, so that models that
    round inside (a norm in float32 under float64 weights) round alike.
    weight: what the loss is divided by; None takes the valid items of the microbatches
    """
    if weight is None:
        weight = sum(loss.weight(microbatch) for microbatch in microbatches)
    total = 0.0
    device = next(model.parameters()).device
    for microbatch in microbatches:
        microbatch = tree_map_only(Tensor, lambda tensor: tensor.to(device), dict(microbatch))
        if isinstance(model, PreTrainedModel):
            inputs = {name: value for name, value in microbatch.items() if name != "labels"}
            output = outcome(model, model(**inputs, use_cache=False))
        else:
            output = ProvidedCall(model)((), microbatch)
        share = loss.total(output, microbatch) / weight
        share.backward()  # type: ignore[no-untyped-call]
        total += float(share.detach())
    return total


def allowed(tolerance: float, size: float, dtype: torch.dtype, largest: float) -> float:
    """The largest difference of a gradient that passes. `largest`: the size of the model's largest gradient.

    A gradient of which nothing reaches rounding of the largest one is zero but for rounding (a bias that
    softmax cancels); it need only be as small in the split.
    """
    rounding = torch.finfo(dtype).eps * largest
    return max(tolerance * size, rounding) if size <= rounding else tolerance * size


def only_one(kind: Literal["weight", "gradient"], place: Place) -> Compared:
    """A gradient that the other model has none of, or a weight."""
    remark = "only one of the two has it" if kind == "gradient" else "the whole model has none of that name"
    return Compared(kind, *place, inf, 0.0, 0.0, remark)


def _weight(place: Place, split: Tensor, whole: Tensor | None) -> Compared:
    if whole is None:
        return only_one("weight", place)
    split, whole = split.detach().cpu(), whole.detach().cpu()
    if split.shape != whole.shape:
        remark = f"its shape is {list(split.shape)}, and {list(whole.shape)} in the whole model"
        return Compared("weight", *place, inf, 0.0, 0.0, remark)
    if torch.equal(split, whole):
        return Compared("weight", *place, 0.0, 0.0, 0.0)
    largest, size = float((split - whole).abs().max()), float(whole.abs().max())
    return Compared("weight", *place, largest or inf, size, 0.0)


def _gradient(
    place: Place, split: Tensor | None, whole: Tensor | None, tolerance: float, largest: float
) -> Compared:
    if split is None and whole is None:
        return Compared("gradient", *place, 0.0, 0.0, 0.0)
    if split is None or whole is None:
        return only_one("gradient", place)
    whole = whole.to(split.device)
    size = float(whole.abs().max()) if whole.numel() else 0.0
    found = float((split - whole).abs().max()) if whole.numel() else 0.0
    return Compared("gradient", *place, found, size, allowed(tolerance, size, whole.dtype, largest))
