"""A run is planned ahead of its ranks, and nothing of that shows but the time that they need."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

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


def _form_of_its_own() -> dict[str, object]:
    """A model that no other test has planned."""
    from support.tiny import QWEN3

    return {**QWEN3, "hidden_size": 24, "intermediate_size": 40}
