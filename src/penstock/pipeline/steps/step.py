"""Run one step: from the caller's batch to the numbers that all ranks report.

split     the batch becomes microbatches                         an error of one rank is raised on all
agree     all ranks have the same part of the batch              else BatchError, before anything is sent
run       the executors follow their plans
report    each rank sends its step report to all                 loss, bubble, timeline
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batch.loss import Loss, MeanOverRows, OwnLoss, total_of, weight_of
from penstock.batch.microbatches import Collect, StepInput, fingerprint
from penstock.batch.placement import placed
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, InputError, PeerError, RunError
from penstock.models.stage import DeclaredEdges
from penstock.parallel.reductions import BatchFacts
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.steps.optimizer_step import OptimizerStep
from penstock.pipeline.steps.schedules import LoweredSchedule, Schedules
from penstock.pipeline.steps.split_batch import BatchLike, as_list, on_host
from penstock.runtime import step_report as report
from penstock.runtime.device.memory import PeakMemory
from penstock.runtime.executor import Executor, run_together
from penstock.runtime.health.post_mortem import write_post_mortem
from penstock.runtime.recorder import Progress
from penstock.runtime.rng import draw_seed, next_seed, seeded_step
from penstock.runtime.stage import autocasting
from penstock.schedule import Schedule

StepRecord = tuple[Schedule, report.Reports]  # a step's schedule, and the ranks' reports
_REFUSED = 1 << 32  # above all fingerprints of batches


class StepResult(NamedTuple):
    """The outcome of a step: the same numbers on every rank.

    Attributes:
        loss: mean over the batch's valid tokens, or over what the loss counts
        tokens: number of valid tokens, over all microbatches and all parts of the batch
        bubble: share of the ranks' time in which they did not compute, from 0 to 1
        norm: that of all gradients, before they were clipped; None for a step without an optimizer
        host_share: share of the ranks' time in which GPUs waited, within ops, for their hosts; None where it
            is not known (`Pipeline.measuring_device`), and on the CPU
    """

    loss: float
    tokens: int
    bubble: float
    norm: float | None = None
    host_share: float | None = None


class StepRunner:
    """Runs schedules on this process's stages."""

    def __init__(self, built: BuiltStages) -> None:
        """Collective."""
        self._built, self._world = built, built.world
        self._stages = {stage.index: stage for stage in built.stages}
        self._trace_folder = None if built.trace_folder is None else Path(built.trace_folder)
        self.schedules = Schedules(built)
        self._broken = False
        self._rngs = [stage.rng for stage in built.stages if stage.rng is not None]
        self.peaks: tuple[PeakMemory, ...] = ()  # of the processes, at the end of the last schedule
        self.seconds: tuple[tuple[report.OpSeconds, ...], ...] = ()  # by pipeline and rank
        self.draws: bool = any(built.world.processes.gather(bool(self._rngs)))

    def run(
        self,
        lowered: LoweredSchedule,
        batch: BatchLike,
        collect: Collect | None = None,
        *,
        scored: bool = False,
        changed: Callable[[], bool] = lambda: False,
        optimizer_step: OptimizerStep | None = None,
        total_tokens: int | None = None,
    ) -> tuple[StepResult, StepRecord]:
        """Run the schedule on `batch`. Collective.

        collect: called with the last stage's outputs in place of the loss; with `scored`, in addition to it
        changed: see step_report.StepReport
        optimizer_step: that the caller takes afterwards; compared between the ranks here
        total_tokens: what the loss is divided by; None takes the valid tokens of `batch`
        """
        schedule, executors = lowered.schedule, lowered.executors
        transport = self._world.transport
        if self._broken:
            raise RunError(
                "a step after one that failed",
                "other ranks may still send messages of that step",
                "Build the pipeline again, best in fresh processes",
            )
        begun = False
        try:
            step, tokens, seeds = self._prepare(lowered, batch, collect, scored, optimizer_step, total_tokens)
            begun = True
            for stage in self._stages.values() if schedule.trains else ():
                stage.begin_step()
            with seeds, autocasting(self._built.autocast, self._world.device):
                run_together(executors, step)
            if not schedule.trains:
                for stage in self._stages.values():
                    stage.end_forwards()
            if collect and scored:
                for executor in executors:
                    _take_loss_out(executor, step.weight)
            packed = zip(executors, report.losses(executors), strict=True)
            memory = PeakMemory.now(self._world.device)
            asks = self._world.reductions.asks()
            own = [report.pack(each, memory, loss, changed(), asks) for each, loss in packed]
            reports = report.unpack(schedule, transport.all_gather(own))
            self._world.reductions.learn([each.asks for each in self._by_process(reports)])
            loss = self._gather_measurements(reports)
            transport.messages.end_step()
        except BaseException as error:
            self._give_up(executors, error, begun)
            raise
        left = transport.messages.pending + sum(executor.left_over for executor in executors)
        assert not left, f"{left} entries left in caches after a step"
        bubble, host_share = report.shares(schedule, reports)
        return StepResult(loss, tokens, bubble, host_share=host_share), (schedule, reports)

    def _by_process(self, reports: report.Reports) -> report.Reports:
        """One report of each process: a process that holds all ranks reports its own facts in each."""
        return reports[:1] if self._world.alone else reports

    def _gather_measurements(self, reports: report.Reports) -> float:
        """Sum the loss over the mesh, and keep every rank's peak memory and op seconds. Collective."""
        memory = [number for each in self._by_process(reports) for number in each.memory]
        times = [number for each in reports for number in each.seconds]
        mine = sum(each.loss for each in reports)
        loss, pipelines = self._world.reductions.sum_loss(mine, [*memory, *times])
        width = len(PeakMemory._fields)
        by_rank = [each[at : at + width] for at in range(0, len(memory), width) for each in pipelines]
        self.peaks = tuple(PeakMemory(*map(int, numbers)) for numbers in by_rank)
        self.seconds = tuple(
            tuple(report.OpSeconds(*four) for four in zip(*[iter(each[len(memory) :])] * 4, strict=True))
            for each in pipelines
        )
        return loss

    def split(self, batch: BatchLike, count: int) -> list[Microbatch]:
        """The microbatches that a step makes of `batch`. Collective on a mesh, and where they are padded."""
        with self._agreed(count, has_labels=True):
            microbatches = self._split(on_host(batch, self._world.device), count)
            return list(placed(microbatches, self._world.device))

    def _split(self, batch: BatchLike, count: int) -> list[Microbatch]:
        """The microbatches of a batch `on_host`, on the host. Collective where they are padded."""
        microbatches = self._built.splitter.split(batch, count, self._world)
        if self._built.mesh_plan is not None:
            self._built.mesh_plan.split_sequences(microbatches)
        return microbatches

    def count_tokens(self, batches: Sequence[BatchLike]) -> int:
        """The valid tokens of batches, over all their parts. Collective on a mesh."""
        tokens, built = 0, self._built
        # these weigh a batch as its microbatches, another loss may not
        count = 1 if isinstance(built.loss, OwnLoss | MeanOverRows) else built.schedule.microbatches
        with self._agreed(len(batches), has_labels=True):
            for batch in batches:
                microbatches = built.splitter.unpadded(on_host(batch, self._world.device), count)
                tokens += sum(weight_of(built.loss, part) for part in self._weighed(microbatches))
        return self._world.reductions.sum_tokens(tokens)

    def _prepare(
        self,
        lowered: LoweredSchedule,
        batch: BatchLike,
        collect: Collect | None,
        scored: bool,
        optimizer_step: OptimizerStep | None,
        total_tokens: int | None,
    ) -> tuple[StepInput, int, AbstractContextManager[None]]:
        """Split the batch, and agree on it before anything is sent.

        Returns the input, the batch's valid tokens, and `_seeds`.
        """
        schedule, executors = lowered.schedule, lowered.executors
        world, transport, built = self._world, self._world.transport, self._built
        counts = scored or not collect  # whether there is a loss, which counts valid items
        facts, refusal = BatchFacts(schedule.microbatches, counts, total_tokens=total_tokens or 0), None
        batch = on_host(batch, world.device)
        try:
            microbatches = self._split(batch, schedule.microbatches)
            weighed = self._weighed(microbatches) if counts else ()
            weight = sum(weight_of(built.loss, part) for part in weighed) if counts else 1
            self._infer_edges(microbatches, schedule.placement.depth)
            facts = facts._replace(tokens=weight)
            if world.mesh is not None:
                number, words = _fingerprint(batch, len(microbatches), lowered, optimizer_step, total_tokens)
                facts = facts._replace(fingerprint=number, description=words)
        except InputError as error:
            refusal, words = error, f"it refuses its batch ({error})"
            facts = facts._replace(fingerprint=_REFUSED + zlib.crc32(words.encode()), description=words)
        tokens = world.reductions.agree(facts, refusal)
        if world.mesh is not None:
            transport.follow(_progress_of(executors[0]))
            world.processes.begin(facts.fingerprint, facts.description)
        if refusal is not None:
            world.processes.settle()  # it raises, unless every rank refuses
            raise refusal
        weight = total_tokens or (tokens if counts else 1)
        if weight == 0:
            world.processes.settle()  # or a rank with another batch would wait for this one
            raise BatchError("a batch without a valid token", "a mean needs one at least", "Leave it out")
        if isinstance(built.edges, DeclaredEdges):
            with self._agreed(schedule.microbatches, counts):
                if unseen := built.edges.unseen(microbatches):
                    world.processes.settle()  # or ranks with other batches would not meet in what follows
                    built.edges.agree(unseen, world.processes)
        local: Sequence[Microbatch] = microbatches
        if built.mesh_plan is not None:
            local = [built.mesh_plan.local(microbatch) for microbatch in microbatches]
        local = placed(local, world.device)
        if collect and scored:
            collect = _with_loss(collect, built.loss, local)
        seeds = self._seeds(schedule, microbatches, local)
        return StepInput(local, weight, collect), tokens if counts else 1, seeds

    @contextmanager
    def _agreed(self, count: int, has_labels: bool) -> Iterator[None]:
        """Raise an InputError of one rank on all ranks of the mesh: they are about to exchange something."""
        refusal = None
        try:
            yield
        except InputError as error:
            refusal = error
        self._world.reductions.agree(BatchFacts(count, has_labels), refusal)
        if refusal is not None:
            raise refusal

    def _weighed(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return microbatches to count valid items of.

        Our own losses count on the host, so as not to wait for a GPU; a user's loss gets them on the device.
        """
        if isinstance(self._built.loss, OwnLoss | MeanOverRows):
            return microbatches
        return placed(microbatches, self._world.device)

    def _infer_edges(self, microbatches: Sequence[Microbatch], depth: int) -> None:
        """Infer edges before the step, so that all ranks refuse a wrong shape together."""
        if depth == 1 or self._world.reductions.batch_part[1] == 1:
            return
        edges = self._built.edges
        if edges is not None and not isinstance(edges, DeclaredEdges):
            for microbatch in microbatches:
                edges(0, microbatch)

    def _seeds(
        self, schedule: Schedule, microbatches: Sequence[Microbatch], local: Sequence[Microbatch]
    ) -> AbstractContextManager[None]:
        """Seed what the step draws, equally on every mesh. Collective over the mesh.

        Nothing is drawn from the global generator for a refused batch, nor without a module in training.
        """
        if not self.draws or not schedule.trains:
            return nullcontext()
        world = self._world
        training = any(inner.training for stage in self._stages.values() for inner in stage.module.modules())
        local_seed = torch.tensor([next_seed() if training else 0], dtype=torch.float64)
        # all ranks have accepted the batch; users may seed them differently, and a step takes one seed
        seeds = world.transport.all_gather([local_seed] * len(world.ranks))
        seed = world.reductions.max(int(max(seeds)))
        if not seed:
            return nullcontext()
        draw_seed()
        return seeded_step(self._rngs, seed, microbatches, local)

    def _give_up(self, executors: Sequence[Executor], error: BaseException, begun: bool) -> None:
        """Tell the other ranks of a failed step, write its post-mortem and clear its state."""
        # all ranks raised the same error before anything was sent, so that another batch may follow
        early = not begun or not any(executor.current for executor in executors)
        harmless = early and isinstance(error, BatchError | ConfigError)
        harmless |= not begun and isinstance(error, InputError)
        if not harmless:
            self.fail()
            if not isinstance(error, PeerError):
                ops = "".join(f"{executor.current}: " for executor in executors if executor.current)
                self._world.processes.fail(f"{ops}{type(error).__name__}: {error}")
            write_post_mortem(error, executors, self._trace_folder)
        for executor in executors if begun else ():
            executor.reset()
        self._world.transport.reset()

    def fail(self, error: PeerError | None = None, lowered: LoweredSchedule | None = None) -> None:
        """Let no step follow: other processes, if any, may still be in this one.

        error: of a wait after the schedule `lowered` has run; its post-mortem is written
        """
        self._broken |= not self._world.alone
        self._world.processes.mesh = None  # ranks that are in this step compare no calls
        if error is not None and lowered is not None and error.timeline is None:
            write_post_mortem(error, lowered.executors, self._trace_folder)


def _fingerprint(
    batch: BatchLike,
    count: int,
    lowered: LoweredSchedule,
    optimizer_step: OptimizerStep | None,
    total_tokens: int | None,
) -> tuple[int, str]:
    """What must be equal on all ranks of the pipeline, as a number and in words."""
    number, words = fingerprint(as_list(batch), count, lowered.number)
    if optimizer_step is not None:
        max_norm, max_loss = optimizer_step.max_norm, optimizer_step.max_loss
        words += f", an optimizer, max_norm={max_norm}"
        words += "" if max_loss == math.inf else f", max_loss={max_loss}"
        number = zlib.crc32(f"{number} {max_norm, max_loss}".encode())
    if total_tokens is not None:
        words += f", total_tokens={total_tokens}"
        number = zlib.crc32(f"{number} of {total_tokens}".encode())
    return number, words


def _progress_of(executor: Executor) -> Callable[[], Progress | None]:
    """The executor's progress, for a watch thread that must not keep a dropped pipeline's weights alive."""
    reference = weakref.ref(executor)
    return lambda: None if (alive := reference()) is None else alive.progress


def _with_loss(collect: Collect, loss: Loss, microbatches: Sequence[Microbatch]) -> Collect:
    """A function that returns the loss and what `collect` returns. `_take_loss_out` separates them."""

    def both(output: Any, number: int) -> tuple[Tensor, Any]:
        return total_of(loss, output, microbatches[number], number), collect(output, number)

    return both


def _take_loss_out(executor: Executor, weight: int) -> None:
    """Undo `_with_loss`: move the losses from `ops.results` to `ops.loss_shares`."""
    executor.ops.loss_shares = [total / weight for total, _ in executor.ops.results.values()]
    executor.ops.results = {number: kept for number, (_, kept) in executor.ops.results.items()}
