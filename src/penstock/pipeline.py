"""Pipeline: a model cut into stages, a proven schedule, and the step that runs it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.commit import write_folder
from penstock.errors import BatchError, ConfigError, ModelError, PeerLostError, RunError, StalledPeerError
from penstock.models.protocol import ProvidedCall, ProvidedEdges, Provider, StageInfo
from penstock.models.saved import SavedModel
from penstock.runtime import report
from penstock.runtime.executor import EdgeShapes, Executor, StepInput, run_together
from penstock.runtime.loss import Loss, LossLike, as_loss
from penstock.runtime.lower import lower
from penstock.runtime.microbatch import Batch, SplitDims, batch_rows, fingerprint, split
from penstock.runtime.processes import Processes
from penstock.runtime.recorder import Recorder
from penstock.runtime.shapes import Microbatch
from penstock.runtime.shared import SharedGradients, SharedWeights, of_replicas
from penstock.runtime.stage import Stage, evaluating
from penstock.runtime.world import World, open_world
from penstock.schedule import Proof, Schedule, Timeline, verify
from penstock.schedule.builders.inference import forwards
from penstock.schedule.config import ScheduleLike, chosen_schedule


class StepResult(NamedTuple):
    """The same numbers on every rank.

    loss: mean over the batch's valid items; tokens: how many those are
    bubble: the share of the ranks' time in which they did not compute
    """

    loss: float
    tokens: int
    bubble: float


class Pipeline:
    """Stages of one model, and the schedule that they run.

    Made by AutoPipeline.build or Pipeline.from_provider. All its methods but the properties are to be called
    on every rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        stages: Sequence[Stage],
        edges: EdgeShapes,
        loss: Loss,
        *,
        shared: Sequence[SharedWeights] = (),
        saved: SavedModel | None = None,
        split_dims: SplitDims | None = None,
    ) -> None:
        self.schedule = schedule
        self._world, self._edges, self._loss = world, edges, loss
        self._stages = {stage.index: stage for stage in stages}
        self._shared = SharedGradients(shared, world.transport)
        self._saved = saved
        self._split_dims: SplitDims = split_dims or {}
        self._recorders = {rank: Recorder(world.device, world.clock_offset) for rank in world.ranks}
        self._evaluations: dict[int, _Lowered] = {}  # by number of microbatches
        self._last: _Told | None = None
        self._failed = False
        self._proof = verify(schedule)
        self._training = self._lower(self._proof)

    @classmethod
    def from_provider(
        cls,
        provider: Provider,
        *,
        schedule: ScheduleLike,
        ranks: int | None = None,
        microbatches: int | None = None,
        loss_fn: LossLike = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        timeout: float = 300.0,
        split_dims: SplitDims | None = None,
    ) -> Pipeline:
        """A pipeline of modules of one's own: `provider` builds the module of one stage.

        It is called for this process's stages, and once for each on the meta device to learn what goes over
        the edges. A stage's forward gets what came over the edge as its first arguments (nothing on the first
        stage), and by name each entry of the microbatch that it has a parameter for. loss_fn takes the last
        stage's output and the microbatch and returns the mean over its rows (None: next-token cross-entropy).
        timeout: seconds that a rank waits for another.
        """
        chosen = chosen_schedule(schedule, ranks, microbatches)
        dims = split_dims or {}
        world = open_world(chosen, mesh, device, timeout)
        depth = chosen.placement.depth
        stages = []
        for index in own_stages(chosen, world):
            module = provider(StageInfo(index % depth, depth)).to(world.device)
            stages.append(Stage(index, module, ProvidedCall(module)))
        shared = list(of_replicas(chosen.placement, {stage.index: stage.module for stage in stages}))
        edges = ProvidedEdges(provider, depth)
        loss = as_loss(loss_fn, dims)
        pipe = cls(chosen, world, stages, edges, loss, shared=shared, split_dims=dims)
        pipe._shared.make_alike([parameter for _, parameter in pipe.owned_parameters()])
        return pipe

    def step(self, batch: Batch) -> StepResult:
        """Forward and backward of one batch: every parameter's gradient is added to its `.grad`.

        batch: tensors by name, e.g. input_ids and labels of shape (rows, sequence); the same on every rank.
        Raises BatchError where it cannot be split or differs between ranks, ShapeError where a stage gives
        another shape than it should, PeerLostError or StalledPeerError where another rank fails.
        """
        if not self.schedule.trains:
            raise ConfigError(
                f"step() with schedule {self.schedule.name!r}", "it holds no backward", "Call evaluate()"
            )
        self._shared.begin_step()
        try:
            with torch.enable_grad():
                result, self._last = self._run(self._training, batch)
            self._shared.end_step()
        except BaseException as error:
            self._shared.restore()
            self._failed |= self.processes.count > 1 and not isinstance(error, BatchError)
            raise
        return result

    def evaluate(self, batch: Batch) -> StepResult:
        """Loss of one batch of any number of rows, in evaluation mode, without gradients."""
        count = min(self.schedule.microbatches, batch_rows(batch, self._split_dims))
        with evaluating(*self.modules.values()):
            return self._run(self._evaluation(max(count, 1)), batch)[0]

    def microbatches(self, batch: Batch, count: int | None = None) -> list[Microbatch]:
        """`batch` on this process's device, split as a step does, or into `count`. Raises BatchError."""
        device = self._world.device
        here = {
            name: value.to(device) if isinstance(value, Tensor) and value.device != device else value
            for name, value in batch.items()
        }
        return split(here, count or self.schedule.microbatches, self._split_dims)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

        One norm over all stages, a shared weight counted once; the same number on every rank.
        """
        counted = [parameter.grad for _, parameter in self.owned_parameters() if parameter.grad is not None]
        norms = torch._foreach_norm(counted) if counted else []
        mine = sum((norm.double().square().to(self._world.device) for norm in norms), start=torch.zeros(
            (), dtype=torch.float64, device=self._world.device))  # fmt: skip
        vectors = [mine.reshape(1) if i == 0 else torch.zeros_like(mine.reshape(1))
                   for i in range(len(self._world.ranks))]  # fmt: skip
        norm = float(torch.stack(self._world.transport.exchange(vectors)).sum().sqrt())
        scale = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if scale < 1 and grads:
            torch._foreach_mul_(grads, scale)
        return norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the whole model's names.

        Where the schedule keeps two copies of the model, a process that holds both copies of a stage gives
        each name twice.
        """
        for stage in self._stages.values():
            yield from stage.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters without further copies of shared ones: each is owned once over all."""
        copies = self._saved.copies if self._saved else frozenset()
        return ((name, parameter) for name, parameter in self._first_copies() if name not in copies)

    def _first_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the first copy of the model."""
        for index, stage in self._stages.items():
            if index < self.schedule.placement.depth:
                yield from stage.module.named_parameters()

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """This process's modules by stage."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def config(self) -> Any:
        """The Hugging Face config of the whole model."""
        return self._needs_saved().config

    @property
    def proof(self) -> Proof:
        """What was proven of the schedule before anything ran."""
        return self._proof

    @property
    def processes(self) -> Processes:
        return self._world.processes

    @property
    def timeline(self) -> Timeline:
        """What the last step really did, on all ranks; known on every rank, so nothing is sent."""
        if self._last is None:
            raise ConfigError("timeline before the first step", "it shows the last step", "Call step() first")
        return report.measured(*self._last)

    @property
    def deferred_bytes(self) -> tuple[int, ...]:
        """By rank, the most that the last step held between I and W; 0 where no backward is split."""
        return report.deferred_bytes(self._last[1]) if self._last else (0,) * self.schedule.ranks

    def write_weights(self, folder: Path) -> None:
        """Every process writes its weights into `folder`, process 0 index and configs besides."""
        depth = self.schedule.placement.depth
        first = {index: stage for index, stage in self._stages.items() if index < depth}
        self._needs_saved().write(folder, first, self.processes)

    def load_weights(self, folder: str | Path) -> None:
        """Read this process's weights back from a folder that write_weights or save_pretrained wrote."""
        self._needs_saved().load(folder, self._stages)

    def save_pretrained(self, path: str | Path) -> None:
        """Write a folder that `from_pretrained` opens, complete or not at all."""
        write_folder(Path(path), self.write_weights, self.processes)

    def verify_against(self, model: nn.Module, batch: Batch) -> None:
        """Compare loss and every gradient of one batch with the whole `model`'s; `.grad` is left as it was.

        In evaluation mode, so that dropout does not count.

        Raises EquivalenceError that names what differs where.
        """
        from penstock.equivalence import compare

        compare(self, model, batch, self._loss)

    def close(self) -> None:
        """Let go of the pipeline's thread and process groups; the modules stay usable."""
        self._world.transport.close()

    def _needs_saved(self) -> SavedModel:
        if self._saved is None:
            raise ModelError(
                "a pipeline made by from_provider",
                "only its provider knows its files",
                "Save `modules` yourself",
            )
        return self._saved

    def _lower(self, proof: Proof) -> _Lowered:
        world, schedule = self._world, proof.schedule
        executors = []
        for rank in world.ranks:
            plan, recorder = lower(proof, rank), self._recorders[rank]
            hosted = {stage: self._stages[stage] for stage in schedule.placement.stages_of(rank)}
            executors.append(Executor(plan, hosted, self._edges, self._loss, world.transport, recorder))
        return _Lowered(schedule, executors, zlib.crc32(str(schedule).encode()))

    def _evaluation(self, microbatches: int) -> _Lowered:
        if microbatches not in self._evaluations:
            proof = verify(forwards(self.schedule.placement, microbatches))
            self._evaluations[microbatches] = self._lower(proof)
        return self._evaluations[microbatches]

    def _run(self, lowered: _Lowered, batch: Batch) -> tuple[StepResult, _Told]:
        schedule, executors, number = lowered
        transport = self._world.transport
        if self._failed:
            raise RunError(
                "a step after one that failed",
                "other ranks may still send what was meant for that one",
                "Build the pipeline again, best in fresh processes",
            )
        try:
            microbatches = self.microbatches(batch, schedule.microbatches)
            weight = sum(self._loss.weight(microbatch) for microbatch in microbatches)
            if weight == 0:
                raise BatchError("a batch without a valid token", "a mean needs one at least", "Leave it out")
            if self.processes.count > 1:
                transport.agree(*fingerprint(batch, microbatches, number))
            run_together(executors, StepInput(microbatches, weight))
            told = transport.exchange([report.report(executor) for executor in executors])
        except BaseException as error:
            self._give_up(executors, error)
            raise
        left = transport.pending + sum(executor.left_over for executor in executors)
        assert not left, f"{left} entries left in caches after a step"
        reports = [vector.tolist() for vector in told]
        result = StepResult(report.total_loss(reports), weight, report.bubble(schedule, reports))
        return result, (schedule, reports)

    def _give_up(self, executors: Sequence[Executor], error: BaseException) -> None:
        """Say where it happened, tell the other ranks, and leave nothing half-done behind."""
        where = ""
        for executor in executors:
            if executor.current is not None:
                where = f"{executor.current}: "
                error.add_note(f"penstock: on rank {executor.plan.rank}, in {executor.current}")
            executor.reset()
        self._world.transport.reset()
        if isinstance(error, BatchError):
            return  # found before anything was sent, so that the next batch may do
        self._failed = self.processes.count > 1
        if not isinstance(error, PeerLostError | StalledPeerError):
            self._world.transport.tell_failure(f"{where}{type(error).__name__}: {error}")


_Told = tuple[Schedule, report.Reports]  # a step's schedule, and what the ranks told of it


class _Lowered(NamedTuple):
    """A schedule ready to run in this process; `number` is equal on ranks that hold the same one."""

    schedule: Schedule
    executors: list[Executor]
    number: int


def own_stages(schedule: Schedule, world: World) -> list[int]:
    """The stages that this process hosts."""
    return [stage for rank in world.ranks for stage in schedule.placement.stages_of(rank)]
