"""What the pool's workers run under tensor parallelism, each beside the plain model of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.errors import BatchError, PenstockError
from penstock.models.huggingface.stages import HFCall, cut
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import find_chain
from penstock.parallel.tensor.plan import check
from penstock.parallel.tensor.shard import complete_gradients, tensor_parallel
from penstock.runtime.split_backward import recording as tape
from penstock.runtime.split_backward.backward import hold, input_backward
from support import census, zoo
from support.families import FAMILIES, FLOAT32_INSIDE, ragged_batch, tiny_model
from support.reference import TOLERANCE, Gradients, assert_gradients, plain_step

SINKS = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn": "local_params",
}

# other types than those of families.py, each for a style or a part that those lack
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4, "head_dim": 4,
    },
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model, whose norms and biases are no ones and zeros: those would hide much."""
    plan = changes.pop("plan", None)
    with mock.patch.dict(FAMILIES, OTHERS):
        model = tiny_model(family, dtype, **{"layers": 2, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    if plan is not None:
        model.tp_plan = plan
    return model


def tp_mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def batch_of(length: int = 12) -> dict[str, Tensor]:
    batch = ragged_batch(4, length)
    batch["input_ids"][1, 3:5] = 0  # of some families the padding, whose row gets no gradient
    return batch


def loss_of(model: PreTrainedModel, batch: Mapping[str, Tensor], count: int | None = None) -> Tensor:
    """Summed over the valid tokens, over `count`, or over their number."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    assert type(logits) is Tensor
    targets = batch["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return total / (count or int((targets != -100).sum()))


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


def assert_exact(
    model: PreTrainedModel, loss: float, expected: tuple[float, Gradients], tolerance: float
) -> None:
    assert abs(loss - expected[0]) <= tolerance * abs(expected[0])
    found = gathered(model)
    assert found.keys() == expected[1].keys()
    assert_gradients(found, expected[1], tolerance)


def tolerance_of(family: str, dtype: torch.dtype) -> float:
    return TOLERANCE[torch.float32 if family in FLOAT32_INSIDE else dtype]


def exact(
    family: str, tp: int, dtype: torch.dtype, sequence_parallel: bool, changes: dict[str, Any]
) -> list[str]:
    """One step beside the plain process; the parameters of which each rank has a piece."""
    model, batch = build(family, dtype, **changes), batch_of()
    values = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    expected = plain_step(model, batch)
    tensor_parallel(model, tp_mesh(tp), sequence_parallel=sequence_parallel)
    made = dict(model.named_parameters(remove_duplicate=False))
    assert [*made] == [*values]
    assert all(torch.equal(p.full_tensor(), values[name]) for name, p in made.items())
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    complete_gradients(model)
    assert_exact(model, float(loss), expected, tolerance_of(family, dtype))
    return [name for name, p in made.items() if p.placements[0].is_shard()]


def accumulated(family: str, sequence_parallel: bool) -> None:
    """Microbatches one after the other, twice over, the gradients of the first time kept."""
    model, batch = build(family, torch.float64), batch_of()
    expected = plain_step(model, batch)
    tensor_parallel(model, tp_mesh(2), sequence_parallel=sequence_parallel)
    count = int((batch["labels"][:, 1:] != -100).sum())
    for times in (1, 2):
        losses = []
        for row in range(4):
            losses.append(
                loss_of(model, {name: value[row : row + 1] for name, value in batch.items()}, count)
            )
            losses[-1].backward()  # type: ignore[no-untyped-call]
        complete_gradients(model)
        twice = {name: times * gradient for name, gradient in expected[1].items()}
        assert_exact(model, float(sum(losses)), (expected[0], twice), 1e-10)


def checkpointed(family: str, sequence_parallel: bool) -> None:
    """Each layer's forward run again in the backward."""
    model, batch = build(family, torch.float64), batch_of()
    expected = plain_step(model, batch)
    tensor_parallel(model, tp_mesh(2), sequence_parallel=sequence_parallel)
    for layer in model.model.layers:
        layer.forward = _again(layer.forward)
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    complete_gradients(model)
    assert_exact(model, float(loss), expected, 1e-10)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def in_halves(family: str, sequence_parallel: bool) -> int:
    """A stage's backward in two halves; the bytes that the second waited with."""
    model = build(family, torch.float64)
    hidden = torch.randn(4, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def forward(received: Tensor) -> Tensor:
        result: Tensor = model(inputs_embeds=received, use_cache=False).logits.square().sum()
        return result

    plain = hidden.clone().requires_grad_()
    forward(plain).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    tensor_parallel(model, tp_mesh(2), sequence_parallel=sequence_parallel)
    received = hidden.clone().requires_grad_()
    with tape.deferring() as held:
        total = forward(received)
    live = hold((received,), (total,), held)
    inputs, deferred = input_backward(live, (torch.ones_like(total),))
    waiting = deferred.nbytes
    deferred.run()
    assert_gradients({"inputs": inputs[0]}, {"inputs": plain.grad}, 1e-10)  # type: ignore[dict-item]
    complete_gradients(model)
    found = gathered(model)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, 1e-10)
    return waiting


def with_fsdp(family: str, sequence_parallel: bool, tied: bool, late: bool) -> list[str]:
    """FSDP2 over the other axis of a mesh of 2 x 2, each of its ranks with half of the rows.

    late: the reduction is put off until the last microbatch, as a pipeline does
    """
    model, batch = build(family, torch.float64, tied=tied), batch_of()
    expected = plain_step(model, batch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    sharded: Any = fully_shard(model, mesh=mesh["dp_shard"])
    for part in sharded.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(1.0)  # a sum: the loss is divided by all ranks' tokens
    count = int((batch["labels"][:, 1:] != -100).sum())
    first = 2 * mesh["dp_shard"].get_local_rank()
    total = torch.zeros(1, dtype=torch.float64)
    for row in (first, first + 1):
        if late:
            sharded.set_requires_gradient_sync(row == first + 1)
        loss = loss_of(model, {name: value[row : row + 1] for name, value in batch.items()}, count)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    complete_gradients(model)
    dist.all_reduce(total, group=mesh["dp_shard"].get_group())
    assert_exact(model, float(total), expected, 1e-10)
    return [str(p.placements) for p in model.parameters()]


def as_stages(family: str, sequence_parallel: bool) -> None:
    """Two stages of a pipeline one after the other, with placeholders for each other's modules."""
    model, batch = build(family, torch.float64), batch_of()
    expected = plain_step(model, batch)
    chain, mesh = find_chain(model), tp_mesh(2)
    infos = [StageInfo(0, 2), StageInfo(1, 2)]
    stages = [cut(model, chain, range(info.stage, info.stage + 1), info) for info in infos]
    for stage in stages:
        tensor_parallel(stage, mesh, sequence_parallel=sequence_parallel)
    first, last = (HFCall(stage, info) for stage, info in zip(stages, infos, strict=True))
    hidden = first((), batch)
    received = hidden.detach().requires_grad_()
    logits = last((received,), batch)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss.backward()  # type: ignore[no-untyped-call]
    hidden.backward(received.grad)
    found: Gradients = {}
    for stage in stages:
        complete_gradients(stage)
        found |= gathered(stage)
    assert abs(float(loss) - expected[0]) <= 1e-10
    assert found.keys() == expected[1].keys()
    assert_gradients(found, expected[1], 1e-10)


def refused_length() -> str:
    model = build("llama")
    tensor_parallel(model, tp_mesh(2), sequence_parallel=True)
    try:
        return str(loss_of(model, batch_of(11)))
    except BatchError as error:
        return str(error)


def out_of_the_vocabulary() -> list[bool]:
    """Whether this rank saw that an id below, or above, has no vector."""
    model, mesh = build("llama"), tp_mesh(2)
    tensor_parallel(model, mesh)
    seen = []
    for wrong in (-1, 64):
        try:
            model.model.embed_tokens(torch.tensor([[wrong, 3]]))
        except IndexError:
            seen.append(True)
            dist.all_reduce(torch.zeros(1, 2, 32), group=mesh.get_group())  # the other rank's sum
        else:
            seen.append(False)
    return seen


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
    tensor_parallel(model, tp_mesh(2), sequence_parallel=sequence_parallel)
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
