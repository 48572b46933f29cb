"""Split the batch of a step into microbatches, in the same way on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batch.microbatches import (
    Batch,
    Sharding,
    batch_rows,
    check_entries,
    check_groups,
    joined,
    split,
)
from penstock.batch.packing import PER_TOKEN
from penstock.batch.padding import Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, InputError
from penstock.parallel.world import World
from penstock.private import tree_map_only

BatchLike = Batch | Sequence[Microbatch]  # a batch to split, or its microbatches


def as_list(batch: BatchLike) -> list[Mapping[str, Any]]:
    """A list of the batch, or of its microbatches."""
    return [batch] if isinstance(batch, Mapping) else list(batch)


class RefusedBatch(dict[str, Any]):
    """Replaces a batch that this rank refuses, until all ranks agree: splitting it raises the error."""

    def __init__(self, error: InputError) -> None:
        super().__init__()
        self.error = error


class BatchSplitter(NamedTuple):
    """How a batch becomes microbatches.

    sharding: how each entry is split; padding: the length to pad to, if any
    complete: adds the entries that the model needs and a microbatch implies
    check: raises for a batch, or a microbatch, that the model does not accept
    group: the number of rows that stay together
    """

    sharding: Sharding
    padding: Padding | None = None
    complete: Callable[[Microbatch], Microbatch] = dict
    check: Callable[[Microbatch], None] = lambda batch: None
    group: int = 1

    def split(self, batch: BatchLike, count: int, world: World) -> list[Microbatch]:
        """Return `count` microbatches of a batch `on_host`.

        Collective over the pipeline where they are padded to the longest of all ranks.
        Raises BatchError; where collective, on every rank.
        """
        if self.padding is None:
            return [self.complete(part) for part in self._divide(batch, count)]
        if self.padding.length is None:
            microbatches, longest = self._longest(self.padding, batch, count, world)
        else:
            microbatches = self._divide(batch, count)
            longest = self.padding.longest(microbatches)
        lengths = self.padding.lengths(longest)
        return [self.complete(self.padding.pad(part, lengths)) for part in microbatches]

    def unpadded(self, batch: BatchLike, count: int) -> list[Microbatch]:
        """The microbatches of a list, or `count` of a mapping, to count their items. Raises BatchError."""
        count = count if isinstance(batch, Mapping) else max(len(batch), 1)
        return [self.complete(part) for part in self._divide(batch, count)]

    def unpadded_lengths(self, batch: BatchLike) -> list[int]:
        """The row length of a batch, or of each microbatch, where they are padded; else empty."""
        return [] if self.padding is None else [self.padding.longest([part]) for part in as_list(batch)]

    def _longest(
        self, padding: Padding, batch: BatchLike, count: int, world: World
    ) -> tuple[list[Microbatch], int]:
        """The microbatches, and the length of the longest on any rank of the pipeline."""
        refusal, microbatches, longest = None, list[Microbatch](), -1
        try:
            microbatches = self._divide(batch, count)
            longest = padding.longest(microbatches)
        except InputError as error:
            refusal = error
        vector = torch.tensor([longest], dtype=torch.float64)
        lengths = [int(length) for length in world.transport.all_gather([vector] * len(world.ranks))]

        def refuse() -> None:
            if refusal is not None:
                raise refusal

        if min(lengths) < 0:
            world.processes.attempt("split its part of the batch", refuse)
        return microbatches, max(lengths)

    def _divide(self, batch: BatchLike, count: int) -> list[Microbatch]:
        if isinstance(batch, RefusedBatch):
            raise batch.error
        parts = as_list(batch)
        for part in parts:
            check_entries(part, self.sharding)
            self.check(part)
        if isinstance(batch, Mapping):
            parts = split(parts[0], count, self.sharding, self.group)
        elif len(parts) != count:
            raise BatchError(
                f"a list of {len(parts)} microbatches",
                f"this call has {count}, by `microbatches` or by the batches of other ranks, and at least 1",
                "Give a list of the same length, 1 or more, on every rank, and leave `microbatches` out",
            )
        else:
            parts = [joined(part) for part in parts]
            for index, part in enumerate(parts if self.group > 1 else ()):
                check_groups(f"microbatch {index}", batch_rows(part, self.sharding), self.group)
        for index, part in enumerate(parts):
            tensors = [value for value in part.values() if isinstance(value, Tensor)]
            if any(tensor.dim() and not len(tensor) for tensor in tensors):
                raise BatchError(f"microbatch {index}", "it has no rows", "Leave it out, or give it one")
            ids = part.get("input_ids")
            if isinstance(ids, Tensor) and not ids.numel():
                raise BatchError(f"microbatch {index}", "its rows have no tokens", "Leave it out")
        return parts


def on_host(batch: BatchLike, device: torch.device) -> BatchLike:
    """`batch` with its integers and booleans on the host, which reads them. Waits for a GPU once.

    device: of the pipeline. Floating-point tensors on a GPU, such as embeddings, go there: the host does not
        read their values
    """
    if isinstance(batch, RefusedBatch):
        return batch
    waited_for = set[torch.device]()

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_cpu:
            return tensor
        if device.type != "cpu" and tensor.is_floating_point() and tensor.dim() > PER_TOKEN:
            return tensor.to(device)
        if tensor.is_cuda:
            waited_for.add(tensor.device)
        return tensor.to("cpu", non_blocking=True)

    parts = [tree_map_only(Tensor, moved, dict(part)) for part in as_list(batch)]
    for gpu in waited_for:
        torch.cuda.current_stream(gpu).synchronize()
    return parts[0] if isinstance(batch, Mapping) else parts
