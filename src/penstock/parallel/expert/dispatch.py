"""Tokens on their way to the ranks of their experts, and back.

    rank 0: tokens a b c        chosen experts (two a rank)    sent to rank 0   to rank 1
    a: 0 2   b: 3 1   c: 0 0    sorted: a0 c0 c0 b1 a2 b3      a0 c0 c0 b1      a2 b3

A row is one token for one of its experts. Rows are sorted by expert, so those for one rank lie together, and
how many there are for each expert is told first: the receiver needs no more to know whose each row is.
All ranks of the group call alike, also with nothing to send: a collective that one of them leaves out would
never end for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from penstock.runtime.transport.groups import AllProcesses


def without_values(tensor: Tensor) -> bool:
    """Whether only shapes are asked for: nobody would answer, and there is nothing to tell."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@dataclass(frozen=True)
class Directions:
    """The process groups over which tokens travel, of the same ranks in the same order.

    forward: in a forward
    backward: in a backward, and in what activation checkpointing runs again there

    Where a forward and a backward run side by side in two threads the two must differ: what ranks exchange in
    one group pairs up in the order of the calls, and the threads' order is not the same on every rank.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh, *, separate: bool = False) -> Directions:
        """The groups of the 1-D `mesh`: its own for both, or with a second one for the backward.

        Making the second is collective over the whole world: every process calls it, once, not once a stage.
        """
        group = mesh.get_group()
        return cls(group, _twin(group, torch.device(mesh.device_type)) if separate else group)

    def current(self) -> dist.ProcessGroup:
        """That of what runs now in this thread."""
        # the engine knows, also in the threads of its own that run backwards on GPUs
        return self.forward if torch._C._current_graph_task_id() == -1 else self.backward


def _twin(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another group of the same ranks."""
    own = dist.get_process_group_ranks(group)
    backend: Any = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    limit = backend.options._timeout
    everyone = AllProcesses(limit.total_seconds(), device).gather(own)
    twin: dist.ProcessGroup | None = None
    # all processes make all groups in one order, as torch names groups by how many there are
    for members in sorted({tuple(ranks) for ranks in everyone}):
        made: Any = dist.new_group(list(members), backend=dist.get_backend(group), timeout=limit)
        twin = made if list(members) == own else twin
    assert twin is not None
    return twin


@dataclass(frozen=True)
class Route:
    """Where the rows of one mixture go in one forward.

    order: which of the tokens * top_k choices each sent row is, sorted by expert: (rows sent,)
    experts: for which of this rank's experts each received row is, counted from 0: (rows received,)
    sent, received: rows for and from each rank of the group
    """

    order: Tensor
    experts: Tensor
    sent: list[int]
    received: list[int]
    directions: Directions


def plan_route(chosen: Tensor, experts: int, directions: Directions) -> Route:
    """The route of tokens to the experts that they chose. Collective.

    chosen: (tokens, top_k), numbers of experts. Some models write a number of `experts` or more where a token
        skips an expert: no such row is sent.
    experts: how many there are, over all ranks
    """
    ranks = directions.forward.size()
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat, minlength=experts)[:experts].view(ranks, experts // ranks)
    told = exchange(counts, [1] * ranks, [1] * ranks, directions.current())
    sent, received = torch.stack((counts.sum(1), told.sum(1))).tolist()  # the one wait for the device
    order = torch.argsort(flat, stable=True)[: sum(sent)]
    numbers = torch.arange(experts // ranks, device=chosen.device).repeat(ranks)
    return Route(order, numbers.repeat_interleave(told.flatten()), sent, received, directions)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """What the ranks of the group have sent here. Collective, and not seen by autograd.

    rows: (sum of `sent`, ...), in the order of the ranks that they are for
    """
    carried = rows.contiguous()
    if rows.is_cuda and dist.get_backend(group) == "gloo":
        carried = carried.cpu()
    result = carried.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, carried, received, sent, group=group)
    return result.to(rows.device)


class _There(torch.autograd.Function):
    """Rows to the ranks of their experts; their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, route: Route, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.sent, ctx.received, ctx.directions = route.sent, route.received, route.directions
        group = route.directions.current()
        return tuple(exchange(part, route.sent, route.received, group) for part in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        group = ctx.directions.current()
        # of all parts, and in one order: which of them autograd asks for is not for each rank to say
        return None, *(exchange(part, ctx.received, ctx.sent, group) for part in gradients)


class _Back(torch.autograd.Function):
    """Rows back to where they came from; their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, route: Route, rows: Tensor) -> Tensor:
        ctx.sent, ctx.received, ctx.directions = route.sent, route.received, route.directions
        # Something saved after the collectives. Where a forward is run again in the backward, torch breaks
        # it off once it has all that was saved, and experts without tokens save less than others do: without
        # this such a rank would leave out collectives in which the others wait for it.
        ctx.save_for_backward(route.order)
        return exchange(rows, route.received, route.sent, route.directions.current())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        _ = ctx.saved_tensors  # which makes every rank begin to run its forward again here
        return None, exchange(gradient, ctx.sent, ctx.received, ctx.directions.current())


def dispatch(route: Route, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that this rank's experts work on, and each row's weight. Collective, differentiable.

    hidden: (tokens, width); weights: (tokens, top_k)
    returns (rows received, width) and (rows received, 1)
    """
    rows = hidden[route.order // weights.shape[-1]]
    there: tuple[Tensor, Tensor] = _There.apply(  # type: ignore[no-untyped-call]
        route, rows, weights.reshape(-1, 1)[route.order]
    )
    return there


def combine(route: Route, rows: Tensor, tokens: int, top_k: int) -> Tensor:
    """The sum of each token's rows, back on its own rank. Collective, differentiable.

    rows: (rows received, width), weighted
    returns (tokens, width)
    """
    back: Tensor = _Back.apply(route, rows)  # type: ignore[no-untyped-call]
    # added up in the order of the choices, and not as rows come in: the same every time, on a GPU too
    spread = back.new_zeros(tokens * top_k, back.shape[-1]).index_copy(0, route.order, back)
    return spread.view(tokens, top_k, back.shape[-1]).sum(1)
