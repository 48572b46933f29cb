"""Autocast's copies of weights, and the passes over memory that W takes in half precision."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.split_backward.backward import hold, input_backward
from penstock.runtime.split_backward.casts import WeightCasts
from penstock.runtime.split_backward.deferred import Deferred
from penstock.runtime.split_backward.recording import casting, deferring

LOW = torch.bfloat16
ROWS, WIDTH = 16, 64


class Passes(TorchDispatchMode):
    """The ops that compute, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func is torch.ops.aten.new_empty.default):
            self.names.append(func._overloadpacket.__name__)
            self.nbytes += sum(tensor.nbytes for tensor in (*args, result) if isinstance(tensor, Tensor))
        return result


class Repeated(nn.Module):
    """A weight with several uses, whose gradients autocast sums in half precision."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.linear, self.uses = nn.Linear(WIDTH, WIDTH, bias=False), uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = self.linear(x)
        return x


def accumulating(module: nn.Module) -> nn.Module:
    """With gradients of an earlier microbatch."""
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    return module


def deferred_of(module: nn.Module, x: Tensor, dy: Tensor, *, autocast: bool) -> Deferred:
    with torch.autocast("cpu", LOW, enabled=autocast), deferring() as tape:
        output = module(x)
    return input_backward(hold([x], [output], tape), [dy])[1]


def plain(module: nn.Module, x: Tensor, dy: Tensor, *, autocast: bool) -> None:
    with torch.autocast("cpu", LOW, enabled=autocast):
        output = module(x)
    output.backward(dy)


@pytest.mark.parametrize("uses", [1, 3])
def test_under_autocast_w_adds_to_the_gradient_without_a_copy_in_float32(uses: int) -> None:
    """0.5.0: `_to_copy` came before the sum, and W moved 20 bytes an entry in place of 12."""
    module = accumulating(Repeated(uses))
    reference = copy.deepcopy(module)
    (weight,), (expected,) = module.parameters(), reference.parameters()
    expected.grad = None if weight.grad is None else weight.grad.clone()
    x, dy = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, dtype=LOW)
    plain(reference, x, dy, autocast=True)
    deferred = deferred_of(module, x, dy, autocast=True)
    with Passes() as passes:
        deferred.run()
    entries, activations = WIDTH * WIDTH, 2 * ROWS * WIDTH * 2
    sums = (uses - 1) * (2 + 2 + 2 + 2)  # product and sum in half precision
    assert passes.names == ["mm", *["mm", "add_"] * (uses - 1), "add_"]
    assert passes.nbytes == uses * activations + (2 + 4 + 2 + 4 + sums) * entries
    assert weight.grad is not None
    assert expected.grad is not None
    assert torch.equal(weight.grad, expected.grad)


def test_weights_in_half_precision_take_the_two_roundings_of_autograd() -> None:
    """A product that adds to the gradient moves 4 bytes an entry in place of 8, but rounds once.

    Two plain runs on one machine differ in no bit, and W must not differ from them either.
    """
    module = accumulating(nn.Linear(WIDTH, WIDTH, bias=False).to(LOW))
    reference, (weight,) = copy.deepcopy(module), module.parameters()
    (expected,) = reference.parameters()
    assert weight.grad is not None
    before = weight.grad.clone()
    expected.grad = before.clone()
    x, dy = torch.randn(ROWS, WIDTH, dtype=LOW), torch.randn(ROWS, WIDTH, dtype=LOW)
    plain(reference, x, dy, autocast=False)
    deferred = deferred_of(module, x, dy, autocast=False)
    with Passes() as passes:
        deferred.run()
    entries, activations = WIDTH * WIDTH, 2 * ROWS * WIDTH * 2
    assert passes.nbytes == activations + (2 + 2 + 2 + 2) * entries
    assert torch.equal(weight.grad, expected.grad)
    once = before.clone().addmm_(dy.t(), x)
    assert int((once != expected.grad).sum()) > entries // 20
    exact = before.double() + dy.double().t() @ x.double()
    assert (once - exact).abs().mean() < (expected.grad - exact).abs().mean()


def test_a_weight_is_cast_anew_where_it_has_changed() -> None:
    """An optimizer that steps in a hook of the backward, say."""
    casts, weight = WeightCasts(), nn.Parameter(torch.ones(2, 2))
    first = casts.of(weight, LOW)
    assert casts.of(weight, LOW) is first
    with torch.no_grad():
        weight.mul_(2)
        second = casts.of(weight, LOW)
    assert second.tolist() == [[2.0, 2.0]] * 2
    assert second.requires_grad, "a later microbatch may need it"
    weight.data = weight.data * 2  # keeps the version
    assert casts.of(weight, LOW).tolist() == [[4.0, 4.0]] * 2
    weight.requires_grad_(False)
    frozen = casts.of(weight, LOW)
    assert not frozen.requires_grad
    assert len(casts) == 1
    assert casts.of(weight, torch.float16) is not frozen
    casts.clear()
    assert not len(casts)


def test_a_product_on_a_device_without_autocast() -> None:
    """A forward that looks at shapes on the meta device failed as soon as autocast was on."""
    with torch.autocast("cpu", LOW), casting(WeightCasts()):
        found = F.linear(torch.ones(2, 3, device="meta"), torch.ones(4, 3, device="meta"))
    assert found.dtype == torch.float32
