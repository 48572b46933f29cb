"""Attention over a cut sequence by heads: DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509).

    before                     after the all-to-all
    all heads, own tokens  ->  own heads, all tokens  ->  attention as in one process  ->  and back

Every rank computes its share of the heads with the model's own function on the whole sequence, in its true
order and without what was padded for the cut, so that what one process would compute, mask and all, is what
is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.errors import ConfigError
from penstock.parallel.context.sequence import joined, pieces

if TYPE_CHECKING:
    from penstock.parallel.context.mask import Mask


Base = Callable[..., tuple[Tensor, Any]]


def attend(
    group: ProcessGroup,
    base: Base,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    **options: Any,
) -> Tensor:
    """Own tokens' attention, (rows, part, heads, value_dim).

    query: (rows, heads, part, head_dim); key and value: (rows, key_heads, part, ...)
    base: an attention function of transformers; options: what the model gives it beside
    Raises ConfigError where heads cannot be dealt out.
    """
    count, index = group.size(), group.rank()
    heads, key_heads = query.shape[1], key.shape[1]
    times = repeats(heads, key_heads, count)
    if times > 1:
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    own = slice(index * heads // count, (index + 1) * heads // count)
    sinks = options.get("s_aux")
    share = Share(module, heads // key.shape[1], sinks, own)
    if sinks is not None:
        options["s_aux"] = sinks[own]
    wholes = _gather_tokens(group, (query, key, value), mask.whole.length)
    result, _ = base(share, *wholes, mask.full(), **options)
    return _gather_heads(group, result, mask.whole.padded)


def repeats(heads: int, key_heads: int, count: int) -> int:
    """How often each key and value head is sent so that each rank has those of its share of the heads."""
    if heads % count:
        raise ConfigError(
            f"cp={count} by ulysses",
            f"each rank takes the same number of the {heads} attention heads",
            f"Let cp divide {heads}, or use the ring",
        )
    if key_heads % count == 0:
        return 1
    if count % key_heads:
        raise ConfigError(
            f"cp={count} by ulysses",
            f"cp divides the {key_heads} key and value heads, or they divide cp",
            f"Choose another cp for {key_heads} key and value heads, or use the ring",
        )
    return count // key_heads


class Share:
    """An attention module as its function sees it on a rank that has some of the heads only."""

    def __init__(self, module: nn.Module, groups: int, sinks: Tensor | None, own: slice) -> None:
        self._module = module
        if hasattr(module, "num_key_value_groups"):
            self.num_key_value_groups = groups
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is sinks:  # which some functions take from the module
                setattr(self, name, parameter[own])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _gather_tokens(group: ProcessGroup, tensors: tuple[Tensor, ...], length: int) -> list[Tensor]:
    """(rows, heads, part, dim) of own tokens to (rows, heads / count, length, dim) of all."""
    count = group.size()
    sent = [torch.stack(tensor.tensor_split(count, dim=1)) for tensor in tensors]
    received = _all_to_all(group, *sent)
    return [joined(list(parts.unbind()), 2)[:, :, :length] for parts in received]


def _gather_heads(group: ProcessGroup, whole: Tensor, padded: int) -> Tensor:
    """(rows, length, heads / count, dim) of all tokens to (rows, part, heads, dim) of own ones."""
    count = group.size()
    missing = padded - whole.shape[1]
    if missing:
        zeros = whole.new_zeros(whole.shape[0], missing, *whole.shape[2:])
        whole = torch.cat([whole, zeros], dim=1)
    cut = whole.tensor_split(2 * count, dim=1)
    sent = torch.stack(
        [torch.cat([cut[number] for number in pieces(rank, count)], dim=1) for rank in range(count)]
    )
    (received,) = _all_to_all(group, sent)
    return torch.cat(received.unbind(), dim=2)


def _all_to_all(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    given: tuple[Tensor, ...] = AllToAll.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return given


class AllToAll(torch.autograd.Function):
    """Each tensor's [r] goes to rank r, and [s] of what comes back is from rank s. All go in one message.

    Its own transpose: so a gradient takes the same way back.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(True)
        return _exchanged(group, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_exchanged(ctx.group, gradients)


def _exchanged(group: ProcessGroup, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    count = group.size()
    rows = [tensor.contiguous().view(count, -1).view(torch.uint8) for tensor in tensors]  # of any dtypes
    sent = torch.cat(rows, dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    found = torch.split(received, [row.shape[1] for row in rows], dim=1)
    return tuple(
        part.contiguous().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(found, tensors, strict=True)
    )
