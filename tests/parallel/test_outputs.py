"""Outputs of whole sequences, and lengths that differ, on a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import Axes, Padding
from support.families import tiny_model
from support.mesh import LAYERS, batch, build_pipe, full, model_of, own_part
from support.pool import Pool


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
    """Of the rows of the own part of the batch."""
    for differences in pool.run(4, outputs, ranks, axes, options, 13):
        assert len(differences) >= 2
        assert max(differences) < 1e-10, differences


def ragged(parts: int) -> list[list[dict[str, Tensor]]]:
    """For each part of the batch two microbatches, all of different lengths."""
    return [[batch(2, 9 + 4 * part + 3 * at) for at in range(2)] for part in range(parts)]


def padded(ranks: int, axes: Axes, options: dict[str, Any]) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of two steps, of lengths that microbatches and parts of the batch differ in."""
    pipe = build_pipe("llama", ranks, axes, options)
    index, parts = pipe.batch_part
    found = []
    for _ in range(2):
        loss = pipe.step(ragged(parts)[index]).loss
        gradients = {name: full(p.grad).clone() for name, p in pipe.named_parameters() if p.grad is not None}
        found.append((loss, gradients))
        pipe.zero_grad()
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "axes", "shapes"),
    [
        (2, Axes(cp=2), "padded"),
        (1, Axes(dp_shard=2, cp=2), Padding(multiple=3, context_shards=2)),
        (2, Axes(dp_shard=2), "padded"),
    ],
)
def test_lengths_may_differ_between_microbatches_and_parts(
    pool: Pool, ranks: int, axes: Axes, shapes: Any
) -> None:
    """Between microbatches, and between parts of the batch, each of which is padded by itself."""
    parts = ragged(axes.batch_parts)
    model = tiny_model("llama", torch.float64, layers=LAYERS)
    given = [microbatch for part in parts for microbatch in part]
    loss = ragged_loss(model, given)
    for steps in pool.run(4, padded, ranks, axes, {"shapes": shapes}):
        for found, gradients in steps:
            assert found == pytest.approx(loss, rel=1e-10)
            for name, gradient in gradients.items():
                whole = model.get_parameter(name).grad
                assert whole is not None
                assert float((gradient - whole).abs().max()) < 1e-10 * float(whole.abs().max()), name


def ragged_loss(model: Any, microbatches: list[dict[str, Tensor]]) -> float:
    """Of all microbatches in one plain process; its gradients are left in the model."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one in microbatches:
        logits, labels = model(input_ids=one["input_ids"]).logits[:, :-1], one["labels"][:, 1:]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens += int((labels != -100).sum())
    (total / tokens).backward()  # type: ignore[no-untyped-call]
    return float(total.detach()) / tokens
