"""FSDP2 around stages: verification, collectives of a step, mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Axes, Sharded
from penstock.errors import EquivalenceError

# which layers are sharded by themselves, without processes
from penstock.parallel.fsdp import _with_own_weights
from support.families import tiny_model
from support.mesh import batch, build_whole, model_of, own_part
from support.pool import Pool
from support.predicting import tiny_predicting
from support.reference import plain_step


def test_a_layer_that_shares_a_weight_with_the_rest_is_sharded_with_the_rest() -> None:
    """As a prediction layer on the last stage does, which has the final norm's weight."""
    layers = tiny_predicting().model.layers
    alone = nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2)})
    assert _with_own_weights(alone, [*layers]) == [*layers]
    norm = nn.Module()
    norm.weight = layers[4].final_norm.weight
    shared = nn.ModuleDict({"layers": layers, "norm": norm})
    assert _with_own_weights(shared, [*layers]) == [*layers[:4]]


def verified(axes: Axes) -> tuple[bool, float, str]:
    """Whether the split model passes, its largest difference, and the error for another weight."""
    model = model_of("llama")
    pipe = build_whole(model, 2, axes)
    mine = own_part(batch(), *pipe.batch_part)
    report = pipe.verify_against(model, mine)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1.001)
    with pytest.raises(EquivalenceError) as refused:
        pipe.verify_against(model, mine)
    pipe.close()
    return report.passed, report.largest, str(refused.value)


def test_verify_against_the_whole_model(pool: Pool) -> None:
    for passed, largest, refused in pool.run(4, verified, Axes(dp_shard=2)):
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


def collectives(axes: Axes, schedule: str) -> tuple[int, int, int]:
    """In one step, the first left out: groups of weights that FSDP2 gathers, gatherings and reductions."""
    pipe = build_whole(tiny_model("llama"), 2, axes, schedule=schedule, microbatches=4)
    mine = own_part(batch(8), *pipe.batch_part)
    pipe.step(mine)
    pipe.zero_grad()
    with Collectives() as counted:
        pipe.step(mine)
    layers = sum(len(stage.layers) for stage in pipe.info) // 2
    groups = layers + len(pipe.stages)  # each layer, and the rest of each stage
    pipe.close()
    return groups, counted.found["_allgather_base_"], counted.found["_reduce_scatter_base_"]


def test_weights_are_gathered_and_gradients_reduced_once_for_all_microbatches(pool: Pool) -> None:
    for groups, gathered, reduced in pool.run(4, collectives, Axes(dp_shard=2), "zb_h1"):
        assert groups == gathered == reduced > 0


def in_halves(axes: Axes, schedule: str) -> tuple[float, float, bool]:
    """The loss of a step computed in bfloat16 on shards kept in float32, that of one process in float32, and
    whether gradients are in float32."""
    model, whole = tiny_model("llama"), batch()
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
