"""The split model beside the whole one, on one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from penstock.errors import EquivalenceError
from penstock.models.hf import outcome
from penstock.models.protocol import ProvidedCall
from penstock.runtime.loss import Loss
from penstock.runtime.shapes import Microbatch
from penstock.runtime.stage import evaluating
from penstock.steps import Given

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

# largest difference, relative to the largest entry of the tensor compared
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def compare(pipe: Pipeline, model: nn.Module, batch: Given, loss: Loss) -> None:
    """Raise EquivalenceError on every rank where loss or any gradient of `pipe` differs from `model`'s.

    Weights must be equal to begin with. The gradients of both are put back as they were.
    """
    whole = dict(model.named_parameters(remove_duplicate=False))
    own = list(pipe.named_parameters())  # a name stands twice where there are two copies of the model
    problems = [_missing(name) for name, _ in own if name not in whole]
    problems += [f"weight {name}: it differs before any step" for name, p in own
                 if name in whole and not torch.equal(p.cpu(), whole[name].cpu())]  # fmt: skip
    _raise_together(pipe, problems)
    laid_aside = [(p, p.grad) for p in {*(p for _, p in own), *whole.values()}]
    for parameter, _ in laid_aside:
        parameter.grad = None
    try:
        with evaluating(model, *pipe.modules.values()):
            found = pipe.step(batch).loss
            expected = whole_backward(model, pipe.microbatches(batch), loss)
        tolerance = TOLERANCE.get(next(iter(whole.values())).dtype, 1e-5)
        if abs(found - expected) > tolerance * max(1.0, abs(expected)):
            problems.append(f"loss: {found} split, {expected} whole")
        largest = max((float(p.grad.abs().max()) for p in whole.values() if p.grad is not None), default=0.0)
        for name, parameter in own:
            problems += _difference(name, parameter.grad, whole[name].grad, tolerance, largest)
    finally:
        for parameter, gradient in laid_aside:
            parameter.grad = gradient
    _raise_together(pipe, problems)


def whole_backward(model: nn.Module, microbatches: Sequence[Microbatch], loss: Loss) -> float:
    """Loss and gradients of the whole model in this process, one microbatch after the other.

    The same sums as the pipeline's, in the same order where autograd leaves a choice, so that models that
    round inside (a norm in float32 under float64 weights) round alike.
    """
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


def _missing(name: str) -> str:
    return f"weight {name}: the whole model has none of that name"


def _difference(
    name: str, split: Tensor | None, whole: Tensor | None, tolerance: float, largest: float
) -> list[str]:
    """What is wrong with one gradient. `largest`: the largest entry of any gradient of the model.

    A gradient whose entries all lie below rounding of the largest one is zero but for rounding (a bias that
    softmax cancels); it need only be as small in the split.
    """
    if split is None or whole is None:
        return [] if split is whole else [f"gradient {name}: only one of the two has it"]
    whole = whole.to(split.device)
    size = float(whole.abs().max())
    found = float((split - whole).abs().max())
    rounding = torch.finfo(whole.dtype).eps * largest
    if found <= tolerance * size or (size <= rounding and found <= rounding):
        return []
    return [f"gradient {name}: it differs by {found:.3g}, and its largest entry is {size:.3g}"]


def _raise_together(pipe: Pipeline, problems: list[str]) -> None:
    """Raise on every rank when any has a problem, so that none goes on alone."""
    everywhere = [problem for part in pipe.processes.gather(problems) for problem in part]
    if everywhere:
        shown = "; ".join(everywhere[:5]) + (
            f"; and {len(everywhere) - 5} more" if len(everywhere) > 5 else ""
        )
        raise EquivalenceError(
            shown,
            "the split model gives the loss and the gradients of the whole one",
            "Compare with the very weights that the pipeline was built from; if they are equal, do not train",
        )
