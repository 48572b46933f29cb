"""Models whose edges carry more than hidden states, over real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock import AutoPipeline
from support import census, zoo
from support.reference import TOLERANCE, assert_gradients


def exact(ranks: int, cases: Sequence[tuple[str, Any, dict[str, Any]]]) -> list[str]:
    """Of each model type, schedule and change of the config: what went wrong on this rank."""
    torch.set_num_threads(1)
    wrong = []
    for model_type, schedule, changes in cases:
        model, batch = zoo.tiny_model(model_type, **changes), zoo.tiny_batch(model_type)
        loss, expected = census.plain(model, batch)
        pipe = AutoPipeline(
            ranks=ranks, schedule=schedule, microbatches=census.MICROBATCHES, timeout=30
        ).build(model)
        try:
            for _ in range(2):  # a second step meets nothing that the first one left
                pipe.zero_grad()
                assert abs(pipe.step(batch).loss - loss) <= 1e-5 * max(1.0, abs(loss))
            for module in pipe.modules.values():
                found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
                assert found.keys() == dict(module.named_parameters()).keys() & expected.keys()
                assert_gradients(found, expected, TOLERANCE[torch.float32])
        except AssertionError as difference:
            wrong.append(f"{model_type} P={ranks} {schedule}: {difference}")
        pipe.close()
    return wrong
