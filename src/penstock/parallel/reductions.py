"""Sums and agreement over the ranks of the mesh.

| quantity | the same on | summed over |
|---|---|---|
| batch | pp, cp, tp | (dp_replicate and dp_shard have a part of it each) |
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
    """What a rank states of its part of a batch before a step. Ranks with the same part state the same.

    Args:
        fingerprint: a number made from the data; 0 where they are not compared.
        description: of the data, for the message where they differ.
        total_tokens: by which the loss is to be divided; 0 where it is by `tokens` of all parts.
    """

    microbatches: int
    has_labels: bool
    tokens: int = 0
    fingerprint: int = 0
    description: str = ""
    total_tokens: int = 0

    @property
    def on_all_parts(self) -> dict[str, str]:
        """What must be the same on all parts of a batch."""
        labels = "given" if self.has_labels else "none"
        counts = {"microbatches": str(self.microbatches), "total_tokens": str(self.total_tokens or "none")}
        return {**counts, "labels": labels}


_ON_ALL_PARTS = {  # the rule, and the remedy
    "microbatches": (
        "all parts of a batch are split into as many, as their ranks exchange something in each",
        "Give every rank a list of the same length",
    ),
    "total_tokens": (
        "the losses of all parts of a batch are divided by the same number",
        "Give every rank what Pipeline.count_tokens returns",
    ),
    "labels": (
        "the loss is that of all parts of a batch, or of none",
        "Give every rank those of its part, or give none at all",
    ),
}


class Reductions:
    """Collectives between one pipeline and the others of its mesh.

    Without a mesh the pipeline is all there is (or other axes are the caller's business): each method returns
    its argument. With one, every method is collective over the whole mesh.

    Attributes:
        is_first: whether this is the first pipeline of the mesh, which writes what is written once
        batch_part: (index, count): this pipeline's part of the batch, and the number of parts
        everyone: all processes of the mesh; this one alone where the mesh is one pipeline, whose ranks have
            the same batch
        stage_ranks: the processes that host the same stages as this one, and itself; empty without a mesh
        asks: a number sent to all processes in each step, such as a signal's
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
        """Over `mesh`. Each wait is limited to `limit`; `watch` names the rank that is late. Collective."""
        made = cls()
        made._connect(mesh, watch, limit)
        return made

    def _connect(self, mesh: DeviceMesh, watch: Watch, limit: datetime.timedelta) -> None:
        self._watch, self._limit, self._device = watch, limit, torch.device(mesh.device_type)
        axes = mesh.mesh_dim_names or ()
        others = tuple(name for name in axes if name != "pp")
        flat = [flattened(mesh, names) for names in (BATCH, LOSS, others)]
        groups = [None if each is None else each.get_group() for each in flat]
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
        where ranks have other numbers of microbatches, labels on some ranks only, other totals, or other
        data of one part.
        Without a mesh nothing is raised: the ranks of a pipeline have one batch, and agree by other means.
        """
        if self.everyone.count == 1:
            return mine.tokens
        part, facts = self.batch_part[0], (mine.microbatches, int(mine.has_labels), mine.total_tokens)
        numbers = [part, int(error is not None), *facts, mine.fingerprint, mine.tokens]
        gathered = self._all_gather([*numbers, self.asks()])
        everyone, self.asked = [row[:-1] for row in gathered], tuple(row[-1] for row in gathered)
        agreed = len({(refused, *counts) for _, refused, *counts, _, _ in everyone}) == 1
        data = {(number, fingerprint) for number, *_, fingerprint, _ in everyone}
        tokens = {number: count for number, *_, count in everyone}
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
        parts = [number for number, _ in data]
        differing = min(number for number in parts if parts.count(number) > 1)
        # of one part, as the others may differ in the same way
        ranks = [rank for rank, (number, *_) in enumerate(everyone) if number == differing]
        raise BatchError(
            "; ".join(f"process {rank}: {descriptions[rank]}" for rank in ranks),
            "all ranks of pp, cp and tp step on the same part of the batch",
            "Give each of them the part that pipe.batch_part names, from the same data",
        )

    def learn(self, asked: Sequence[int]) -> None:
        """Take what ranks ask from their reports, where there is no mesh to agree on it."""
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

        One collective for both. The facts are in the order of the ranks, of those with the same place on tp.
        """
        if self._loss is None:
            return loss, [[*facts]]
        pipelines, place, count = self._loss.size(), self._loss.rank(), len(facts)
        numbers = [loss, *[0.0] * (pipelines * count)]
        numbers[1 + place * count : 1 + (place + 1) * count] = facts
        vector = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
        total, *all_facts = self._sum(vector, self._loss, "the loss of the other parts of the batch").tolist()
        return total, [all_facts[at * count : (at + 1) * count] for at in range(pipelines)]

    @property
    def loss_place(self) -> int:
        """Where `sum_loss` has this pipeline's facts."""
        return 0 if self._loss is None else self._loss.rank()

    def sum_over_batch(self, gradient: Tensor) -> Tensor:
        """Sum over the parts of the batch, in place."""
        return self._sum(gradient, self._batch, "the gradients of the other parts of the batch")

    def sum_over_mesh(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks that host the same stages, in place."""
        return self._sum(tensor, self._others, "the norms of the other ranks of the mesh")

    @property
    def first_reads(self) -> FirstReads | None:
        """The ranks that host the same stages, to read weights once for all. None where there is one."""
        if self._others is None:
            return None
        return FirstReads(self._others, self._limit, self._device, self._watch)

    def close(self) -> None:
        """Free the group that only this uses; those of the mesh's axes stay, as DTensors use them too."""
        if self._values is not None and dist.is_initialized():  # else it has gone with all others
            dist.destroy_process_group(self._values)

    def _all_gather(self, numbers: list[int]) -> list[list[int]]:
        """Each process's `numbers`, which are as many on all of them."""
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
