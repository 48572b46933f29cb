"""Loss and every gradient of a mesh are those of one process: each axis, and any two that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock import Axes, Sharded
from penstock.errors import InputError
from support.mesh import batch, build_pipe, compare, later, model_of, own_part, worst_gradient
from support.pool import Pool
from support.reference import plain_step

ULYSSES, RING = {"context": "ulysses"}, {"context": "ring"}
# family, ranks of the pipeline, axes, schedule, options
CASES: list[tuple[str, int, Axes, Any, dict[str, Any]]] = [
    ("qwen3", 2, Axes(tp=2), "1f1b", {"activation_checkpointing": True}),
    ("qwen3", 2, Axes(tp=2), "zb_v", {"sequence_parallel": True}),
    ("llama", 1, Axes(dp_shard=2, tp=2), "1f1b", {"sequence_parallel": True, "tied": True}),
    ("mixtral", 1, Axes(dp_shard=2, cp=2, ep=4), "1f1b", ULYSSES),
    ("mistral", 2, Axes(cp=2), "zb_v", RING),
    ("llama", 2, Axes(dp_shard=2), "zb_v", {}),
    ("llama", 2, Axes(dp_shard=2), "1f1b", {"tied": True}),
]
MORE: list[tuple[str, int, Axes, Any, dict[str, Any]]] = [
    ("llama", 2, Axes(cp=2), "1f1b", ULYSSES),
    ("mixtral", 2, Axes(dp_shard=2, ep=2), "1f1b", {}),
    ("mixtral", 2, Axes(dp_shard=2, ep=2), "dualpipe_v", {}),
    ("llama", 1, Axes(cp=2, tp=2), "1f1b", RING),
    ("llama", 2, Axes(tp=2), "zb_v", {}),
    *((family, 1, Axes(dp_shard=2, tp=2), "1f1b", {"sequence_parallel": sequence, "tied": tied})
      for family, sequence, tied in (("qwen2", False, True), ("phi3", True, False), ("mixtral", True, True),
                                     ("olmo2", True, True), ("llama", False, False))),
    ("mixtral", 1, Axes(dp_shard=4, ep=2), "1f1b", {}),
    ("mixtral", 1, Axes(dp_replicate=2, dp_shard=2, ep=2), "1f1b", {}),
    ("llama", 2, Axes(tp=2), "1f1b", {"tied": True}),
    ("llama", 2, Axes(dp_shard=2), "1f1b", {}),
    ("llama", 2, Axes(dp_shard=2), "dualpipe_v", {}),
    # gathered again for each backward
    ("llama", 2, Axes(dp_shard=2), "1f1b", {"sharded": Sharded(reshard_after_forward=True)}),
    ("llama", 2, Axes(dp_replicate=2), "1f1b", {}),
    ("llama", 1, Axes(dp_shard=2, dp_replicate=2), "1f1b", {}),
    ("llama", 1, Axes(dp_shard=-1), "1f1b", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "ranks", "axes", "schedule", "options"),
    [CASES[0], CASES[3], *later(*CASES[1:3], *CASES[4:], *MORE)],
)
def test_as_one_process(
    pool: Pool, family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any]
) -> None:
    compare(pool, family, ranks, axes, schedule, options)


SCHEDULES: dict[str, Any] = {
    "1f1b": "1f1b",
    "interleaved_zero_bubble": {"schedule": "1f1b", "stages_per_rank": 2, "zero_bubble": True},
    "dualpipe_v": "dualpipe_v",
}
DENSE: list[tuple[Axes, dict[str, Any]]] = [
    (Axes(dp_replicate=2), {}),
    (Axes(dp_shard=4), {}),
    (Axes(cp=4), {}),
    (Axes(cp=4), RING),
    (Axes(tp=2), {}),
    (Axes(dp_replicate=2, dp_shard=2), {}),
    (Axes(dp_replicate=2, cp=2), {}),
    (Axes(dp_replicate=2, tp=2), {}),
    (Axes(dp_shard=2, cp=2), RING),
    (Axes(dp_shard=2, tp=2), {}),
    (Axes(cp=2, tp=2), {}),
    (Axes(cp=2, tp=2), RING),
]
MIXTURE: list[tuple[Axes, dict[str, Any]]] = [
    (Axes(dp_shard=4, ep=4), {}),
    (Axes(dp_shard=4, ep=2), {}),
    (Axes(cp=4, ep=4), {}),
    (Axes(cp=4, ep=4), RING),
    (Axes(dp_replicate=2, dp_shard=2, ep=2), {}),
    (Axes(dp_shard=2, cp=2, ep=2), RING),
    (Axes(dp_shard=2, cp=2, ep=4), {}),
    (Axes(dp_shard=2, ep=2, tp=2), {}),
    (Axes(dp_replicate=2, tp=2), {}),
]
EIGHT = [("qwen3", *case) for case in DENSE] + [("mixtral", *case) for case in MIXTURE]


@pytest.mark.parallel
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("family", "axes", "options"), EIGHT, ids=str)
def test_two_axes_on_eight_processes(
    eight: Pool, family: str, axes: Axes, options: dict[str, Any], schedule: str
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    world = 2 * axes.ranks_per_stage
    compare(eight, family, 2, axes, SCHEDULES[schedule], {**options, "model": heads}, world)


def compiled_layers(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):
            part.compile(backend="aot_eager")
    return module


def compiled(family: str, ranks: int, axes: Axes, options: dict[str, Any]) -> tuple[str, float]:
    """What two steps of compiled layers end in: "exact" with how far gradients are off, or the refusal."""
    torch._dynamo.reset()
    model = model_of(family)
    loss, expected = plain_step(model, batch())
    try:
        pipe = build_pipe(family, ranks, axes, {**options, "parallelize_fn": compiled_layers})
        results = [pipe.step(own_part(batch(), *pipe.batch_part)) for _ in range(2)]
    except InputError as error:
        return f"{type(error).__name__}: {error}", 0.0
    worst = max(worst_gradient(pipe, expected, times=2)[0], *(abs(result.loss - loss) for result in results))
    pipe.close()
    return "exact", worst


COMPILED: list[tuple[str, Axes, dict[str, Any]]] = [
    ("llama", Axes(dp_shard=2), {}),
    ("llama", Axes(tp=2), {}),
    ("llama", Axes(cp=2), ULYSSES),
    ("llama", Axes(cp=2), RING),
    ("mixtral", Axes(dp_shard=2, ep=2), {}),
    ("llama", Axes(tp=2), {"sequence_parallel": True}),
]


@pytest.mark.parallel
@pytest.mark.parametrize(("family", "axes", "options"), COMPILED)
def test_compiled_layers_are_exact(pool: Pool, family: str, axes: Axes, options: dict[str, Any]) -> None:
    for verdict, worst in pool.run(4, compiled, family, 2, axes, options):
        assert verdict == "exact"
        assert worst < 1e-10
