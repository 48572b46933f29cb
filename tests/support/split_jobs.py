"""Split backwards of FSDP2 modules, run by the pool's workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from penstock.runtime.sharded_weights import Sharding
from support.reference import Gradients, assert_gradients
from support.splitting import ORDERS, gradients_of, plain, split

WIDTH, MICROBATCHES = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return hidden


class Stack(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.checkpointed = nn.Linear(WIDTH, WIDTH), checkpointed
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def stack(checkpointed: bool) -> nn.Module:
    torch.manual_seed(0)
    return Stack(checkpointed).double()


def data(rank: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    shape = (4, WIDTH)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64)] for _ in range(MICROBATCHES)]


def mean_over_ranks(ranks: int) -> Gradients:
    """What one process has after all ranks' microbatches, as FSDP2 averages it."""
    module = stack(False)
    for rank in range(ranks):
        plain(module, call, data(rank))
    return {name: gradient / ranks for name, gradient in gradients_of(module).items()}


def call(module: nn.Module, *inputs: Tensor) -> Any:
    return module(*inputs)


def reduce(module: Any) -> None:
    """The one reduction of a step, after its last W: what FSDP2 does at the end of any other backward."""
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    state = module._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def sharded(order: str, reshard: bool, checkpointed: bool) -> list[int]:
    """Two steps of split backwards, each with one reduction at its end; bytes held for a W in each."""
    module: Any = stack(checkpointed)
    for block in module.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(module, reshard_after_forward=reshard)
    assert Sharding(module).reduces_in_backward
    expected = mean_over_ranks(dist.get_world_size())
    most = []
    for _ in range(2):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(reshard)
        module.set_requires_gradient_sync(False)
        assert not Sharding(module).reduces_in_backward
        held = split(module, call, data(dist.get_rank()), ORDERS[order])[1]
        reduce(module)
        found = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
        assert_gradients(found, expected, 1e-10)
        module.zero_grad()
        most.append(held)
    return most
