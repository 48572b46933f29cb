"""What a forward records for a deferred weight gradient."""

from __future__ import annotations

import torch
from torch import nn

from penstock.runtime.split_backward.backward import hold, input_backward
from penstock.runtime.split_backward.recording import deferring
from support.halves import ROWS, WIDTH, Attention, forward, given

SIZE = ROWS * WIDTH * 4  # bytes of one activation in float32


def test_an_activation_that_three_products_share_is_counted_once() -> None:
    _, deferred = input_backward(forward(Attention(), torch.randn(ROWS, WIDTH)), given())
    x_of_qkv, x_of_o, dy = 1, 1, 4
    assert deferred.nbytes == (x_of_qkv + x_of_o + dy) * SIZE
    deferred.run()
    assert deferred.nbytes == 0


def test_parameters_are_not_counted() -> None:
    table, one = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Linear(WIDTH, WIDTH)
    with deferring() as tape:
        output = one(table)
    _, deferred = input_backward(hold([], [output], tape), given())
    assert deferred.nbytes == SIZE


def test_a_forward_that_was_not_deferring_takes_a_whole_backward() -> None:
    module = Attention()
    with torch.no_grad():
        x = torch.randn(ROWS, WIDTH)
    output = module(x.requires_grad_())
    gradients, deferred = input_backward(hold([x], [output]), given())
    assert len(gradients) == 1
    assert deferred.nbytes == 0
    assert all(p.grad is not None for p in module.parameters())
    deferred.run()


def test_stages_of_one_process_do_not_mix() -> None:
    """Two stages with a shared module, the second one's I between the first one's F and I."""
    shared = nn.Linear(WIDTH, WIDTH)
    x, gradient = torch.randn(ROWS, WIDTH), given()
    reference = x.clone().requires_grad_()
    shared(shared(reference)).backward(gradient[0])
    expected = shared.weight.grad
    shared.zero_grad()
    with deferring() as tape:
        middle = shared(x.requires_grad_())
    first = hold([x], [middle], tape)
    second = forward(shared, received := middle.detach())
    (back,), late = input_backward(second, gradient)
    assert back is received.grad
    (found,), later = input_backward(first, [back])
    assert shared.weight.grad is None
    later.run()
    late.run()
    torch.testing.assert_close(shared.weight.grad, expected)
    torch.testing.assert_close(found, reference.grad)
