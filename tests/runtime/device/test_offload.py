"""Offload: what of a forward leaves the device, what comes back, and what autograd still checks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.device.offload import Offload
from penstock.runtime.stage_part import Forward
from support.host_link import LateLink

CPU = torch.device("cpu")


@contextmanager
def forward(offload: Offload, number: int = 0) -> Iterator[None]:
    offload.before_forward(number, {}, Forward(offload=True))
    with offload.saving():
        yield
    offload.after_forward()


def there_and_back(offload: Offload, number: int = 0, staying: frozenset[int] = frozenset()) -> int:
    """Returns the bytes that left."""
    offload.offload(number, staying)
    left = offload.release(number)
    assert offload.reload(number) == left
    offload.restore(number)
    assert offload.left_over == 0
    return left


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def test_a_storage_leaves_once_and_its_views_come_back_as_they_were() -> None:
    offload, x = Offload(CPU, 0, LateLink()), leaf(4, 6)
    seen: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[no-untyped-def]
            for saved, expected in zip(ctx.saved_tensors, views, strict=True):
                assert torch.equal(saved, expected)
                seen.append((saved.shape, saved.stride(), saved.untyped_storage().data_ptr()))
            return (None,) * len(ctx.saved_tensors)

    made = x * 2
    views = [each.detach().clone() for each in (made, made.t(), made[1:, ::2], made.view(torch.int64))]
    with forward(offload):
        total = Saves.apply(made, made.t(), made[1:, ::2], made.detach().view(torch.int64))  # type: ignore[no-untyped-call]
    del made
    assert there_and_back(offload) == 4 * 6 * 8
    total.backward()
    assert [(shape, stride) for shape, stride, _ in seen] == [
        ((4, 6), (6, 1)), ((6, 4), (1, 6)), ((3, 3), (6, 2)), ((4, 6), (6, 1)),
    ]  # fmt: skip
    assert len({address for *_, address in seen}) == 1


# _away: memory in the host is seen there alone
def test_memory_is_freed_while_it_is_away_and_after_its_last_use() -> None:
    offload, x = Offload(CPU, 0), leaf(8)
    with forward(offload):
        hidden = x.exp()
        total = hidden.sin().sum()
    offload.offload(0, set())
    (saved,) = offload._away[0].storages
    storage = hidden.untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == 3  # hidden, saved, storage
    assert offload.release(0) == 64
    assert torch._C._storage_Use_Count(storage._cdata) == 2
    offload.reload(0)
    offload.restore(0)
    alive = weakref.ref(saved)
    del saved
    assert alive() is not None
    total.backward()  # type: ignore[no-untyped-call]
    assert alive() is None
    assert offload.left_over == 0


def small_and_others(offload: Offload) -> tuple[Tensor, list[Tensor]]:
    weight, frozen = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)
    x = torch.randn(2, 4)
    with forward(offload):
        hidden = x @ weight.t()
        total = ((hidden @ frozen).tanh() * 3.0).sum()
    return total, [weight, frozen, x]


def test_what_others_hold_and_what_is_small_stays() -> None:
    offload = Offload(CPU, 0, LateLink())
    total, (_, frozen, x) = small_and_others(offload)
    staying = frozenset({frozen.untyped_storage()._cdata, x.untyped_storage()._cdata})
    assert there_and_back(offload, staying=staying) == 2 * 4 * 4  # what tanh returned
    total.backward()  # type: ignore[no-untyped-call]
    offload = Offload(CPU, 33, LateLink())
    total, others = small_and_others(offload)
    assert there_and_back(offload) == 4 * 4 * 4  # `frozen` alone: a parameter stays, and a view of one
    total.backward()  # type: ignore[no-untyped-call]
    weight = others[0]
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("changed", [0, 1], ids=["an activation", "a weight"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_modified_in_place_is_still_an_error(changed: int, when: str) -> None:
    """Hooks of saved tensors take autograd's own check away."""
    offload, x, weight = Offload(CPU, 0), leaf(3), leaf(3)
    with forward(offload):
        hidden = x.exp()
        total = (hidden * weight).sum()
    offload.offload(0, set())
    if when == "before":
        with torch.no_grad():
            (hidden, weight)[changed].add_(1)
    offload.release(0)
    offload.reload(0)
    offload.restore(0)
    if when == "after":
        with torch.no_grad():
            (hidden, weight)[changed].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1;"):
        total.backward()  # type: ignore[no-untyped-call]


def test_a_layer_that_runs_again_keeps_its_inputs_in_host_memory_and_runs_as_before() -> None:
    offload, x, weight = Offload(CPU, 0, LateLink()), leaf(2, 4), leaf(4, 4)
    ran: list[bool] = []

    def layer(hidden: Tensor) -> Tensor:
        ran.append(offload.records)  # under checkpointing's own hooks
        return (hidden @ weight).tanh().exp()

    expected = torch.autograd.grad(layer(x * 2).sum(), weight)[0]
    ran.clear()
    with forward(offload):
        total = checkpoint(layer, x * 2, use_reentrant=False).sum()
    assert there_and_back(offload) == 2 * 4 * 8
    total.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert ran == [False, False]


def test_gradients_within_a_forward_find_what_has_not_left_yet() -> None:
    offload, x = Offload(CPU, 0, LateLink()), leaf(4)
    with forward(offload):
        (slope,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        total = (slope * x.sin()).sum()
    there_and_back(offload)
    total.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.allclose(x.grad, x.exp() * (x.sin() + x.cos()))


def test_a_failed_step_is_forgotten() -> None:
    link = LateLink()
    offload, x = Offload(CPU, 0, link), leaf(4)
    with forward(offload):
        kept = x.exp().sin()
    offload.offload(0, set())
    with pytest.raises(KeyError), forward(offload, 1):
        raise KeyError
    assert offload.left_over == 2
    offload.reset()
    assert offload.left_over == 0
    assert link.log == ["down", "wait down"]  # memory is not used again under a copy
    assert kept.shape == (4,)
