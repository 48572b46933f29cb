"""Runs of the trainer with torchao's optimizers, in a process that has torchao on its path."""

from __future__ import annotations

import sys
import traceback
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.cli.dry_run import memory
from penstock.train.checkpoints import NEWEST
from penstock.train.optimizers.optimizer import AdamWSection, make_optimizers
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.families import pipeline, ragged_batch, tiny_model
from support.tiny import assert_same_tensors, checkpoint, metrics, tensors
from support.twin import DECAY, OPTIONS, RATE, Make, by_hand, decayed, largest_difference, made

TORCHAO = Path(sys.prefix) / "torchao"  # as the Makefile installs it


def answer(connection: Connection, job: Callable[..., Any], compiled: bool, *args: Any) -> None:
    """Run `job` and send its traceback, or nothing. compiled: by torch.compile, which takes seconds"""
    sys.path.append(str(TORCHAO))
    torch.set_num_threads(1)
    if not compiled:
        torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        job(*args)
        connection.send("")
    except BaseException:
        connection.send(traceback.format_exc())


def make_like(states: str) -> Make:
    """torchao's own optimizer."""
    import torchao.optim

    name = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}[states]
    return lambda named: [getattr(torchao.optim, name)(decayed(named), **OPTIONS)]


def twin(folder: Path, states: str, tolerance: float) -> None:
    """A run over two ranks is a loop with torchao's optimizer; it goes on bit for bit, and on one rank."""
    keys = made(folder, "mixed", {"states": states}, **{"train.checkpoint_every": 2})
    prepared = preflight(keys)
    run(prepared)
    optimizers: list[Optimizer] = []

    def keep(named: Any) -> list[Optimizer]:
        optimizers.extend(make_like(states)(named))
        return optimizers

    losses, trained = by_hand(keys, keep)
    rows = [row["loss"] for row in metrics(folder) if "loss" in row]
    last, half = checkpoint(folder, 4), checkpoint(folder, 2)
    saved = tensors(last)
    assert max(abs(a / b - 1) for a, b in zip(rows, losses, strict=True)) < 1e-5
    found = {key.partition(" ")[2]: value for key, value in saved.items() if key.startswith("model")}
    assert largest_difference(found, trained) <= tolerance
    codes = [key for key in saved if ":codes" in key]
    assert len(codes) == 4, codes  # both moments of embedding and head

    held = sum(
        sum(getattr(value, piece).nbytes for piece in ("codes", "scale", "qmap") if hasattr(value, piece))
        if hasattr(value, "codes") else value.nbytes
        for optimizer in optimizers for state in optimizer.state.values()
        for part, value in state.items() if part != "step"
    )  # fmt: skip
    assert sum(each.optimizer for each in memory(prepared)) == held

    before = folder / "before"
    last.rename(before)
    run(preflight(keys, NEWEST))
    assert_same_tensors(before, last)
    one = keys.pipeline.model_copy(update={"ranks": 1})
    output = keys.output.model_copy(update={"folder": str(folder / "one" / "out")})
    run(preflight(keys.model_copy(update={"pipeline": one, "output": output}), str(half)))
    again = tensors(checkpoint(folder / "one", 4))
    for key, value in found.items():
        (other,) = (v for k, v in again.items() if k.startswith("model") and k.endswith(f" {key}"))
        assert float((value - other).abs().max()) <= tolerance * float(value.abs().max()), key


def rounding(folder: Path, states: str | None) -> None:
    """Over two ranks each weight is rounded as in one process, and the copies of a tied one stay equal."""
    import torchao.optim

    _copies_stay_equal()

    optimizer = {"stochastic_rounding": True} | ({} if states is None else {"states": states})
    keys = made(folder, "bfloat16", optimizer)
    run(preflight(keys))
    kind = {None: "_AdamW", "bfloat16": "_AdamW", "8bit": "AdamW8bit"}[states]
    own: dict[str, Optimizer] = {}

    class OneByOne(Optimizer):
        """The weights one by one, each after a seed of its name and step."""

        def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
            super().__init__([p for _, p in named], {})
            self.done = 0
            for name, p in named:
                group = {"params": [p], "weight_decay": DECAY if p.ndim > 1 else 0.0}
                make: Any = getattr(torchao.optim, kind)
                own[name] = make([group], bf16_stochastic_round=True, **OPTIONS)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for name, each in own.items():
                torch.manual_seed(zlib.crc32(f"{name} {self.done}".encode()))
                each.step()
            self.done += 1

    losses, trained = by_hand(keys, lambda named: [OneByOne(list(named))])
    rows = [row["loss"] for row in metrics(folder) if "loss" in row]
    assert max(abs(a / b - 1) for a, b in zip(rows, losses, strict=True)) < 1e-6, (rows, losses)
    saved = tensors(checkpoint(folder, 4))
    found = {key.partition(" ")[2]: value for key, value in saved.items() if key.startswith("model")}
    expected = dict(trained.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def _copies_stay_equal() -> None:
    pipe = pipeline(tiny_model("llama", torch.bfloat16, layers=2, tied=True))
    embedding = pipe.modules[0].get_parameter("model.embed_tokens.weight")
    head, before = pipe.modules[1].get_parameter("lm_head.weight"), embedding.detach().clone()
    named = list(pipe.named_parameters())
    section = AdamWSection(learning_rate=RATE, stochastic_rounding=True)
    (optimizer,) = make_optimizers(section, named, {name: "AdamW" for name, _ in named})
    for _ in range(3):
        pipe.zero_grad()
        pipe.step(ragged_batch())
        optimizer.step()
    assert not torch.equal(before, head)
    assert torch.equal(embedding, head)


def below_half_a_step(folder: Path) -> None:
    """Steps far below half a rounding move bfloat16 weights on average; to the nearest they are all lost."""
    del folder
    moved = {}
    for rounded in (False, True):
        weight = nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
        section = AdamWSection(learning_rate=1e-4, weight_decay=0.0, stochastic_rounding=rounded)
        (optimizer,) = make_optimizers(section, [("weight", weight)], {"weight": "AdamW"})
        for _ in range(10):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[rounded] = 1 - float(weight.detach().float().mean())
    assert moved[False] == 0
    assert abs(moved[True] - 1e-3) < 1e-4, moved
