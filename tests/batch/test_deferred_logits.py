"""A forward that computes with deferred logits, reads or changes them gives what it gives of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.deferred_logits import DeferredLogits, whole
from penstock.batch.head_logits import HeadLogits
from penstock.batch.loss import NextToken
from penstock.errors import ModelError
from penstock.private import DisableTorchFunctionSubclass
from support.refusals import refuses

LABELS = torch.tensor([[0, 3, 6, 2, 1], [5, 5, -100, 0, 4]])


def read(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits.sum()
    return logits


def change_a_slice(logits: Tensor) -> Tensor:
    logits[:, 1:3].mul_(3.0)
    return logits


def change_after_a_slice(logits: Tensor) -> Tensor:
    part = logits[:1]
    logits.mul_(3.0)
    return part


def change_a_copy(logits: Tensor) -> Tensor:
    logits[:, :-1].contiguous().mul_(3.0)
    return logits


def change_a_cast(logits: Tensor) -> Tensor:
    logits.to(torch.float64).contiguous().mul_(3.0)
    return logits


def change_a_product(logits: Tensor) -> Tensor:
    (logits * 2).mul_(3.0)
    return logits


def slice_without_gradients(logits: Tensor) -> Tensor:
    with torch.no_grad():
        part = logits[:, :2] * 2
    return logits * float(part.mean())


def add_a_vector(logits: Tensor) -> Tensor:
    return logits + torch.arange(7, dtype=logits.dtype)


FORWARDS: list[Callable[[Any], Any]] = [
    read, change_a_slice, change_after_a_slice, change_a_copy, change_a_cast, change_a_product,
    slice_without_gradients, add_a_vector,
]  # fmt: skip


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_forward_sees_plain_logits(forward: Callable[[Any], Any], name: str) -> None:
    """0.9.0: logits that someone read without gradients got none from the loss."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for kind in (F.linear, HeadLogits):
        logits = forward(kind(hidden, weight))
        total = NextToken().total({"logits": logits}, {name: LABELS[: len(logits)]})
        results.append([total, *torch.autograd.grad(total, (hidden, weight))])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_arithmetic_reads_no_values() -> None:
    logits = HeadLogits(torch.randn(2, 5, 4), torch.randn(7, 4, requires_grad=True))
    later = (torch.tanh(logits.float()[:, :-1] / 30) * 30).to(torch.bfloat16)
    assert isinstance(later, DeferredLogits)
    assert (later.shape, later.dtype, later.requires_grad) == ((2, 4, 7), torch.bfloat16, True)
    assert not logits.is_whole
    assert not later.is_whole
    assert type(whole({"logits": later})["logits"]) is Tensor


def test_logits_without_gradients_need_none() -> None:
    with torch.no_grad():
        logits = HeadLogits(torch.randn(2, 5, 4), torch.randn(7, 4, requires_grad=True))
    assert not logits.requires_grad
    assert not logits.whole().requires_grad


def test_reads_below_autograd_are_refused() -> None:
    logits = HeadLogits(torch.randn(2, 5, 4), torch.randn(7, 4))
    with DisableTorchFunctionSubclass(), refuses(ModelError, rule="below autograd"):
        logits.sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_an_autograd_function_of_them_is_refused() -> None:
    """0.9.0: its gradient did not reach the head, without an error."""
    logits = HeadLogits(torch.randn(2, 5, 4), torch.randn(7, 4, requires_grad=True))
    total = NextToken().total(Doubled.apply(logits), {"labels": LABELS})  # type: ignore[no-untyped-call]
    with refuses(ModelError, "autograd.Function"):
        total.backward()  # type: ignore[no-untyped-call]
