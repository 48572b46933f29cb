"""Split backwards next to plain autograd, in the orders that zero-bubble schedules run them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from penstock.parallel.fsdp import Sharded, shard_stage
from penstock.runtime.sharded_weights import FSDPGradients
from penstock.runtime.split_backward.backward import Live, hold, input_backward, whole_backward
from penstock.runtime.split_backward.casts import WeightCasts
from penstock.runtime.split_backward.deferred import Deferred
from penstock.runtime.split_backward.modules import ProductModules
from penstock.runtime.split_backward.recording import deferring
from support.reference import TOLERANCE, assert_gradients, gradients_of

# what runs for which microbatch; B is a whole backward after a forward that could have been split
ORDERS = {
    "at once": "F0 I0 W0 F1 I1 W1 F2 I2 W2",
    "interleaved": "F0 F1 I0 F2 I1 W0 I2 W1 W2",
    "delayed": "F0 F1 F2 I0 I1 I2 W2 W0 W1",
    "whole": "F0 F1 B0 F2 B1 B2",
    "mixed": "F0 F1 I0 B1 F2 I2 W0 W2",
}
# how a forward finds products: torch shows it every call; modules ask, once the first forward has shown that
# these make all products; modules ask, and a product that is made elsewhere is left to I
WAYS = ("every call", "modules", "modules alone")
Call = Callable[..., Any]


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def upstream(outputs: Sequence[Tensor], number: int) -> list[Tensor]:
    """The gradients that come back for microbatch `number`: of every floating-point output."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
            for o in outputs if o.is_floating_point()]  # fmt: skip


def plain(module: nn.Module, call: Call, microbatches: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Accumulates by plain autograd; the gradients of the inputs."""
    found = []
    for number, microbatch in enumerate(microbatches):
        inputs = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in microbatch]
        torch.manual_seed(number)
        outputs = outputs_of(call(module, *inputs))
        floating = [output for output in outputs if output.is_floating_point()]
        gradients = upstream(outputs, number)
        pairs = [(o, g) for o, g in zip(floating, gradients, strict=True) if o.requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        found.append([torch.zeros_like(i) if i.grad is None else i.grad for i in inputs if i.requires_grad])
    return found


def split(
    module: nn.Module,
    call: Call,
    microbatches: Sequence[Sequence[Tensor]],
    order: str,
    way: str = WAYS[0],
) -> tuple[list[list[Tensor]], int]:
    """The same by `order`; the gradients of the inputs, and the most bytes that one W had to hold."""
    products = ProductModules(module)
    if way != WAYS[0]:
        products.begin_step(all_ask=True if way == WAYS[2] else None)
    try:
        return _split(module, call, microbatches, order, products)
    finally:
        products.end_step()


def _split(
    module: nn.Module,
    call: Call,
    microbatches: Sequence[Sequence[Tensor]],
    order: str,
    products: ProductModules,
) -> tuple[list[list[Tensor]], int]:
    found: dict[int, list[Tensor]] = {}
    live: dict[int, tuple[Live, list[Tensor]]] = {}
    deferred: dict[int, Deferred] = {}
    held, casts = 0, WeightCasts()
    for op in order.split():
        kind, number = op[0], int(op[1:])
        if kind == "F":
            inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in microbatches[number]]
            torch.manual_seed(number)
            with deferring(casts, every_call=products.every_call) as tape:
                outputs = outputs_of(call(module, *inputs))
            products.saw(tape)
            live[number] = hold(inputs, outputs, tape), upstream(outputs, number)
            del inputs, outputs
        elif kind == "B":
            found[number] = list(whole_backward(*live.pop(number)))
        elif kind == "I":
            given, deferred[number] = input_backward(*live.pop(number))
            found[number] = list(given)
            held = max(held, deferred[number].nbytes)
        else:
            deferred[number].run()
            assert deferred.pop(number).nbytes == 0
    assert not live
    assert not deferred
    return [found[number] for number in sorted(found)], held


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def assert_exact(
    module: nn.Module,
    microbatches: Sequence[Sequence[Tensor]],
    *,
    call: Call = lambda module, *inputs: module(*inputs),
    orders: Sequence[str] = tuple(ORDERS),
    tolerance: float | None = None,
) -> int:
    """Every gradient as plain autograd has it, and None where it has None; the most bytes that a W held."""
    module.zero_grad()
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    inputs_expected = plain(module, call, microbatches)
    expected = gradients_of(module)
    most = 0
    for order, way in itertools.product(orders, WAYS):
        module.zero_grad()
        inputs_found, held = split(module, call, microbatches, ORDERS[order], way)
        found = gradients_of(module)
        assert found.keys() == expected.keys(), (order, way)
        if found:
            assert_gradients(found, expected, tolerance)
        for mine, theirs in zip(inputs_found, inputs_expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=0, atol=tolerance * largest(other), msg=f"{order}, {way}"
                )
        most = max(most, held)
    module.zero_grad()
    return most


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


def call(module: nn.Module, *inputs: Tensor) -> Any:
    return module(*inputs)


def sharded(order: str, reshard: bool, checkpointed: bool) -> list[int]:
    """Two exact steps of split backwards, each with one reduction at its end; bytes held for a W in each."""
    module: Any = stack(checkpointed)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    shards = shard_stage(module, [*module.blocks], mesh, Sharded(reshard_after_forward=reshard))
    assert not FSDPGradients(module).reduces_in_backward
    module.set_requires_gradient_sync(True)
    assert FSDPGradients(module).reduces_in_backward
    module.set_requires_gradient_sync(False)
    whole = stack(False)
    for rank in range(ranks):
        plain(whole, call, data(rank))
    most = []
    for _ in range(2):
        most.append(split(module, call, data(dist.get_rank()), ORDERS[order])[1])
        shards.reduce()
        found = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
        assert_gradients(found, gradients_of(whole), 1e-10)
        module.zero_grad()
    return most
