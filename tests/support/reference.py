"""The plain process that every pipeline is compared with; written without any of penstock's code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

Gradients = dict[str, Tensor]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Named(Protocol):
    """A module or a pipeline."""

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterable[tuple[str, nn.Parameter]]: ...


def gradients_of(named: Named) -> Gradients:
    """Copies of the gradients by parameter name, a shared weight under each of its names."""
    parameters = named.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def plain_step(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients of the mean over all valid tokens of the whole batch, in one forward."""
    return plain_steps(model, [batch])


def plain_steps(
    model: PreTrainedModel, microbatches: Sequence[Mapping[str, Tensor]], *, shifted: bool = True
) -> tuple[float, Gradients]:
    """Loss and gradients of the mean over all valid tokens of all microbatches, one forward each.

    Where the config asks for it, the routers' auxiliary loss counts too: a mean over each microbatch.
    shifted: whether a label is that of the token before it
    """
    model.zero_grad()
    first = int(shifted)
    valid = [int((microbatch["labels"][:, first:] != -100).sum()) for microbatch in microbatches]
    loss = 0.0
    for microbatch, count in zip(microbatches, valid, strict=True):
        inputs = {name: value for name, value in microbatch.items() if name != "labels"}
        output = model(**inputs, use_cache=False)
        length = output.logits.shape[1] - first
        logits, labels = output.logits[:, :length].flatten(0, 1), microbatch["labels"][:, first:].flatten()
        total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        if getattr(output, "aux_loss", None) is not None:
            total = total + _auxiliary_coefficient(model) * output.aux_loss * count
        share = total / sum(valid)
        share.backward()  # type: ignore[no-untyped-call]
        loss += float(share.detach())
    gradients = gradients_of(model)
    model.zero_grad()
    return loss, gradients


def _auxiliary_coefficient(model: PreTrainedModel) -> float:
    name = "aux_loss_coef" if model.config.model_type == "jetmoe" else "router_aux_loss_coef"
    return float(getattr(model, name))


def assert_gradients(found: Mapping[str, Tensor], expected: Gradients, tolerance: float) -> None:
    """Every gradient is within `tolerance` of its largest entry.

    A gradient that is only rounding (all entries below one rounding of the model's largest entry) must be
    as small.
    """
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in found.items():
        size = float(expected[name].abs().max())
        difference = float((gradient - expected[name]).abs().max())
        rounding = torch.finfo(gradient.dtype).eps * largest
        allowed = max(tolerance * size, rounding if size <= rounding else 0.0)
        assert difference <= allowed, f"{name}: differs by {difference:.3g}, largest entry {size:.3g}"


def assert_every_gradient(modules: Iterable[nn.Module], expected: Gradients, tolerance: float) -> None:
    """Every parameter of the stages has a gradient, and it is the expected one.

    modules: the stages one by one, as copies of the model hold the same names
    """
    for module in modules:
        found = gradients_of(module)
        assert found.keys() == dict(module.named_parameters(remove_duplicate=False)).keys()
        assert_gradients(found, expected, tolerance)
