"""Copies of a stage's weights in autocast's dtype: one of each weight for all microbatches of a step.

torch keeps casts too, but that would do only for trained weights and whole backwards: it leaves out frozen
weights, shows nothing to an autograd function of one's own, forgets all where a thread of the engine runs a
layer again, and goes on with the first step's weights in a region around several steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

_SHARD = "is_shard_of_weight"  # the name of a mark


def marked_as_weight(shard: Tensor) -> Tensor:
    """`shard`, which each forward makes anew of a weight: its casts are shared as those of a weight are."""
    setattr(shard, _SHARD, True)
    return shard


def is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a shard of one."""
    return isinstance(tensor, nn.Parameter) or hasattr(tensor, _SHARD)


class _Cast(NamedTuple):
    """A cast of `weight` as it was in `state`. The weight is held: another one could take over its id."""

    weight: Tensor
    state: tuple[int, int, bool]
    tensor: Tensor


class WeightCasts:
    """The casts of a stage's weights, from the first use of each to the end of the step.

    All microbatches share the node of autograd that made a cast. It saves nothing, so that each backward may
    pass through it.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], _Cast] = {}

    def __len__(self) -> int:
        return len(self._casts)

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight`, which `is_weight`, in `dtype`. Cast anew if modified in place, frozen or unfrozen since.

        What is written into the memory of `weight.data` shows to nobody, as in autograd.
        """
        memory = weight.untyped_storage()._cdata  # another one after `weight.data = new`
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
    """`tensor` in `dtype`, with a gradient even where none is recorded: the next user may need it."""
    with torch.inference_mode(False), torch.enable_grad():
        return tensor.to(dtype)
