"""FSDP2 and HSDP beside the pipeline: loss and every gradient of one process, whatever the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Axes, Pipeline, Sharded
from penstock.errors import EquivalenceError
from support.families import tiny_model
from support.mesh import batch, build_whole, compare, full, later, own_part
from support.pool import Pool
from support.reference import plain_step

RESHARDED = {"sharded": Sharded(reshard_after_forward=True)}
CASES: list[tuple[int, Axes, str, dict[str, Any]]] = [
    (2, Axes(dp_shard=2), "1f1b", {}),
    (2, Axes(dp_shard=2), "zb_v", {}),
    (2, Axes(dp_shard=2), "1f1b", {"tied": True}),
]
MORE: list[tuple[int, Axes, str, dict[str, Any]]] = [
    (2, Axes(dp_shard=2), "dualpipe_v", {}),
    (2, Axes(dp_shard=2), "1f1b", RESHARDED),  # gathered again for each backward
    (2, Axes(dp_replicate=2), "1f1b", {}),
    (1, Axes(dp_shard=2, dp_replicate=2), "1f1b", {}),
    (1, Axes(dp_shard=-1), "1f1b", {}),
]


@pytest.mark.parametrize(("ranks", "axes", "schedule", "options"), [*CASES, *later(*MORE)])
def test_as_one_process(pool: Pool, ranks: int, axes: Axes, schedule: str, options: dict[str, Any]) -> None:
    compare(pool, "llama", ranks, axes, schedule, options)


def verified(ranks: int, axes: Axes, schedule: str) -> tuple[bool, float, str]:
    """Whether the split model passes, its largest difference, and the error for another weight."""
    model = tiny_model("llama", torch.float64, layers=4)
    pipe = build_whole(model, ranks, axes, schedule=schedule)
    mine = own_part(batch(), *pipe.batch_part)
    report = pipe.verify_against(model, mine)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1.001)
    try:
        pipe.verify_against(model, mine)
        refused = ""
    except EquivalenceError as error:
        refused = str(error)
    pipe.close()
    return report.passed, report.largest, refused


def test_verify_against_the_whole_model(pool: Pool) -> None:
    for passed, largest, refused in pool.run(4, verified, 2, Axes(dp_shard=2), "1f1b"):
        assert passed
        assert largest < 1e-10
        assert "model.norm.weight" in refused


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


def collectives(axes: Axes, schedule: str, microbatches: int) -> dict[str, int]:
    """How often each collective on tensors runs in one step, the first left out."""
    model = tiny_model("llama", layers=4)
    pipe = build_whole(model, 2, axes, schedule=schedule, microbatches=microbatches)
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


def test_gathered_and_reduced_once_a_step(pool: Pool) -> None:
    """However many microbatches: one gathering and one reduction for each layer and for the rest."""
    for microbatches in (2, 4):
        found = pool.run(4, collectives, Axes(dp_shard=2), "zb_h1", microbatches)
        for counts in found:
            groups = counts["layers"] + counts["hosted"]
            assert counts["_allgather_base_"] == groups, counts
            assert counts["_reduce_scatter_base_"] == groups, counts


def in_halves(axes: Axes, schedule: str) -> tuple[float, float, bool]:
    """The loss of a step computed in bfloat16 on shards kept in float32, that of one process in float32, and
    whether gradients are in float32."""
    model = tiny_model("llama", layers=4)
    whole = batch()
    sharded = Sharded(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pipe = build_whole(model, 2, axes, schedule=schedule, sharded=sharded)
    found = pipe.step(own_part(whole, *pipe.batch_part)).loss
    kept = all(p.grad is not None and p.grad.dtype == torch.float32 for p in pipe.parameters())
    pipe.close()
    return found, plain_step(model, whole)[0], kept


def test_weights_computed_in_bfloat16_keep_float32_gradients(pool: Pool) -> None:
    for found, expected, kept in pool.run(4, in_halves, Axes(dp_shard=2), "zb_v"):
        assert found != expected
        assert found == pytest.approx(expected, rel=1e-2)
        assert kept


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
        lambda info: Line(info.stage), ranks=2, schedule=schedule, microbatches=2, timeout=30, axes=axes,
        loss_fn=lambda output, part: (output - part["target"]).square().mean(),
    )  # fmt: skip
    x, target = lines()
    loss = pipe.step(own_part({"x": x, "target": target}, *pipe.batch_part)).loss
    found = {}
    for index, module in pipe.modules.items():
        gradient = module.get_parameter("weight").grad
        assert gradient is not None
        found[index] = full(gradient)
    pipe.close()
    return loss, found


def test_modules_of_ones_own(pool: Pool) -> None:
    answers = pool.run(4, provided, Axes(dp_shard=2), "zb_v")
    stages = max(index for _, found in answers for index in found) + 1
    whole = torch.nn.Sequential(*(Line(number) for number in range(stages)))
    x, target = lines()
    loss = (whole(x) - target).square().mean()
    loss.backward()
    for found_loss, found in answers:
        assert found_loss == pytest.approx(float(loss.detach()), rel=1e-10)
        for index, gradient in found.items():
            expected = whole[index].get_parameter("weight").grad
            assert expected is not None
            assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-14)
