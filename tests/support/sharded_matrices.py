"""Models whose matrices are sharded, next to one plain process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.errors import PenstockError
from penstock.parallel.tensor.plan import check
from penstock.parallel.tensor.shard import complete_gradients, tensor_parallel
from support import census, zoo
from support.families import FLOAT32_INSIDE, ragged_batch
from support.planned_models import build
from support.reference import TOLERANCE, Gradients, assert_gradients, plain_step


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def batch_of(length: int = 12) -> dict[str, Tensor]:
    batch = ragged_batch(4, length)
    batch["input_ids"][1, 3:5] = 0  # of some families the padding, whose row gets no gradient
    return batch


def loss_of(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean over the valid tokens."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    assert type(logits) is Tensor
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def gathered(model: PreTrainedModel) -> Gradients:
    """Every gradient whole; a parameter without one is left out, as by the plain process."""
    found: Gradients = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor), f"{name} is no DTensor"
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor), f"the gradient of {name} is no DTensor"
            assert parameter.grad.placements == parameter.placements, (
                f"the gradient of {name} is not complete"
            )
            found[name] = parameter.grad.full_tensor().clone()
    return found


def exact(family: str, dtype: torch.dtype, sequence_parallel: bool, changes: dict[str, Any]) -> list[str]:
    """One step compared with the plain process; the parameters of which each rank has a piece."""
    model, batch = build(family, dtype, **changes), batch_of()
    values = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    expected_loss, expected = plain_step(model, batch)
    tensor_parallel(model, tp_mesh(), sequence_parallel=sequence_parallel)
    made = dict(model.named_parameters(remove_duplicate=False))
    assert [*made] == [*values]
    assert all(torch.equal(p.full_tensor(), values[name]) for name, p in made.items())
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    complete_gradients(model)
    tolerance = TOLERANCE[torch.float32 if family in FLOAT32_INSIDE else dtype]
    assert abs(float(loss) - expected_loss) <= tolerance * abs(expected_loss)
    found = gathered(model)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, tolerance)
    return [name for name, p in made.items() if p.placements[0].is_shard()]


def verdict(model_type: str, sequence_parallel: bool) -> str:
    """Whether a tiny model of the type is "exact", is refused, differs, or fails."""
    dist.barrier()  # a rank that is refused is gone before others have met it
    model, batch = zoo.tiny_model(model_type, torch.float64), zoo.tiny_batch(model_type)
    try:
        check(model, 2, sequence_parallel=sequence_parallel)
    except PenstockError as refused:
        return f"refused: {refused}"
    try:
        loss, expected = census.plain(model, batch)
    except RuntimeError:  # a type whose own code mixes dtypes
        loss, expected = census.plain(model.float(), batch)
    tensor_parallel(model, tp_mesh(), sequence_parallel=sequence_parallel)
    try:
        again, gradients = census.plain(model, batch)
    except Exception as failed:
        return f"fails: {type(failed).__name__}: {str(failed)[:200]}"
    found = {name: gradient.full_tensor() for name, gradient in gradients.items()}  # type: ignore[attr-defined]
    if abs(again - loss) > 1e-5 * abs(loss) or found.keys() != expected.keys():
        return f"differs: {again} {loss} {found.keys() ^ expected.keys()}"
    try:
        assert_gradients(found, expected, 1e-5)  # many types compute parts in float32 whatever their dtype
    except AssertionError as wrong:
        return f"differs: {wrong}"
    return "exact"
