"""Sends tokens to the ranks of their experts, and the results back.

    rank 0: tokens a b c        chosen experts (two a rank)    sent to rank 0   to rank 1
    a: 0 2   b: 3 1   c: 0 0    sorted: a0 c0 c0 b1 a2 b3      a0 c0 c0 b1      a2 b3

A row is one token for one of its experts. Rows are sorted by expert, so those for one rank are contiguous.
Ranks first exchange the number of rows for each expert, from which the receiver knows the expert of each row.
All ranks of the group make the same calls, also with nothing to send: if one rank leaves out a collective,
the others wait forever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.mesh import refuse_second_derivative
from penstock.private import FakeTensor


def without_values(tensor: Tensor) -> bool:
    """Whether only shapes are computed, so that nothing may be sent."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@dataclass(frozen=True)
class Route:
    """The destinations of one mixture's rows in one forward.

    order: for each sent row, the index of its choice (of tokens * top_k), sorted by expert: (rows sent,)
    experts: for each received row, the index of its expert on this rank: (rows received,)
    sent, received: number of rows for and from each rank of `group`
    """

    order: Tensor
    experts: Tensor
    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup


def plan_route(chosen: Tensor, experts: int, group: dist.ProcessGroup) -> Route:
    """The route of tokens to the experts that they chose. Collective.

    Args:
        chosen: (tokens, top_k) indices of experts. Some models write an index of `experts` or more where a
            token skips an expert: such a row is not sent
        experts: number of experts over all ranks
    """
    ranks = group.size()
    flat = chosen.reshape(-1).long()
    # not bincount, which waits for the device twice
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat.clamp(max=experts), torch.ones_like(flat))
    counts = counts[:experts].view(ranks, experts // ranks)
    incoming = exchange(counts, [1] * ranks, [1] * ranks, group)
    sent, received = torch.stack((counts.sum(1), incoming.sum(1))).tolist()  # the only wait for the device
    order = torch.argsort(flat, stable=True)[: sum(sent)]
    numbers = torch.arange(experts // ranks, device=chosen.device).repeat(ranks)
    kinds = numbers.repeat_interleave(incoming.flatten(), output_size=sum(received))
    return Route(order, kinds, sent, received, group)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of the group, and return those received. Collective; not seen by autograd.

    Args:
        rows: (sum of `sent`, ...), in the order of their target ranks
    """
    carried = rows.contiguous()
    if rows.is_cuda and dist.get_backend(group) == "gloo":
        carried = carried.cpu()
    result = carried.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, carried, received, sent, group=group)
    return result.to(rows.device)


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of their experts, or back if `back`, and gradients the other way."""

    @staticmethod
    def forward(ctx: Any, route: Route, back: bool, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.group = route.group
        there, here = (route.received, route.sent) if back else (route.sent, route.received)
        ctx.sent, ctx.received = here, there
        # Save a tensor after the collectives. A forward that runs again in the backward ends once it has
        # recomputed all saved tensors, and experts without tokens save fewer. Without this tensor, such a
        # rank would leave out collectives for which the others wait.
        ctx.save_for_backward(route.order)
        return tuple(exchange(part, there, here, route.group) for part in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("ep")
        _ = ctx.saved_tensors  # makes every rank begin its recomputation here
        # exchange all gradients, in one order, as the ones that autograd needs may differ by rank
        return None, None, *(exchange(part, ctx.sent, ctx.received, ctx.group) for part in gradients)


def dispatch(route: Route, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The rows for this rank's experts, and each row's weight. Collective, differentiable.

    Args:
        hidden: (tokens, width)
        weights: (tokens, top_k)

    Returns (rows received, width) and (rows received, 1).
    """
    rows = hidden[route.order // weights.shape[-1]]
    received: tuple[Tensor, Tensor] = _Exchange.apply(  # type: ignore[no-untyped-call]
        route, False, rows, weights.reshape(-1, 1)[route.order]
    )
    return received


def combine(route: Route, rows: Tensor, tokens: int, top_k: int) -> Tensor:
    """The sum of each token's rows, back on its own rank. Collective, differentiable.

    Args:
        rows: (rows received, width), weighted

    Returns (tokens, width).
    """
    back: Tensor
    (back,) = _Exchange.apply(route, True, rows)  # type: ignore[no-untyped-call]
    # summed in the order of the choices, not of arrival, so that results are deterministic, on a GPU too
    placed = back.new_zeros(tokens * top_k, back.shape[-1]).index_copy(0, route.order, back)
    return placed.view(tokens, top_k, back.shape[-1]).sum(1)
