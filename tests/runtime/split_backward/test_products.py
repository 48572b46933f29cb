"""Which calls of torch are products with a weight, and the gradients of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.runtime.split_backward.products import CALLS, LINEAR, MATMUL, ProductForm, find

X, SQUARE, CUBE = torch.ones(2, 3), torch.ones(3, 3), torch.ones(2, 3, 3)


def form_of(function: object, *args: Any, **kwargs: Any) -> ProductForm | None:
    call = find(*CALLS[function], args, kwargs)
    return None if call is None else call[3]


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "form"),
    [
        (F.linear, (X, SQUARE), {}, LINEAR),
        (F.linear, (), {"input": X, "weight": SQUARE, "bias": None}, LINEAR),
        (torch.addmm, (X, X, SQUARE), {}, MATMUL),
        (torch.matmul, (CUBE, SQUARE), {}, MATMUL),
        (Tensor.__matmul__, (X, SQUARE), {}, MATMUL),
        (torch.mm, (X, SQUARE), {}, MATMUL),
        (F.linear, (X, SQUARE[0]), {}, None),  # no matrix
        (torch.matmul, (X, CUBE), {}, None),  # several matrices
        (torch.addmm, (X, X, SQUARE), {"beta": 2}, None),  # an option that changes the result
        (torch.mm, (X, SQUARE, X), {}, None),
        (torch.matmul, (X,), {"input": X}, None),  # torch raises its own error
        (torch.matmul, (X, 2.0), {}, None),
    ],
)  # fmt: skip
def test_calls_that_are_products_of_one_matrix(
    function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], form: ProductForm | None
) -> None:
    assert form_of(function, *args, **kwargs) is form


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("form", [LINEAR, MATMUL])
def test_gradients_are_those_of_autograd(form: ProductForm, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn((5, 4) if form is LINEAR else (4, 5), dtype=torch.float64, requires_grad=True)
    y = form.product(x, weight, None)
    dy = torch.randn_like(y)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), dy)
    with torch.no_grad():
        torch.testing.assert_close(form.input_gradient(dy, weight), of_x)
        torch.testing.assert_close(form.weight_gradient(x, dy), of_weight)
        assert form.add_weight_gradient is not None
        total = torch.ones_like(weight)
        form.add_weight_gradient(total, x, dy)
        torch.testing.assert_close(total, of_weight + 1)
