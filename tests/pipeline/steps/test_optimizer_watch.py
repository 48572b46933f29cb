from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

from penstock import AutoPipeline, Pipeline
from penstock.errors import ConfigError
from penstock.pipeline.steps.optimizer_watch import OptimizerWatch
from support.families import ragged_batch, tiny_model
from support.refusals import refuses


def pipeline() -> tuple[Pipeline, list[torch.nn.Parameter]]:
    model = tiny_model("llama", layers=2)
    return AutoPipeline(ranks=2, microbatches=2).build(model), list(model.parameters())


def test_an_optimizer_of_the_given_model_is_named_once() -> None:
    """0.5.0: it changed nothing, without a word, as the pipeline has copies of the weights."""
    pipe, given = pipeline()
    optimizer = SGD(given, lr=0.1)
    pipe.step(ragged_batch())
    optimizer.step()
    with pytest.warns(UserWarning, match=r"Make it over pipe\.parameters\(\)") as told:
        pipe.step(ragged_batch())
    assert told[0].filename == __file__
    optimizer.step()
    pipe.step(ragged_batch())  # warnings are errors: it is told once


def test_an_optimizer_of_the_pipeline_is_not_named() -> None:
    pipe, given = pipeline()
    ours, other = SGD(pipe.parameters(), lr=0.1), SGD(given, lr=0.1)
    for _ in range(2):
        pipe.step(ragged_batch())
        pipe.step(ragged_batch())  # gradients of two steps are summed
        other.step()  # another model's
        ours.step()
        pipe.zero_grad()


def test_weights_that_are_changed_by_hand_are_trained() -> None:
    pipe, given = pipeline()
    other = SGD(given, lr=0.1)
    for _ in range(2):
        pipe.step(ragged_batch())
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.sub_(0.1)
        other.step()


# _parts: the watch of an optimizer is in no public list
@pytest.mark.parametrize("end", ["close", "trained"])
def test_no_optimizer_is_looked_at_any_more(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: a hook of torch on all optimizers stayed for ever."""
    seen: list[object] = []
    monkeypatch.setattr(OptimizerWatch, "stepped", lambda watch, optimizer: seen.append(watch))
    pipe, given = pipeline()
    pipe.step(ragged_batch())
    SGD(given, lr=0.1).step()
    (watch,) = (part for part in pipe._parts if isinstance(part, OptimizerWatch))
    assert seen.count(watch) == 1
    if end == "close":
        pipe.close()
    else:
        watch._done = True  # as its own optimizer leaves it
        pipe.step(ragged_batch())
    SGD(given, lr=0.1).step()
    assert seen.count(watch) == 1


def test_a_gpu_that_is_not_there_is_refused() -> None:
    """0.5.0: in one process it trained on the CPU."""
    if not torch.cuda.is_available():
        with refuses(ConfigError, "device='cuda'", "sees 0 GPUs"):
            AutoPipeline(ranks=2, microbatches=2, device="cuda").build(tiny_model("llama", layers=2))
    with refuses(ConfigError, "device='cuda:99'", "this process sees"):
        AutoPipeline(ranks=2, microbatches=2, device="cuda:99").build(tiny_model("llama", layers=2))
