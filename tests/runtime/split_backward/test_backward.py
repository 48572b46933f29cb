"""Whole and split backwards: what they hold, when they let go, and how they share a process."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.split_backward.backward import hold, input_backward, whole_backward
from penstock.runtime.split_backward.recording import Tape, deferring
from support.halves import ROWS, WIDTH, Attention, forward, given
from support.pool import Pool
from support.splitting import sharded


def test_a_hook_that_is_registered_between_the_halves_sees_the_gradient() -> None:
    one, seen = nn.Linear(WIDTH, WIDTH, bias=False), list[Tensor]()
    one.weight.grad = torch.zeros_like(one.weight)
    _, deferred = input_backward(forward(one, torch.randn(ROWS, WIDTH)), given())
    one.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    deferred.run()
    torch.testing.assert_close(seen, [one.weight.grad])


# _groups: what is kept for W is seen there alone
def test_i_keeps_nothing_that_w_does_not_need() -> None:
    kept: list[weakref.ref[object]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            squashed = hidden.sigmoid()
            square = hidden * hidden  # saves `hidden`
            kept.extend(weakref.ref(t.untyped_storage()) for t in (hidden, squashed))
            result: Tensor = self.two(squashed) + square
            return result

    gc.disable()  # a cycle would count as held
    try:
        live = forward(Watched(), torch.randn(ROWS, WIDTH))
        _, deferred = input_backward(live, given())
        del live
        assert [ref() is not None for ref in kept] == [False, True]
        assert all(product.x.grad_fn is None for group in deferred._groups for product in group)
        deferred.run()
        assert [ref() is not None for ref in kept] == [False, False]
    finally:
        gc.enable()


def test_w_runs_once() -> None:
    module = Attention()
    _, deferred = input_backward(forward(module, torch.randn(ROWS, WIDTH)), given())
    assert [p.grad is None for p in module.q.parameters()] == [True, False]
    deferred.run()
    before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    deferred.run()
    after = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(before) == len(after) == 8
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# _groups: what is kept for W is seen there alone
def test_a_first_gradient_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps the product that it is given: one that Python held as well it would have to copy."""
    made: list[int] = []
    module = nn.Linear(WIDTH, WIDTH)
    _, deferred = input_backward(forward(module, torch.randn(ROWS, WIDTH)), given())
    (group,) = deferred._groups
    form = group[0].form

    def noting(x: Tensor, dy: Tensor) -> Tensor:
        gradient = form.weight_gradient(x, dy)
        made.append(gradient.data_ptr())
        return gradient

    group[0] = group[0]._replace(form=form._replace(weight_gradient=noting))
    deferred.run()
    assert module.weight.grad is not None
    assert module.weight.grad.data_ptr() == made[0]


def test_nothing_that_needs_a_gradient() -> None:
    with deferring() as tape:
        output = nn.Linear(WIDTH, WIDTH).requires_grad_(False)(torch.ones(ROWS, WIDTH))
    gradients, deferred = input_backward(hold([], [output], tape), given())
    deferred.run()
    assert (gradients, deferred.nbytes) == ((), 0)


# _task: that the tape is free again is seen there alone
def test_a_failed_i_leaves_the_tape_as_it_was() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    live = forward(module, torch.randn(ROWS, WIDTH))
    with pytest.raises(RuntimeError):
        input_backward(live, [torch.ones(ROWS, WIDTH + 1)])
    assert isinstance(live.tape, Tape)
    assert live.tape._task is None
    whole_backward(forward(module, torch.randn(ROWS, WIDTH)), given())
    assert module.weight.grad is not None


@pytest.mark.parametrize(
    ("ranks", "reshard", "checkpointed"),  # each pair of values once
    [
        *(pytest.param(1, *rest, marks=pytest.mark.sweep) for rest in ((False, False), (True, True))),
        (2, False, True),
        (2, True, False),
    ],
)
def test_fsdp2(pool: Pool, ranks: int, reshard: bool, checkpointed: bool) -> None:
    for order in ("interleaved", "delayed", "whole"):
        for held in pool.run(ranks, sharded, order, reshard, checkpointed):
            assert all((size > 0) == (order != "whole") for size in held)
