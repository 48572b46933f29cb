"""Pipeline: a model cut into stages, a proven schedule, and the step that runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from penstock.batch.microbatches import Collect, with_entries
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, CheckpointError, ConfigError, ModelError, PeerError, RunError
from penstock.models.partition import LayerCosts
from penstock.models.stage import Provider
from penstock.models.weights.folder import together, write_folder
from penstock.models.weights.saved import MAX_SHARD_SIZE, FileLayout, SavedModel
from penstock.parallel.reductions import Reductions
from penstock.parallel.world import World
from penstock.pipeline.built import BuiltStages, StageFacts, names_in, stage_facts
from penstock.pipeline.compare import Report, compare
from penstock.pipeline.evaluate import Evaluation, Evaluations, chosen_experts
from penstock.pipeline.from_provider import provided_parts, taking
from penstock.pipeline.options import Options, Shapes
from penstock.pipeline.split_batch import BatchLike, RefusedBatch
from penstock.pipeline.step import StepRecord, StepResult, StepRunner
from penstock.pipeline.summary import layer_costs, step_costs, summary
from penstock.runtime import step_report as report
from penstock.runtime.memory import Held
from penstock.runtime.sharded_weights import host_copy, own, whole
from penstock.runtime.shared_weights import SharedGradients
from penstock.runtime.stage import Stage, gradients_aside
from penstock.runtime.transport.groups import Processes
from penstock.schedule import Costs, Proof, Timeline, verify

# ---- The norm of all gradients, over all stages and all ranks of the mesh.


def global_norm(gradients: Sequence[Tensor], world: World) -> float:
    """Of the gradients of all ranks; sharded ones count whole. The same number on every rank. Collective."""
    squares = torch.zeros(1, dtype=torch.float64, device=world.device)
    for holders, each in _held(gradients, world).items():
        norms = torch.stack([norm.to(world.device) for norm in torch._foreach_norm(each)])
        squares += norms.double().square().sum() / holders
    squares = world.reductions.sum_over_mesh(squares)
    vectors = [squares if place == 0 else torch.zeros_like(squares) for place in range(len(world.ranks))]
    return float(torch.stack(world.transport.exchange(vectors)).sum().sqrt())


def _held(gradients: Sequence[Tensor], world: World) -> dict[int, list[Tensor]]:
    """What this rank holds of them, by the number of ranks beside the pipeline that hold the very same."""
    beside = max(1, len(world.reductions.stage_ranks))
    held: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            held.setdefault(beside, []).append(gradient)
        elif world.reductions.stage_ranks.issuperset(gradient.device_mesh.mesh.flatten().tolist()):
            held.setdefault(beside // _parts(gradient), []).append(gradient.to_local())
        else:  # of a mesh of the user's own
            held.setdefault(beside, []).append(whole(torch.linalg.vector_norm(gradient)))
    return held


def _parts(gradient: DTensor) -> int:
    """How many different parts of it there are, each on ranks of its own."""
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(isinstance(placement, Partial) for placement in placements), "a sum not yet made"
    return math.prod(mesh.size(dim) for dim, each in enumerate(placements) if not each.is_replicate())


def scale_(gradients: Sequence[Tensor], factor: float) -> None:
    torch._foreach_mul_([own(gradient) for gradient in gradients], factor)


# ---- A model that is split: the stages of this process, their parameters, and the model's files.


T = TypeVar("T")


class SplitModel:
    """What a Pipeline holds, whatever runs on it: this process's modules and parameters, and their files."""

    def __init__(self, parts: BuiltStages) -> None:
        """Collective."""
        self.schedule, self._world = parts.schedule, parts.world
        self._stages = {stage.index: stage for stage in parts.stages}
        self._layers, self._saved, self._names = parts.layers, parts.saved, parts.names or {}
        placement = parts.schedule.placement
        self._info = stage_facts(parts.stages, parts.layers, placement, parts.world.processes)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the whole model's names.

        remove_duplicate: as of torch's own: a tied weight has the first of its names on every stage, so that
            groups which are made by name treat its copies alike. False gives the names that each stage has
            them under.
        Where a process holds several copies, of a tied weight or of the model, they all are given.
        """
        ties = self._saved.ties if self._saved and remove_duplicate else ()
        first = {name: names[0] for names in ties for name in names}
        for stage in self._stages.values():
            for name, parameter in stage.module.named_parameters():
                yield first.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters without further copies of shared ones: each is owned once over all."""
        copies = self._saved.copies if self._saved else frozenset()
        return ((name, parameter) for name, parameter in self._first_copies() if name not in copies)

    def _first_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the first copy of the model."""
        for stage in self._first_stages().values():
            yield from stage.module.named_parameters()

    def _first_stages(self) -> dict[int, Stage]:
        """This process's stages of the first copy of the model; those of further copies are alike."""
        depth = self.schedule.placement.depth
        return {index: stage for index, stage in self._stages.items() if index < depth}

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """This process's modules by stage."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """This process's stages."""
        return tuple(self._stages.values())

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """This process's modules, in the order of their stages."""
        return tuple(self._stages[index].module for index in sorted(self._stages))

    @property
    def info(self) -> tuple[StageFacts, ...]:
        """Of every stage where it stands, its rank, layers, parameters and bytes, as it was built."""
        return self._info

    @property
    def config(self) -> Any:
        """The Hugging Face config of the whole model."""
        return self._needs_saved().config

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of the whole batch `step` takes on this process, from 0, and how many parts there are.

        More than one where the mesh has ranks on dp_replicate and dp_shard: each works on its own.
        """
        return self._world.reductions.batch_part

    @property
    def reductions(self) -> Reductions:
        """What is summed over the ranks of the mesh beside this pipeline's."""
        return self._world.reductions

    @property
    def processes(self) -> Processes:
        return self._world.processes

    def whole_values(self) -> dict[int, dict[str, Tensor]]:
        """By stage of this process what is saved of it, in host memory that is nobody else's. Collective.

        Nothing but the gathering on all but the first pipeline of a mesh.
        """
        copies, kept = self._needs_saved().copies, self.writes
        return {index: _values(stage, copies, kept) for index, stage in self._first_stages().items()}

    @property
    def writes(self) -> bool:
        """Whether this process's pipeline is the one of the mesh that writes files."""
        return self._world.reductions.is_first

    @property
    def is_spread(self) -> bool:
        """Whether any of its weights lies on several ranks of the mesh."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters())

    def load_weights(self, folder: str | Path) -> None:
        """Read this process's weights back from a folder that save_pretrained wrote.

        Raises CheckpointError for a folder that is not there or holds other weights.
        """
        self._needs_saved().load(folder, self._stages)

    def save_pretrained(self, path: str | Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Write a folder that `from_pretrained` opens, complete or not at all. Collective.

        max_shard_size: of each file, bytes or text such as "5GB"; a single weight may be larger
        """
        self.all_or_none(f"write {path}", self._check_savable)
        values = self.whole_values() if self.is_spread else None
        saved, stages = self._needs_saved(), self._first_stages()

        def write(folder: Path) -> None:
            layouts = laid_out(saved, stages, self.processes, values)
            saved.write(folder, layouts, self.processes, max_shard_size)

        self.first_alone(f"write {path}", lambda: write_folder(Path(path), write, self.processes))

    def first_alone(self, deed: str, work: Callable[[], None]) -> None:
        """Let the first pipeline of the mesh do what is done once; all wait for it. Collective.

        Raises what `work` raises; on the other pipelines RunError.
        """
        self.all_or_none(deed, lambda: work() if self.writes else None)

    def all_or_none(self, deed: str, work: Callable[[], T]) -> T:
        """What `work` gives, or an error on all pipelines of the mesh where it fails on any. Collective.

        work: fails on all processes of a pipeline or on none
        Raises what `work` raises; on the other pipelines RunError.
        """
        made: list[T] = []
        failure: Exception | None = None
        try:
            made.append(work())
        except Exception as error:
            failure = error
        told = self._world.reductions.first_problem(
            None if failure is None else f"{type(failure).__name__}: {failure}"
        )
        if failure is not None:
            raise failure
        if told is not None:
            raise RunError("another pipeline of the mesh", f"it could not {deed}: {told}", "Mend that first")
        return made[0]

    def _check_savable(self) -> None:
        self._check_names()
        self._check_whole()

    def _check_names(self) -> None:
        """Raises ModelError, on every rank, where weights are not under the names that they came with."""
        mine = [min(names ^ names_in(self._stages[index].module), default=None)
                for index, names in self._names.items()]  # fmt: skip
        for name in (name for part in self.processes.gather(mine) for name in part):
            if name is not None:
                raise ModelError(
                    f"weights with {name}, which only the model or what parallelize_fn made of it has",
                    "a folder holds the model's weights under its own names",
                    "Put the model's own modules back, e.g. by merging adapters, or save `modules` yourself",
                )

    def _check_whole(self) -> None:
        """Raises CheckpointError, on every rank, where a weight is spread over ranks of another mesh."""
        ours = self._world.reductions.stage_ranks
        mine = min(
            (
                name
                for name, p in self.named_parameters()
                if isinstance(p, DTensor) and not ours.issuperset(p.device_mesh.mesh.flatten().tolist())
            ),
            default=None,
        )
        for name in self.processes.gather(mine):
            if name is not None:
                raise CheckpointError(
                    f"{name}, a DTensor",
                    "its weights are sharded over another mesh; gather them first",
                    "Save full_tensor() of each in `modules`, or use torch.distributed.checkpoint",
                )

    def _needs_saved(self) -> SavedModel:
        if self._saved is None:
            raise ModelError(
                "a pipeline made by from_provider",
                "only its provider knows its files",
                "Save `modules` yourself",
            )
        return self._saved


def laid_out(
    saved: SavedModel,
    stages: Mapping[int, Stage],
    processes: Processes,
    states: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> dict[int, FileLayout]:
    """SavedModel.lay_out, or an error on all processes where it fails on any. Collective."""
    layouts: dict[int, FileLayout] = {}
    together(processes, "lay out its weights", lambda: layouts.update(saved.lay_out(stages, states)))
    return layouts


def _values(stage: Stage, left_out: Collection[str], kept: bool) -> dict[str, Tensor]:
    """What the stage holds, in host memory that is nobody else's; a tied weight is copied once.

    kept: False takes part in the gathering of what is spread, and keeps nothing of it
    """
    made: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, value in stage.module.state_dict(keep_vars=True).items():
        if name in left_out:
            continue
        if id(value) not in made:
            made[id(value)] = host_copy(value) if kept else whole(value).new_empty(0)
        values[name] = made[id(value)]
    return values if kept else {}


__all__ = ["Pipeline", "Shapes"]


class Pipeline(SplitModel):
    """Stages of one model, and the schedule that they run.

    Made by AutoPipeline.build or Pipeline.from_provider. All its methods but the properties and `summary` are
    to be called on every rank.
    """

    def __init__(self, parts: BuiltStages) -> None:
        """Collective."""
        super().__init__(parts)
        self._loss, self._splitter = parts.loss, parts.splitter
        self._shared = SharedGradients(parts.shared, parts.world.transport, self.processes)
        traces = None if parts.trace_folder is None else Path(parts.trace_folder)
        self._steps = StepRunner(parts.world, self._stages, parts.edges, parts.loss, parts.splitter, traces)
        self._proof = verify(parts.schedule)
        recomputed = parts.recomputed if parts.schedule.trains else frozenset()
        self._training = self._steps.lower(self._proof, recomputed)
        self._evaluations = Evaluations(parts, self._steps)
        self._last: StepRecord | None = None
        mine = sum(parameter.numel() for _, parameter in self.owned_parameters())
        self._weights: int = sum(self.processes.gather(mine))

    @classmethod
    @taking(Options)
    def from_provider(cls, provider: Provider, options: Options) -> Pipeline:
        """A pipeline of modules of one's own: `provider` builds the module of one stage.

        It is called for this process's stages, and where they do not declare their shapes
        (penstock.models.stage.DeclaresShapes) once for each on the meta device, to learn what goes over
        the edges: a tensor, or any nest of tuples, lists and dicts with tensors in it. A stage's forward gets
        what came over the edge (a mapping by name, a tuple by position), and by name each entry of the
        microbatch that it has a parameter for.

        The options are keywords: penstock.pipeline.options.Options tells of each. Raises TypeError for any
        other. Activation checkpointing is of the layers in the module lists of each stage.
        """
        pipe = cls(provided_parts(provider, options))
        pipe._shared.make_alike([parameter for _, parameter in pipe.owned_parameters()])
        return pipe

    def step(self, batch: BatchLike, **entries: Any) -> StepResult:
        """Forward and backward of one batch: every parameter's gradient is added to its `.grad`.

        batch: tensors by name, e.g. input_ids and labels of shape (rows, sequence), the same on every rank;
            or a list of as many microbatches as the schedule has, which may differ in rows and in length
        entries: more of the batch, by name; what is no tensor goes to every microbatch as it is.
            `routed_experts`, where the pipeline was built with replay_routing=True, tells which experts each
            token is to choose, in the form of `Pipeline.routed_experts`, and -1 for those of the routers' own
            choice; `evaluate` and `infer` take it as well
        After an error gradients may be partial: clear them before the next step.
        Raises BatchError where it cannot be split or differs between ranks, ShapeError where a stage gives
        another shape than it should, PeerLostError or StalledPeerError where another rank fails.
        """
        if not self.schedule.trains:
            raise ConfigError(
                f"step() with schedule {self.schedule.name!r}", "it holds no backward", "Call evaluate()"
            )
        if not any(stage.trainable for stage in self._info):
            rule = "no parameter of it requires a gradient"
            raise ModelError("step() of a model", rule, "Unfreeze a part before build, or call evaluate()")
        self._shared.begin_step()
        try:
            with torch.enable_grad():
                result, self._last = self._steps.run(
                    self._training, self._with(batch, entries), changed=self._shared.changed
                )
            if report.any_changed(self._last[1]):
                self._shared.compare()
            self._shared.end_step()
        except BaseException as error:
            if isinstance(error, PeerError):  # perhaps in the sum over shared weights
                self._steps.tell_of(error, self._training)
                self._steps.fail()
            self._shared.restore()
            raise
        return result

    def _with(self, batch: BatchLike, entries: Mapping[str, Any]) -> BatchLike:
        try:
            return with_entries(batch, entries, self._splitter.sharding)
        except BatchError as error:  # which other ranks may not find
            return RefusedBatch(error)

    @overload
    def evaluate(self, batch: BatchLike, outputs: Literal[False] = ..., **entries: Any) -> StepResult: ...

    @overload
    def evaluate(
        self, batch: BatchLike, outputs: Literal[True] | Collect, everywhere: bool = ..., **entries: Any
    ) -> Evaluation: ...

    def evaluate(
        self, batch: BatchLike, outputs: bool | Collect = False, everywhere: bool = False, **entries: Any
    ) -> StepResult | Evaluation:
        """Loss of one batch of any number of rows, in evaluation mode, without gradients.

        outputs: True to have what the last stage returned as well: one tensor with all rows in their order,
            or a list by microbatch where it is none or rows differ in shape. A function of (what the last
            stage returned, number of the microbatch) to have a list of its results in their place, so that
            logits need not be kept. Labels are not needed then; without them there is no loss.
        everywhere: whether every rank has the outputs, and not just the one that hosts the last stage: the
            last rank, or rank 0 where the placement goes out and back. Where two copies of the model run
            (dualpipe), no rank hosts all of it: outputs over several processes then ask for everywhere=True
        Beside other axes outputs are of the rows of this pipeline's own part of the batch (`batch_part`); the
        loss is of all parts. Each rank of cp has the outputs of whole sequences.
        Raises ConfigError without it.
        """
        given = self._with(batch, entries)
        if outputs is False:
            return self._evaluations.loss(given)
        return self._evaluations.outputs(given, outputs, everywhere)

    def infer(self, batch: BatchLike, collect: Collect | None = None, **entries: Any) -> dict[int, Any]:
        """Run the forward alone, in evaluation mode, and keep what comes out of it.

        collect: called with what the last stage returned and the microbatch's number as soon as it is there,
            on the rank of the last stage, of whole sequences under cp too; None keeps the output itself
        Returns what `collect` returned by microbatch, on the rank of the last stage; nothing on others.
        """
        given = self._with(batch, entries)
        return self._evaluations.results(given, collect or (lambda output, number: output))[1]

    def microbatches(self, batch: BatchLike, count: int | None = None) -> list[Microbatch]:
        """`batch` on this process's device, as a step sees it, or split into `count`. Raises BatchError.

        Collective beside other axes, and where they are padded to the longest.
        """
        return self._steps.cut(batch, count or self.schedule.microbatches)

    def routed_experts(self) -> Tensor | list[Tensor]:
        """Which experts each token of the last step chose: int32 (rows, sequence, mixtures, top_k), of this
        pipeline's own part of the batch, on each of its ranks; a list by microbatch where these differ in
        length. `step` takes them as `routed_experts`, with the same batch.

        Rows are as long as they were made (`shapes="padded"`). Collective.
        Raises ConfigError, on every rank, where the pipeline was not built with replay_routing=True, which
        keeps them until the next step, and before the first step.
        """
        return chosen_experts(self._stages, self.schedule.microbatches, self._splitter, self._world)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

        One norm over all stages, a shared weight counted once; the same number on every rank.
        """
        counted = [parameter.grad for _, parameter in self.owned_parameters() if parameter.grad is not None]
        norm = global_norm(counted, self._world)
        scale = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if scale < 1:
            scale_([p.grad for p in self.parameters() if p.grad is not None], scale)
        return norm

    def summary(self) -> str:
        """A table of all stages: rank, layers, parameters, memory, and share of the last step's time."""
        measured = None if self._last is None else self.memory
        timeline = None if self._last is None else self.timeline
        return summary(self.schedule, self._info, self._weights, measured, timeline)

    __str__ = summary

    @property
    def proof(self) -> Proof:
        """What was proven of the schedule before anything ran."""
        return self._proof

    @property
    def draws(self) -> bool:
        """Whether a step in training seeds what it draws, by layer and microbatch: the same on any mesh.

        It does where some rank holds a dropout, as far as one can be told (penstock.runtime.rng.dropouts).
        """
        return self._steps.draws

    @property
    def timeline(self) -> Timeline:
        """What the last step really did, on all ranks; known on every rank, so nothing is sent."""
        if self._last is None:
            raise ConfigError("timeline before the first step", "it shows the last step", "Call step() first")
        return report.measured(*self._last)

    @property
    def memory(self) -> tuple[Held, ...]:
        """By rank, the bytes that it held when the last step held most: activations, buffers, and for W."""
        return report.peak_held(self._last[1]) if self._last else (Held(),) * self.schedule.ranks

    def costs(self) -> Costs:
        """What the last step took and held, to simulate other schedules with: seconds and bytes.

        The median time of each stage's ops; the bytes of each stage and microbatch. Not what of an op is
        exchange, see `Costs.measured`. Collective.
        """
        if self._last is None:
            raise ConfigError("costs before the first step", "they are measured in one", "Call step() first")
        return step_costs(self._last, self._training.executors, self.processes)

    def layer_costs(self, batch: BatchLike, repeats: int = 3, **entries: Any) -> LayerCosts:
        """Seconds that each layer, embedding and head take for a microbatch, in steps on `batch`: what
        AutoPipeline(balance=...) splits the model by.

        Parameters and gradients stay as they are. Collective.
        """

        def step() -> Timeline:
            self.zero_grad()
            self.step(batch, **entries)
            return self.timeline

        with gradients_aside(self.parameters()):
            return layer_costs(step, repeats, self._layers, self._info, self._world.device, self.processes)

    @property
    def deferred_bytes(self) -> tuple[int, ...]:
        """By rank, the most that the last step held between I and W; 0 where no backward is split."""
        return report.deferred_bytes(self._last[1]) if self._last else (0,) * self.schedule.ranks

    def verify_against(self, model: nn.Module, batch: BatchLike) -> Report:
        """Compare loss and every gradient of one batch with the whole `model`'s; `.grad` is left as it was.

        In evaluation mode, so that dropout does not count. Returns what was compared, and how it differs.

        Raises EquivalenceError that names what differs where; its `report` has all of it.
        """
        found = compare(self, model, batch, self._loss)
        found.raise_if_wrong()
        return found

    def close(self) -> None:
        """Let go of the pipeline's thread and process groups; the modules stay usable."""
        self._world.transport.close()
