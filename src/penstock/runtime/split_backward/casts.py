"""Copies of a stage's weights in autocast's dtype: one of each weight for all microbatches of a step.

torch's own cache of casts would do only for trained weights and whole backwards: it leaves out frozen
weights, is not visible to a custom autograd function, is empty in an engine thread that runs a layer again,
and keeps the first step's weights in an autocast region around several steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

_SHARD = "is_shard_of_weight"  # the name of a mark


def marked_as_weight(shard: Tensor) -> Tensor:
    """Mark `shard`, which each forward makes anew from a weight: its cast is shared like that of a weight."""
    setattr(shard, _SHARD, True)
    return shard


def is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a shard of one."""
    return isinstance(tensor, nn.Parameter) or hasattr(tensor, _SHARD)


class _Cast(NamedTuple):
    """A cast of `weight` as of `state`. It keeps the weight, as another tensor could get the same id."""

    weight: Tensor
    state: tuple[int, int, bool]
    tensor: Tensor


class WeightCasts:
    """The casts of a stage's weights, from the first use of each to the end of the step.

    All microbatches share the autograd node of a cast. The node saves no tensor, so that every backward may
    pass through it.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], _Cast] = {}

    def __len__(self) -> int:
        return len(self._casts)

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight`, which `is_weight`, in `dtype`. Cast anew if modified in place, frozen or unfrozen since.

        Writes through `weight.data` are not noticed, as in autograd.
        """
        memory = weight.untyped_storage()._cdata  # changes with `weight.data = new`
        owner = id(weight) if isinstance(weight, nn.Parameter) else memory
        key, state = (owner, dtype), (memory, weight._version, weight.requires_grad)
        known = self._casts.get(key)
        if known is None or known.state != state:
            known = self._casts[key] = _Cast(weight, state, cast(weight, dtype))
        return known.tensor

    @property
    def storages(self) -> Iterator[UntypedStorage]:
        """The memory of all casts."""
        return (cast.tensor.untyped_storage() for cast in self._casts.values())

    def clear(self) -> None:
        self._casts.clear()


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, recorded by autograd even under no_grad: the next user may need a gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        return tensor.to(dtype)
