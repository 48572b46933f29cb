"""Random state and the loop's own state in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.checkpoint import contents
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint, save_checkpoint
from penstock.errors import CheckpointError
from penstock.parallel.reductions import Reductions
from support.folders import relist
from support.jobs_checkpoint import make
from support.refusals import refuses
from support.writing import Made


# _random_states is asked for a GPU that this machine does not have
def test_the_random_state_is_that_of_the_pipelines_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: with device="cuda:1" in one process the state of GPU 0 was saved and restored."""
    asked: list[tuple[str, torch.device]] = []

    def get(device: torch.device) -> Tensor:
        asked.append(("get", device))
        return torch.zeros(4, dtype=torch.uint8)

    zeros: Any = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: asked.append(("set", device)))
    pipe: Any = SimpleNamespace(
        device=torch.device("cuda:1"), reductions=Reductions(), processes=SimpleNamespace(index=0, count=1)
    )
    ((state,)) = contents._random_states(pipe).values()
    contents.set_random_state({"cuda": state["cuda"]}, pipe)
    assert asked == [("get", pipe.device), ("set", pipe.device)]


def test_the_state_comes_back_and_so_do_random_numbers(tmp_path: Path) -> None:
    pipe, optimizers = make(2, "1f1b")
    state = {"step": 3, "data": {"file": "a", "row": [1, 2.5, None, True]}}
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizers, state)
    drawn = torch.rand(3)
    assert load_checkpoint(tmp_path / "checkpoint", pipe, optimizers) == state
    assert torch.equal(torch.rand(3), drawn)

    (random,) = (tmp_path / "checkpoint").glob("random-*")
    random.rename(random.with_name("random-00001-of-00002.safetensors"))  # as two processes write it
    relist(tmp_path / "checkpoint")
    before = torch.get_rng_state()
    load_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_that_json_would_change_is_refused(tmp_path: Path, alone: Made) -> None:
    pipe, optimizers = alone
    for state, value in (
        ({"milestones": {10: 1}}, "state['milestones']: the key 10"),
        ({"losses": [torch.zeros(1)]}, "state['losses'][0] is a Tensor"),
    ):
        with refuses(CheckpointError, value, "is JSON"):
            CheckpointWriter(pipe).save(tmp_path / "checkpoint", optimizers, state)
    assert list(tmp_path.iterdir()) == []
