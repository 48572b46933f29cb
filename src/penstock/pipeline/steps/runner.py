"""Run one step: from the caller's batch to the result that all ranks report.

split     the batch becomes microbatches                         an error of one rank is raised on all
agree     ranks with one part of the batch have equal data       else BatchError, before anything is sent
run       the executors follow their plans
report    each rank sends its step report to all                 loss, bubble, timeline

The parts of the step act between these phases (penstock.pipeline.steps.step).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import isfinite
from pathlib import Path

import torch

from penstock.batch.loss import HostLoss, hits_of, weight_of
from penstock.batch.microbatches import Collect, StepInput, fingerprint
from penstock.batch.placement import placed
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, InputError, PeerError, RunError
from penstock.parallel.reductions import BatchFacts
from penstock.parallel.world import World
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.steps.schedules import LoweredSchedule, Schedules
from penstock.pipeline.steps.split_batch import BatchLike, as_list, on_host
from penstock.pipeline.steps.step import Step, StepPart, StepResult
from penstock.runtime import step_report as report
from penstock.runtime.device.memory import PeakMemory
from penstock.runtime.executor import Executor
from penstock.runtime.health.post_mortem import write_post_mortem
from penstock.runtime.recorder import Progress

_REFUSED = 1 << 32  # above all fingerprints of batches


class StepRunner:
    """Prepares steps and evaluations, and reports them. `run_together` runs their ops in between.

    Attributes:
        peaks: peak memory of the processes, at the end of the last step or evaluation
        seconds: by pipeline and rank, the seconds of its ops, by kind
    """

    def __init__(self, built: BuiltStages, every_step: Sequence[StepPart]) -> None:
        """every_step: the parts of every step and evaluation"""
        self._built, self._world, self.every_step = built, built.world, every_step
        self._trace_folder = None if built.trace_folder is None else Path(built.trace_folder)
        self.schedules = Schedules(built)
        self._broken = False
        self.peaks: tuple[PeakMemory, ...] = ()
        self.seconds: tuple[tuple[report.OpSeconds, ...], ...] = ()

    @contextmanager
    def running(
        self,
        lowered: LoweredSchedule,
        batch: BatchLike,
        parts: Sequence[StepPart] = (),
        *,
        collect: Collect | None = None,
        scored: bool = True,
        total_tokens: int | None = None,
    ) -> Iterator[Step]:
        """A context for `run_together(lowered.executors, step.input)`, after which the step has a result.

        Collective.

        Args:
            parts: those of this step, after those of every step
            collect: called with the last stage's outputs, in an evaluation
            scored: whether the last stage computes the loss
            total_tokens: divisor of the loss; None takes the valid tokens of `batch`
        """
        if self._broken:
            raise RunError(
                "a step after one that failed",
                "other ranks may still send messages of that step",
                "Build the pipeline again, if possible in new processes",
            )
        parts, begun = [*self.every_step, *parts], False
        try:
            try:
                step = self._prepare(lowered, batch, parts, collect, scored, total_tokens)
                for part in parts:
                    part.begin(step)
                begun = True
                with torch.enable_grad() if step.trains else nullcontext(), ExitStack() as around:
                    for part in parts:
                        around.enter_context(part.around(step))
                    yield step
                self._report(step, any(part.changed for part in parts))
            except BaseException as error:
                self._give_up(lowered.executors, error, begun)
                raise
            for part in parts:
                part.end(step)
        except BaseException as error:
            if isinstance(error, PeerError):  # a part of the step may also have waited for a peer
                self._fail(error, lowered)
            for part in parts:
                part.failed()
            raise

    # ---- before the ops

    def _prepare(
        self,
        lowered: LoweredSchedule,
        batch: BatchLike,
        parts: Sequence[StepPart],
        collect: Collect | None,
        scored: bool,
        total_tokens: int | None,
    ) -> Step:
        """Split the batch, and agree on it before anything is sent."""
        built, world = self._built, self._world
        microbatches, refusal = list[Microbatch](), None
        hits_of(built.loss).reset()  # of a step that failed, or of an estimate without values
        facts = BatchFacts(lowered.schedule.microbatches, scored)
        batch = on_host(batch, world.device)
        try:
            microbatches = self._split(batch, facts.microbatches)
            for part in parts:
                part.check(microbatches)
            _check_total(total_tokens)
            valid = self._weight(microbatches) if scored else 1
            facts = facts._replace(tokens=valid, total_tokens=total_tokens or 0)
            if world.mesh is not None:
                facts = _with_fingerprint(facts, batch, lowered, parts)
        except InputError as error:
            refusal, facts = error, _refused(facts, error)
        tokens = _agree(world, lowered.executors[0], facts, refusal)
        local: Sequence[Microbatch] = microbatches
        if built.mesh_plan is not None:
            local = [built.mesh_plan.local(microbatch) for microbatch in microbatches]
        given = StepInput(placed(local, world.device), total_tokens or tokens, collect, scored)
        return Step(lowered, batch, microbatches, given, tokens)

    def split(self, batch: BatchLike, count: int) -> list[Microbatch]:
        """The microbatches of `batch` in a step. Collective on a mesh, and where they are padded."""
        device = self._world.device
        return self._world.reductions.everyone.attempt(
            "split its batch", lambda: list(placed(self._split(on_host(batch, device), count), device))
        )

    def _split(self, batch: BatchLike, count: int) -> list[Microbatch]:
        """The microbatches of a batch `on_host`, on the host. Collective where they are padded."""
        microbatches = self._built.splitter.split(batch, count, self._world)
        if self._built.mesh_plan is not None:
            self._built.mesh_plan.split_sequences(microbatches)
        return microbatches

    def count_tokens(self, batches: Sequence[BatchLike]) -> int:
        """The valid tokens of batches, over all their parts. Collective on a mesh."""
        built, device = self._built, self._world.device
        # penstock's losses weigh a batch as the sum of its microbatches; another loss may not
        count = 1 if isinstance(built.loss, HostLoss) else built.schedule.microbatches

        def count_own() -> int:
            return sum(self._weight(built.splitter.unpadded(on_host(b, device), count)) for b in batches)

        reductions = self._world.reductions
        tokens = reductions.everyone.attempt("count its tokens", count_own)
        return reductions.agree(BatchFacts(len(batches), has_labels=True, tokens=tokens))

    def _weight(self, microbatches: Sequence[Microbatch]) -> int:
        """The valid items of microbatches.

        Penstock's losses count on the host, so as not to wait for a GPU; a user's loss counts on the device.
        """
        loss = self._built.loss
        if not isinstance(loss, HostLoss):
            microbatches = placed(microbatches, self._world.device)
        return sum(weight_of(loss, microbatch) for microbatch in microbatches)

    # ---- after the ops

    def _report(self, step: Step, changed: bool) -> None:
        """Send each rank's report to all, and make the step's result from the reports. Collective.

        changed: see StepPart
        """
        schedule, executors = step.lowered.schedule, step.lowered.executors
        transport, reductions = self._world.transport, self._world.reductions
        memory, asks = PeakMemory.now(self._world.device), reductions.asks()
        hits = [hits_of(self._built.loss).take(), *[0.0] * (len(executors) - 1)]
        packed = zip(executors, report.losses(executors), hits, strict=True)
        own = [report.pack(executor, memory, loss, hit, changed, asks) for executor, loss, hit in packed]
        step.reports = report.unpack(schedule, transport.all_gather(own))
        reductions.learn([of_process.asks for of_process in self._by_process(step.reports)])
        loss, all_hits = self._gather_measurements(step.reports)
        transport.messages.end_step()
        left = transport.messages.pending + sum(executor.left_over for executor in executors)
        assert not left, f"{left} entries left in caches after a step"
        bubble, host_share = report.shares(schedule, step.reports)
        counted = step.input.scored and step.tokens > 0 and isfinite(all_hits)
        accuracy = all_hits / step.tokens if counted else None
        step.result = StepResult(loss, step.tokens, bubble, host_share=host_share, accuracy=accuracy)

    def _by_process(self, reports: report.Reports) -> report.Reports:
        """One report of each process: a process that hosts all ranks repeats its facts in every report."""
        return reports[:1] if self._world.alone else reports

    def _gather_measurements(self, reports: report.Reports) -> tuple[float, float]:
        """Sum loss and hits over the mesh, and keep every rank's peak memory and op seconds. Collective."""
        memory = [nbytes for of_process in self._by_process(reports) for nbytes in of_process.memory]
        times = [seconds for of_rank in reports for seconds in of_rank.seconds]
        mine = sum(of_rank.loss for of_rank in reports)
        hits = sum(of_rank.hits for of_rank in reports)
        loss, pipelines = self._world.reductions.sum_loss(mine, [*memory, *times, hits])
        width = len(PeakMemory._fields)
        by_rank = [numbers[at : at + width] for at in range(0, len(memory), width) for numbers in pipelines]
        self.peaks = tuple(PeakMemory(*map(int, numbers)) for numbers in by_rank)
        self.seconds = tuple(
            tuple(
                report.OpSeconds(*four) for four in zip(*[iter(numbers[len(memory) : -1])] * 4, strict=True)
            )
            for numbers in pipelines
        )
        return loss, sum(numbers[-1] for numbers in pipelines)

    # ---- a failure

    def _give_up(self, executors: Sequence[Executor], error: BaseException, begun: bool) -> None:
        """Notify the other ranks of a failed step, write its post-mortem and clear its state."""
        # if all ranks raised the same error before anything was sent, another step may follow
        early = not begun or not any(executor.current for executor in executors)
        harmless = early and isinstance(error, BatchError | ConfigError)
        harmless |= not begun and isinstance(error, InputError)
        if not harmless:
            self._let_none_follow()
            if not isinstance(error, PeerError):
                ops = "".join(f"{executor.current}: " for executor in executors if executor.current)
                self._world.processes.fail(f"{ops}{type(error).__name__}: {error}")
            write_post_mortem(error, executors, self._trace_folder)
        for executor in executors if begun else ():
            executor.reset()
        self._world.transport.reset()

    def _fail(self, error: PeerError, lowered: LoweredSchedule) -> None:
        """Forbid further steps after a failed wait, and write the post-mortem, if that is not done."""
        self._let_none_follow()
        if error.timeline is None:
            write_post_mortem(error, lowered.executors, self._trace_folder)

    def _let_none_follow(self) -> None:
        """Forbid further steps, unless this process is alone: other processes may still be in this step."""
        self._broken |= not self._world.alone
        self._world.processes.mesh = None  # ranks still in this step compare no calls


def _check_total(total_tokens: int | None) -> None:
    """Raise ConfigError for a number that a loss cannot be divided by."""
    if total_tokens is not None and (type(total_tokens) is not int or total_tokens < 1):
        rule = "the loss is divided by it, a whole number of at least 1"
        raise ConfigError(f"total_tokens={total_tokens!r}", rule, "Give the result of Pipeline.count_tokens")


# ---- all ranks accept their batches, which are equal, before anything is sent:
#
#      rank 0   accepts its batch        fingerprint of it     ----.
#      rank 1   refuses it (BatchError)  the error's           ----+--> the same error on both


def _agree(world: World, executor: Executor, facts: BatchFacts, refusal: InputError | None) -> int:
    """Return the valid tokens of all parts of the batch. Collective.

    executor: one of this process's; a failed wait reports its progress
    refusal: this rank's error, if it refuses its batch

    Before anything is sent, raises the refusal of the first rank on all ranks of a mesh, and BatchError where
    ranks with the same part have different data, or no part has a valid token.
    """
    tokens = world.reductions.agree(facts, refusal)
    if world.mesh is not None:
        world.transport.follow(_progress_of(executor))
    if world.reductions.everyone.count == 1:  # else the mesh has compared all parts
        world.processes.begin(facts.fingerprint, facts.description)
    if refusal is None and not (facts.total_tokens or tokens):
        refusal = BatchError("a batch without a valid token", "a mean needs at least one", "Leave it out")
    if refusal is not None:
        world.processes.settle()  # raises where another rank accepts another batch, and would wait
        raise refusal
    return tokens


def _with_fingerprint(
    facts: BatchFacts, batch: BatchLike, lowered: LoweredSchedule, parts: Sequence[StepPart]
) -> BatchFacts:
    """The facts with a fingerprint, and its description, of data that must be equal on all ranks."""
    number, words = fingerprint(as_list(batch), facts.microbatches, lowered.number)
    more = "".join(part.facts for part in parts)
    more += f", total_tokens={facts.total_tokens}" if facts.total_tokens else ""
    if more:
        number, words = zlib.crc32(f"{number}{more}".encode()), words + more
    return facts._replace(fingerprint=number, description=words)


def _refused(facts: BatchFacts, error: InputError) -> BatchFacts:
    """The facts of a rank that refuses its batch."""
    words = f"it refuses its batch ({error})"
    return facts._replace(fingerprint=_REFUSED + zlib.crc32(words.encode()), description=words)


def _progress_of(executor: Executor) -> Callable[[], Progress | None]:
    """The executor's progress, for a watch thread that must not keep a dropped pipeline's weights alive."""
    reference = weakref.ref(executor)
    return lambda: None if (alive := reference()) is None else alive.progress
