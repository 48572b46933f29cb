"""Routing replay: what is run again chooses what was chosen before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.routing import RoutingReplay
from support import jobs_expert as jobs
from support import zoo
from support.families import ragged_batch
from support.pool import Pool
from support.reference import Gradients, assert_gradients, plain_step

# glm4_moe chooses its one group by a top-k of as many experts; zaya writes over some of the choices
KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "glm4_moe", "zaya")


def model_of(model_type: str = "mixtral") -> PreTrainedModel:
    return jobs.mixture(model_type, torch.float64)


def checkpointed(model: PreTrainedModel) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})


def loss_of(model: PreTrainedModel) -> Tensor:
    batch = ragged_batch()
    return jobs.total_loss(model, batch) / jobs.valid(batch)


def gradients(model: PreTrainedModel) -> Gradients:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def routers(model: PreTrainedModel) -> list[nn.Module]:
    return [part for name, part in model.named_modules() if name.endswith((".gate", ".router"))]


def shaken(model: PreTrainedModel, size: float, when: Callable[[], bool]) -> list[Tensor]:
    """Routers whose input is noisy while `when()`; returns the choices that they make, filled as they run."""
    made: list[Tensor] = []

    def shake(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(given[0].shape, generator=generator, dtype=given[0].dtype)
        return (given[0] + size * noise, *given[1:]) if when() else given

    for router in routers(model):
        router.register_forward_pre_hook(shake)
        router.register_forward_hook(lambda module, given, result: made.append(result[2].detach().clone()))
    return made


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@pytest.mark.parametrize("model_type", KINDS)
def test_recomputation_chooses_as_the_forward_did(model_type: str) -> None:
    """Other choices without replay, the same with it, from a router whose input has changed in between."""
    model = model_of(model_type)
    replay = RoutingReplay(model)
    checkpointed(model)
    made = shaken(model, 0.5, in_backward)
    # without: the noise is enough for others to be chosen (or what is run again has another form)
    loss_before = loss_of(model)
    first = list(made)
    made.clear()
    try:
        loss_before.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        assert "checkpoint" in str(error)  # noqa: PT017  other shapes were saved
    assert made
    # layers are run again from the last one
    assert any(not torch.equal(a, b) for a, b in zip(made, reversed(first), strict=False))
    model.zero_grad()
    with replay.record(7):
        loss = loss_of(model)
    first = list(replay.choices(7).values())
    made.clear()
    with replay.replay_backward(7):
        loss.backward()  # type: ignore[no-untyped-call]
    assert len(made) == len(first)
    for again, before in zip(made, reversed(first), strict=True):
        assert torch.equal(again, before)
    assert replay.held == [7]
    replay.release(7)
    assert replay.held == []


@pytest.mark.parametrize("model_type", KINDS)
def test_replay_changes_no_gradient(model_type: str) -> None:
    model = model_of(model_type)
    loss, expected = plain_step(model, ragged_batch())
    replay = RoutingReplay(model)
    checkpointed(model)
    with replay.record(0):
        own = loss_of(model)
    with replay.replay_backward(0):
        own.backward()  # type: ignore[no-untyped-call]
    assert float(own.detach()) == pytest.approx(loss, rel=1e-12)
    assert_gradients(gradients(model), expected, 1e-10)


def test_near_ties_that_flip() -> None:
    """A router off by a little chooses others: the gradients are those of the forward only with replay."""
    model = model_of("gpt_oss")  # which chooses in float64, others in float32 always
    biases = []
    with torch.no_grad():
        for router in routers(model):  # all four experts are nearly tied, for two places
            weight, bias = router.weight, router.bias
            assert isinstance(weight, Tensor)
            assert isinstance(bias, Tensor)
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)
            weight.copy_(weight[:1] + 1e-9 * noise)
            biases.append(bias.zero_())

    def nudge(size: float) -> None:
        for bias in biases:
            bias.data += size * torch.tensor([1.0, -1.0, 1.0, -1.0])

    replay = RoutingReplay(model)
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    checkpointed(model)
    with replay.record(0):
        loss = loss_of(model)
    nudge(1e-8)
    with replay.replay_backward(0):
        loss.backward()  # type: ignore[no-untyped-call]
    assert_gradients(gradients(model), expected, 1e-6)  # the nudge, and nothing more
    replay.release(0)
    nudge(-1e-8)
    loss = loss_of(model)
    nudge(1e-8)
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        without = gradients(model)
    except RuntimeError:  # the experts' tokens have other numbers, which torch notices
        return
    with pytest.raises(AssertionError):
        assert_gradients(without, expected, 1e-6)


def test_given_choices_take_the_place_of_the_routers() -> None:
    """Before anything was recorded, and with weights that come from the router's logits."""
    model = model_of("deepseek_v3")
    source = RoutingReplay(other := model_of("deepseek_v3"))
    with source.record(0):
        loss_of(other)
    chosen = {name: (value + 1) % 4 for name, value in source.choices(0).items()}
    replay = RoutingReplay(model)
    made = shaken(model, 0.0, in_backward)
    replay.give(3, chosen)
    with replay.replay_forward(3):
        loss = loss_of(model)
    layers = list(chosen.values())
    assert [torch.equal(value, layer) for value, layer in zip(made[-len(layers) :], layers, strict=True)]
    with replay.replay_backward(3):
        loss.backward()  # type: ignore[no-untyped-call]
    for router in routers(model):
        assert isinstance(router.weight, Tensor)
        assert router.weight.grad is not None
        assert router.weight.grad.any()
    assert all(torch.equal(replay.choices(3)[name], chosen[name]) for name in chosen)


def test_given_own_choices_change_nothing() -> None:
    model = model_of("qwen3_moe")
    _, expected = plain_step(model, ragged_batch())
    source = RoutingReplay(other := model_of("qwen3_moe"))
    with source.record(0):
        loss_of(other)
    replay = RoutingReplay(model)
    replay.give(0, source.choices(0))
    with replay.replay_forward(0):
        loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    assert_gradients(gradients(model), expected, 1e-10)


def test_evaluation_in_between_changes_nothing() -> None:
    model = model_of()
    replay = RoutingReplay(model)
    checkpointed(model)
    with replay.record(0):
        loss = loss_of(model)
        kept = replay.choices(0)
        with torch.no_grad():
            loss_of(model)
        model.eval()
        loss_of(model)
        model.train()
    assert replay.choices(0).keys() == kept.keys() == set(replay.names)
    assert all(replay.choices(0)[name] is kept[name] for name in kept)
    with replay.replay_backward(0):
        with torch.no_grad():
            made = shaken(model, 1.0, lambda: True)
            loss_of(model)
        evaluated = list(made)
    assert any(not torch.equal(a, b) for a, b in zip(evaluated, kept.values(), strict=True))
    del loss


def test_shape_inference_is_left_alone() -> None:
    model = model_of()
    model.set_experts_implementation("batched_mm")  # which runs without values
    replay = RoutingReplay(model)
    block = model.to("meta").get_submodule(replay.names[0].rpartition(".")[0])
    with replay.record(0):
        block(torch.zeros(2, 5, 32, dtype=torch.float64, device="meta"))
    assert replay.choices(0) == {}


def test_microbatches_are_told_apart() -> None:
    model = model_of()
    replay = RoutingReplay(model)
    checkpointed(model)
    made = shaken(model, 0.5, lambda: in_backward())
    losses = []
    for microbatch in (0, 1):
        ids = (ragged_batch()["input_ids"] + microbatch) % zoo.VOCABULARY
        with replay.record(microbatch):
            losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert replay.held == [0, 1]
    for microbatch in (1, 0):
        made.clear()
        with replay.replay_backward(microbatch):
            losses[microbatch].backward()
        layers = list(replay.choices(microbatch).values())
        assert all(torch.equal(a, b) for a, b in zip(reversed(made), layers, strict=True))


def test_errors() -> None:
    model = model_of()
    replay = RoutingReplay(model)
    with pytest.raises(ConfigError, match="microbatch 4"), replay.replay_forward(4):
        pass
    with pytest.raises(ConfigError, match="choices without"):
        replay.give(0, {})
    tokens = ragged_batch()["input_ids"].numel()
    for bad in (torch.zeros(tokens, 2, dtype=torch.int64), torch.rand(tokens, 2), torch.tensor([[-1, 0]])):
        with pytest.raises(ConfigError, match="different numbers"):
            replay.give(0, dict.fromkeys(replay.names, bad))
    replay.give(0, dict.fromkeys(replay.names, torch.tensor([[0, 1]] * (tokens - 1))))
    with pytest.raises(ConfigError, match="tokens"), replay.replay_forward(0):
        loss_of(model)
    with pytest.raises(ConfigError, match="4 experts"):
        replay.give(0, dict.fromkeys(replay.names, torch.tensor([[0, 4]] * tokens)))
    with pytest.raises(ModelError, match="replayed already"):
        RoutingReplay(model)


def test_recomputation_of_an_unknown_microbatch_is_an_error() -> None:
    model = model_of()
    replay = RoutingReplay(model)
    checkpointed(model)
    with replay.record(0):
        loss = loss_of(model)
    with pytest.raises(ConfigError, match="replay_backward"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_choice_by_something_else_is_refused() -> None:
    model = jobs.mixture("phimoe", torch.float32)
    replay = RoutingReplay(model)
    with pytest.raises(ModelError, match="top-k"), replay.record(0):
        loss_of(model)


def test_with_expert_parallelism_and_checkpointing(pool: Pool) -> None:
    assert not jobs.told(pool.run(2, jobs.replayed))
