"""A run is planned ahead of its ranks, and nothing of that shows but the time that they need."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.models.huggingface.masks import shape_questions
from penstock.models.split import multiply_adds
from penstock.models.split.multiply_adds import works
from penstock.models.tracing.chain import find_chain
from penstock.train.model import named_model
from penstock.train.rehearsal import rehearse
from penstock.train.settings import make_auto
from support.tiny import config


def test_a_rehearsed_plan_takes_a_moment_and_is_the_same(tmp_path: Path) -> None:
    """And no thread is left, with which ranks could not be forked."""
    settings = config(tmp_path, {**_form_of_its_own(), "num_hidden_layers": 3})
    before, threads = torch.get_rng_state(), threading.active_count()
    began = time.perf_counter()
    rehearse(settings)
    rehearsed = time.perf_counter()
    plan = make_auto(settings).build_plan(named_model(settings.model))
    assert time.perf_counter() - rehearsed < (rehearsed - began) / 2
    assert torch.equal(torch.get_rng_state(), before)
    assert threading.active_count() == threads
    assert [list(stage.layers) for stage in plan.stages] == [[0, 1], [2]]


# _find, _counted: what traces the model
def test_a_rank_that_is_forked_from_a_rehearsal_traces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unreleased: the first step of each start counted the questions about shapes, for .04 s."""
    settings = config(tmp_path, {**_form_of_its_own(), "num_hidden_layers": 4})
    rehearse(settings)
    for traced in (find_chain, shape_questions):
        monkeypatch.setattr(traced, "_find", _refused)
    monkeypatch.setattr(multiply_adds, "_counted", _refused)
    plan = make_auto(settings).build_plan(named_model(settings.model))
    assert plan.completer().shape_questions > 0
    assert works(plan.source.model, plan.chain)


def _refused(*_: object) -> None:
    raise AssertionError("it was traced again")


def _form_of_its_own() -> dict[str, object]:
    """A model that no other test has planned."""
    from support.tiny import QWEN3

    return {**QWEN3, "hidden_size": 24, "intermediate_size": 40}
