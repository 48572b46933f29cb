"""Steps of a count of microbatches, next to a plain process."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from penstock import AutoPipeline, Pipeline
from support.ragged import Microbatches
from support.reference import assert_every_gradient, plain_steps


def made(model: PreTrainedModel, schedule: Any = "1f1b", ranks: int = 2, **options: Any) -> Pipeline:
    options = {"microbatches": 4, "timeout": 30, **options}
    return AutoPipeline(ranks=ranks, schedule=schedule, **options).build(model)


def assert_exact(
    pipe: Pipeline, model: PreTrainedModel, given: Microbatches, tolerance: float = 1e-10
) -> None:
    loss, expected = plain_steps(model, given)
    pipe.zero_grad()
    result = pipe.step(given)
    assert result.loss == pytest.approx(loss, abs=tolerance)
    assert result.tokens == sum(int((each["labels"][:, 1:] != -100).sum()) for each in given)
    assert_every_gradient(pipe.modules.values(), expected, tolerance)
    assert pipe.timeline.microbatches == len(given)
