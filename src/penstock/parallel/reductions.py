"""Sums and agreement over the ranks of the mesh.

| quantity | the same on | summed over |
|---|---|---|
| batch | pp, cp, tp | (each rank of dp_replicate and dp_shard has a part) |
| valid tokens, by which the loss is divided | pp, cp, tp | dp_replicate, dp_shard |
| loss | pp, tp | dp_replicate, dp_shard, cp |
| gradient of a weight | tp, unless tp shards it | dp_replicate, dp_shard, cp |
| gradient of an expert | | dp_replicate, and the ranks of dp_shard x cp with the same experts |
| squared gradient norm | ranks that hold the same weight | pp, and all ranks that hold different shards |

Gradients are summed and never averaged: the loss is divided by all valid tokens before it is differentiated.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.batch.placement import to_device
from penstock.errors import BatchError, InputError
from penstock.parallel.axes import BATCH, LOSS
from penstock.parallel.first_reads import FirstReads
from penstock.parallel.mesh import flattened
from penstock.runtime.health.agreement import differences
from penstock.runtime.health.watch import Watch
from penstock.runtime.ranks import GroupRanks, Ranks, first_error, in_words
from penstock.runtime.transport.groups import limit_waits, new_group


class BatchFacts(NamedTuple):
    """A rank's facts about its part of a batch, compared before a step. Ranks with the same part agree.

    Args:
        fingerprint: a hash of the data; 0 where data are not compared.
        description: of the data, for the error where they differ.
        total_tokens: the divisor of the loss; 0 to divide by the sum of `tokens` over all parts.
    """

    microbatches: int
    has_labels: bool
    tokens: int = 0
    fingerprint: int = 0
    description: str = ""
    total_tokens: int = 0

    @property
    def on_all_parts(self) -> dict[str, str]:
        """The facts that must be equal on all parts of a batch."""
        labels = "given" if self.has_labels else "none"
        counts = {"microbatches": str(self.microbatches), "total_tokens": str(self.total_tokens or "none")}
        return {**counts, "labels": labels}


_ON_ALL_PARTS = {  # the rule, and the remedy
    "microbatches": (
        "all parts of a batch have equally many microbatches, as their ranks exchange data in each",
        "Give every rank a list of the same length",
    ),
    "total_tokens": (
        "the losses of all parts of a batch are divided by the same number",
        "Give every rank the result of Pipeline.count_tokens",
    ),
    "labels": (
        "the loss is that of all parts of a batch, or of none",
        "Give every rank the labels of its part, or none at all",
    ),
}


class Reductions:
    """Collectives between one pipeline and the others of its mesh.

    Without a mesh there is one pipeline (or the caller handles other axes): each method returns its argument.
    With one, every method is collective over the whole mesh.

    Attributes:
        is_first: whether this is the first pipeline of the mesh, which writes files that are written once
        batch_part: (index, count): this pipeline's part of the batch, and the number of parts
        everyone: all processes of the mesh; only this one where the mesh is one pipeline, whose ranks have
            the same batch
        stage_ranks: the processes that host the same stages as this one, with itself; empty without a mesh
        asks: returns a number for all processes, such as a signal's, which each step sends
        asked: the numbers of the last step, by process
    """

    def __init__(self) -> None:
        self.is_first = True
        self.everyone = Ranks()
        self.asks: Callable[[], int] = lambda: 0
        self.asked: tuple[int, ...] = ()
        self.batch_part = 0, 1
        self.stage_ranks = frozenset[int]()
        self._batch: dist.ProcessGroup | None = None
        self._loss: dist.ProcessGroup | None = None
        self._others: dist.ProcessGroup | None = None
        self._values: dist.ProcessGroup | None = None  # for values on the host
        self._device = torch.device("cpu")

    @classmethod
    def over(cls, mesh: DeviceMesh, watch: Watch, limit: datetime.timedelta) -> Reductions:
        """The reductions over `mesh`. A wait takes at most `limit`; `watch` names a late rank. Collective."""
        made = cls()
        made._connect(mesh, watch, limit)
        return made

    def _connect(self, mesh: DeviceMesh, watch: Watch, limit: datetime.timedelta) -> None:
        self._watch, self._limit, self._device = watch, limit, torch.device(mesh.device_type)
        axes = mesh.mesh_dim_names or ()
        others = tuple(name for name in axes if name != "pp")
        flat = [flattened(mesh, names) for names in (BATCH, LOSS, others)]
        groups = [None if axis is None else axis.get_group() for axis in flat]
        self._batch, self._loss, self._others = groups
        limit_waits(filter(None, groups), limit.total_seconds())
        if flat[0] is not None:
            self.batch_part = flat[0].get_local_rank(), flat[0].size()
        self.stage_ranks = frozenset(mesh[others].mesh.flatten().tolist() if others else [dist.get_rank()])
        self.is_first = all(mesh.get_local_rank(name) == 0 for name in others)
        if len(self.stage_ranks) > 1:
            self._values = new_group(mesh.mesh.flatten().tolist(), limit, "mesh values")
            self.everyone = GroupRanks(self._values, limit, watch=watch)

    def agree(self, mine: BatchFacts, error: InputError | None = None) -> int:
        """Agree on the next step's batch, in one collective. Returns the valid tokens of all its parts.

        Raises on all ranks the error of the first rank that refuses its part of the batch, and BatchError
        where ranks differ in the number of microbatches, in having labels, in totals, or in the data of one
        part. Without a mesh nothing is raised: the ranks of a pipeline have one batch, which is compared
        elsewhere.
        """
        if self.everyone.count == 1:
            return mine.tokens
        part, facts = self.batch_part[0], (mine.microbatches, int(mine.has_labels), mine.total_tokens)
        numbers = [part, int(error is not None), *facts, mine.fingerprint, mine.tokens]
        gathered = self._all_gather([*numbers, self.asks()])
        everyone, self.asked = [row[:-1] for row in gathered], tuple(row[-1] for row in gathered)
        agreed = len({(refused, *counts) for _, refused, *counts, _, _ in everyone}) == 1
        data = {(index, fingerprint) for index, *_, fingerprint, _ in everyone}
        tokens = {index: count for index, *_, count in everyone}
        if agreed and len(data) == len(tokens) and error is None:
            return sum(tokens.values())
        refusals = self.everyone.gather(None if error is None else in_words(error))
        if (refusal := first_error(dict(enumerate(refusals)), "given to process")) is not None:
            raise refusal from error
        all_facts = self.everyone.gather(mine.on_all_parts)
        for name, (rule, remedy) in _ON_ALL_PARTS.items():
            if lines := differences([{name: facts[name]} for facts in all_facts]):
                raise BatchError(lines[0], rule, remedy)
        descriptions = self.everyone.gather(mine.description)
        parts = [index for index, _ in data]
        differing = min(index for index in parts if parts.count(index) > 1)
        # one part is enough for the error: others may differ in the same way
        ranks = [rank for rank, (index, *_) in enumerate(everyone) if index == differing]
        raise BatchError(
            "; ".join(f"process {rank}: {descriptions[rank]}" for rank in ranks),
            "all ranks of pp, cp and tp step on the same part of the batch",
            "Give each of them the part that pipe.batch_part names, from the same data",
        )

    def learn(self, asked: Sequence[int]) -> None:
        """Set `asked` from the step reports, where there is no mesh to exchange it."""
        if self.everyone.count == 1:
            self.asked = tuple(asked)

    def max(self, number: int) -> int:
        """The largest `number` of all ranks."""
        return max(largest for (largest,) in self._all_gather([number]))

    def min(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        return -self.max(-number)

    def sum_tokens(self, count: int) -> int:
        """Valid tokens of the whole batch, where this pipeline's part has `count`."""
        if self._batch is None:
            return count
        counts = to_device(torch.tensor([count], dtype=torch.int64), self._device)
        return int(self._sum(counts, self._batch, "the other parts of the batch"))

    def sum_loss(self, loss: float, facts: Sequence[float]) -> tuple[float, list[list[float]]]:
        """Loss of the whole batch, to which this pipeline contributes `loss`, and every pipeline's `facts`.

        One collective for both. The facts are in the order of the ranks with the same index on tp.
        """
        if self._loss is None:
            return loss, [[*facts]]
        pipelines, index, count = self._loss.size(), self._loss.rank(), len(facts)
        numbers = [loss, *[0.0] * (pipelines * count)]
        numbers[1 + index * count : 1 + (index + 1) * count] = facts
        vector = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
        total, *all_facts = self._sum(vector, self._loss, "the loss of the other parts of the batch").tolist()
        return total, [all_facts[at * count : (at + 1) * count] for at in range(pipelines)]

    @property
    def loss_place(self) -> int:
        """The index of this pipeline's facts in the result of `sum_loss`."""
        return 0 if self._loss is None else self._loss.rank()

    def sum_over_batch(self, gradient: Tensor) -> Tensor:
        """Sum over the parts of the batch, in place."""
        return self._sum(gradient, self._batch, "the gradients of the other parts of the batch")

    def sum_over_mesh(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks that host the same stages, in place."""
        return self._sum(tensor, self._others, "the norms of the other ranks of the mesh")

    @property
    def first_reads(self) -> FirstReads | None:
        """The ranks that host the same stages, to read weights once for all. None for a single rank."""
        if self._others is None:
            return None
        return FirstReads(self._others, self._limit, self._device, self._watch)

    def close(self) -> None:
        """Destroy the group that only this object uses. DTensors use those of the mesh's axes too."""
        if self._values is not None and dist.is_initialized():  # else it is destroyed with all others
            dist.destroy_process_group(self._values)

    def _all_gather(self, numbers: list[int]) -> list[list[int]]:
        """Each process's `numbers`, of the same length on all processes."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        return [row.tolist() for row in self.everyone.all_gather(mine, "the other ranks' batches")]

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None, waiting_for: str) -> Tensor:
        if group is not None:
            with self._watch.waiting(waiting_for, None):
                self._wait(dist.all_reduce(tensor, group=group, async_op=True))
        return tensor

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait(self._limit)
