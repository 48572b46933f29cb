"""Groups by dimension, and the learning rate as a function of the step alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.train.config import OptimizerSection
from penstock.train.optim import learning_rate, make_optimizer, set_learning_rate


def test_only_matrices_decay() -> None:
    layer, frozen = nn.Linear(2, 3), nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    optimizer = make_optimizer(OptimizerSection(weight_decay=0.3), [*layer.parameters(), frozen])
    matrices, vectors = optimizer.param_groups
    assert matrices["params"] == [layer.weight]
    assert matrices["weight_decay"] == 0.3
    assert vectors["params"] == [layer.bias]
    assert vectors["weight_decay"] == 0.0
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_process_with_matrices_only_has_one_group() -> None:
    assert len(make_optimizer(OptimizerSection(), [nn.Parameter(torch.zeros(2, 2))]).param_groups) == 1


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine_to_its_floor() -> None:
    section = OptimizerSection(learning_rate=2.0, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(section, 12, step) for step in range(1, 13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[7] == pytest.approx(2.0 * 0.55)  # half-way down
    assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (0, 3), (3, 3)])
def test_short_runs_have_a_rate_at_every_step(warmup: int, steps: int) -> None:
    section = OptimizerSection(learning_rate=1.0, warmup_steps=warmup)
    assert all(0 < learning_rate(section, steps, step) <= 1 for step in range(1, steps + 1))
