"""Whole runs of the trainer on a mesh, each worker of the pool one process of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from penstock import AutoPipeline, Axes, Pipeline
from penstock.errors import EquivalenceError, PenstockError
from penstock.models.weights.saved import SavedModel
from penstock.runtime.device.memory import PeakMemory
from penstock.runtime.sharded_weights import local_shard
from penstock.train.before_steps import compare
from penstock.train.between_steps import Checkpoints
from penstock.train.check.before_training import Reference, check_split
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.families import tiny_config
from support.tiny import QWEN3, config


def trained(
    tree: dict[str, Any],
    poisoned: Collection[int] = (),
    part: int = 0,
    resume: str | None = None,
) -> dict[str, Any]:
    """What one process says of the run; the first one's metrics lie in the output folder.

    poisoned: steps in which a row of this part of the batch becomes NaN on its way
    resume: a checkpoint to go on from. One is written where the tree's `train.checkpoint_every` asks for it
    """
    torch.set_num_threads(1)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        close = torch.distributed.destroy_process_group  # the world itself is the pool's to close
        patch.setattr(torch.distributed, "destroy_process_group", lambda group=None: group and close(group))
        if "checkpoint_every" not in tree["train"]:
            patch.setattr(Checkpoints, "save", lambda *_: Path("none"))
        poison(patch, poisoned, part)
        updates = count_updates(patch)
        error = ""
        try:
            run(preflight(TrainConfig.model_validate(tree), resume))
        except PenstockError as caught:
            error = f"{type(caught).__name__}: {caught}"
    return {"said": said.getvalue(), "updates": updates(), "error": error}


def resumed_with_a_failing_disk(tree: dict[str, Any], rank: int) -> tuple[str, str]:
    """As `trained` to step 2, then from the newest checkpoint, whose weights `rank` cannot read.

    The tree asks for a checkpoint after each of two steps.
    """
    first = trained(tree)
    assert not first["error"], first["error"]
    dist.barrier()
    load = SavedModel.load

    def failing(saved: SavedModel, folder: Path, stages: Any) -> None:
        if dist.get_rank() == rank and folder.name.endswith("2"):
            raise OSError(5, "Input/output error")
        load(saved, folder, stages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedModel, "load", failing)
        tree["train"]["steps"] = 3
        second = trained(tree, resume=NEWEST)
    return second["said"], second["error"]


def checked_on_a_mesh(tree: dict[str, Any], rank: int, name: str) -> tuple[str, str]:
    """What the check says of a right pipeline, and of one in which `rank` spoils a gradient.

    What that rank holds of the gradient of the first parameter whose name ends with `name` is too large.
    """
    torch.set_num_threads(1)
    prepared, shown = preflight(TrainConfig.model_validate(tree)), list[str]()
    pipe = prepared.auto.build(prepared.model)
    compare(prepared, pipe, shown.append)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            enlarge(patch, name)
        with pytest.raises(EquivalenceError) as caught:
            compare(prepared, pipe, shown.append)
    pipe.close()
    return "".join(shown), str(caught.value)


def enlarge(patch: pytest.MonkeyPatch, name: str) -> None:
    original = Pipeline.step

    def step(pipe: Pipeline, batch: Any, **entries: Any) -> Any:
        result = original(pipe, batch, **entries)
        gradient = next(p.grad for own, p in pipe.named_parameters() if own.endswith(name))
        assert gradient is not None
        local_shard(gradient).mul_(1.01)
        return result

    patch.setattr(Pipeline, "step", step)


def count_updates(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the optimizer has stepped since."""
    rates: list[float] = []
    original = AdamW.step

    def step(optimizer: AdamW) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        original(optimizer)

    vars(step).update(vars(original))  # torch marks a step that shows itself to profilers
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


def checked_on_ranks(folder: str, schedule: str) -> list[str]:
    """What the check says on this rank: as built; with little memory on rank 0 alone; with rank 1 damaged."""
    here = Path(folder) / str(dist.get_rank())
    here.mkdir()
    made = config(here, {**QWEN3, "num_hidden_layers": 4, "tie_word_embeddings": True})
    ranks = dist.get_world_size()
    section = made.pipeline.model_copy(update={"ranks": ranks, "schedule": schedule, "microbatches": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.setenv("WORLD_SIZE", str(ranks))
        prepared = preflight(made.model_copy(update={"pipeline": section}))
    pipe = prepared.auto.build(prepared.model)
    reference = Reference(prepared.plan.source, prepared.auto.seed, prepared.auto.loss())
    batch = prepared.data.batch(1).content
    said = [check_split(pipe, reference, batch, "auto")]
    said.append(check_split(pipe, reference, batch, "auto", lambda _: None if dist.get_rank() else 1000))
    if dist.get_rank() == 1:
        spoil(next(p for name, p in pipe.named_parameters() if name.endswith("q_proj.weight")))
    try:
        check_split(pipe, reference, batch, "auto")
    except EquivalenceError as error:
        said.append(str(error))
    pipe.close()
    return said


def checked_when_deep(layers: int) -> str:
    """What the check says of a model in half precision with tp=2, in a pipeline of two."""
    torch.set_num_threads(1)
    config = tiny_config("llama", layers=layers)
    axes = Axes(tp=2)
    auto = AutoPipeline(ranks=2, microbatches=2, axes=axes, dtype=torch.bfloat16)
    pipe = auto.build(config)
    tokens = torch.randint(3, 64, (2, 48), generator=torch.Generator().manual_seed(1))
    reference = Reference(auto.build_plan(config).source, auto.seed, auto.loss(), axes=axes)
    said = check_split(pipe, reference, {"input_ids": tokens, "labels": tokens.clone()}, "auto")
    pipe.close()
    return said


@torch.no_grad()
def spoil(parameter: nn.Parameter) -> None:
    parameter[0, 0] += 1e-3


def trained_with_numbered_memory(tree: dict[str, Any]) -> list[int]:
    """The resident memory of each process as this one knows it, where each says its own rank."""
    with pytest.MonkeyPatch.context() as patch:
        rank = dist.get_rank()
        patch.setattr(PeakMemory, "now", classmethod(lambda cls, device: cls(resident=rank)))
        built: list[Pipeline] = []
        original = Pipeline.__init__

        def keep(pipe: Pipeline, *arguments: Any) -> None:
            original(pipe, *arguments)
            built.append(pipe)

        patch.setattr(Pipeline, "__init__", keep)
        error = trained(tree)["error"]
        assert not error, error
        return [each.resident for each in built[-1].peak_memory]
