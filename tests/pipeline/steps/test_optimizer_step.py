"""`pipe.step(optimizer=...)`: parameters, states, norm and loss are those of three calls, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, NAdam, Optimizer

from penstock import AutoPipeline, Pipeline
from penstock.errors import BatchError, ConfigError
from penstock.models.stage import StageInfo
from penstock.parallel.axes import Axes
from penstock.runtime.sharded_weights import local_shard
from support.covering import every
from support.families import ragged_batch, tiny_model
from support.pool import Pool
from support.refusals import refuses

STEPS = 7
NAN, ACCUMULATED = 3, 4  # steps: before one a gradient is set to NaN, before the other there is one already
SPIKE = 6  # its loss is above max_loss
# of max_norm to the norm: a step of many that fits, one that is clipped, though no rank alone would be
FACTORS = (2.0, 0.999, 2.0, 2.0, 2.0, 0.999, 2.0)


class ByHand(Optimizer):
    """Momentum with a state that is replaced in each step, and a number; and it counts in its group."""

    def __init__(self, parameters: Iterator[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = 0.9 * state.get("mean", 0) + parameter.grad
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(state["mean"], alpha=group["lr"] / state["count"])


def optimizers_of(pipe: Pipeline) -> list[Optimizer]:
    """One of each kind, each over a part of the parameters."""
    parts = [list(pipe.parameters())[place::4] for place in range(4)]
    return [
        AdamW(parts[0], lr=0.01, foreach=True),
        NAdam(parts[1], lr=0.01),
        SGD(parts[2], lr=0.01, momentum=0.9, foreach=False),
        ByHand(iter(parts[3])),
    ]


def held(pipe: Pipeline, optimizers: Sequence[Optimizer]) -> list[Any]:
    """Copies of parameters, states and options; of a sharded tensor this rank's shard."""
    found: list[Any] = list(pipe.parameters())
    for optimizer in optimizers:
        content = optimizer.state_dict()
        found += [value for state in content["state"].values() for value in state.values()]
        found += [value for group in content["param_groups"] for value in group.items()]
    return [local_shard(each.detach()).clone() if isinstance(each, Tensor) else each for each in found]


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def prepare(pipe: Pipeline, step: int, poisoned: int) -> dict[str, Tensor]:
    """Set the gradients that a step begins with; its batch."""
    pipe.zero_grad()
    if step == NAN and pipe.processes.index == poisoned:
        parameter = next(pipe.parameters())
        parameter.grad = torch.full_like(parameter, math.nan)
    if step == ACCUMULATED:
        pipe.step(ragged_batch(8, 7))
    return ragged_batch(8, 10 + step)


def plain(pipe: Pipeline, poisoned: int) -> tuple[list[Any], list[float]]:
    """What the three calls leave after each step, with loss and norm; the largest norms of the steps."""
    optimizers, found, limits = optimizers_of(pipe), list[Any](), []
    for step in range(STEPS):
        loss = pipe.step(prepare(pipe, step, poisoned)).loss
        norm = pipe.clip_grad_norm_(math.inf)
        limits.append(1.0 if step == NAN else FACTORS[step] * norm)
        if math.isfinite(norm) and step != SPIKE:
            pipe.clip_grad_norm_(limits[-1])
            for optimizer in optimizers:
                optimizer.step()
        found.append((loss, norm, held(pipe, optimizers)))
    return found, limits


def together(pipe: Pipeline, poisoned: int, limits: Sequence[float]) -> list[Any]:
    optimizers, found = optimizers_of(pipe), list[Any]()
    for step in range(STEPS):
        batch = prepare(pipe, step, poisoned)
        largest = 0.1 if step == SPIKE else math.inf
        result = pipe.step(batch, optimizer=optimizers, max_norm=limits[step], max_loss=largest)
        found.append((result.loss, result.norm, held(pipe, optimizers)))
    return found


def compare(ranks: int, schedule: Any, **options: Any) -> None:
    """Both orders, from equal weights."""
    model = tiny_model("llama", tied=options.pop("tied", False))
    build = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=8, timeout=30, **options).build
    pipe = build(model)
    poisoned = ranks // 2 if pipe.processes.count > 1 else 0
    expected, limits = plain(pipe, poisoned)
    pipe.close()
    pipe = build(model)
    found = together(pipe, poisoned, limits)
    for step, ((loss, norm, state), (loss_, norm_, state_)) in enumerate(zip(found, expected, strict=True)):
        assert loss == loss_, step
        assert norm == norm_ or (math.isnan(norm) and math.isnan(norm_) and step == NAN), (step, norm, norm_)
        assert same(state, state_), step
    pipe.close()


@pytest.mark.parametrize("ranks", every(2, [2, 4]))
def test_in_one_process(ranks: int) -> None:
    compare(ranks, "1f1b")


def over_processes(tied: bool) -> None:
    compare(2, "zb_v", tied=tied)


@pytest.mark.parametrize("tied", every(2, [True, False]))
def test_over_processes(pool: Pool, tied: bool) -> None:
    """One weight of both stages, whose gradients are summed at the end, among them."""
    pool.run(2, over_processes, tied)


def sharded() -> None:
    compare(2, "zb_h1", axes=Axes(dp_shard=2))


@pytest.mark.sweep
def test_on_a_mesh(pool: Pool) -> None:
    """Shards of weights: AdamW on plain and sharded tensors alike."""
    pool.run(4, sharded)


# ---- errors


class Part(nn.Module):
    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


def small_pipe() -> Pipeline:
    return Pipeline.from_provider(
        Part, ranks=2, microbatches=2, timeout=10, loss_fn=lambda output, _: output.square().mean()
    )


BATCH = {"x": torch.ones(4, 4)}


def refused(action: str) -> str:
    pipe = small_pipe()
    optimizer: Optimizer | None = AdamW(pipe.parameters())
    first = pipe.processes.index == 0
    limit, largest = 1.0, math.inf
    if action == "foreign" and first:
        optimizer = AdamW(nn.Linear(2, 3).parameters())
    if action == "lbfgs" and first:
        optimizer = LBFGS(pipe.parameters())
    if action == "limits" and first:
        limit = 2.0
    if action == "losses" and first:
        largest = 2.0
    if action == "one":
        optimizer, limit = (optimizer, 1.0) if first else (None, math.inf)
    try:
        pipe.step(BATCH, optimizer=optimizer, max_norm=limit, max_loss=largest)
    except (ConfigError, BatchError) as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("foreign", "optimizer=AdamW with a parameter of shape [3, 2]: it is no parameter of this rank"),
        ("lbfgs", "optimizer=LBFGS: it computes loss and gradients several times"),
        ("limits", "an optimizer, max_norm=2.0; rank 1"),
        ("losses", "an optimizer, max_norm=1.0, max_loss=2.0; rank 1"),
        ("one", "an optimizer, max_norm=1.0; rank 1"),
    ],
)
def test_a_refused_optimizer_is_an_error_on_all_ranks(pool: Pool, action: str, words: str) -> None:
    for error in pool.run(2, refused, action):
        assert error.startswith("BatchError rank 0: ")
        assert words in error


def test_a_norm_without_an_optimizer_is_refused() -> None:
    pipe = AutoPipeline(ranks=2, microbatches=4).build(tiny_model("llama"))
    with refuses(ConfigError, "max_norm=1.0 without an optimizer"):
        pipe.step(ragged_batch(), max_norm=1.0)
