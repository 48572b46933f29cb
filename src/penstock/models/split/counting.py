"""Count the multiply-adds of a forward without values, and with them those of its backward.

    product             F      I                         W
    x @ weight          f      f                         f, if the weight trains
    x @ y               f      2 f                       0
    fused attention     f      torch's count: 2.5 f      0
                               where all heads have one width

f is the count of torch's own FLOP counter, two FLOPs a multiply-add. A tensor that is made of weights alone,
as the experts that a token goes to, counts as a weight; one that is made of neither weights nor hidden
states, as positions, needs no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.models.activation_checkpointing import SavePolicy
from penstock.private import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    FLASH_ATTENTION_FOR_CPU,
    FLASH_ATTENTION_FOR_CPU_BACKWARD,
    GROUPED_MM,
    TorchDispatchMode,
    tree_leaves,
)

_ATTENTION = frozenset({FLASH_ATTENTION_FOR_CPU, EFFICIENT_ATTENTION, FLASH_ATTENTION})
_ADDS = frozenset({torch.ops.aten.addmm, torch.ops.aten.baddbmm})  # their first argument is no factor
_LOOKUP = torch.ops.aten.embedding


class ProductCounts(NamedTuple):
    """Multiply-adds of F, I and W, and of what I or B of a checkpointed layer runs again first."""

    forward: float = 0
    input_grad: float = 0
    weight_grad: float = 0
    again: float = 0

    def plus(self, other: ProductCounts) -> ProductCounts:
        return ProductCounts(*(a + b for a, b in zip(self, other, strict=True)))

    def less(self, before: ProductCounts) -> ProductCounts:
        return ProductCounts(*(now - then for now, then in zip(self, before, strict=True)))


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products that run under it, without gradients, on a model of fake tensors.

    total: so far
    """

    def __init__(self, model: nn.Module, saved: SavePolicy | None = None) -> None:
        """saved: the ops whose results a checkpointed layer keeps"""
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = ProductCounts()
        self._saved = saved
        # what is made of no hidden states, by address: whether it trains. The storages stay, or another could
        # get the address of one
        self._trains: dict[int, tuple[bool, UntypedStorage]] = {}
        for tensor in (*model.buffers(), *model.parameters()):
            self._mark(tensor, tensor.requires_grad)

    def _mark(self, tensor: Tensor, trains: bool) -> None:
        storage = tensor.untyped_storage()
        self._trains[storage._cdata] = trains, storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func._overloadpacket
        if func.namespace != "prim" and packet not in flop_registry and packet not in _MORE:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        inputs = _floating((args, kwargs))
        sources = [self._trains.get(tensor.untyped_storage()._cdata) for tensor in inputs]
        if None not in sources and packet is not _LOOKUP:
            for tensor in _floating(result):
                self._mark(tensor, any(source is not None and source[0] for source in sources))
        elif packet in _ATTENTION or packet in flop_registry or packet in _MORE:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        packet = func._overloadpacket
        if packet in _ATTENTION:
            once, back = attention_flops(*args[:3])
            weights = 0
        else:
            once = int((_MORE.get(packet) or flop_registry[packet])(*args, **kwargs, out_val=result))
            factors = args[1:3] if packet in _ADDS else args[:2]
            trains = [self._trains.get(factor.untyped_storage()._cdata) for factor in factors]
            back, weights = once * trains.count(None), once * sum(bool(of and of[0]) for of in trains)
        policy, again = self._saved, once
        if policy is not None and policy.covers(func) and policy.saves(func, result, args, kwargs):
            again = 0
        flops = zip(self.total, (once, back, weights, again), strict=True)
        self.total = ProductCounts(*(before + more // 2 for before, more in flops))


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """FLOPs of fused attention, forward and backward, for the half of all pairs that a causal mask shows."""
    # before torch 2.12 the formulas refuse query heads that share a key's
    shared = [(*query.shape[:2], *of.shape[2:]) for of in (key, value)]
    shapes = query.shape, *shared
    out = (*query.shape[:-1], value.shape[-1])
    forward: int = sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
    backward: int = sdpa_backward_flop_count(out, *shapes)  # type: ignore[no-untyped-call]
    return forward // 2, backward // 2


def flops_of(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """FLOPs of one op, forward or backward; None for an op that is neither a product nor attention."""
    if packet in _ATTENTION:
        return attention_flops(*args[:3])[0]
    if packet is FLASH_ATTENTION_FOR_CPU_BACKWARD:
        return attention_flops(*args[1:4])[1]
    formula = _MORE.get(packet) or flop_registry.get(packet)
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


def is_attention(packet: Any) -> bool:
    return packet in _ATTENTION or packet is FLASH_ATTENTION_FOR_CPU_BACKWARD


def _grouped(left: Tensor, right: Tensor, *_: object, **__: object) -> int:
    """Of a product of groups, whichever of the two has them: each row of `left` meets one matrix."""
    return 2 * left.numel() * right.shape[-1]


_IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
_MORE = {GROUPED_MM: _grouped} | {op: flop_registry[plain] for op, plain in _IN_PLACE.items()}


def _floating(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]
