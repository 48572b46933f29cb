"""Tokens reach the ranks of their experts and come back."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from penstock.parallel.expert.dispatch import combine, dispatch, plan_route
from penstock.parallel.expert.experts import expert_parallel, mixtures
from support.mixtures import (
    ep_mesh,
    mixture,
)
from support.reads import watched


def test_shape_inference_sends_nothing(one_process: None) -> None:
    model = mixture("mixtral", torch.float32)
    expert_parallel(model, ep_mesh())
    experts = next(iter(mixtures(model).values()))
    with torch.device("meta"):
        assert experts(torch.ones(6, 32), torch.ones(6, 2), torch.ones(6, 2)).shape == (6, 32)
    with FakeTensorMode():
        assert experts(torch.ones(6, 32), torch.ones(6, 2), torch.ones(6, 2)).shape == (6, 32)


def test_choices_of_no_expert_are_not_sent(one_process: None) -> None:
    """Some routers write the number of experts where a token skips one."""
    group = ep_mesh().get_group()
    hidden = torch.ones(3, 2, requires_grad=True)
    chosen, weights = torch.tensor([[0, 4], [4, 4], [3, 1]]), torch.ones(3, 2)
    route = plan_route(chosen, 4, group)
    assert route.experts.tolist() == [0, 1, 3]
    rows, row_weights = dispatch(route, hidden, weights)
    result = combine(route, rows * row_weights, 3, 2)
    assert result.tolist() == [[1, 1], [0, 0], [2, 2]]
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad[:, 0].tolist() == [1, 0, 2]


def test_a_rank_may_have_no_token(one_process: None) -> None:
    group = ep_mesh().get_group()
    route = plan_route(torch.zeros(0, 2, dtype=torch.int64), 4, group)
    rows, _ = dispatch(route, torch.ones(0, 3), torch.ones(0, 2))
    assert combine(route, rows, 0, 2).shape == (0, 3)


@pytest.mark.usefixtures("one_process")
def test_tokens_find_their_experts_with_one_wait() -> None:
    """0.5.0: to count them took two more."""
    group = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)).get_group()
    chosen = torch.tensor([[0, 2], [3, 4], [2, 0]])  # expert 4 of 4: skipped
    with watched() as reads:
        route = plan_route(reads.put(chosen), 4, group)
        assert [where.split()[0] for _, where in reads.found] == ["tolist"]
    assert (route.sent, route.received) == ([5], [5])
    assert route.order.tolist() == [0, 5, 1, 4, 2]
    assert route.experts.tolist() == [0, 0, 2, 2, 3]
