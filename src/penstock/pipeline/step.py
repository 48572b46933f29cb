"""A step, from what the caller gives to what all ranks told of it."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batch.loss import Loss
from penstock.batch.microbatches import Collect, StepInput, fingerprint
from penstock.batch.shapes import EdgeShapes, Microbatch
from penstock.errors import BatchError, InputError, PeerError, RunError
from penstock.models.stage import DeclaredEdges
from penstock.parallel.world import World
from penstock.pipeline.split_batch import BatchLike, BatchSplitter
from penstock.runtime import step_report as report
from penstock.runtime.executor import Executor, run_together
from penstock.runtime.health.post_mortem import write_post_mortem
from penstock.runtime.health.progress import Progress
from penstock.runtime.plan import lower
from penstock.runtime.recorder import Recorder
from penstock.runtime.rng import drawn, foreseen, seeded
from penstock.runtime.stage import Stage
from penstock.schedule import Proof, Schedule
from penstock.schedule.order import exchanges
from penstock.schedule.recompute import Places

StepRecord = tuple[Schedule, report.Reports]  # a step's schedule, and what the ranks told of it
_REFUSED = 1 << 32  # above all fingerprints of batches


class StepResult(NamedTuple):
    """The same numbers on every rank.

    loss: mean over the batch's valid items; tokens: how many those are
    bubble: the share of the ranks' time in which they did not compute
    """

    loss: float
    tokens: int
    bubble: float


class LoweredSchedule(NamedTuple):
    """A schedule ready to run in this process; `number` is equal on ranks that hold the same one."""

    schedule: Schedule
    executors: list[Executor]
    number: int


class StepRunner:
    """Runs schedules on this process's stages.

    edges: None where what crosses an edge tells itself what it is
    trace_folder: where each process writes the timeline so far when a step fails
    """

    def __init__(
        self,
        world: World,
        stages: Mapping[int, Stage],
        edges: EdgeShapes | None,
        loss: Loss,
        splitter: BatchSplitter,
        trace_folder: Path | None,
    ) -> None:
        self._world, self._stages, self._edges, self._loss = world, stages, edges, loss
        self._splitter, self._trace_folder = splitter, trace_folder
        self._recorders = {rank: Recorder(world.device, world.clock_offset) for rank in world.ranks}
        self._broken = False
        self._chances = [stage.chance for stage in stages.values() if stage.chance is not None]
        self.draws = any(world.processes.gather(bool(self._chances)))

    def lower(self, proof: Proof, recomputed: Places = frozenset()) -> LoweredSchedule:
        """recomputed: the (stage, microbatch) whose layers run again in the backward"""
        world, schedule = self._world, proof.schedule
        together = exchanges(schedule) if world.batched else None
        executors = []
        reduced = frozenset(index for index, stage in self._stages.items() if stage.shards is not None)
        for rank in world.ranks:
            plan = lower(proof, rank, recomputed=recomputed, together=together, reduced=reduced)
            hosted = {stage: self._stages[stage] for stage in schedule.placement.stages_of(rank)}
            recorder = self._recorders[rank]
            executors.append(Executor(plan, hosted, self._edges, self._loss, world.transport, recorder))
        return LoweredSchedule(schedule, executors, zlib.crc32(str(schedule).encode()))

    def run(
        self,
        lowered: LoweredSchedule,
        given: BatchLike,
        collect: Collect | None = None,
        *,
        scored: bool = False,
        changed: bool = False,
    ) -> tuple[StepResult, StepRecord]:
        """collect: takes the place of the loss; where `scored`, it stands beside it; changed: see `report`"""
        schedule, executors, _ = lowered
        transport = self._world.transport
        if self._broken:
            raise RunError(
                "a step after one that failed",
                "other ranks may still send what was meant for that one",
                "Build the pipeline again, best in fresh processes",
            )
        begun = False
        try:
            step, chance = self._prepare(lowered, given, collect, scored)
            begun = True
            with chance:
                run_together(executors, step)
            if not schedule.trains:
                for stage in self._stages.values():
                    stage.end_forwards()
            if collect and scored:
                for executor in executors:
                    _tell_apart(executor, step.weight)
            told = transport.exchange([report.report(executor, changed) for executor in executors])
            reports = [vector.tolist() for vector in told]
            loss = self._world.reductions.sum_loss(report.total_loss(reports))
            transport.end_step()
        except BaseException as error:
            self._give_up(executors, error, begun)
            raise
        left = transport.pending + sum(executor.left_over for executor in executors)
        assert not left, f"{left} entries left in caches after a step"
        return StepResult(loss, step.weight, report.bubble(schedule, reports)), (schedule, reports)

    def _prepare(
        self, lowered: LoweredSchedule, given: BatchLike, collect: Collect | None, scored: bool
    ) -> tuple[StepInput, AbstractContextManager[None]]:
        """All that is found out, and agreed upon, before anything is sent; and what to run it in."""
        schedule, executors, number = lowered
        transport, counts = self._world.transport, scored or not collect
        with self._refused_by_all(schedule.microbatches, counts, agreed=True):
            microbatches = self._splitter.cut(given, schedule.microbatches, self._world)
            weight = sum(self._loss.weight(microbatch) for microbatch in microbatches) if counts else 1
            self._foresee(microbatches, schedule.placement.depth)
        if counts:
            weight = self._world.reductions.sum_tokens(weight)
        if self._world.mesh is not None:
            parts = [given] if isinstance(given, Mapping) else given
            transport.follow(_progress_of(executors[0]))
            told = fingerprint(parts, len(microbatches), number)
            transport.agree(*told)
            self._world.reductions.all_equal(*told)
        if weight == 0:
            transport.settle()  # or a rank that was given another batch would wait for this one
            raise BatchError("a batch without a valid token", "a mean needs one at least", "Leave it out")
        if isinstance(self._edges, DeclaredEdges):
            with self._refused_by_all(schedule.microbatches, counts):
                if unseen := self._edges.unseen(microbatches):
                    transport.settle()  # or ranks with other batches would not meet in what follows
                    self._edges.agree(unseen, self._world.processes)
        own = microbatches
        if self._splitter.own is not None:
            own = [self._splitter.own(microbatch) for microbatch in microbatches]
        if collect and scored:
            collect = _with_loss(collect, self._loss, own)
        return StepInput(own, weight, collect), self._chance(schedule, microbatches, own)

    def _chance(
        self, schedule: Schedule, microbatches: Sequence[Microbatch], own: Sequence[Microbatch]
    ) -> AbstractContextManager[None]:
        """Collective over the mesh.

        Nothing is drawn where the batch is refused, nor where nothing is in training on any rank.
        """
        if not self.draws or not schedule.trains:
            return nullcontext()
        world = self._world
        training = any(part.training for stage in self._stages.values() for part in stage.module.modules())
        mine = torch.tensor([foreseen() if training else 0], dtype=torch.float64)
        told = world.transport.exchange([mine] * len(world.ranks))  # after all ranks took the batch
        seed = world.reductions.max(int(max(told)))  # one for all, whatever each was seeded with
        if not seed:
            return nullcontext()
        drawn()
        return seeded(self._chances, seed, microbatches, own)

    def cut(self, given: BatchLike, count: int) -> list[Microbatch]:
        """The microbatches that a step makes of it. Collective over the mesh, and where they are padded."""
        with self._refused_by_all(count, True):
            return self._splitter.cut(given, count, self._world)

    @contextmanager
    def _refused_by_all(self, count: int, scored: bool, *, agreed: bool = False) -> Iterator[None]:
        """What a rank refuses within is raised on all of them: they are about to exchange something.

        agreed: the pipeline's own ranks go on to make sure of having the same batch, and learn it there
        """
        refusal = None
        try:
            yield
        except InputError as error:
            refusal = error
        self._world.reductions.all_accept(count, scored, refusal)
        if refusal is None:
            return
        if agreed:
            transport, words = self._world.transport, f"it refuses its batch ({refusal})"
            transport.agree(_REFUSED + zlib.crc32(words.encode()), words)
            transport.settle()
        raise refusal

    def _foresee(self, microbatches: Sequence[Microbatch], depth: int) -> None:
        """Learn what goes over the edges where parts of a batch may differ in it: one may be refused."""
        if depth == 1 or self._world.reductions.batch_part[1] == 1:
            return
        if self._edges is not None and not isinstance(self._edges, DeclaredEdges):
            for microbatch in microbatches:
                self._edges(0, microbatch)

    def _give_up(self, executors: Sequence[Executor], error: BaseException, begun: bool) -> None:
        """Tell the other ranks, say where it happened, and leave nothing half-done behind."""
        # found by all ranks alike and before anything was sent, so that the next batch may do
        early = not begun or not any(executor.current for executor in executors)
        harmless = early and isinstance(error, BatchError)
        harmless |= not begun and isinstance(error, InputError)
        if not harmless:
            self.fail()
            if not isinstance(error, PeerError):
                ops = "".join(f"{executor.current}: " for executor in executors if executor.current)
                self._world.transport.tell_failure(f"{ops}{type(error).__name__}: {error}")
            write_post_mortem(error, executors, self._trace_folder)
        for executor in executors if begun else ():
            executor.reset()
        self._world.transport.reset()

    def fail(self) -> None:
        """No step may follow: where there are other processes, they may still be in this one."""
        self._broken |= not self._world.alone

    def tell_of(self, error: PeerError, lowered: LoweredSchedule) -> None:
        """What this rank knows of a wait that broke off after the schedule had run."""
        if error.timeline is None:
            write_post_mortem(error, lowered.executors, self._trace_folder)


def _progress_of(executor: Executor) -> Callable[[], Progress | None]:
    """For a thread that lives on where a pipeline is dropped without `close`: it is not to keep weights."""
    known = weakref.ref(executor)
    return lambda: None if (still := known()) is None else still.progress


def _with_loss(collect: Collect, loss: Loss, microbatches: Sequence[Microbatch]) -> Collect:
    """Both the loss and what `collect` returns."""

    def both(output: Any, number: int) -> tuple[Tensor, Any]:
        return loss.total(output, microbatches[number]), collect(output, number)

    return both


def _tell_apart(executor: Executor, weight: int) -> None:
    """What `_with_loss` put together, each to where it belongs."""
    executor.ops.shares = [total / weight for total, _ in executor.ops.results.values()]
    executor.ops.results = {number: kept for number, (_, kept) in executor.ops.results.items()}
