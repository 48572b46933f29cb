"""What a process trains with: nothing is copied to look at it, and it goes back bit for bit."""

from __future__ import annotations

import torch

from penstock.checkpoint.live_state import Holdings, check_finite, check_identity
from penstock.errors import CheckpointError, UnfitError
from support.jobs_checkpoint import advance, make
from support.refusals import refuses
from support.writing import Made


def trained(alone: Made) -> Holdings:
    pipe, optimizers = alone
    advance(pipe, optimizers, 1, 1)
    return Holdings(pipe, optimizers)


def test_what_is_held_now_is_put_back_after_further_steps(alone: Made) -> None:
    pipe, optimizers = alone
    holdings = trained(alone)
    state = holdings.now()
    kept = {name: tensor.clone() for name, tensor in (state.steady | state.passing).items()}
    advance(pipe, optimizers, 1, 1)
    torch.rand(3)
    after = holdings.now()
    assert any(not torch.equal(tensor, kept[name]) for name, tensor in after.steady.items())
    holdings.put_back(kept, state.numbers)
    again = holdings.now()
    assert {name: torch.equal(t, kept[name]) for name, t in (again.steady | again.passing).items()} == (
        dict.fromkeys(kept, True)
    )


def test_no_value_is_copied(alone: Made) -> None:
    state = trained(alone).now()
    parameters = {p.data_ptr() for module in alone[0].modules.values() for p in module.parameters()}
    weights = {name: tensor for name, tensor in state.steady.items() if name.startswith("weight/")}
    assert {tensor.data_ptr() for tensor in weights.values()} == parameters
    assert {name.partition("/")[0] for name in state.steady} >= {"weight", "exp_avg", "exp_avg_sq"}


def test_the_state_of_another_model_does_not_fit(alone: Made) -> None:
    own = Holdings(*alone).identity(1)
    check_identity(own, Holdings(*make(1, "1f1b", layers=1)).identity(1))
    with refuses(UnfitError, "a checkpoint in memory", "layout of ranks"):
        check_identity(own, Holdings(*alone).identity(2))
    with refuses(UnfitError, "a checkpoint in memory", "model's config differs"):
        check_identity({**own, "the model's config": "x"}, own)


def test_weights_that_are_not_finite_are_refused_and_buffers_may_be() -> None:
    tensors = {"weight/a": torch.zeros(2), "weight/mask": torch.tensor([-torch.inf])}
    check_finite(tensors, ["weight/mask"])
    with refuses(CheckpointError, "weight/mask in memory", "NaN or infinity"):
        check_finite(tensors, [])


def test_an_optimizer_that_had_no_state_has_none_again(alone: Made) -> None:
    pipe, optimizers = alone
    holdings = Holdings(pipe, optimizers)
    state = holdings.now()
    assert {name.partition("/")[0] for name in state.steady} == {"weight"}
    kept = {name: tensor.clone() for name, tensor in (state.steady | state.passing).items()}
    advance(pipe, optimizers, 1, 1)
    holdings.put_back(kept, state.numbers)
    assert not any(optimizer.state for optimizer in optimizers)
