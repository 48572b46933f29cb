"""Make modules into stages that are ready to run, and collect the other parts of a Pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.batch.loss import Loss
from penstock.batch.shapes import EdgeShapes
from penstock.errors import ConfigError, InputError, ModelError
from penstock.models import activation_offloading
from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.models.activation_offloading import Offloading
from penstock.models.stage import ProvidedCall, Provider, StageInfo, declared_on_every_stage, provided_edges
from penstock.models.weights.saved import SavedModel
from penstock.parallel.mesh_plan import MeshPlan
from penstock.parallel.world import World, close_on_error, open_world
from penstock.pipeline.building.split_module import layers_of
from penstock.pipeline.options import Options, Parallelize
from penstock.pipeline.steps.split_batch import BatchSplitter
from penstock.runtime.device.offload import Offload
from penstock.runtime.health.agreement import named
from penstock.runtime.ranks import Ranks, compare_values
from penstock.runtime.rng import StageRNG, dropouts
from penstock.runtime.sharded_weights import local_shard
from penstock.runtime.shared_weights import SharedWeights, copy_of, shared_by_replicas, shared_by_stages
from penstock.runtime.stage import Stage, StageCall
from penstock.runtime.stage_part import StagePart
from penstock.schedule import Proof, Schedule
from penstock.schedule.ops import Placement
from penstock.schedule.simulation.recompute import StageMicrobatches, first_in_flight

NumberedLayers = Sequence[tuple[int, nn.Module]]  # layers with their indices in the whole model
LayersByStage = Mapping[int, NumberedLayers]  # by stage


@dataclass(frozen=True)
class StageWeights:
    """Facts about the weights of a build.

    shared: weights with copies on several stages
    saved: how they are saved; None for a user's own modules
    names: by stage of this process, the names of the parameters that are saved
    copies: by stage of this process, the names of the parameters that are copies of the first stage's
    """

    shared: Sequence[SharedWeights] = ()
    saved: SavedModel | None = None
    names: Mapping[int, frozenset[str]] = field(default_factory=dict)
    copies: Mapping[int, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowering:
    """How to make the schedule for a number of microbatches, and lower it to plans.

    make_schedule: makes the schedule; raises ConfigError
    recomputed: returns a proven schedule's (stage, microbatch) pairs whose layers run again in the backward
    ahead: see Offloading; None without offloading
    """

    make_schedule: Callable[[int], Schedule]
    recomputed: Callable[[Proof], StageMicrobatches]
    ahead: int | None


@dataclass(frozen=True)
class BuiltStages:
    """The result of a build, for Pipeline.

    stages: those of this process
    edges: the shapes that cross each edge; None where messages carry their shapes
    mesh_plan: how the axes other than the pipeline's change a microbatch; None without such axes
    trace_folder: where each process writes the timeline of a step that fails
    autocast: the dtype of torch.autocast in every forward; None leaves it to the caller
    balances: whether the model's forward adds an auxiliary loss of its routers
    """

    schedule: Schedule
    world: World
    stages: Sequence[Stage]
    layers: LayersByStage
    weights: StageWeights
    edges: EdgeShapes | None
    loss: Loss
    splitter: BatchSplitter
    lowering: Lowering
    mesh_plan: MeshPlan | None = None
    trace_folder: str | Path | None = None
    autocast: torch.dtype | None = None
    balances: bool = False


class StageFacts(NamedTuple):
    """Facts about a stage.

    info: its position in its copy of the model; layers: indices in the whole model
    parameters, trainable: numbers of scalars; bytes: of this process's shards
    """

    info: StageInfo
    rank: int
    layers: tuple[int, ...]
    parameters: int
    trainable: int
    bytes: int

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients, if trained and frozen weights have one dtype."""
        return self.bytes * self.trainable // self.parameters if self.parameters else 0


def stage_facts(
    stages: Sequence[Stage], layers: LayersByStage, placement: Placement, processes: Ranks
) -> tuple[StageFacts, ...]:
    """The facts of all stages, on every process. Collective."""
    local = []
    for stage in stages:
        parameters = list(stage.module.parameters())
        numbers = [number for number, _ in layers[stage.index]]
        trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        scalars, nbytes = sum(p.numel() for p in parameters), sum(local_shard(p).nbytes for p in parameters)
        sizes = scalars, trainable, nbytes
        local.append((stage.index, numbers, *sizes))
    everyone = sorted(entry for process in processes.gather(local) for entry in process)
    depth = placement.depth
    return tuple(
        StageFacts(StageInfo(index % depth, depth), placement.rank_of[index], tuple(numbers), *sizes)
        for index, numbers, *sizes in everyone
    )


def parameter_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))


def own_stages(schedule: Schedule, ranks: Sequence[int]) -> list[int]:
    """The stages that these ranks host."""
    return [stage for rank in ranks for stage in schedule.placement.stages_of(rank)]


class StageDraft:
    """A stage under construction, which each of its parts changes in place.

    Attributes:
        position: its index in its copy of the model
        module: has the parameters; callee: is called, and is `module` or a wrapper of it
        layers: with their indices in the whole model
        places: the layers by their positions in the whole model, for random numbers
    """

    def __init__(
        self,
        index: int,
        position: int,
        module: nn.Module,
        device: torch.device,
        layers: NumberedLayers | None,
    ) -> None:
        self.index, self.position, self.device = index, position, device
        self.module = self.callee = module
        self.layers = layers_of(module) if layers is None else layers
        if layers is None:  # their indices over all stages are unknown
            names = {id(inner): name for name, inner in module.named_modules()}
            self.places = [(f"stage {position}, {names[id(layer)]}", layer) for _, layer in self.layers]
        else:
            self.places = [(f"layer {number}", layer) for number, layer in layers]

    @property
    def plain_layers(self) -> list[nn.Module]:
        return [layer for _, layer in self.layers]


AddPart = Callable[[StageDraft], StagePart | None]  # changes a stage; its result acts around the ops


def stage_parts(
    *,
    checkpointing: Checkpointing | None = None,
    offloading: Offloading | None = None,
    parallelize_fn: Parallelize | None = None,
    compile: Callable[[Sequence[nn.Module]], None] | None = None,
    after: Mapping[str, nn.Module] | None = None,
    placed: bool = False,
) -> list[AddPart]:
    """The parts of a stage, for `make_stage`, in the order in which they change it.

    Args:
        parallelize_fn: see Options
        compile: compiles the stage's layers in place
        after: by name, the modules that run after all layers of the model
        placed: whether the module needs no move: it is on its device, or on meta until a later part fills it
    """

    def checkpointed(draft: StageDraft) -> StagePart | None:
        return None if checkpointing is None else install(draft.layers, checkpointing)

    def offloaded(draft: StageDraft) -> StagePart | None:
        if offloading is None:
            return None
        offload = Offload(draft.device, offloading.min_bytes)
        activation_offloading.install(draft.plain_layers, offloading, offload)
        return offload

    def moved(draft: StageDraft) -> None:
        draft.module = draft.callee = draft.module if placed else draft.module.to(draft.device)

    def wrapped(draft: StageDraft) -> None:
        if parallelize_fn is not None:
            draft.module, draft.callee = parallelized(draft.module, parallelize_fn, draft.index)
            activation_offloading.check_compiled(draft.callee)

    def compiled(draft: StageDraft) -> None:
        if compile is not None:
            compile(draft.plain_layers)

    def seeded(draft: StageDraft) -> StagePart | None:
        if next(dropouts(draft.module), None) is None:  # here, as parallelize_fn may add dropout in adapters
            return None
        return StageRNG(draft.position, draft.device, [*draft.places, *(after or {}).items()])

    return [checkpointed, offloaded, moved, wrapped, compiled, seeded]


def make_stage(
    index: int,
    module: nn.Module,
    device: torch.device,
    parts: Sequence[AddPart] | None = None,
    *,
    layers: NumberedLayers | None = None,
    call: Callable[[nn.Module, nn.Module], StageCall] = ProvidedCall,
    position: int | None = None,
    **deprecated: Any,
) -> Stage:
    """Make stage `index`, which is ready to run, from a module and the parts that change it.

    Args:
        parts: change the module, in order; None takes `stage_parts()`, which moves it to `device`
        layers: layers of `module` with their indices in the whole model; None searches its module lists
        call: returns the function that runs the stage, from the module with the parameters and the callee
        position: index of the stage in its copy of the model; None takes `index`
        deprecated: arguments of `stage_parts`

    Raises ModelError for a result that `parallelize_fn` may not return.
    """
    if deprecated:
        names = ", ".join(deprecated)
        warnings.warn(f"make_stage: give {names} to stage_parts", DeprecationWarning, stacklevel=2)
    if parts is None or deprecated:
        parts = [*(parts or ()), *stage_parts(**deprecated)]
    draft = StageDraft(index, index if position is None else position, module, device, layers)
    added = [part for add in parts if (part := add(draft)) is not None]
    return Stage(index, draft.module, call(draft.module, draft.callee), added)


def parallelized(module: nn.Module, parallelize_fn: Parallelize, stage: int) -> tuple[nn.Module, nn.Module]:
    """The module with the stage's parameters, and the module to call: usually the same.

    If the function returns a wrapper of `module` (torch.compile, a user's module), the wrapper is called, and
    the parameters keep their names in `module`.
    Raises ModelError for a result that is no module, loses the parameters' names or adds parameters.
    """
    names = {name for name, _ in module.named_parameters()}
    result: object = parallelize_fn(module)

    def refusal(returned: str, remedy: str) -> ModelError:
        return ModelError(
            f"parallelize_fn, which returned {returned} for stage {stage}",
            "it returns the stage's module, or a wrapper of it, with the parameters under their names",
            remedy,
        )

    if not isinstance(result, nn.Module):
        remedy = "Return the module, even if it is changed in place"
        raise refusal(f"a {type(result).__name__}", remedy)
    returned_names = [name for name, _ in result.named_parameters()]
    if result is module or all(inner is not module for inner in result.modules()):
        if names and names.isdisjoint(returned_names):
            remedy = f"Keep names such as {min(names)}, or put the stage's module into the one returned"
            raise refusal(f"parameters such as {returned_names[0] if returned_names else 'none'}", remedy)
        return result, result
    inside = set(map(id, module.parameters()))
    if added := [name for name, parameter in result.named_parameters() if id(parameter) not in inside]:
        rest = f"a module with {added[0]} in addition to the stage's own parameters"
        raise refusal(rest, "Put it into the stage's module")
    return module, result


# ---- the stages of a user's own modules: each rank calls the provider for its stages only


def stages_from_provider(provider: Provider, options: Options) -> BuiltStages:
    """Call `provider` for this process's stages and make them ready to run. Collective.

    Raises the errors of Pipeline.from_provider.
    """
    schedule, checkpointing = options.chosen_schedule(), options.checkpointing()
    if checkpointing is not None and checkpointing.memory_limit is not None:
        rule = "the memory of a user's own module is unknown before it runs"
        raise ConfigError("memory_limit with from_provider", rule, "Give in_flight, from Pipeline.memory")
    if options.chunked_loss == "liger":
        rule = "the head is known only for a transformers model"
        raise ConfigError("chunked_loss='liger' with from_provider", rule, "Call Liger in your loss_fn")
    if options.axes is not None and (options.axes.cp, options.axes.ep, options.axes.tp) != (1, 1, 1):
        raise ConfigError(
            f"{options.axes} with from_provider",
            "penstock can shard sequences, experts and matrices of transformers models only",
            "Take dp_shard and dp_replicate, and do the rest in parallelize_fn",
        )
    facts = {**options.facts(), "provider": named(provider)}
    world = open_world(schedule, options.world_options(), facts)
    with close_on_error(world.transport):
        return _stages_in(world, provider, options, schedule)


def _stages_in(world: World, provider: Provider, options: Options, schedule: Schedule) -> BuiltStages:
    depth, offloading = schedule.placement.depth, options.offloading()
    mesh_plan = options.mesh_plan(world)
    provided = {
        index: provider(StageInfo(index % depth, depth)) for index in own_stages(schedule, world.ranks)
    }
    _check_provided(provided, world, offloading, on_mesh=mesh_plan is not None)
    on_every_stage = _on_every_stage(provided, world.everyone)

    def make() -> tuple[list[Stage], Mapping[int, nn.Module], StageWeights]:
        parts = stage_parts(
            checkpointing=options.checkpointing(),
            offloading=offloading,
            parallelize_fn=options.parallelize_fn,
            compile=options.layer_compiler(schedule, world.device),
        )
        if mesh_plan is not None:
            parts.append(lambda draft: mesh_plan.fully_shard(draft.module, draft.plain_layers))
        stages = [
            make_stage(index, module, world.device, parts, position=index % depth)
            for index, module in provided.items()
        ]
        modules = _modules(stages)
        return stages, modules, _weights(schedule.placement, modules, on_every_stage)

    stages, modules, weights = world.everyone.attempt("make its stages", make, InputError)
    edges = None
    if options.shapes != "exchanged":
        edges = provided_edges(provider, modules, depth, world.processes, options.autocast)
    return BuiltStages(
        schedule,
        world,
        stages,
        {index: layers_of(module) for index, module in modules.items()},
        weights,
        edges,
        options.loss(),
        options.batch_splitter(),
        Lowering(
            options.schedules(schedule),
            recomputed_by(options.checkpointing()),
            None if offloading is None else offloading.ahead,
        ),
        mesh_plan,
        options.trace_folder,
        options.autocast,
    )


def recomputed_by(checkpointing: Checkpointing | None) -> Callable[[Proof], StageMicrobatches]:
    """`Lowering.recomputed`, for a number of microbatches in flight or for all."""
    if checkpointing is None:
        return lambda proof: frozenset()
    return lambda proof: first_in_flight(proof.schedule, checkpointing.in_flight)


def _weights(
    placement: Placement, modules: Mapping[int, nn.Module], on_every_stage: frozenset[str]
) -> StageWeights:
    """The weights of a user's own modules. on_every_stage: names of weights with a copy on every stage"""
    copies = {stage: _names_in(module, on_every_stage) for stage, module in modules.items()}
    summed = frozenset[str]().union(*copies.values())
    shared = list(shared_by_replicas(placement, modules, summed))
    if on_every_stage:
        shared.append(shared_by_stages(placement, modules, sorted(on_every_stage)))
    depth = placement.depth
    return StageWeights(shared, copies={stage: names for stage, names in copies.items() if stage % depth})


def _on_every_stage(modules: Mapping[int, nn.Module], everyone: Ranks) -> frozenset[str]:
    """The names of the weights with a copy on every stage. Collective.

    modules: those of this process, by stage
    Raises ModelError, on every rank, where stages declare different names or shapes.
    """
    declared = everyone.attempt(
        "read what its modules declare",
        lambda: {stage: declared_on_every_stage(module) for stage, module in modules.items()},
    )
    shapes = {
        stage: {name: [str(weight.dtype), *weight.shape] for name, weight in weights.items()}
        for stage, weights in declared.items()
    }
    gathered = everyone.gather([*shapes.items()])
    every = sorted((entry for process in gathered for entry in process), key=lambda entry: int(entry[0]))
    (first, expected), *others = every
    for stage, stage_shapes in others:
        for name in sorted({*expected, *stage_shapes}):
            if expected.get(name) != stage_shapes.get(name):
                shown = [
                    f"{of_stage.get(name, 'none')} on stage {at}"
                    for at, of_stage in every
                    if at in (first, stage)
                ]
                rule = f"every stage has a copy of the same weight, but it is {' and '.join(shown)}"
                raise ModelError(f"on_every_stage with {name!r}", rule, "Name it in every stage's module")
    return frozenset(expected)


def _names_in(module: nn.Module, shared: Collection[str]) -> frozenset[str]:
    """The names of the copies of weights `shared` in `module`, where one copy may have several names."""
    copies = {id(copy_of(module, name)) for name in shared}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in copies)


def _check_provided(
    provided: Mapping[int, nn.Module], world: World, offloading: Offloading | None, *, on_mesh: bool
) -> None:
    """Check the modules of all ranks together. Collective.

    Raises, on every rank, ConfigError for a module to offload that no layer has, and the error of
    `compare_values` where the ranks of a mesh have different values of a stage.
    """
    if offloading is not None:
        names = activation_offloading.names_in(layer for m in provided.values() for _, layer in layers_of(m))
        everywhere = {name for of_process in world.everyone.gather(sorted(names)) for name in of_process}
        activation_offloading.check_names(offloading, everywhere)
    if on_mesh:
        (rank,) = world.ranks
        values = {f"{n} of stage {i}": p for i, m in provided.items() for n, p in m.named_parameters()}
        compare_values(world.everyone, rank, values, ())


def _modules(stages: Sequence[Stage]) -> Mapping[int, nn.Module]:
    """The modules by stage. Raises ModelError for a weight on two stages, which would be clipped twice."""
    seen: dict[int, int] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if (other := seen.setdefault(id(parameter), stage.index)) != stage.index:
                raise ModelError(
                    f"the parameter {name} of stage {stage.index}",
                    f"it is the same object as one of stage {other}",
                    "Let the provider make new modules in each call",
                )
    return {stage.index: stage.module for stage in stages}
