"""Whatever runs a part of a model that its user did not ask for leaves no trace.

Version 0.5.0, three symptoms. With routing replay and the routers' auxiliary loss, gradients of the first
step were off by up to 73 %: each block ran once more to show which top-k is its router's choice, and
transformers' recorder of outputs took the logits of that run too. Hooks counted the forwards of a build, on
tensors without values. A buffer that a checkpointed layer changes was changed again in the backward, and
found changed by the forwards of later microbatches.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from penstock import AutoPipeline, Pipeline
from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.runtime.unseen import LayerState, detached, unseen
from support import zoo
from support.census import microbatches
from support.covering import some
from support.families import tiny_model
from support.mixtures import mixture
from support.mutations import CASES, seeded
from support.reference import assert_gradients, gradients_of, plain_steps

SCHEDULES: tuple[Any, ...] = (
    "1f1b", "zb_h1", "zb_v", "dualpipe", {"schedule": "interleaved_zero_bubble", "stages_per_rank": 2},
)  # fmt: skip
AGAIN = (False, "full", "selective")
SEEN: list[str] = []  # what a script at its top level assigns to


def assert_two_steps(pipe: Pipeline, model: PreTrainedModel, batch: Mapping[str, Tensor], tol: float) -> None:
    """Each step has the loss and gradients of one process, also after an evaluation."""
    loss, expected = plain_steps(model, microbatches(batch))
    for _ in range(2):
        pipe.zero_grad()
        assert pipe.step(batch).loss == pytest.approx(loss, rel=tol)
        found = gradients_of(pipe)
        assert found.keys() == expected.keys() & dict(pipe.named_parameters(remove_duplicate=False)).keys()
        assert_gradients(found, expected, tol)
        pipe.evaluate(batch)


@pytest.mark.parametrize("how", some(AGAIN, False, "selective"))
@pytest.mark.parametrize(
    "model_type",
    ["mixtral", *(pytest.param(t, marks=pytest.mark.sweep) for t in ("jamba", "gpt_oss", "olmoe", "qwen3_moe",
     "qwen3_next", "granitemoehybrid", "flex_olmo", "minimax"))],
)  # fmt: skip
def test_routing_replay_leaves_the_auxiliary_loss_alone(model_type: str, how: str | bool) -> None:
    """0.5.0: the first step alone was wrong; its block ran twice, and both runs' logits were recorded."""
    model = mixture(model_type, torch.float64, layers=4, output_router_logits=True)
    auto = AutoPipeline(ranks=2, microbatches=2, replay_routing=True, activation_checkpointing=how)
    batch = zoo.tiny_batch(model_type)
    assert_two_steps(auto.build(model), model, batch, 1e-10)
    auto.build(model).verify_against(model, batch)  # the first step after a build


def test_a_comparison_sees_the_first_step_after_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is wrong once, in the first step, does not pass."""
    model = tiny_model("llama", torch.float64)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    runs = Counter[str]()

    def once(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        runs["forwards"] += 1
        return output * 1.01 if runs["forwards"] == 1 else None

    pipe.modules[0].get_submodule("model.layers.0.mlp").register_forward_hook(once)
    assert not pipe.compare(model, zoo.tiny_batch("llama")).passed
    assert pipe.compare(model, zoo.tiny_batch("llama")).passed


def at_top_level(*_: Any) -> None:
    SEEN.append("forward")


def hooked(model: PreTrainedModel, names: tuple[str, ...]) -> Callable[[], dict[str, int]]:
    """Put functions of each kind on modules; returns what they have counted so far.

    Objects and partials are copied with the layers of a stage, and count there.
    """
    listed: list[str] = []
    defaults, number = {"calls": 0}, 0

    def by_closure(module: nn.Module, *_: Any) -> None:
        listed.append(type(module).__name__)

    def by_default(*_: Any, held: dict[str, int] = defaults) -> None:
        held["calls"] += 1

    def by_variable(*_: Any) -> None:
        nonlocal number
        number += 1

    SEEN.clear()
    for module in map(model.get_submodule, names):
        module.register_forward_hook(by_closure)
        for pre in (by_default, by_variable, at_top_level):
            module.register_forward_pre_hook(pre)
    return lambda: {
        "closure": len(listed), "default": defaults["calls"], "variable": number, "global": len(SEEN),
    }  # fmt: skip


def test_hooks_count_what_a_plain_process_counts() -> None:
    """0.5.0: a build ran them up to nine times, and a later stage the embedding's, all without values."""
    names = ("model.embed_tokens", "model.layers.0.mlp", "model.layers.3.block_sparse_moe.gate", "lm_head")
    model = mixture("mixtral", torch.float64, layers=4, output_router_logits=True)
    names = tuple(name for name, _ in model.named_modules() if name in names or name.endswith("3.mlp.gate"))
    assert len(names) == 4
    batch = zoo.tiny_batch("mixtral")
    counted = hooked(model, names)
    plain_steps(model, microbatches(batch))
    expected = {kind: 2 * len(names) for kind in counted()}
    assert counted() == expected
    pipe = AutoPipeline(ranks=2, microbatches=2, replay_routing=True).build(model)
    assert counted() == expected, "the build"
    for steps in (2, 3):
        pipe.step(batch)
        assert counted() == {kind: steps * count for kind, count in expected.items()}
    pipe.evaluate(batch)
    assert counted() == {kind: 4 * count for kind, count in expected.items()}


def test_a_build_draws_nothing_and_calls_no_global_hook() -> None:
    model = mixture("mixtral", torch.float32, layers=4, output_router_logits=True, attention_dropout=0.3)
    calls: list[str] = []
    handle = register_module_forward_hook(lambda *_: calls.append("called"))
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    try:
        AutoPipeline(ranks=2, microbatches=2, replay_routing=True, shapes="padded").build(model)
    finally:
        handle.remove()
    assert calls == []
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), str(np.random.get_state())) == states[1:]


def test_nothing_unseen_reaches_generators() -> None:
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    with unseen():
        torch.rand(3), random.random(), np.random.rand(3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]


def test_a_detached_hook_computes_as_the_users_does() -> None:
    """With the same modules and tensors, and with functions that it calls."""
    seen: list[float] = []
    layer = nn.Linear(2, 2)

    def note(value: Tensor) -> None:
        seen.append(float(value.sum()))

    def hook(
        module: nn.Module, args: Any, output: Tensor, scale: float = 2.0, *, more: float = 0.5
    ) -> Tensor:
        note(output)
        changed: Tensor = layer(output)
        return changed * scale + more

    copied = detached(hook, {})
    given = torch.ones(1, 2)
    assert torch.equal(copied(layer, (), given), hook(layer, (), given))
    assert seen == [2.0]


# ---- A layer that runs again


class Keeps(nn.Module):
    """A layer whose result depends on a running mean, a counter and the state that its last forward left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.mean: Tensor
        self.replaced: Tensor
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("replaced", torch.ones(width, dtype=torch.float64))
        self.calls = 0
        self.state: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        self.replaced = self.replaced * 1.1
        left = 0.0 if self.state is None else self.state
        self.state = hidden.detach().mean((0, 1))
        return torch.tanh(self.linear(hidden) * self.replaced.clone() + self.mean.clone() + left) / self.calls

    def kept(self) -> list[Any]:
        assert self.state is not None
        return [self.calls, self.mean.tolist(), self.replaced.tolist(), self.state.tolist()]


def forwards_then_backwards(layers: nn.Sequential, count: int) -> None:
    """As a pipeline runs them: several microbatches are live."""
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(count):
        given = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        losses.append(layers(given).square().sum())
    for loss in reversed(losses):
        loss.backward()


@pytest.mark.parametrize("save", [(), ("matmul",)])
def test_a_layer_that_runs_again_finds_and_leaves_what_it_keeps(save: tuple[str, ...]) -> None:
    """0.5.0: a buffer counted twice, and gradients were those of another microbatch's running mean."""
    torch.manual_seed(1)
    plain = nn.Sequential(Keeps(4), Keeps(4)).train()
    again = nn.Sequential(Keeps(4), Keeps(4)).train()
    again.load_state_dict(plain.state_dict())
    install(enumerate(again), Checkpointing(save=save))
    for count in (3, 1):
        forwards_then_backwards(plain, count)
        forwards_then_backwards(again, count)
        assert [layer.kept() for layer in again] == [layer.kept() for layer in plain]  # type: ignore[operator]
        assert_gradients(gradients_of(again), gradients_of(plain), 1e-10)


# _before: what is remembered is seen there alone
def test_what_a_forward_leaves_alone_is_forgotten() -> None:
    """Copies of buffers are held from a forward to its backward only where it changes them."""
    layer = nn.BatchNorm1d(4)
    state = LayerState(layer)
    with state.forward():
        layer.eval()(torch.ones(2, 4))
    assert [table.keys() for table, _ in state._before] == [vars(layer).keys()]  # `training` alone
    layer.train()
    with state.forward():
        layer(torch.ones(2, 4))
    assert vars(layer)["_buffers"] in [table for table, _ in state._before]


# ---- Random models, schedules and options, against one process


TYPES = ("mixtral", "qwen3_moe", "jamba", "olmoe", "gpt_oss", "granitemoehybrid", "qwen3_next", "minimax")


class Averaging(nn.Module):
    """Counts its forwards in a buffer, and adds what it remembers of them: the buffer reaches gradients."""

    seen: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        output = self.inner(hidden, *args, **kwargs)
        return output * (1 + 0.01 * self.seen)


FEATURES: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": "full"},
    {"replay_routing": True, "activation_checkpointing": "selective"},
    {"replay_routing": True},
    {"shapes": "exchanged"},
)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param(schedule, options, marks=() if at == number < 2 else pytest.mark.sweep)
        for at, schedule in enumerate(("zb_v", "1f1b", "dualpipe_v"))
        for number, options in enumerate(FEATURES)
    ],
)
def test_dropout_hooks_and_buffers_do_not_notice(schedule: str, options: dict[str, Any]) -> None:
    """Gradients of two steps, calls of hooks, buffers and generators have the bits of a step without it."""
    count = 4 if schedule == "dualpipe_v" else 2
    batch = zoo.tiny_batch("mixtral", count)

    def stepped(**more: Any) -> tuple[list[dict[str, Tensor]], Counter[str], dict[str, Tensor], Tensor]:
        model = mixture("mixtral", torch.float64, layers=4, output_router_logits=True, attention_dropout=0.3)
        for layer in model.model.layers:
            layer.self_attn.o_proj = Averaging(layer.self_attn.o_proj)
        calls = Counter[str]()

        def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls["forwards"] += 1
            return output / 2

        model.model.embed_tokens.register_forward_hook(halve)
        torch.manual_seed(7)
        pipe = AutoPipeline(ranks=2, schedule=schedule, microbatches=count, **more).build(model)
        gradients = []
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(batch)
            gradients.append({name: value.clone() for name, value in gradients_of(pipe).items()})
        buffers = {n: b.clone() for m in pipe.modules.values() for n, b in m.named_buffers() if "seen" in n}
        return gradients, calls, buffers, torch.get_rng_state()

    (plain, plain_calls, plain_buffers, plain_state), (with_it, calls, buffers, state) = (
        stepped(),
        stepped(**options),
    )
    for before, after in zip(plain, with_it, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(plain[0]["lm_head.weight"], plain[1]["lm_head.weight"])  # other numbers were drawn
    assert calls == plain_calls == Counter(forwards=2 * count)
    assert {name: float(value) for name, value in buffers.items()} == dict.fromkeys(
        plain_buffers, 2.0 * count
    )
    assert torch.equal(state, plain_state)


@pytest.mark.parametrize("cases", CASES)
def test_random_mixtures_are_exact(cases: range) -> None:
    """Type, schedule, replay, checkpointing, auxiliary loss, hooks that change values, and lengths."""
    for case in cases[:: 100 if cases.start == 0 else 4]:
        with seeded(case) as choices:
            exact(choices)


def exact(choices: random.Random) -> None:
    model_type = choices.choice(TYPES)
    schedule = choices.choice(SCHEDULES)
    count = 4 if schedule == "dualpipe" else 2
    changes = {"output_router_logits": True} if choices.random() < 0.7 else {}
    model = mixture(model_type, torch.float64, layers=4, **changes)
    calls = Counter[str]()
    if choices.random() < 0.5:
        factor = choices.choice((0.5, 1.5))

        def scale(module: nn.Module, args: Any, output: Any) -> Any:
            calls["hook"] += 1
            return output * factor if isinstance(output, Tensor) else (output[0] * factor, *output[1:])

        layers = [part for part in model.modules() if type(part).__name__.endswith("RMSNorm")]
        choices.choice(layers).register_forward_hook(scale)
    pipe = AutoPipeline(
        ranks=2,
        schedule=schedule,
        microbatches=count,
        replay_routing=choices.random() < 0.7,
        activation_checkpointing=choices.choice(AGAIN),
    ).build(model)
    assert not calls
    length = choices.choice((9, 12))
    parts = [zoo.tiny_batch(model_type, choices.choice((1, 2)), length) for _ in range(count)]
    loss, expected = plain_steps(model, parts)
    for _ in range(2):
        pipe.zero_grad()
        assert pipe.step(parts).loss == pytest.approx(loss, rel=1e-10)
        assert_gradients(gradients_of(pipe), expected, 1e-10)
