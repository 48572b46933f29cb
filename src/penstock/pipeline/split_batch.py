"""What is given to a step, made into its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from penstock.batch.microbatches import Batch, Collect, Sharding, split
from penstock.batch.padding import Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, InputError
from penstock.parallel.mesh_plan import MeshPlan
from penstock.parallel.world import World
from penstock.runtime.health.agreement import first_error, in_words

BatchLike = Batch | Sequence[Microbatch]  # to be split, or as it is


class RefusedBatch(dict[str, Any]):
    """In the place of a batch that was refused before the ranks meet; they are told where they do."""

    def __init__(self, error: InputError) -> None:
        super().__init__()
        self.error = error


class BatchSplitter(NamedTuple):
    """How what is given becomes microbatches.

    sharding: how entries are cut; padding: whether microbatches are made equal in length
    complete: adds what the model needs and can be told from a microbatch
    own: what of a whole microbatch is this rank's; None takes all of it
    """

    sharding: Sharding
    padding: Padding | None = None
    complete: Callable[[Microbatch], Microbatch] = dict
    own: Callable[[Microbatch], Microbatch] | None = None

    def cut(self, given: BatchLike, count: int, world: World) -> list[Microbatch]:
        """`count` microbatches on the world's device. Raises BatchError.

        Collective where they are padded to the longest, and refused by all ranks of the pipeline then.
        """
        if self.padding is None or self.padding.length is not None:
            return [self.complete(part) for part in self._padded(self._split(given, count, world), None)]
        refusal, parts, longest = None, list[Microbatch](), -1
        try:
            parts = self._split(given, count, world)
            longest = self.padding.longest(parts)
        except InputError as error:
            refusal = error
        mine = torch.tensor([longest], dtype=torch.float64)
        told = [int(each) for each in world.transport.exchange([mine] * len(world.ranks))]
        if min(told) < 0:
            everyone = world.processes.gather(in_words(refusal))
            found = first_error(dict(enumerate(everyone)), "rank")
            assert found is not None
            raise found from refusal
        return [self.complete(part) for part in self._padded(parts, max(told))]

    def _split(self, given: BatchLike, count: int, world: World) -> list[Microbatch]:
        if isinstance(given, RefusedBatch):
            raise given.error
        parts = [given] if isinstance(given, Mapping) else list(given)
        parts = [tree_map_only(Tensor, lambda tensor: tensor.to(world.device), dict(part)) for part in parts]
        if isinstance(given, Mapping):
            parts = split(parts[0], count, self.sharding)
        elif len(parts) != count:
            raise BatchError(
                f"a list of {len(parts)} microbatches",
                f"the schedule has {count}",
                f"Give {count} of them, or build the pipeline with microbatches={len(parts)}",
            )
        for number, part in enumerate(parts):
            if any(isinstance(value, Tensor) and value.dim() and not len(value) for value in part.values()):
                raise BatchError(f"microbatch {number}", "it has no rows", "Leave it out, or give it one")
        return parts

    def _padded(self, microbatches: list[Microbatch], longest: int | None) -> list[Microbatch]:
        """longest: over all ranks; None where a fixed length makes it no matter"""
        if self.padding is None:
            return microbatches
        lengths = self.padding.lengths(longest or self.padding.longest(microbatches))
        return [self.padding.pad(microbatch, lengths) for microbatch in microbatches]


# ---- Microbatches of a pipeline on a mesh: cut along the sequence, and put together again.


class MeshBatchSplitter(BatchSplitter):
    """Prepares each rank's part of every microbatch as well."""

    beside: MeshPlan

    @classmethod
    def around(cls, splitter: BatchSplitter, beside: MeshPlan) -> MeshBatchSplitter:
        made = cls(*splitter[:3], beside.local)
        made.beside = beside
        return made

    def cut(self, given: BatchLike, count: int, world: World) -> list[Microbatch]:
        """As BatchSplitter has it."""
        microbatches = super().cut(given, count, world)
        self.beside.split_sequences(microbatches)
        return microbatches

    def joining(self, collect: Collect) -> Collect:
        """Given outputs of whole sequences."""

        def joined(output: Any, number: int) -> Any:
            return collect(self.beside.gather_output(output, number), number)

        return joined
