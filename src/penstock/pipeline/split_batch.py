"""Split the batch of a step into microbatches of equal form on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from penstock.batch.microbatches import Batch, Sharding, check_entries, split
from penstock.batch.padding import Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, InputError
from penstock.parallel.world import World
from penstock.runtime.health.agreement import first_error, in_words

BatchLike = Batch | Sequence[Microbatch]  # to be split, or microbatches as they are


def as_list(batch: BatchLike) -> list[Mapping[str, Any]]:
    """The batch alone, or its microbatches."""
    return [batch] if isinstance(batch, Mapping) else list(batch)


class RefusedBatch(dict[str, Any]):
    """Stands for a batch that this rank refused before the ranks meet; splitting it raises the error."""

    def __init__(self, error: InputError) -> None:
        super().__init__()
        self.error = error


class BatchSplitter(NamedTuple):
    """How a batch becomes microbatches.

    sharding: how each entry is split; padding: the length to pad to, if any
    complete: adds the entries that the model needs and a microbatch implies
    check: raises for a batch, or a microbatch, that the model does not take
    """

    sharding: Sharding
    padding: Padding | None = None
    complete: Callable[[Microbatch], Microbatch] = dict
    check: Callable[[Microbatch], None] = lambda batch: None

    def split(self, batch: BatchLike, count: int, world: World) -> list[Microbatch]:
        """Return `count` microbatches on the world's device.

        Collective over the pipeline where they are padded to the longest of all ranks.
        Raises BatchError; where collective, on every rank.
        """
        if self.padding is None:
            return [self.complete(part) for part in self._divide(batch, count, world)]
        if self.padding.length is None:
            microbatches, longest = self._longest(self.padding, batch, count, world)
        else:
            microbatches = self._divide(batch, count, world)
            longest = self.padding.longest(microbatches)
        lengths = self.padding.lengths(longest)
        return [self.complete(self.padding.pad(part, lengths)) for part in microbatches]

    def _longest(
        self, padding: Padding, batch: BatchLike, count: int, world: World
    ) -> tuple[list[Microbatch], int]:
        """The microbatches, and the length of the longest on any rank of the pipeline."""
        refusal, microbatches, longest = None, list[Microbatch](), -1
        try:
            microbatches = self._divide(batch, count, world)
            longest = padding.longest(microbatches)
        except InputError as error:
            refusal = error
        vector = torch.tensor([longest], dtype=torch.float64)
        lengths = [int(each) for each in world.transport.exchange([vector] * len(world.ranks))]
        if min(lengths) < 0:
            refusals = world.processes.gather(in_words(refusal))
            found = first_error(dict(enumerate(refusals)), "given to rank")
            assert found is not None
            raise found from refusal
        return microbatches, max(lengths)

    def _divide(self, batch: BatchLike, count: int, world: World) -> list[Microbatch]:
        if isinstance(batch, RefusedBatch):
            raise batch.error
        for part in as_list(batch):  # before they go to a GPU, where a look at a value waits
            check_entries(part, self.sharding)
            self.check(part)
        device, ordered = world.device, world.device.type == "cuda"  # what reads a copy on a GPU follows it
        parts = [
            tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=ordered), dict(part))
            for part in as_list(batch)
        ]
        if isinstance(batch, Mapping):
            parts = split(parts[0], count, self.sharding)
        elif len(parts) != count:
            raise BatchError(
                f"a list of {len(parts)} microbatches",
                f"the schedule has {count}",
                f"Give {count} of them, or build the pipeline with microbatches={len(parts)}",
            )
        for number, part in enumerate(parts):
            tensors = [value for value in part.values() if isinstance(value, Tensor)]
            if any(tensor.dim() and not len(tensor) for tensor in tensors):
                raise BatchError(f"microbatch {number}", "it has no rows", "Leave it out, or give it one")
            ids = part.get("input_ids")
            if isinstance(ids, Tensor) and not ids.numel():
                raise BatchError(f"microbatch {number}", "its rows have no tokens", "Leave it out")
        return parts
