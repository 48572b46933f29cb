"""Attention over a split sequence by rotating blocks: Ring Attention (Liu et al., 2023, arXiv 2310.01889).

    step      0     1     2         rank r works on its own queries and the block of rank r - step, while the
    rank 0    kv0   kv2   kv1       next block is under way
    rank 1    kv1   kv0   kv2
    rank 2    kv2   kv1   kv0       keys and values: r -> r + 1

Each block is merged as it arrives. With m the largest score of a query so far, l the sum of exp(score - m)
and a the sum of exp(score - m) value, the attention is a / l in the end, and the backward needs only log l +
m. In the backward the blocks rotate again, each with its gradient, to which every rank adds. One more step
returns the gradient to its own rank.

A rank has two pieces of the sequence (sequence.py). Fully masked pairs of a piece of queries and a piece of
keys are skipped, equally many on each rank. All is computed in float32, or in float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup

from penstock.errors import ModelError
from penstock.parallel.context.mask import Mask
from penstock.parallel.context.sequence import pieces
from penstock.parallel.mesh import refuse_second_derivative
from penstock.private import disable_current_modes

_BLOCKS, _GRADIENTS = 0, 1  # tags of the two kinds of messages


class AttentionCall(NamedTuple):
    """One call of attention: the arguments that all of its blocks share.

    softcap: scores become softcap * tanh(score / softcap)
    uniform: whether a query without any key attends equally to all keys, as with a mask of the dtype's
        minimum; else to none, as with a mask of minus infinity
    """

    group: ProcessGroup
    mask: Mask
    scaling: float
    softcap: float | None
    uniform: bool


def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: AttentionCall) -> Tensor:
    """Attention of the local tokens, (rows, part, heads, value_dim). Collective.

    Args:
        query: (rows, heads, part, head_dim)
        key, value: (rows, key_heads, part, ...), where key_heads divides heads
        sinks: (heads,), a score for each head that takes a share of the softmax and has no value
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as it casts for attention in one call
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (t.to(dtype) if t.dtype == torch.float32 else t for t in (query, key, value))
    with torch.autocast(kind, enabled=False):
        result: Tensor = _Ring.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).contiguous()


def compare(
    base: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    options: Mapping[str, Any],
) -> None:
    """Raise ModelError unless `base`, the model's own function, equals the ring on a few tokens.

    Only shapes and device of the tensors are used. Nothing is sent.
    """
    generator, tokens = torch.Generator().manual_seed(0), 4
    with torch.no_grad(), disable_current_modes(), torch.autocast(query.device.type, enabled=False):
        q, k, v = (
            torch.randn(1, t.shape[1], tokens, t.shape[3], generator=generator).to(t.device)
            for t in (query, key, value)
        )
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        least = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
        theirs, _ = base(module, q, k, v, least[None, None], dropout=0.0, **options)
        scores = _scores(_grouped(q, k), k.unsqueeze(2), call).masked_fill(~seen, -torch.inf)
        if (sinks := options.get("s_aux")) is not None:
            sink = sinks.float().view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., :tokens]
        ours = (weights @ v.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
        same = torch.allclose(theirs.view(ours.shape), ours, rtol=1e-3, atol=1e-3)
    if not same:
        raise ModelError(
            f"the attention of {type(module).__name__}",
            "the ring computes softmax attention with scaling, softcap and sinks, and this one differs",
            "Use ulysses, which runs the model's own function",
        )


class QueryKeyPair(NamedTuple):
    """A piece of the local queries and one of a block's keys.

    allowed: bool, by query and key; None for all
    uniform: queries without any key, which attend equally to all keys
    """

    queries: slice
    keys: slice
    allowed: Tensor | None
    uniform: Tensor | None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: AttentionCall
    ) -> Tensor:
        wide = _grouped(query, key)
        best = wide.new_full((*wide.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(best)
        result = wide.new_zeros(*wide.shape[:-1], value.shape[-1])
        for source, keys, values in _rounds(call.group, key, value):
            for pair in _pairs(call, source):
                q, at = wide[..., pair.queries, :], (..., pair.queries, slice(None))
                scores = _masked(_scores(q, keys[..., pair.keys, :], call), pair)
                _merge(best[at], total[at], result[at], scores, values[..., pair.keys, :])
        if sinks is not None:
            sink = _per_head(sinks, wide)
            most = torch.maximum(best, sink)
            result *= (best - most).exp()
            total = total * (best - most).exp() + (sink - most).exp()
            best = most
        empty = total == 0
        result /= total.masked_fill(empty, 1)
        logsum = (best + total.log()).masked_fill(empty, 0)
        output = result.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, logsum)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative("cp")
        call: AttentionCall = ctx.call
        query, key, value, sinks, output, logsum = ctx.saved_tensors
        wide, above = _grouped(query, key), _grouped(gradient, key)
        delta = (above * _grouped(output, key)).sum(-1, keepdim=True)
        to_query, going = torch.zeros_like(wide), None
        for source, keys, values in _rounds(call.group, key, value):
            to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
            for pair in _pairs(call, source):
                at = (..., pair.queries, slice(None))
                k, v = keys[..., pair.keys, :], values[..., pair.keys, :]
                scores = _scores(wide[at], k, call)
                weights = (_masked(scores, pair) - logsum[at]).exp()
                to_values[..., pair.keys, :] += (weights.mT @ above[at]).sum(2, keepdim=True)
                to_scores = weights * (above[at] @ v.mT - delta[at])
                if call.softcap is not None:
                    to_scores = to_scores * (1 - (scores / call.softcap) ** 2)
                to_scores = to_scores * call.scaling
                to_query[at] += to_scores @ k
                to_keys[..., pair.keys, :] += (to_scores.mT @ wide[at]).sum(2, keepdim=True)
            packed = _pack(to_keys, to_values)
            going = Hop(call.group, packed if going is None else packed + going.wait(), _GRADIENTS)
        assert going is not None  # a ring has a rank at least
        to_key, to_value = _unpack(going.wait(), key, value)
        to_sinks = None
        if sinks is not None:
            to_sinks = (
                -((_per_head(sinks, wide) - logsum).exp() * delta).sum((0, 3, 4)).flatten().to(sinks.dtype)
            )
        return (
            to_query.flatten(1, 2).to(query.dtype),
            to_key.squeeze(2).to(key.dtype),
            to_value.squeeze(2).to(value.dtype),
            to_sinks,
            None,
        )


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _per_head(sinks: Tensor, wide: Tensor) -> Tensor:
    return sinks.to(wide.dtype).view(1, wide.shape[1], -1, 1, 1)


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """(rows, heads, part, dim) as (rows, key_heads, heads per key head, part, dim), in the wide dtype."""
    rows, heads, *rest = tensor.shape
    return _wide(tensor).reshape(rows, key.shape[1], heads // key.shape[1], *rest)


def _scores(query: Tensor, key: Tensor, call: AttentionCall) -> Tensor:
    scores = query @ key.mT * call.scaling
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def _masked(scores: Tensor, pair: QueryKeyPair) -> Tensor:
    if pair.uniform is not None:
        scores = scores.masked_fill(pair.uniform, 0.0)
    return scores if pair.allowed is None else scores.masked_fill(~pair.allowed, -torch.inf)


def _merge(best: Tensor, total: Tensor, result: Tensor, scores: Tensor, values: Tensor) -> None:
    """Merge a block's scores and values into the sums so far, in place."""
    new = torch.maximum(best, scores.amax(-1, keepdim=True))
    finite = new.masked_fill(new == -torch.inf, 0)  # for a query without a key so far
    weights, kept = (scores - finite).exp(), (best - finite).exp()
    total.mul_(kept).add_(weights.sum(-1, keepdim=True))
    result.mul_(kept).add_(weights @ values)
    best.copy_(new)


def _pairs(call: AttentionCall, source: int) -> Iterator[QueryKeyPair]:
    """Pairs of a piece of local queries and one of rank `source`'s keys, without fully masked ones."""
    mask, full = call.mask, call.mask.full
    uniform = mask.without_keys if call.uniform else None
    size = full.piece
    halves = slice(0, size), slice(size, 2 * size)
    for queries, first in zip(halves, pieces(full.index, full.count), strict=True):
        for keys, second in zip(halves, pieces(source, full.count), strict=True):
            if uniform is None:
                if mask.reaches(first, second):
                    yield QueryKeyPair(queries, keys, mask.between(first, second), None)
                continue
            allowed = mask.between(first, second)
            lonely = uniform[:, queries, None]
            real = torch.arange(second * size, (second + 1) * size, device=lonely.device) < full.length
            some = real & lonely if allowed is None else allowed[:, 0, 0] | (real & lonely)
            yield QueryKeyPair(queries, keys, some[:, None, None], lonely[:, None, None])


class Hop:
    """Sends a tensor to the next rank of the ring, and receives one from the previous rank."""

    def __init__(self, group: ProcessGroup, tensor: Tensor, tag: int) -> None:
        count, index = group.size(), group.rank()
        self._sent = tensor  # kept until it is sent
        self._received, self._works = tensor, []
        if count > 1:
            after, before = (dist.get_global_rank(group, (index + by) % count) for by in (1, -1))
            self._received = torch.empty_like(tensor)
            ends = [
                P2POp(dist.isend, tensor, after, group, tag),
                P2POp(dist.irecv, self._received, before, group, tag),
            ]
            self._works = dist.batch_isend_irecv(ends)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _rounds(group: ProcessGroup, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rank, its keys, its values) of each block in turn, local first, as (rows, key_heads, 1, part, dim)."""
    count, index = group.size(), group.rank()
    block = _pack(key, value)
    for step in range(count):
        going = Hop(group, block, _BLOCKS) if step < count - 1 else None
        keys, values = _unpack(block, key, value)
        yield (index - step) % count, _wide(keys), _wide(values)
        block = block if going is None else going.wait()


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message, in the wider of their dtypes."""
    return torch.cat([key.flatten(), value.flatten()])


def _unpack(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = torch.split(packed, [key.numel(), value.numel()])
    return keys.view(key.shape).unsqueeze(2), values.view(value.shape).unsqueeze(2)
