"""`pipe.step(optimizer=...)`: parameters, states, norm and loss are those of three calls, bit for bit."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam, Optimizer

from penstock import AutoPipeline, Pipeline
from penstock.errors import BatchError, ConfigError, PeerError
from penstock.models.stage import StageInfo
from penstock.parallel.axes import Axes
from penstock.pipeline.steps.optimizer_step import Drain, UndoCopies
from penstock.runtime.device.copies import BackgroundCopies
from penstock.runtime.sharded_weights import local_shard
from support.covering import every
from support.families import ragged_batch, tiny_model
from support.pool import Pool

STEPS = 7
NAN, ACCUMULATED = 3, 4  # steps: before one a gradient is set to NaN, before the other there is one already
SPIKE = 6  # its loss is above max_loss
# of max_norm to the norm: a step of many that fits, one that is clipped, though no rank alone would be
FACTORS = (2.0, 0.999, 2.0, 2.0, 2.0, 0.999, 2.0)


class Always(Drain):
    """Every step that could be right is taken early, whatever it costs, on every rank."""

    def is_worthwhile(self) -> bool:
        return True


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


def compare(ranks: int, schedule: Any, drain: Drain | None = None, **options: Any) -> tuple[int, int]:
    """Both orders, from equal weights; how many early steps were kept and undone."""
    model = tiny_model("llama", tied=options.pop("tied", False), layers=8)
    build = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=8, timeout=30, **options).build
    poisoned = ranks // 2
    pipe = build(model)
    expected, limits = plain(pipe, poisoned if pipe.processes.count > 1 else 0)
    pipe.close()
    pipe = build(model)
    if drain is not None and pipe._drain is not None:
        pipe._drain = drain
    found = together(pipe, poisoned if pipe.processes.count > 1 else 0, limits)
    for step, ((loss, norm, state), (loss_, norm_, state_)) in enumerate(zip(found, expected, strict=True)):
        assert loss == loss_, step
        assert norm == norm_ or (math.isnan(norm) and math.isnan(norm_) and step == NAN), (step, norm, norm_)
        assert same(state, state_), step
    drain = pipe._drain
    pipe.close()
    return (0, 0) if drain is None else (drain.kept, drain.undone)


SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zb_v", "interleaved_1f1b")
DEFAULT = (("zb_v", 2),)  # the others are in the sweep


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        pytest.param(schedule, ranks, marks=() if (schedule, ranks) in DEFAULT else pytest.mark.sweep)
        for schedule in SCHEDULES
        for ranks in (2, 4)
    ],
)
def test_early_steps_are_those_of_the_plain_order(pool: Pool, schedule: str, ranks: int) -> None:
    """All ranks step early in each step. One that is clipped, with a NaN or too large a loss is undone."""
    counts = pool.run(ranks, compare, ranks, schedule, Always())
    healthy, poisoned = counts[0], counts[ranks // 2]
    assert healthy[0] == 3
    assert 2 <= healthy[1] <= 4  # on zb_v its own norm may be as large as that of all
    assert poisoned == (3, 3)  # it knows of its own NaN


@pytest.mark.parametrize("ranks", every(2, [2, 4]))
def test_in_one_process(ranks: int) -> None:
    assert compare(ranks, "1f1b") == (0, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zb_v"])
def test_stages_that_share_a_weight_step_after_all_have_ended(pool: Pool, schedule: str) -> None:
    assert pool.run(2, tied, schedule) == [(0, 0)] * 2


def tied(schedule: str) -> tuple[int, int]:
    return compare(2, schedule, Always(), tied=True)


@pytest.mark.sweep
def test_early_steps_on_a_mesh(pool: Pool) -> None:
    """Shards of weights, AdamW on plain and sharded tensors alike; ranks of a stage step early together."""
    for kept, undone in pool.run(4, sharded):
        assert (kept, undone) in ((3, 4), (3, 3))


def sharded() -> tuple[int, int]:
    return compare(2, "zb_h1", Always(), axes=Axes(dp_shard=2))


# ---- when a rank steps early


def test_an_early_step_is_worth_a_copy_that_takes_less_than_the_wait() -> None:
    drain = Drain()
    assert not drain.is_worthwhile()  # nothing is known
    drain.waited = 0.5
    assert drain.is_worthwhile()
    drain.copies.seconds = 0.6
    assert not drain.is_worthwhile()
    drain.waited = 0.7
    assert drain.is_worthwhile()
    drain.clipped = True
    assert not drain.is_worthwhile()


class Slow(nn.Module):
    """Its backward takes long on the first stage."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if info.stage == 0:
            self.register_full_backward_hook(lambda *_: time.sleep(0.05))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


def slow_pipe() -> Pipeline:
    return Pipeline.from_provider(
        Slow, ranks=2, microbatches=2, timeout=10, loss_fn=lambda output, _: output.square().mean()
    )


BATCH = {"x": torch.ones(4, 4)}


def counts_of_early_steps() -> list[tuple[int, int]]:
    pipe, found = slow_pipe(), []
    optimizer = AdamW(pipe.parameters())
    for step in range(4):
        pipe.zero_grad()
        if step == 3:
            optimizer.register_step_post_hook(lambda *_: None)
        pipe.step(BATCH, optimizer=optimizer)
        assert pipe._drain is not None
        found.append((pipe._drain.kept, pipe._drain.undone))
    return found


def test_the_rank_that_ends_early_steps_early(pool: Pool) -> None:
    """From the second step on, when it knows that it waits; not with a hook, which may change anything."""
    last, early = pool.run(2, counts_of_early_steps)
    assert last == [(0, 0)] * 4
    assert early == [(0, 0), (1, 0), (2, 0), (2, 0)]


# ---- errors


class Broken(nn.Module):
    """Fails in the second backward of the first stage, when the last stage has stepped already."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.backwards = 0
        if info.stage == 0:
            self.register_full_backward_hook(self.fail)

    def fail(self, *_: Any) -> None:
        time.sleep(0.1)
        self.backwards += 1
        if self.backwards == 4:
            raise ValueError("no more")

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


def after_an_error() -> tuple[str, bool, int]:
    pipe = Pipeline.from_provider(
        Broken, ranks=2, microbatches=2, timeout=10, loss_fn=lambda output, _: output.square().mean()
    )
    pipe._drain = Always()
    optimizer = AdamW(pipe.parameters())
    pipe.step(BATCH, optimizer=optimizer)
    before = held(pipe, [optimizer])
    try:
        pipe.step(BATCH, optimizer=optimizer)
    except (PeerError, ValueError) as error:
        return type(error).__name__, same(held(pipe, [optimizer]), before), pipe._drain.undone
    return "", False, 0


def test_an_error_of_another_rank_undoes_an_early_step(pool: Pool) -> None:
    first, last = pool.run(2, after_an_error)
    assert first == ("ValueError", True, 0)
    assert last == ("PeerLostError", True, 1)


def refused(action: str) -> str:
    pipe = slow_pipe()
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
        ("foreign", "optimizer=AdamW with a parameter of shape [3, 2]: it is none of this rank's"),
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
    with pytest.raises(ConfigError, match=r"max_norm=1.0 without an optimizer"):
        pipe.step(ragged_batch(), max_norm=1.0)


# ---- copies


def test_copies_put_back_what_a_step_changed() -> None:
    """Also of the first step, before which there is no state; the memory is used again."""
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2), requires_grad=False)]
    optimizers: list[Optimizer] = [Adam(parameters[:1]), ByHand(iter(parameters[1:]))]
    copies = UndoCopies()
    memory = None
    for step in range(4):
        parameters[0].grad = torch.randn(3)
        values = parameters[0].detach().clone()
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        assert copies.prepare(optimizers)
        copies.take()
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(parameters[0], values)
        copies.put_back()
        assert torch.equal(parameters[0], values)
        for optimizer, before in zip(optimizers, states, strict=True):
            assert str(optimizer.state_dict()) == str(before)
        if step > 1:
            assert [each.data_ptr() for each in copies._copies] == memory
        for optimizer in optimizers:
            optimizer.step()
        memory = [each.data_ptr() for each in copies._copies]


def test_a_state_that_cannot_be_copied_is_not_prepared() -> None:
    parameter = nn.Parameter(torch.randn(3))
    optimizer = Adam([parameter])
    optimizer.state[parameter]["history"] = {1, 2}
    assert not UndoCopies().prepare([optimizer])


def test_the_wait_of_a_checkpoint_lets_a_step_be_undone_and_a_users_hook_does_not() -> None:
    """A writer's hook stays until the next save: no step after the first checkpoint would have been early."""
    optimizer = Adam([nn.Parameter(torch.randn(3))])
    optimizer.register_step_pre_hook(BackgroundCopies(None).before_step)
    assert UndoCopies().prepare([optimizer])
    optimizer.register_step_post_hook(lambda *_: None)
    assert not UndoCopies().prepare([optimizer])
