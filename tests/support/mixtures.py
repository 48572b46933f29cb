"""Tiny mixtures of experts, and their loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from support import zoo
from support.reference import Gradients, assert_gradients

Batch = Mapping[str, Tensor]


def mixture(model_type: str, dtype: torch.dtype, layers: int = 2, **changes: Any) -> PreTrainedModel:
    """Tiny, its routers' corrections not zero, and its experts' part in the gradients not a rounding."""
    model = zoo.tiny_model(model_type, dtype, layers=layers, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer += 0.05 * torch.randn(buffer.shape, generator=generator)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 3
    return model


def routers(module: nn.Module) -> list[nn.Module]:
    return [part for name, part in module.named_modules() if name.endswith((".gate", ".router"))]


def none_wrong(results: list[list[str]]) -> None:
    """Assert that no rank found anything wrong."""
    wrong = [text for rank in results for text in rank]
    assert not wrong, "\n".join(wrong)


def valid(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def total_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def ep_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def own_rows(batch: Batch, rank: int, ranks: int) -> dict[str, Tensor]:
    """Unevenly: of 8 rows 3 and 5, or 1, 2, 2 and 3."""
    rows = len(batch["input_ids"])
    start, stop = (round(rows * (part / ranks) ** 1.3) for part in (rank, rank + 1))
    return {name: value[start:stop] for name, value in batch.items()}


def gathered(model: PreTrainedModel) -> Gradients:
    """What the ranks' gradients are of the whole: experts' put together, all others summed."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        gradient = parameter.grad
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor), f"{name} has the gradient {gradient}"
            assert gradient.placements == (Shard(0),) == parameter.placements
            found[name] = gradient.full_tensor()
            continue
        whole = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        dist.all_reduce(whole)
        found[name] = whole
    return found


def differences(label: str, loss: Tensor, expected_loss: float, found: Gradients, expected: Gradients,
            tolerance: float) -> list[str]:  # fmt: skip
    everything = loss.detach().clone()
    dist.all_reduce(everything)
    try:
        assert abs(float(everything) - expected_loss) <= tolerance * abs(expected_loss), "the loss"
        unused = {name for name, gradient in found.items() if name not in expected and bool(gradient.any())}
        assert not unused, unused
        assert_gradients({name: found[name] for name in expected}, expected, tolerance)
    except AssertionError as difference:
        return [f"{label}, rank {dist.get_rank()}: {difference}"]
    return []
