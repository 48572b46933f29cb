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
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import BatchError, InputError
from penstock.parallel.axes import BATCH, LOSS
from penstock.parallel.mesh import flattened
from penstock.runtime.health.agreement import first_error, in_words
from penstock.runtime.health.watch import Watch
from penstock.runtime.transport.calls import call_number, different_calls
from penstock.runtime.transport.groups import GroupProcesses, limit_waits

_SLOW = datetime.timedelta(hours=1)  # a disk may be


class Reductions:
    """Collectives between one pipeline and the others of its mesh.

    Without a mesh the pipeline is all there is (or other axes are the caller's business): each method returns
    its argument. With one, every method is collective over the whole mesh.

    Attributes:
        is_first: whether this is the first pipeline of the mesh, which writes what is written once
        batch_part: (index, count): this pipeline's part of the batch, and the number of parts
        stage_ranks: the processes that host the same stages as this one, and itself; empty without a mesh
    """

    def __init__(self) -> None:
        self.is_first = True
        self.batch_part = 0, 1
        self.stage_ranks = frozenset[int]()
        self._all: dist.ProcessGroup | None = None
        self._batch: dist.ProcessGroup | None = None
        self._loss: dist.ProcessGroup | None = None
        self._others: dist.ProcessGroup | None = None
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
        flat = [flattened(mesh, names) for names in (axes, BATCH, LOSS, others)]
        groups = [None if each is None else each.get_group() for each in flat]
        self._all, self._batch, self._loss, self._others = groups
        limit_waits(filter(None, groups), limit.total_seconds())
        self._patient = dist.new_group(mesh.mesh.flatten().tolist(), timeout=_SLOW, backend="gloo")
        if flat[1] is not None:
            self.batch_part = flat[1].get_local_rank(), flat[1].size()
        self.stage_ranks = frozenset(mesh[others].mesh.flatten().tolist() if others else [dist.get_rank()])
        self.is_first = all(mesh.get_local_rank(name) == 0 for name in others)

    def shared_token(self) -> int:
        """A random number that the processes of this mesh share. Collective."""
        token = secrets.randbits(60)
        return token if self._all is None else int(next(iter(self._gather(token).values())))

    def same_call(self, name: str) -> None:
        """Raise ConfigError, on all ranks, where ranks call different methods of the pipeline."""
        if self._others is None:  # the ranks of one pipeline find out by themselves
            return
        number = call_number(name)
        with self._watch.waiting(f"the other ranks to call {name}", None):
            if self._max([number, -number]) == [number, -number]:
                return
            names = self._gather(name)
        raise different_calls(names)

    def all_equal(self, fingerprint: int, description: str) -> None:
        """Raise BatchError, on all ranks, where ranks with the same part of the batch have other data."""
        if self._all is None:
            return
        with self._watch.waiting("the ranks that work on the same part of the batch", None):
            mine = torch.tensor([self.batch_part[0], fingerprint], dtype=torch.int64, device=self._device)
            everyone = [torch.empty_like(mine) for _ in range(self._all.size())]
            self._wait(dist.all_gather(everyone, mine, group=self._all, async_op=True))
            by_part: dict[int, set[int]] = {}
            for part, number in (pair.tolist() for pair in everyone):
                by_part.setdefault(part, set()).add(number)
            differing = [part for part, numbers in by_part.items() if len(numbers) > 1]
            if not differing:
                return
            descriptions = self._gather((self.batch_part[0], description))
        # of one part, as the others may differ in the same way
        shown = {rank: text for rank, (part, text) in descriptions.items() if part == differing[0]}
        raise BatchError(
            "; ".join(f"process {rank}: {text}" for rank, text in shown.items()),
            "all ranks of pp, cp and tp step on the same part of the batch",
            "Give each of them the part that pipe.batch_part names, from the same data",
        )

    def all_accept(self, microbatches: int, has_labels: bool, error: InputError | None) -> None:
        """Raise on all ranks the error of the first rank that refuses its part of the batch.

        Raises BatchError too where ranks have other numbers of microbatches, or labels on some ranks only.
        Without a mesh nothing is raised: the ranks of a pipeline have one batch, and agree by other means.
        """
        if self._all is None:
            return
        with self._watch.waiting("the other ranks' batches", None):
            numbers = [microbatches, int(has_labels)]
            refused, *most = self._max([int(error is not None), *numbers, *(-n for n in numbers)])
            if not refused and most[:2] == [-number for number in most[2:]]:
                return
            everyone = self._gather((*numbers, in_words(error)))
        found = first_error({rank: words for rank, (*_, words) in everyone.items()}, "given to process")
        if found is not None:
            raise found from error
        if most[0] != -most[2]:
            counts = "; ".join(f"{count} on process {rank}" for rank, (count, *_) in everyone.items())
            raise BatchError(
                f"microbatches: {counts}",
                "all parts of a batch are split into as many, as their ranks exchange something in each",
                "Give every rank a list of the same length",
            )
        without = ", ".join(str(rank) for rank, (_, labels, _) in everyone.items() if not labels)
        raise BatchError(
            f"labels for some parts of a batch, and none given to process {without}",
            "the loss is that of all parts, or of none",
            "Give every rank those of its part, or give none at all",
        )

    def max(self, number: int) -> int:
        """The largest `number` of all ranks."""
        if self._all is None:
            return number
        with self._watch.waiting("the other ranks' batches", None):
            return self._max([number])[0]

    def min(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        return -self.max(-number)

    def sum_tokens(self, count: int) -> int:
        """Valid tokens of the whole batch, where this pipeline's part has `count`."""
        counts = torch.tensor([count], dtype=torch.int64, device=self._device)
        return int(self._sum(counts, self._batch, "the other parts of the batch"))

    def sum_loss(self, loss: float) -> float:
        """Loss of the whole batch, to which this pipeline contributes `loss`."""
        losses = torch.tensor([loss], dtype=torch.float64, device=self._device)
        return float(self._sum(losses, self._loss, "the loss of the other parts of the batch"))

    def sum_over_batch(self, gradient: Tensor) -> Tensor:
        """Sum over the parts of the batch, in place."""
        return self._sum(gradient, self._batch, "the gradients of the other parts of the batch")

    def sum_over_mesh(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks that host the same stages, in place."""
        return self._sum(tensor, self._others, "the norms of the other ranks of the mesh")

    def first_problem(self, problem: str | None) -> str | None:
        """The first process's problem, the same on all; waits up to an hour, as a disk may be slow."""
        if self._all is None:
            return problem
        everyone = GroupProcesses(self._patient, _SLOW, torch.device("cpu")).gather(problem)
        return next(filter(None, everyone), None)

    def close(self) -> None:
        """Free the group that only this uses; those of the mesh's axes stay, as DTensors use them too."""
        if self.stage_ranks and dist.is_initialized():  # else it has gone with all others
            dist.destroy_process_group(self._patient)

    def _max(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._wait(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._all, async_op=True))
        return [int(number) for number in tensor]

    def _gather(self, value: Any) -> dict[int, Any]:
        """Each process's `value` (JSON must hold it), by its rank in the world."""
        assert self._all is not None
        everyone = GroupProcesses(self._all, self._limit, self._device).gather(value)
        return dict(sorted(zip(dist.get_process_group_ranks(self._all), everyone, strict=True)))

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None, waiting_for: str) -> Tensor:
        if group is not None:
            with self._watch.waiting(waiting_for, None):
                self._wait(dist.all_reduce(tensor, group=group, async_op=True))
        return tensor

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait(self._limit)
