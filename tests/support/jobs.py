"""What the pool's workers run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock import AutoPipeline
from support.families import ragged_batch, tiny_model
from support.reference import TOLERANCE, assert_gradients, plain_step

Case = tuple[str, int]  # schedule, microbatches


def equivalence(family: str, tied: bool, ranks: int, cases: Sequence[Case]) -> list[str]:
    """Each case's gradients on this rank beside those of a plain process; what went wrong."""
    model = tiny_model(family, tied=tied)
    batch = ragged_batch()
    loss, expected = plain_step(model, batch)
    wrong = []
    for schedule, microbatches in cases:
        pipe = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=microbatches, timeout=30).build(
            model
        )
        result = pipe.step(batch)
        found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        try:
            assert abs(result.loss - loss) < 1e-5
            assert len(found) == len(dict(pipe.named_parameters()))
            assert_gradients(found, expected, TOLERANCE[torch.float32])
            assert pipe.timeline.peak_live == pipe.proof.peak_live
        except AssertionError as difference:
            wrong.append(f"{family} tied={tied} P={ranks} {schedule} m={microbatches}: {difference}")
        pipe.close()
    return wrong


def results(family: str, ranks: int, microbatches: int, **options: Any) -> Any:
    """Loss, norm and evaluation as this rank sees them."""
    pipe = AutoPipeline(ranks=ranks, microbatches=microbatches, timeout=30, **options).build(
        tiny_model(family)
    )
    before = pipe.evaluate(ragged_batch())
    result = pipe.step(ragged_batch())
    norm = pipe.clip_grad_norm_(0.5)
    return before.loss, result.loss, result.tokens, result.bubble, norm, pipe.clip_grad_norm_(0.5)
