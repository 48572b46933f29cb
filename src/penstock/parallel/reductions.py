"""Who works on the same data, and over which ranks each thing is summed.

| thing | alike on | differs, and is summed, over |
|---|---|---|
| batch | pp, cp, tp | dp_replicate, dp_shard: each of them has its part |
| valid items, by which the loss is divided | pp, cp, tp | dp_replicate, dp_shard |
| loss | pp, tp | dp_replicate, dp_shard, cp: each rank of cp has a part of the sequence |
| gradient of a weight | tp, where tp spreads nothing of it | dp_replicate, dp_shard, cp |
| gradient of an expert | | dp_replicate, and the ranks of dp_shard x cp that hold the same experts |
| square of the norm | wherever a weight is whole | pp, and wherever a weight is spread |

Gradients are summed and never averaged: the loss is divided by all valid items before it is differentiated.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import BatchError, InputError
from penstock.parallel.mesh import own_backend
from penstock.runtime.health.agreement import first_error, in_words
from penstock.runtime.health.watch import Watch
from penstock.runtime.transport.groups import GroupProcesses, limit_waits

BATCH = ("dp_replicate", "dp_shard")
LOSS = (*BATCH, "cp")
_SLOW = datetime.timedelta(hours=1)  # a disk may be


class Reductions(Protocol):
    """What is summed beyond the pipeline's own ranks. All of it is collective over the whole mesh."""

    @property
    def first(self) -> bool:
        """Whether this rank's pipeline is the first of the mesh: the one that writes what is written once."""

    @property
    def part(self) -> tuple[int, int]:
        """Which part of the whole batch this pipeline works on, from 0, and how many there are."""

    @property
    def ranks(self) -> frozenset[int]:
        """The processes of this rank and those beside it, which host the same stages."""

    def alike(self, fingerprint: int, description: str) -> None:
        """Raises BatchError, on all ranks, where some that work on one part of the batch differ in it."""

    def accepted(self, microbatches: int, scored: bool, refusal: InputError | None) -> None:
        """Raises, on all ranks, what the first of them has to say against its own part of the batch, and
        BatchError where they make different numbers of microbatches of their parts, or some of them no loss.

        Where the pipeline is all there is, it takes no part in this: its ranks have one batch.
        """

    def least(self, count: int) -> int:
        """Of what each rank gives."""

    def most(self, count: int) -> int:
        """Of what each rank gives."""

    def items(self, count: int) -> int:
        """Valid items of the whole batch, of which this pipeline has `count`."""

    def loss(self, share: float) -> float:
        """The loss of the whole batch, of which this pipeline has `share`."""

    def parts(self, gradient: Tensor) -> Tensor:
        """The sum over the parts of the batch, in place."""

    def everywhere(self, squares: Tensor) -> Tensor:
        """The sum over all ranks of the mesh but those of the pipeline."""

    def agree(self, problem: str | None) -> str | None:
        """The first problem that any process of the mesh has, the same on all of them; they may be far apart
        in time, as a disk may be slow."""


class NoReductions:
    """The pipeline is all there is, or other axes are the caller's own business."""

    first = True
    part = 0, 1
    ranks = frozenset[int]()

    def alike(self, fingerprint: int, description: str) -> None:
        """There is nobody else."""

    def accepted(self, microbatches: int, scored: bool, refusal: InputError | None) -> None:
        """There is nobody else."""

    def least(self, count: int) -> int:
        return count

    def most(self, count: int) -> int:
        return count

    def items(self, count: int) -> int:
        return count

    def loss(self, share: float) -> float:
        return share

    def parts(self, gradient: Tensor) -> Tensor:
        return gradient

    def everywhere(self, squares: Tensor) -> Tensor:
        return squares

    def agree(self, problem: str | None) -> str | None:
        return problem


class MeshReductions:
    """Over the axes of `mesh` that are there; one that is not has one rank."""

    def __init__(self, mesh: DeviceMesh, watch: Watch, limit: datetime.timedelta) -> None:
        self._watch, self._limit = watch, limit
        self._device = torch.device(mesh.device_type)
        self._whole = over(mesh, mesh.mesh_dim_names or ())
        self._batch, self._loss = over(mesh, BATCH), over(mesh, LOSS)
        others = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
        self._others = over(mesh, others)
        groups = filter(None, (self._whole, self._batch, self._loss, self._others))
        limit_waits(groups, limit.total_seconds())
        self._patient = dist.new_group(mesh.mesh.flatten().tolist(), timeout=_SLOW, backend="gloo")
        beside = others and mesh[others].mesh.flatten().tolist()
        self.ranks = frozenset(beside or [dist.get_rank()])
        batch = flat(mesh, BATCH)
        self.part = (0, 1) if batch is None else (batch.get_local_rank(), batch.size())
        self.first = all(mesh.get_local_rank(name) == 0 for name in others)

    def token(self) -> int:
        """A number that the mesh's processes share, and no other mesh of the job has. Collective."""
        drawn = secrets.randbits(60)
        return drawn if self._whole is None else int(next(iter(self._told(drawn).values())))

    def alike(self, fingerprint: int, description: str) -> None:
        if self._whole is None:
            return
        with self._waiting("the ranks that work on the same part of the batch"):
            mine = torch.tensor([self.part[0], fingerprint], dtype=torch.int64, device=self._device)
            everyone = [torch.empty_like(mine) for _ in range(self._whole.size())]
            work = dist.all_gather(everyone, mine, group=self._whole, async_op=True)
            assert work is not None
            work.wait(self._limit)
            numbers: dict[int, set[int]] = {}
            for part, number in (told.tolist() for told in everyone):
                numbers.setdefault(part, set()).add(number)
            differing = [part for part, found in numbers.items() if len(found) > 1]
            if not differing:
                return
            descriptions = self._told((self.part[0], description))
        # of one part, as the others may differ in the same way
        shown = {rank: text for rank, (part, text) in descriptions.items() if part == differing[0]}
        raise BatchError(
            "; ".join(f"process {rank}: {text}" for rank, text in shown.items()),
            "all ranks of a pipeline, and those of cp and tp beside them, step on the same part of the batch",
            "Give each of them the part that pipe.batch_part tells, from the same data",
        )

    def accepted(self, microbatches: int, scored: bool, refusal: InputError | None) -> None:
        if self._whole is None:
            if refusal is not None:
                raise refusal
            return
        with self._waiting("the other ranks' batches"):
            numbers = [microbatches, int(scored)]
            refused, *most = self._most([int(refusal is not None), *numbers, *(-n for n in numbers)])
            if not refused and most[:2] == [-number for number in most[2:]]:
                return
            told = self._told((*numbers, in_words(refusal)))
        found = first_error({rank: words for rank, (*_, words) in told.items()}, "process")
        if found is not None:
            raise found from refusal
        if most[0] != -most[2]:
            counts = "; ".join(f"{count} on process {rank}" for rank, (count, *_) in told.items())
            raise BatchError(
                f"microbatches: {counts}",
                "all parts of a batch are cut into as many, as their ranks exchange something in each",
                "Give every rank a list of the same length",
            )
        without = ", ".join(str(rank) for rank, (_, has, _) in told.items() if not has)
        raise BatchError(
            f"labels for some parts of a batch, and none given to process {without}",
            "the loss is that of all parts, or of none",
            "Give every rank those of its part, or give none at all",
        )

    def least(self, count: int) -> int:
        return -self.most(-count)

    def most(self, count: int) -> int:
        if self._whole is None:
            return count
        with self._waiting("the other ranks' batches"):
            return self._most([count])[0]

    def _most(self, numbers: list[int]) -> list[int]:
        """Of each, over the whole mesh."""
        given = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        work = dist.all_reduce(given, dist.ReduceOp.MAX, group=self._whole, async_op=True)
        assert work is not None
        work.wait(self._limit)
        return [int(number) for number in given]

    def _told(self, mine: Any) -> dict[int, Any]:
        """What each process of the mesh tells (anything that JSON can hold), by its rank in the world."""
        assert self._whole is not None
        told = GroupProcesses(self._whole, self._limit, self._device).gather(mine)
        return dict(sorted(zip(dist.get_process_group_ranks(self._whole), told, strict=True)))

    def items(self, count: int) -> int:
        given = torch.tensor([count], dtype=torch.int64, device=self._device)
        return int(self._sum(given, self._batch, "the other parts of the batch"))

    def loss(self, share: float) -> float:
        given = torch.tensor([share], dtype=torch.float64, device=self._device)
        return float(self._sum(given, self._loss, "the loss of the other parts of the batch"))

    def parts(self, gradient: Tensor) -> Tensor:
        return self._sum(gradient, self._batch, "the gradients of the other parts of the batch")

    def everywhere(self, squares: Tensor) -> Tensor:
        return self._sum(squares, self._others, "the norms of the other ranks of the mesh")

    def agree(self, problem: str | None) -> str | None:
        told = GroupProcesses(self._patient, _SLOW, torch.device("cpu")).gather(problem)
        return next(filter(None, told), None)

    def close(self) -> None:
        """Let go of the process group that is only for this; those of the mesh's axes stay, as the modules
        that are spread over them use them too."""
        if dist.is_initialized():  # else it has gone with all others
            dist.destroy_process_group(self._patient)

    def _sum(self, given: Tensor, group: dist.ProcessGroup | None, what: str) -> Tensor:
        if group is None:
            return given
        with self._waiting(what):
            work = dist.all_reduce(given, group=group, async_op=True)
            assert work is not None
            work.wait(self._limit)
        return given

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self._watch.begin(what, None)
        try:
            yield
        except RuntimeError as cause:
            raise self._watch.error(cause) from cause
        finally:
            self._watch.end()


def present(mesh: DeviceMesh, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the axes that the mesh has, and that have more than one rank."""
    return tuple(name for name in mesh.mesh_dim_names or () if name in names and mesh[name].size() > 1)


def over(mesh: DeviceMesh, names: Sequence[str]) -> dist.ProcessGroup | None:
    """The group of this rank over these axes; None where it would be alone. Collective."""
    there = flat(mesh, names)
    return None if there is None else there.get_group()


def flat(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """These axes as one. Collective."""
    axes = present(mesh, names)
    if not axes:
        return None
    if len(axes) == 1:
        return mesh[axes[0]]
    return mesh[axes]._flatten("_".join(axes), backend_override=own_backend(mesh.device_type))
