"""Pipelines of a user's own modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Checkpointing, Pipeline, StageInfo, split_batch
from penstock.errors import BatchError, ConfigError, ModelError
from support.own_chain import Piece, squares, x_batch
from support.reference import gradients_of
from support.refusals import refuses


def pipeline(provider: Callable[[StageInfo], nn.Module], **options: Any) -> Pipeline:
    wanted = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "loss_fn": squares, **options}
    return Pipeline.from_provider(provider, **wanted)


def test_a_provider_may_return_modules_that_it_keeps() -> None:
    pieces = [Piece(StageInfo(stage, 2)) for stage in range(2)]
    reference = copy.deepcopy(pieces)
    pipe = pipeline(lambda info: pieces[info.stage])
    pipe.step(x_batch())
    squares(reference[1](reference[0](x_batch()["x"])), None).backward()  # type: ignore[no-untyped-call]
    for own, other in zip(pieces, reference, strict=True):
        torch.testing.assert_close(gradients_of(own), gradients_of(other))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_one_module_for_two_stages_is_refused(schedule: str) -> None:
    pieces = [Piece(StageInfo(stage, 2)) for stage in range(2)]
    with refuses(ModelError, rule="same object"):
        pipeline(lambda info: pieces[0 if schedule == "1f1b" else info.stage], schedule=schedule)


def test_evaluation_in_inference_mode_before_the_first_step() -> None:
    pipe = pipeline(Piece)
    with torch.inference_mode():
        before = pipe.evaluate(x_batch()).loss
    assert pipe.step(x_batch()).loss == pytest.approx(before)


def test_a_loss_that_is_no_number_is_no_harmless_batch() -> None:
    pipe = pipeline(Piece, loss_fn=lambda output, microbatch: output)
    with refuses(ModelError, "a loss of shape [4, 6]", "loss_fn returns"):
        pipe.step(x_batch())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_a_loss_may_look_up_targets_by_the_microbatchs_number(schedule: str) -> None:
    """As d9d's loss handler does, which splits the targets itself."""
    batch = x_batch()
    targets = {"y": torch.arange(float(len(batch["x"])))}
    parts = split_batch(targets, 4)

    def by_number(output: Tensor, microbatch: object, number: int) -> Tensor:
        loss: Tensor = (output.mean(-1) - parts[number]["y"]).square().mean()
        return loss

    def by_entry(output: Tensor, microbatch: Any) -> Tensor:
        loss: Tensor = (output.mean(-1) - microbatch["y"]).square().mean()
        return loss

    ranks = {"schedule": schedule, "microbatches": 4}
    pipe, other = pipeline(Piece, loss_fn=by_number, **ranks), pipeline(Piece, loss_fn=by_entry, **ranks)
    wanted = other.step(batch | targets).loss
    assert pipe.step(batch).loss == wanted
    assert pipe.evaluate(batch).loss == pytest.approx(wanted)
    for own, reference in zip(pipe.modules.values(), other.modules.values(), strict=True):
        torch.testing.assert_close(gradients_of(own), gradients_of(reference), rtol=0, atol=0)
    pipe.close()


def test_a_loss_without_a_graph_is_refused() -> None:
    pipe = pipeline(Piece, loss_fn=lambda output, microbatch: output.detach().mean())
    with refuses(ModelError, "a loss of stage 1 that depends on no trained weight"):
        pipe.step(x_batch())


def test_what_has_no_gradient_is_a_stages_own() -> None:
    """In one process a stage that changed it in place wrote into the batch."""

    class Passes(Piece):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), mask

    class Adds(Piece):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            mask.add_(1)
            return super().forward(x) * mask.sum()

    def provider(info: StageInfo) -> nn.Module:
        return Adds(info) if info.is_last else Passes(info)

    mask = torch.ones(4)
    pipe = pipeline(provider)
    losses = [pipe.step({**x_batch(4), "mask": mask}).loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert mask.tolist() == [1.0] * 4


def test_a_backward_is_not_cast_by_the_callers_autocast() -> None:
    """Plain torch wants autocast left before backward(); a step leaves no moment for that."""

    class Mixed(Piece):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    for schedule in ("1f1b", "zb_h1"):
        found = []
        for enabled in (False, True):
            pipe = pipeline(Mixed, schedule=schedule)
            with torch.autocast("cpu", enabled=enabled):
                pipe.step(x_batch())
            found.append([p.grad for p in pipe.parameters()])
        for plain, cast in zip(*found, strict=True):
            torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_microbatches_without_rows_and_limits_without_a_model() -> None:
    pipe = pipeline(Piece)
    with refuses(BatchError, "microbatch 1", "rows"):
        pipe.step([x_batch(), {"x": torch.zeros(0, 3)}])
    with refuses(ConfigError, "memory_limit with from_provider"):
        pipeline(Piece, activation_checkpointing=Checkpointing(memory_limit=1e9, shape=(1, 1)))
