"""Token accuracy on a mesh is that of one process: parts of a batch, of rows and of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Axes
from penstock.batch.loss import IGNORED, NextToken
from support.mesh import batch, build_pipe, later, model_of, own_part, same_on_all
from support.pool import Pool


def likely_batch() -> tuple[dict[str, Tensor], float]:
    """A batch of which many labels are the whole model's likeliest token, and the accuracy of one process."""
    whole, model = batch(), model_of("llama").eval()
    with torch.no_grad():
        logits = model(input_ids=whole["input_ids"]).logits[:, :-1]
    labels = whole["labels"]
    chosen = torch.rand(labels[:, 1:].shape, generator=torch.Generator().manual_seed(3)) < 0.5
    valid = labels[:, 1:] != IGNORED
    labels[:, 1:] = torch.where(chosen & valid, logits.argmax(-1), labels[:, 1:])
    hits = (logits.argmax(-1) == labels[:, 1:]) & valid  # in float64 no two logits tie
    return whole, float(hits.sum() / valid.sum())


def accuracies(ranks: int, axes: Axes, options: dict[str, Any]) -> list[float]:
    whole, _ = likely_batch()
    pipe = build_pipe("llama", ranks, axes, {"loss_fn": NextToken(accuracy=True), **options})
    mine = own_part(whole, *pipe.batch_part)
    found = [pipe.evaluate(mine).accuracy, pipe.step(mine).accuracy]
    pipe.close()
    return [-1.0 if accuracy is None else accuracy for accuracy in found]


@pytest.mark.parametrize(
    ("ranks", "axes", "options"),
    [
        (2, Axes(tp=2), {}),
        (2, Axes(tp=2), {"chunked_loss": True}),
        (2, Axes(cp=2), {"context": "ring"}),
        (2, Axes(dp_shard=2), {}),
        *later((1, Axes(tp=2, cp=2), {}), (1, Axes(dp_replicate=2, tp=2), {"chunked_loss": True})),
    ],
)
def test_it_is_that_of_one_process(pool: Pool, ranks: int, axes: Axes, options: dict[str, Any]) -> None:
    _, expected = likely_batch()
    assert 0.4 < expected < 0.9
    assert same_on_all(pool.run(4, accuracies, ranks, axes, options)) == pytest.approx(
        [expected] * 2, rel=1e-6
    )
