"""Whole runs of the trainer on a mesh, each worker of the pool one process of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from penstock import Pipeline
from penstock.errors import PenstockError
from penstock.runtime import sharded_weights as spread
from penstock.train import loop
from penstock.train.config.sections import TrainConfig
from penstock.train.run import preflight, run


def trained(
    tree: dict[str, Any],
    poisoned: Collection[int] = (),
    part: int = 0,
    resume: str | None = None,
    wrong: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """What one process tells of the run; the first one's metrics lie in the output folder.

    poisoned: steps in which a row of this part of the batch becomes NaN on its way
    resume: a checkpoint to go on from. One is written where the tree's `train.checkpoint_every` asks for it
    wrong: a rank of the world, and the end of the name of a parameter whose gradient, what this rank holds of
        it, comes out too large there
    """
    torch.set_num_threads(1)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        close = torch.distributed.destroy_process_group  # the world itself is the pool's to close
        patch.setattr(torch.distributed, "destroy_process_group", lambda group=None: group and close(group))
        if "checkpoint_every" not in tree["train"]:
            patch.setattr(loop, "_save", lambda *_: Path("none"))
        poison(patch, poisoned, part)
        if wrong is not None and wrong[0] == torch.distributed.get_rank():
            enlarge(patch, wrong[1])
        updates = count_updates(patch)
        error = ""
        try:
            run(preflight(TrainConfig.model_validate(tree), resume))
        except PenstockError as caught:
            error = f"{type(caught).__name__}: {caught}"
    return {"said": said.getvalue(), "updates": updates(), "error": error}


def enlarge(patch: pytest.MonkeyPatch, name: str) -> None:
    original = Pipeline.step

    def step(pipe: Pipeline, batch: Any, **entries: Any) -> Any:
        result = original(pipe, batch, **entries)
        gradient = next(p.grad for own, p in pipe.named_parameters() if own.endswith(name))
        assert gradient is not None
        spread.own(gradient).mul_(1.01)
        return result

    patch.setattr(Pipeline, "step", step)


def count_updates(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the optimizer has stepped since."""
    rates: list[float] = []
    original = AdamW.step

    def step(optimizer: AdamW) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        original(optimizer)

    patch.setattr(AdamW, "step", step)
    return lambda: len(rates)


def poison(patch: pytest.MonkeyPatch, steps: Collection[int], part: int = 0) -> None:
    """In these steps, counted from 1, one row of this part of the batch becomes NaN on its way."""
    original, calls = Pipeline.step, 0

    def step(pipe: Pipeline, batch: Any, **entries: Any) -> Any:
        nonlocal calls
        calls += 1
        hit = calls in steps and pipe.batch_part[0] == part
        with spoilt_row(pipe) if hit else contextlib.nullcontext():
            return original(pipe, batch, **entries)

    patch.setattr(Pipeline, "step", step)


@contextlib.contextmanager
def spoilt_row(pipe: Pipeline) -> Iterator[None]:
    def spoil(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:1] * float("nan"), output[1:]])

    inner = [(n, m) for module in pipe.modules.values() for n, m in module.named_modules()]
    hooks = [module.register_forward_hook(spoil) for name, module in inner if name.endswith(".mlp")]
    assert hooks
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
