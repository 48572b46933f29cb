"""Expert parallelism and routing replay in the pool's processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from penstock.parallel.expert.balance import load_balancing_loss
from penstock.parallel.expert.dispatch import Directions, combine, dispatch, plan_route
from penstock.parallel.expert.experts import expert_parallel, mixtures
from penstock.parallel.expert.replay import StageRouting
from support import zoo
from support.families import ragged_batch
from support.reference import TOLERANCE, Gradients, assert_gradients, plain_step

Batch = Mapping[str, Tensor]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


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


def told(results: list[list[str]]) -> list[str]:
    """What went wrong on any rank."""
    return [text for rank in results for text in rank]


def ep_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def distributed(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The parameters of experts, which `fully_shard` must leave alone."""
    named = ((name, part.named_parameters(recurse=False)) for name, part in mixtures(model).items())
    return {f"{name}.{key}": parameter for name, parameters in named for key, parameter in parameters}


def own_rows(batch: Batch, rank: int, ranks: int) -> dict[str, Tensor]:
    """Unevenly: of 8 rows 3 and 5, or 1, 2, 2 and 3."""
    rows = len(batch["input_ids"])
    start, stop = (round(rows * (part / ranks) ** 1.3) for part in (rank, rank + 1))
    return {name: value[start:stop] for name, value in batch.items()}


def valid(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def total_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


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


def slices_step(model: PreTrainedModel, batch: Batch, ranks: int) -> tuple[float, Gradients]:
    """One plain process, the ranks' rows one after the other: for families that sum in float32 inside."""
    model.zero_grad()
    loss = 0.0
    for rank in range(ranks):
        part = total_loss(model, own_rows(batch, rank, ranks)) / valid(batch)
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    named = model.named_parameters(remove_duplicate=False)
    found = {name: p.grad.clone() for name, p in named if p.grad is not None}
    model.zero_grad()
    return loss, found


def compare(label: str, loss: Tensor, expected_loss: float, found: Gradients, expected: Gradients,
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


def equivalence(cases: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Model type, dtype and options of each case: loss and gradients beside those of a plain process."""
    wrong = []
    mesh, rank, ranks = ep_mesh(), dist.get_rank(), dist.get_world_size()
    for model_type, dtype, options in cases:
        options = dict(options)
        implementation = options.pop("experts_implementation", None)
        by_slices = options.pop("by_slices", False)
        model = mixture(model_type, DTYPES[dtype], **options)
        batch = zoo.tiny_batch(model_type, rows=8)
        loss, expected = slices_step(model, batch, ranks) if by_slices else plain_step(model, batch)
        if implementation:
            model.set_experts_implementation(implementation)
        names = set(dict(model.named_parameters()))
        held = expert_parallel(model, mesh)
        assert held
        assert names == set(dict(model.named_parameters()))
        sharded = distributed(model)
        assert all(name.rpartition(".")[0] in held and isinstance(p, DTensor) for name, p in sharded.items())
        own = total_loss(model, own_rows(batch, rank, ranks)) / valid(batch)
        own.backward()  # type: ignore[no-untyped-call]
        tolerance = TOLERANCE[DTYPES[dtype]]
        label = f"{model_type} {dtype} {implementation or ''} ep={ranks}"
        wrong += compare(label, own, loss, gathered(model), expected, tolerance)
    return wrong


def under_fsdp(model_type: str) -> list[str]:
    """FSDP2 around it, over the same ranks: it sums what is left to be summed, and leaves experts alone."""
    mesh, rank, ranks = ep_mesh(), dist.get_rank(), dist.get_world_size()
    model = mixture(model_type, torch.float32)
    batch = ragged_batch()
    loss, expected = plain_step(model, batch)
    expert_parallel(model, mesh)
    left = set(distributed(model).values())
    shards = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    parts = [*model.model.layers, model]
    for part in parts:
        fully_shard(part, mesh=shards, ignored_params=left)
        part.set_gradient_divide_factor(1.0)  # the losses are parts of one sum
        part.set_force_sum_reduction_for_comms(True)
    own = total_loss(model, own_rows(batch, rank, ranks)) / valid(batch)
    own.backward()  # type: ignore[no-untyped-call]
    found = {name: cast(DTensor, p.grad).full_tensor() for name, p in model.named_parameters()}
    return compare(f"FSDP2 {model_type}", own, loss, found, expected, 1e-5)


def starved(checkpointed: bool) -> list[str]:
    """Experts of the last rank get no token at all."""
    mesh, rank, ranks = ep_mesh(), dist.get_rank(), dist.get_world_size()
    model = mixture("gpt_oss", torch.float32)
    with torch.no_grad():  # every token chooses among the first two experts
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter[:2] += 1000.0
    batch = ragged_batch()
    loss, expected = plain_step(model, batch)
    expert_parallel(model, mesh)
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    own = total_loss(model, own_rows(batch, rank, ranks)) / valid(batch)
    own.backward()  # type: ignore[no-untyped-call]
    if rank == ranks - 1:
        for name, parameter in distributed(model).items():
            assert isinstance(parameter.grad, DTensor), name
            local = parameter.grad.to_local()
            assert local.shape[0] == 4 // ranks
            assert not local.any(), name
    return compare(f"starved {checkpointed=}", own, loss, gathered(model), expected, 1e-5)


def balanced(model_type: str, masked: bool) -> list[str]:
    """With the auxiliary loss of all tokens."""
    mesh, rank, ranks = ep_mesh(), dist.get_rank(), dist.get_world_size()
    model = mixture(model_type, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".gate.weight"):  # so that the ranks' tokens are used unlike each other
                parameter *= 10
    batch = dict(ragged_batch())
    if masked:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1:3, 6:] = 0
        batch["labels"][1:3, 6:] = -100
    config, coefficient = model.config, 0.5
    model.config.output_router_logits = True
    output = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), use_cache=False)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss = loss + coefficient * output.aux_loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expert_parallel(model, mesh)
    mine = own_rows(batch, rank, ranks)
    mask = mine.get("attention_mask")
    output = model(input_ids=mine["input_ids"], attention_mask=mask, use_cache=False)
    own = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), mine["labels"][:, 1:].flatten(), reduction="sum"
    ) / valid(batch)
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    part = load_balancing_loss(
        output.router_logits, experts, config.num_experts_per_tok, mask, mesh.get_group()
    )
    own = own + coefficient * part
    own.backward()  # type: ignore[no-untyped-call]
    wrong = compare(f"{model_type} {masked=}", own, float(loss.detach()), gathered(model), expected, 1e-5)
    # the mean of the ranks' own losses is something else, or this test would show nothing
    mean = output.aux_loss.detach() / ranks
    whole = part.detach().clone()
    dist.all_reduce(mean)
    dist.all_reduce(whole)
    assert abs(float(mean) - float(whole)) > 1e-4 * float(whole)
    return wrong


def in_two_threads(rounds: int) -> list[str]:
    """A forward and a backward side by side, in another order on each rank."""
    mesh, rank = ep_mesh(), dist.get_rank()
    directions = Directions.of(mesh, separate=True)
    assert directions.forward is not directions.backward
    torch.manual_seed(rank)
    chosen = torch.randint(0, 4, (6 + rank, 2))
    weights = torch.rand(6 + rank, 2)
    failed: list[str] = []

    def forward() -> tuple[Tensor, Tensor]:
        hidden = torch.arange(6.0 + rank).unsqueeze(1).expand(-1, 3).clone().requires_grad_()
        route = plan_route(chosen, 4, directions)
        rows, row_weights = dispatch(route, hidden, weights)
        result = combine(route, rows * row_weights, *chosen.shape)
        if not torch.allclose(result, hidden * weights.sum(1, keepdim=True)):
            failed.append("forward")
        return hidden, result

    waiting = [forward() for _ in range(rounds)]

    def backwards() -> None:
        for hidden, result in waiting:
            result.sum().backward()  # type: ignore[no-untyped-call]
            if hidden.grad is None or not torch.allclose(
                hidden.grad, weights.sum(1, keepdim=True).expand(-1, 3)
            ):
                failed.append("backward")

    def forwards() -> None:
        for _ in range(rounds):
            forward()

    threads = [
        threading.Thread(target=run) for run in ((forwards, backwards) if rank else (backwards, forwards))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def replayed() -> list[str]:
    """Expert parallel, checkpointed, and with every choice recorded and replayed."""
    mesh, rank, ranks = ep_mesh(), dist.get_rank(), dist.get_world_size()
    model = mixture("qwen3_moe", torch.float32)
    batch = ragged_batch()
    loss, expected = plain_step(model, batch)
    expert_parallel(model, mesh, Directions.of(mesh, separate=True))
    routing = StageRouting(model, {name: place for place, name in enumerate(mixtures(model))})
    model.activation_checkpointing_enable({"use_reentrant": False})
    mine = own_rows(batch, rank, ranks)
    with routing.forward(0, mine):
        own = total_loss(model, mine) / valid(batch)
    with routing.backward(0, last=True):
        own.backward()  # type: ignore[no-untyped-call]
    return compare("replayed", own, loss, gathered(model), expected, 1e-5)


def refused(model_type: str, options: dict[str, Any], error: type[Exception]) -> tuple[str, bool]:
    """What the error says, and whether the model is as it was."""
    model = mixture(model_type, torch.float32, **options)
    classes = [type(part) for part in model.modules()]
    try:
        expert_parallel(model, ep_mesh())
    except error as caught:
        same = classes == [type(part) for part in model.modules()]
        return str(caught), same and not any(isinstance(p, DTensor) for p in model.parameters())
    return "", False
