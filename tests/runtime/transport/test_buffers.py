"""The pool of receive buffers: used again only when nobody holds them, fitting well, and never growing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.batch.payload import TensorSpec
from penstock.runtime.transport.buffers import Pool

SPEC = TensorSpec((8, 4), torch.float32)


@pytest.fixture
def pool() -> Pool:
    return Pool(torch.device("cpu"))


def taken(pool: Pool, nbytes: int) -> Tensor:
    return pool.take(TensorSpec((nbytes,), torch.uint8))


def address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def test_what_is_taken_has_shape_and_dtype(pool: Pool) -> None:
    for shape, dtype in (((2, 3), torch.bfloat16), ((), torch.float64), ((0, 4), torch.int64)):
        tensor = pool.take(TensorSpec(shape, dtype))
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)


def graph(tensor: Tensor) -> Any:
    """A graph that saved the tensor, which is itself gone."""
    weight = torch.ones(4, requires_grad=True)
    return (tensor * weight).sum()


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[2:3],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.view(-1).detach().requires_grad_(),
        lambda tensor: tensor.numpy(),
        graph,
    ],
    ids=["itself", "a view", "a detached alias", "a leaf", "an array", "a graph"],
)
def test_it_is_not_used_again_while_it_is_held(pool: Pool, hold: Callable[[Tensor], Any]) -> None:
    tensor = pool.take(SPEC)
    where = address(tensor)
    held = hold(tensor)
    del tensor
    assert pool.idle_bytes == 0
    assert address(pool.take(SPEC)) != where
    del held
    assert pool.idle_bytes == pool.nbytes == 2 * SPEC.nbytes


def test_a_backward_gives_what_its_graph_held_back(pool: Pool) -> None:
    loss = graph(pool.take(SPEC))
    loss.backward()
    assert pool.idle_bytes == SPEC.nbytes


@pytest.mark.parametrize(
    ("first", "then", "shared"),
    [
        (TensorSpec((64,), torch.float32), TensorSpec((32,), torch.float64), True),
        (TensorSpec((1100,), torch.uint8), TensorSpec((1050,), torch.uint8), True),
        (TensorSpec((4096,), torch.uint8), TensorSpec((1024,), torch.uint8), False),
    ],
    ids=["another dtype", "a ragged length", "much too large"],
)
def test_memory_serves_what_fits_it(pool: Pool, first: TensorSpec, then: TensorSpec, shared: bool) -> None:
    where = address(pool.take(first))
    assert (address(pool.take(then)) == where) == shared
    assert address(pool.take(first)) == where


def test_the_best_fit_is_taken(pool: Pool) -> None:
    large, fitting, small = (taken(pool, size) for size in (11000, 10400, 9900))
    best = address(fitting)
    del large, fitting, small
    assert address(taken(pool, 10100)) == best


def test_trim_lets_go_of_what_the_last_step_did_not_use(pool: Pool) -> None:
    held = taken(pool, 4096)
    taken(pool, 1024)
    pool.trim()
    assert pool.nbytes == 5120
    taken(pool, 1024)
    pool.trim()
    assert pool.nbytes == 5120  # one is held still
    del held
    taken(pool, 1024)
    pool.trim()
    assert pool.nbytes == 1024
    pool.trim()
    assert pool.nbytes == 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nothing_grows_over_steps_of_random_shapes(data: st.DataObject) -> None:
    """Each step receives a few messages, and holds some while it receives the next ones."""
    pool = Pool(torch.device("cpu"))
    sizes = data.draw(st.lists(st.integers(1, 1 << 16), min_size=1, max_size=6))
    random = data.draw(st.randoms(use_true_random=False))
    for _ in range(40):
        step = [random.choice(sizes) for _ in range(random.randint(1, 8))]
        held: list[Tensor] = []
        for size in step:
            tensor = taken(pool, size)
            tensor.fill_(len(held))
            held.append(tensor)
            if random.random() < 0.3:
                held.pop(random.randrange(len(held)))
        assert len(set(map(address, held))) == len(held)
        del tensor
        held.clear()
        pool.trim()
        assert pool.idle_bytes == pool.nbytes
        assert pool.nbytes <= sum(1.125 * size + 64 for size in step)


def test_a_small_buffer_does_not_cost_the_large_ones(pool: Pool) -> None:
    large, small = TensorSpec((1000,), torch.float32), TensorSpec((), torch.float32)
    made = []
    for _ in range(5):
        hidden, scalar = pool.take(large), pool.take(small)
        made += [hidden.untyped_storage()._cdata, scalar.untyped_storage()._cdata]
        del hidden, scalar
    assert len(set(made)) == 2
