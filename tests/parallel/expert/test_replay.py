"""Routing replay: a forward that runs again chooses the experts of the forward before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ConfigError, ModelError
from penstock.models.tracing.meta import shadow
from penstock.models.tracing.provenance import Provenance
from penstock.parallel.expert.experts import expert_parallel, mixtures
from penstock.parallel.expert.replay import ModelRouting, StageRouting
from penstock.runtime.stage_part import WHOLE
from penstock.schedule.ops import Kind
from support import zoo
from support.covering import every
from support.families import ragged_batch
from support.mixtures import (
    Batch,
    differences,
    ep_mesh,
    gathered,
    mixture,
    none_wrong,
    own_rows,
    routers,
    total_loss,
    valid,
)
from support.pool import Pool
from support.reference import assert_gradients, gradients_of, plain_step
from support.refusals import refuses

# glm4_moe chooses its one group by a top-k of as many experts; zaya writes over some of the choices
KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "glm4_moe", "zaya")


def model_of(model_type: str = "mixtral") -> PreTrainedModel:
    return mixture(model_type, torch.float64)


def checkpointed(model: PreTrainedModel) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})


def routing_of(model: PreTrainedModel, change: Callable[[], object] = lambda: None) -> StageRouting:
    """change: made to the model before its routers are attached, as other axes of a mesh do"""
    with shadow(model) as without_values, Provenance() as marks:
        whole = ModelRouting(without_values, marks)
    change()
    routing = whole.for_stage(model)
    assert routing is not None
    return routing


@contextmanager
def forward(routing: StageRouting, number: int, batch: Batch) -> Iterator[None]:
    routing.before_forward(number, batch, WHOLE)
    yield
    routing.after_forward()


@contextmanager
def backward(routing: StageRouting, number: int, kind: Kind) -> Iterator[None]:
    routing.before_backward(number)
    yield
    routing.after_backward(number, kind)


def loss_of(model: PreTrainedModel) -> Tensor:
    batch = ragged_batch()
    return total_loss(model, batch) / valid(batch)


def step(model: PreTrainedModel, routing: StageRouting, number: int, batch: Batch) -> Tensor:
    """The loss of a forward of microbatch `number`, whose backward has run."""
    with forward(routing, number, batch):
        loss = loss_of(model)
    with backward(routing, number, "B"):
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


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


@pytest.mark.parametrize("model_type", every(2, KINDS))
def test_recomputation_chooses_as_the_forward_did(model_type: str) -> None:
    """Other choices without replay, the same with it, from a router whose input has changed in between."""
    model = model_of(model_type)
    routing = routing_of(model)
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
    # layers are run again from the last one
    assert any(not torch.equal(a, b) for a, b in zip(made, reversed(first), strict=False))
    model.zero_grad()
    with forward(routing, 7, ragged_batch()):
        loss = loss_of(model)
    first = list(routing.kept(7).values())
    made.clear()
    with backward(routing, 7, "I"):
        loss.backward()  # type: ignore[no-untyped-call]
    assert len(made) == len(first)
    assert all(torch.equal(again, before) for again, before in zip(made, reversed(first), strict=True))
    assert routing.left_over == 1
    with backward(routing, 7, "W"):
        pass
    assert routing.left_over == 0
    recorded = routing.recorded[7].chosen.flatten(0, 1)
    assert all(torch.equal(recorded[:, place], layer) for place, layer in enumerate(first))


@pytest.mark.parametrize("model_type", every(2, KINDS))
def test_replay_changes_no_gradient(model_type: str) -> None:
    """Neither where the routers choose nor where the batch has the choices that they made."""
    model = model_of(model_type)
    loss, expected = plain_step(model, ragged_batch())
    routing = routing_of(model)
    checkpointed(model)
    assert float(step(model, routing, 0, ragged_batch())) == pytest.approx(loss, rel=1e-12)
    assert_gradients(gradients_of(model), expected, 1e-10)
    model.zero_grad()
    step(model, routing, 1, {**ragged_batch(), "routed_experts": routing.recorded[0].chosen})
    assert_gradients(gradients_of(model), expected, 1e-10)


def test_given_choices_replace_the_routers() -> None:
    """With weights that come from the router's logits."""
    model = model_of("deepseek_v3")
    routing = routing_of(model)
    step(model, routing, 0, ragged_batch())
    chosen = (routing.recorded[0].chosen + 1) % 4
    model.zero_grad()
    made = shaken(model, 0.0, in_backward)
    step(model, routing, 3, {**ragged_batch(), "routed_experts": chosen})
    layers = chosen.flatten(0, 1).unbind(1)
    assert all(torch.equal(value, layer) for value, layer in zip(made, layers, strict=True))
    for router in routers(model):
        assert isinstance(router.weight, Tensor)
        assert router.weight.grad is not None
        assert router.weight.grad.any()
    assert torch.equal(routing.recorded[3].chosen, chosen)


def test_evaluation_in_between_changes_nothing() -> None:
    model = model_of()
    routing = routing_of(model)
    checkpointed(model)
    with forward(routing, 0, ragged_batch()):
        loss = loss_of(model)
        kept = dict(routing.kept(0))
        with torch.no_grad():
            loss_of(model)
        model.eval()
        loss_of(model)
        model.train()
    assert routing.kept(0).keys() == kept.keys() == mixtures(model).keys()
    assert all(routing.kept(0)[name] is kept[name] for name in kept)
    with backward(routing, 0, "I"), torch.no_grad():
        made = shaken(model, 1.0, lambda: True)
        loss_of(model)
    assert any(not torch.equal(a, b) for a, b in zip(made, kept.values(), strict=True))
    del loss


def test_shape_inference_is_left_alone() -> None:
    model = model_of()
    model.set_experts_implementation("batched_mm")  # which runs without values
    routing = routing_of(model)
    name = next(iter(mixtures(model)))
    block = model.to("meta").get_submodule(name.rpartition(".")[0])
    with forward(routing, 0, ragged_batch()):
        block(torch.zeros(2, 5, 32, dtype=torch.float64, device="meta"))
    assert routing.kept(0) == {}


def test_each_microbatch_replays_its_own_choices() -> None:
    model = model_of()
    routing = routing_of(model)
    checkpointed(model)
    made = shaken(model, 0.5, in_backward)
    losses = []
    for microbatch in (0, 1):
        ids = (ragged_batch()["input_ids"] + microbatch) % zoo.VOCABULARY
        with forward(routing, microbatch, {"input_ids": ids}):
            losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert routing.left_over == 2
    for microbatch in (1, 0):
        made.clear()
        layers = list(routing.kept(microbatch).values())
        with backward(routing, microbatch, "B"):
            losses[microbatch].backward()
        assert all(torch.equal(a, b) for a, b in zip(reversed(made), layers, strict=True))
    assert routing.left_over == 0


def test_choices_of_another_length_are_refused() -> None:
    model, batch = model_of(), ragged_batch()
    routing = routing_of(model)
    rows, length = batch["input_ids"].shape
    short = torch.zeros(rows, length - 1, len(mixtures(model)), 2, dtype=torch.int64)
    with refuses(ConfigError, "choices [72, 2] to replay in model.layers.0.mlp.experts", "chooses 2 experts"):
        step(model, routing, 0, {**batch, "routed_experts": short})


def test_a_model_is_replayed_once() -> None:
    model = model_of()
    names = mixtures(model)
    places, numbers = {name: place for place, name in enumerate(names)}, dict.fromkeys(names, 0)
    StageRouting(model, places, numbers)
    with refuses(ModelError, "replayed already"):
        StageRouting(model, places, numbers)


def test_reentrant_checkpointing_leaves_no_choice_to_replay() -> None:
    """Its first forward has no gradients."""
    model = model_of()
    routing = routing_of(model)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with forward(routing, 0, ragged_batch()):
        loss = loss_of(model)
    with (
        refuses(ConfigError, "experts, to be replayed", "recorded no choice", "use_reentrant=False"),
        backward(routing, 0, "B"),
    ):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_choice_by_something_else_is_refused() -> None:
    with refuses(ModelError, rule="top-k"):
        routing_of(mixture("phimoe", torch.float32))


def test_a_choice_of_as_many_groups_is_none_of_experts() -> None:
    """The choice among experts is made of that among groups, and comes after it."""
    model = mixture("deepseek_v3", torch.float64, n_group=4, topk_group=2, n_routed_experts=8)
    batch = ragged_batch()
    loss, expected = plain_step(model, batch)
    routing = routing_of(model)
    assert float(step(model, routing, 0, batch)) == pytest.approx(loss, rel=1e-12)
    assert int(routing.recorded[0].chosen.max()) > 3  # of experts, not of groups
    assert_gradients(gradients_of(model), expected, 1e-10)


def replayed() -> list[str]:
    """Expert parallel, checkpointed, and with every choice recorded and replayed."""
    mesh, rank, ranks = ep_mesh(), dist.get_rank(), dist.get_world_size()
    model = mixture("qwen3_moe", torch.float32)
    batch = ragged_batch()
    loss, expected = plain_step(model, batch)
    routing = routing_of(model, lambda: expert_parallel(model, mesh))
    checkpointed(model)
    mine = own_rows(batch, rank, ranks)
    with forward(routing, 0, mine):
        own = total_loss(model, mine) / valid(batch)
    with backward(routing, 0, "B"):
        own.backward()  # type: ignore[no-untyped-call]
    return differences("replayed", own, loss, gathered(model), expected, 1e-5)


def test_with_expert_parallelism_and_checkpointing(pool: Pool) -> None:
    none_wrong(pool.run(2, replayed))
