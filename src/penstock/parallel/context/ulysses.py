"""Attention over a split sequence by heads: DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509).

    before                       after the all-to-all
    all heads, local tokens  ->  local heads, all tokens  ->  attention as in one process  ->  and back

Each rank computes its heads with the model's own function on the full sequence, in its true order and without
the padding of the split. So the result, with its mask, is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.errors import ConfigError
from penstock.parallel.context.mask import Mask
from penstock.parallel.context.sequence import concatenate, local_part
from penstock.parallel.mesh import refuse_second_derivative

AttentionFunction = Callable[..., tuple[Tensor, Any]]


def attend(
    group: ProcessGroup,
    base: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    **options: Any,
) -> Tensor:
    """Attention of the local tokens, (rows, part, heads, value_dim). Collective.

    Args:
        base: an attention function of transformers
        query: (rows, heads, part, head_dim)
        key, value: (rows, key_heads, part, ...)
        options: the model's further arguments to its attention function

    Raises ConfigError where heads cannot be distributed.
    """
    count, index = group.size(), group.rank()
    heads, key_heads = query.shape[1], key.shape[1]
    times = repeats(heads, key_heads, count)
    if times > 1:
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    local = slice(index * heads // count, (index + 1) * heads // count)
    sinks = options.get("s_aux")
    view = _LocalHeads(module, heads // key.shape[1], sinks, local)
    if sinks is not None:
        options["s_aux"] = sinks[local]
    sent = [torch.stack(tensor.tensor_split(count, dim=1)) for tensor in (query, key, value)]
    received = _all_to_all(group, *sent)
    all_tokens = [concatenate(list(parts.unbind()), 2)[:, :, : mask.full.length] for parts in received]
    result, _ = base(view, *all_tokens, mask.tensor, **options)
    if missing := mask.full.padded - result.shape[1]:
        result = torch.cat([result, result.new_zeros(result.shape[0], missing, *result.shape[2:])], dim=1)
    (back,) = _all_to_all(group, torch.stack([local_part(result, 1, rank, count) for rank in range(count)]))
    return torch.cat(back.unbind(), dim=2)


def repeats(heads: int, key_heads: int, count: int) -> int:
    """How often to send each key and value head, so that each rank gets those for its query heads.

    Raises ConfigError where heads do not divide by `count` ranks.
    """
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


class _LocalHeads:
    """Replaces the attention module as an argument of its attention function, with this rank's heads only."""

    def __init__(self, module: nn.Module, groups: int, sinks: Tensor | None, local: slice) -> None:
        self._module = module
        if hasattr(module, "num_key_value_groups"):
            self.num_key_value_groups = groups
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is sinks:  # some functions read them from the module
                setattr(self, name, parameter[local])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _all_to_all(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    received: tuple[Tensor, ...] = _AllToAll.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """Send tensor[r] to rank r; result[s] comes from rank s. All tensors go in one message.

    The exchange is its own transpose, so the backward is the same exchange of gradients.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(True)
        return _exchange(group, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative("cp")
        return None, *_exchange(ctx.group, gradients)


def _exchange(group: ProcessGroup, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    count = group.size()
    rows = [tensor.contiguous().view(count, -1).view(torch.uint8) for tensor in tensors]  # of any dtypes
    sent = torch.cat(rows, dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    parts = torch.split(received, [row.shape[1] for row in rows], dim=1)
    return tuple(
        part.contiguous().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    )
