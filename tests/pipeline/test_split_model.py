"""The norm of all gradients of a split model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from penstock import AutoPipeline
from support.families import pipeline, ragged_batch, tiny_model
from support.reference import gradients_of, plain_step


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_norm_counts_a_tied_weight_once(ranks: int) -> None:
    model = tiny_model("llama", torch.float64, tied=True)
    _, gradients = plain_step(model, ragged_batch())
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    pipe = AutoPipeline(ranks=ranks, microbatches=3).build(model)
    pipe.step(ragged_batch())
    assert pipe.clip_grad_norm_(0.1) == pytest.approx(float(expected), rel=1e-9)
    assert pipe.clip_grad_norm_(1.0) == pytest.approx(0.1, rel=1e-4)
    assert {name for name, _ in pipe.owned_parameters()} == set(dict(model.named_parameters()))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_a_norm_that_is_not_finite_clips_as_torch_does(odd: float, max_norm: float) -> None:
    """0.5.0: with a norm of NaN no gradient changed, as NaN is not below 1: torch makes all of them NaN."""
    model = tiny_model("llama")
    pipe = pipeline(model)
    pipe.step(ragged_batch())
    for name, gradient in gradients_of(pipe).items():
        model.get_parameter(name).grad = gradient
    for named in (dict(pipe.named_parameters()), dict(model.named_parameters())):
        first = named["model.norm.weight"].grad
        assert first is not None
        first[0] = odd
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.testing.assert_close(pipe.clip_grad_norm_(max_norm), float(norm), equal_nan=True)
    torch.testing.assert_close(gradients_of(pipe), gradients_of(model), rtol=0, atol=0, equal_nan=True)
