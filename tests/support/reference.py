"""The plain process that every pipeline is compared with; written without any of penstock's code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

Gradients = dict[str, Tensor]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def plain_step(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients of the mean over all valid tokens of the whole batch, in one forward."""
    model.zero_grad()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)
                 if p.grad is not None}  # fmt: skip
    model.zero_grad()
    return float(loss.detach()), gradients


def assert_gradients(found: Gradients, expected: Gradients, tolerance: float) -> None:
    """Every gradient within `tolerance` of its largest entry. A gradient that is nothing but rounding (all of
    it below one rounding of the model's largest entry) must be as small."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in found.items():
        size = float(expected[name].abs().max())
        difference = float((gradient - expected[name]).abs().max())
        rounding = torch.finfo(gradient.dtype).eps * largest
        allowed = max(tolerance * size, rounding if size <= rounding else 0.0)
        assert difference <= allowed, f"{name}: differs by {difference:.3g}, largest entry {size:.3g}"
