"""Pipelines on a mesh of several axes, run by the pool's workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import AutoPipeline, Axes, CheckpointWriter, Pipeline, Sharded, load_checkpoint
from penstock.errors import EquivalenceError
from support.families import tiny_model
from support.ragged import tokens
from support.reference import plain_step

ROWS, LENGTH = 8, 12


def batch(rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    """With labels so unevenly left out that each part of the batch counts for another number of items."""
    ids, labels = tokens(rows, length, 1), tokens(rows, length, 2)
    for row in range(rows):
        labels[row, : row % length] = -100
    return {"input_ids": ids, "labels": labels}


def own_part(whole: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    return {name: value.chunk(parts)[index] for name, value in whole.items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def steps(family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps, the second without clearing: loss and gradients beside the whole model's."""
    torch.set_num_threads(1)
    options = dict(options)
    tied, sizes = options.pop("tied", False), options.pop("model", {})
    model = tiny_model(family, torch.float64, layers=4, tied=tied, **sizes)
    whole = batch()
    loss, expected = plain_step(model, whole)
    pipe = AutoPipeline(
        ranks=ranks, schedule=schedule, microbatches=2, timeout=30, axes=axes, **options
    ).build(model)
    mine = own_part(whole, *pipe.batch_part)
    kinds = {name: type(parameter.data) for name, parameter in pipe.named_parameters()}
    evaluated = pipe.evaluate(mine)
    assert kinds == {name: type(parameter.data) for name, parameter in pipe.named_parameters()}
    results = [pipe.step(mine) for _ in range(2)]
    assert kinds == {name: type(parameter.data) for name, parameter in pipe.named_parameters()}
    worst, where = 0.0, ""
    named = dict(pipe.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        assert parameter.grad is not None, name
        difference = float((full(parameter.grad) / 2 - expected[name]).abs().max())
        size = float(expected[name].abs().max())
        if difference / max(size, 1e-300) > worst:
            worst, where = difference / max(size, 1e-300), name
    norm = pipe.clip_grad_norm_(1e9)
    pipe.close()
    return {
        "loss": [result.loss for result in results], "expected": loss, "worst": worst, "where": where,
        "names": sorted(named), "norm": norm, "tokens": results[0].tokens, "evaluated": evaluated.loss,
        "rank": dist.get_rank(),
    }  # fmt: skip


def trained(pipe: Any, whole: dict[str, Tensor], optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(own_part(whole, *pipe.batch_part)).loss)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
    return losses


def saved_and_read(
    folder: str, family: str, first: tuple[int, Axes, str], second: tuple[int, Axes, str], background: bool
) -> tuple[list[float], list[float]]:
    """Losses of three steps on one mesh, a checkpoint, and three more on another."""
    torch.set_num_threads(1)
    whole = batch()
    losses = []
    for number, (ranks, axes, schedule) in enumerate((first, second)):
        model = tiny_model(family, torch.float64, layers=4, seed=number)
        pipe = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=2, timeout=30, axes=axes).build(
            model
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if number:
            assert load_checkpoint(f"{folder}/checkpoint", pipe, optimizer) == {"step": 3}
        losses.append(trained(pipe, whole, optimizer, 3))
        if not number:
            with CheckpointWriter(pipe, background=background) as writer:
                writer.save(f"{folder}/checkpoint", optimizer, {"step": 3})
        else:
            pipe.save_pretrained(f"{folder}/pretrained")
        pipe.close()
    return losses[0], losses[1]


def verified(ranks: int, axes: Axes, schedule: str) -> tuple[bool, float, str]:
    """Whether the split model passes, by how much it differs; and what is told of one that was bent."""
    torch.set_num_threads(1)
    model = tiny_model("llama", torch.float64, layers=4)
    pipe = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=2, timeout=30, axes=axes).build(model)
    mine = own_part(batch(), *pipe.batch_part)
    report = pipe.verify_against(model, mine)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1.001)
    try:
        pipe.verify_against(model, mine)
        told = ""
    except EquivalenceError as error:
        told = str(error)
    pipe.close()
    return report.passed, report.largest, told


class Collectives(TorchDispatchMode):
    """Counts torch.distributed's operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            name = func._schema.name.split("::")[1]
            self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def collectives(axes: Axes, schedule: str, microbatches: int, sharded: Sharded) -> dict[str, int]:
    """How often each collective on tensors runs in one step, the first left out."""
    torch.set_num_threads(1)
    model = tiny_model("llama", layers=4)
    pipe = AutoPipeline(
        ranks=2, schedule=schedule, microbatches=microbatches, timeout=30, axes=axes, sharded=sharded
    ).build(model)
    mine = own_part(batch(2 * microbatches * axes.batch_parts), *pipe.batch_part)
    pipe.step(mine)
    pipe.zero_grad()
    with Collectives() as counted:
        pipe.step(mine)
    counts = counted.found
    hosted = len(pipe.stages)
    layers = sum(len(stage.layers) for stage in pipe.info) // 2
    pipe.close()
    return {**counts, "hosted": hosted, "layers": layers}


def in_halves(axes: Axes, schedule: str) -> tuple[float, float, bool]:
    """The loss of a step computed in bfloat16 on shards kept in float32, that of one process in float32, and
    whether gradients are in float32."""
    torch.set_num_threads(1)
    model = tiny_model("llama", layers=4)
    whole = batch()
    how = Sharded(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pipe = AutoPipeline(ranks=2, schedule=schedule, microbatches=2, timeout=30, axes=axes, sharded=how).build(
        model
    )
    found = pipe.step(own_part(whole, *pipe.batch_part)).loss
    kept = all(p.grad is not None and p.grad.dtype == torch.float32 for p in pipe.parameters())
    pipe.close()
    return found, plain_step(model, whole)[0], kept


class Line(nn.Module):
    """A stage of one's own that is no list of layers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


def lines() -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)


def provided(axes: Axes, schedule: str) -> tuple[float, dict[int, Tensor]]:
    """Loss, and by stage of this rank the gradient."""
    pipe = Pipeline.from_provider(
        lambda info: Line(info.stage),
        ranks=2,
        schedule=schedule,
        microbatches=2,
        timeout=30,
        axes=axes,
        loss_fn=lambda output, part: (output - part["target"]).square().mean(),
    )
    x, target = lines()
    loss = pipe.step(own_part({"x": x, "target": target}, *pipe.batch_part)).loss
    found = {}
    for index, module in pipe.modules.items():
        gradient = module.get_parameter("weight").grad
        assert gradient is not None
        found[index] = full(gradient)
    pipe.close()
    return loss, found
