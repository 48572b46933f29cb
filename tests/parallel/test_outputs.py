"""Outputs of whole sequences, and lengths that differ, on a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Axes, Padding
from support.mesh import batch, build_pipe, full, model_of, own_part
from support.pool import Pool
from support.reference import Gradients, assert_gradients, gradients_of, plain_steps


def outputs(ranks: int, axes: Axes, options: dict[str, Any], length: int) -> list[float]:
    """By how much each way to get at logits differs from the whole model's."""
    pipe = build_pipe("llama", ranks, axes, options)
    mine = own_part(batch(length=length), *pipe.batch_part)
    model = model_of("llama").eval()
    with torch.no_grad():
        expected = model(input_ids=mine["input_ids"]).logits
    found = []
    for given in (mine, {"input_ids": mine["input_ids"]}):
        result = pipe.evaluate(given, outputs=True, everywhere=True)
        found.append(float((result.outputs - expected).abs().max()))
    lengths = pipe.evaluate(mine, outputs=lambda output, number: [*output.shape], everywhere=True).outputs
    assert lengths == [[len(mine["input_ids"]) // 2, length, 64]] * 2, lengths
    inferred = pipe.infer(mine)
    if inferred:  # on the rank of the last stage
        whole = torch.cat([inferred[number] for number in sorted(inferred)])
        found.append(float((whole - expected).abs().max()))
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "axes", "options"),
    [(2, Axes(cp=2), {"context": "ulysses"}), (1, Axes(dp_shard=2, cp=2), {"context": "ring"})],
)
def test_outputs_are_of_whole_sequences(pool: Pool, ranks: int, axes: Axes, options: dict[str, Any]) -> None:
    """Those of this rank's part of the batch."""
    for differences in pool.run(4, outputs, ranks, axes, options, 13):
        assert len(differences) >= 2
        assert max(differences) < 1e-10, differences


def ragged(parts: int) -> list[list[dict[str, Tensor]]]:
    """For each part of the batch two microbatches, all of different lengths."""
    return [[batch(2, 9 + 4 * part + 3 * at) for at in range(2)] for part in range(parts)]


def padded(ranks: int, axes: Axes, options: dict[str, Any]) -> list[tuple[float, Gradients]]:
    """Loss and gradients of two steps, of lengths that microbatches and parts of the batch differ in."""
    pipe = build_pipe("llama", ranks, axes, options)
    index, parts = pipe.batch_part
    found = []
    for _ in range(2):
        loss = pipe.step(ragged(parts)[index]).loss
        found.append((loss, {name: full(gradient) for name, gradient in gradients_of(pipe).items()}))
        pipe.zero_grad()
    pipe.close()
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("ranks", "axes", "shapes"),
    [
        (1, Axes(dp_shard=2, cp=2), Padding(multiple=3, context_shards=2)),
        (2, Axes(dp_shard=2), "padded"),
    ],
)
def test_lengths_may_differ_between_microbatches_and_parts(
    pool: Pool, ranks: int, axes: Axes, shapes: Any
) -> None:
    """Between microbatches, and between parts of the batch, each of which is padded by itself."""
    parts = ragged(axes.batch_parts)
    loss, expected = plain_steps(model_of("llama"), [microbatch for part in parts for microbatch in part])
    for steps in pool.run(4, padded, ranks, axes, {"shapes": shapes}):
        for found, gradients in steps:
            assert found == pytest.approx(loss, rel=1e-10)
            assert_gradients(gradients, expected, 1e-10)
