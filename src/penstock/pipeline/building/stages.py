"""Make modules into stages that are ready to run, and collect all that a Pipeline needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from penstock.batch.loss import Loss
from penstock.batch.shapes import EdgeShapes
from penstock.errors import ConfigError, ModelError
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
from penstock.runtime.rng import StageRNG, dropouts, seeded_call
from penstock.runtime.sharded_weights import local_shard
from penstock.runtime.shared_weights import SharedWeights, copy_of, shared_by_replicas, shared_by_stages
from penstock.runtime.stage import RoutedStage, Routing, Shards, Stage, StageCall
from penstock.schedule import Proof, Schedule
from penstock.schedule.ops import Placement
from penstock.schedule.simulation.recompute import StageMicrobatches, first_in_flight

NumberedLayers = Sequence[tuple[int, nn.Module]]  # layers with their numbers in the whole model
LayersByStage = Mapping[int, NumberedLayers]  # by stage
ShardStage = Callable[[nn.Module, Sequence[nn.Module]], Shards | None]


@dataclass(frozen=True)
class BuiltStages:
    """The result of a build, which Pipeline takes.

    stages: those of this process
    edges: the shapes that cross each edge; None where messages carry them
    mesh_plan: how the axes other than the pipeline's change a microbatch; None without them
    shared: weights that several stages hold
    make_schedule: makes the schedule of another number of microbatches; raises ConfigError
    names: by stage of this process, the names of the parameters that are saved
    copies: by stage of this process, the names of the parameters that are copies of the first stage's
    recomputed: finds the (stage, microbatch) whose layers run again in the backward of a proven schedule
    offloading: which activations wait in host memory; None: none do
    trace_folder: where each process writes the timeline of a step that fails
    autocast: the dtype of torch.autocast in every forward; None leaves it to the caller
    balances: whether the model's forward adds an auxiliary loss of its routers
    """

    schedule: Schedule
    world: World
    stages: Sequence[Stage]
    layers: LayersByStage
    edges: EdgeShapes | None
    loss: Loss
    splitter: BatchSplitter
    make_schedule: Callable[[int], Schedule]
    mesh_plan: MeshPlan | None = None
    shared: Sequence[SharedWeights] = ()
    saved: SavedModel | None = None
    names: Mapping[int, frozenset[str]] | None = None
    copies: Mapping[int, frozenset[str]] = field(default_factory=dict)
    recomputed: Callable[[Proof], StageMicrobatches] = lambda proof: frozenset()
    offloading: Offloading | None = None
    trace_folder: str | Path | None = None
    autocast: torch.dtype | None = None
    balances: bool = False


class StageFacts(NamedTuple):
    """A stage in numbers.

    info: its position in its copy of the model; layers: their numbers in the whole model
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
        held = list(stage.module.parameters())
        numbers = [number for number, _ in layers[stage.index]]
        trainable = sum(parameter.numel() for parameter in held if parameter.requires_grad)
        sizes = sum(p.numel() for p in held), trainable, sum(local_shard(p).nbytes for p in held)
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


def make_stage(
    index: int,
    module: nn.Module,
    device: torch.device,
    *,
    layers: NumberedLayers | None = None,
    checkpointing: Checkpointing | None = None,
    offloading: Offloading | None = None,
    parallelize_fn: Parallelize | None = None,
    compile: Callable[[Sequence[nn.Module]], None] | None = None,
    call: Callable[[nn.Module], StageCall] = ProvidedCall,
    shard: ShardStage | None = None,
    placed: bool = False,
    routing: Routing | None = None,
    after: Mapping[str, nn.Module] | None = None,
    position: int | None = None,
) -> Stage:
    """Make stage `index` ready to run: on its device, its layers checkpointed, wrapped by `parallelize_fn`.

    Args:
        layers: layers of `module` with their numbers in the whole model; None searches its module lists
        parallelize_fn: see Options
        compile: compiles its layers in place
        call: makes what runs the module that `parallelize_fn` returned
        shard: called last, with the module and its layers, to shard its weights over a mesh
        placed: whether `module` is where it belongs: on its device, or on meta until `shard` fills it
        routing: records and replays the choices of its routers
        after: by name, the modules that run after all layers of the model
        position: number of the stage in its copy of the model; None takes `index`

    Raises ModelError for what `parallelize_fn` may not return.
    """
    position = index if position is None else position
    held = layers_of(module) if layers is None else layers
    if layers is None:  # their numbers over all stages are unknown
        names = {id(inner): name for name, inner in module.named_modules()}
        labels = [(f"stage {position}, {names[id(layer)]}", layer) for _, layer in held]
    else:
        labels = [(f"layer {number}", layer) for number, layer in held]
    switch = None if checkpointing is None else install(held, checkpointing)
    offload = None
    if offloading is not None:
        offload = Offload(device, offloading.min_bytes)
        activation_offloading.install([layer for _, layer in held], offloading, offload)
        if parallelize_fn is not None:
            parallelize_fn = activation_offloading.checked(parallelize_fn)
    module, callee = parallelized(module if placed else module.to(device), parallelize_fn, index)
    if compile is not None:
        compile([layer for _, layer in held])
    draws = next(dropouts(module), None) is not None  # adapters of parallelize_fn may
    rng = StageRNG(position, device, [*labels, *(after or {}).items()]) if draws else None
    shards = None if shard is None else shard(module, [layer for _, layer in held])
    runs = call(callee)
    runs = seeded_call(runs, rng) if rng else runs
    if routing is None:
        stage = Stage(index, module, runs, switch, shards, offload)
    else:
        stage = RoutedStage(index, module, runs, routing, switch, shards, offload)
    stage.rng = rng
    return stage


def parallelized(
    module: nn.Module, parallelize_fn: Parallelize | None, stage: int
) -> tuple[nn.Module, nn.Module]:
    """The module that holds the stage's parameters, and the one to call: usually the same.

    If `module` comes back inside another one (torch.compile, a user's wrapper), the outer one is called, and
    the parameters keep their names in `module`.
    Raises ModelError for a result that is no module, loses the parameters' names or adds parameters.
    """
    if parallelize_fn is None:
        return module, module
    names = {name for name, _ in module.named_parameters()}
    result: object = parallelize_fn(module)

    def refusal(returned: str, remedy: str) -> ModelError:
        return ModelError(
            f"parallelize_fn, which returned {returned} for stage {stage}",
            "it returns the stage's module, or one around it, with the parameters under their names",
            remedy,
        )

    if not isinstance(result, nn.Module):
        remedy = "Return the module, also where it is changed in place"
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
    return module, cast(nn.Module, _CalledThrough(result, module))


class _CalledThrough:
    """The stage's module `inner` in every respect, except that a call runs `outer`, which contains it."""

    def __init__(self, outer: nn.Module, inner: nn.Module) -> None:
        self._outer, self._inner = outer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)


# ---- the stages of a user's own modules: each rank calls the provider for its stages only


def stages_from_provider(provider: Provider, options: Options) -> BuiltStages:
    """Call `provider` for this process's stages and make them ready to run. Collective.

    Raises what Pipeline.from_provider raises.
    """
    schedule, checkpointing = options.chosen_schedule(), options.checkpointing()
    if checkpointing is not None and checkpointing.memory_limit is not None:
        rule = "the memory that a user's own module takes is unknown before it runs"
        raise ConfigError("memory_limit with from_provider", rule, "Give in_flight, from Pipeline.memory")
    if options.chunked_loss == "liger":
        rule = "only of a transformers model is it known which layer is the head"
        raise ConfigError("chunked_loss='liger' with from_provider", rule, "Call Liger in your loss_fn")
    if options.axes is not None and (options.axes.cp, options.axes.ep, options.axes.tp) != (1, 1, 1):
        raise ConfigError(
            f"{options.axes} with from_provider",
            "only for a transformers model is it known how to shard sequences, experts and matrices",
            "Take dp_shard and dp_replicate, and do the rest in parallelize_fn",
        )
    facts = {**options.facts(), "provider": named(provider)}
    world = open_world(schedule, options.world_options(), facts)
    with close_on_error(world.transport):
        return _stages_in(world, provider, options, schedule)


def _stages_in(world: World, provider: Provider, options: Options, schedule: Schedule) -> BuiltStages:
    depth, checkpointing = schedule.placement.depth, options.checkpointing()
    mesh_plan = options.mesh_plan(world)
    provided = {
        index: provider(StageInfo(index % depth, depth)) for index in own_stages(schedule, world.ranks)
    }
    everyone, offloading = world.everyone, options.offloading()
    if offloading is not None:
        _check_offloading(offloading, provided.values(), everyone)
    if mesh_plan is not None:
        (rank,) = world.ranks
        values = {f"{n} of stage {i}": p for i, m in provided.items() for n, p in m.named_parameters()}
        compare_values(everyone, rank, values, ())
    on_every_stage = _on_every_stage(provided, everyone)

    def make() -> tuple[list[Stage], Mapping[int, nn.Module], list[SharedWeights], dict[int, frozenset[str]]]:
        compiles = options.layer_compiler(schedule, world.device)
        stages = [
            make_stage(
                index,
                module,
                world.device,
                checkpointing=checkpointing,
                offloading=offloading,
                parallelize_fn=options.parallelize_fn,
                compile=compiles,
                position=index % depth,
                shard=None if mesh_plan is None else mesh_plan.fully_shard,
            )
            for index, module in provided.items()
        ]
        modules = _modules(stages)
        copies = {stage: _names_in(module, on_every_stage) for stage, module in modules.items()}
        summed = frozenset[str]().union(*copies.values())
        shared = list(shared_by_replicas(schedule.placement, modules, summed))
        if on_every_stage:
            shared.append(shared_by_stages(schedule.placement, modules, sorted(on_every_stage)))
        return stages, modules, shared, copies

    stages, modules, shared, copies = everyone.attempt("make its stages", make)
    exchanged = options.shapes == "exchanged"
    edges = None
    if not exchanged:
        edges = provided_edges(provider, modules, depth, world.processes, options.autocast)
    return BuiltStages(
        schedule,
        world,
        stages,
        {index: layers_of(module) for index, module in modules.items()},
        edges,
        options.loss(),
        options.batch_splitter(),
        options.schedules(schedule),
        mesh_plan,
        shared=shared,
        copies={stage: names for stage, names in copies.items() if stage % depth},
        recomputed=lambda proof: (
            frozenset() if checkpointing is None else first_in_flight(proof.schedule, checkpointing.in_flight)
        ),
        offloading=offloading,
        trace_folder=options.trace_folder,
        autocast=options.autocast,
    )


def _on_every_stage(modules: Mapping[int, nn.Module], everyone: Ranks) -> frozenset[str]:
    """The names of the weights that every stage holds. Collective.

    modules: this process's, by stage
    Raises ModelError, on every rank, where stages do not name the same ones of the same shapes.
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
    every = sorted((each for process in gathered for each in process), key=lambda each: int(each[0]))
    (first, expected), *others = every
    for stage, stage_shapes in others:
        for name in sorted({*expected, *stage_shapes}):
            if expected.get(name) != stage_shapes.get(name):
                shown = [
                    f"{each.get(name, 'none')} on stage {at}" for at, each in every if at in (first, stage)
                ]
                rule = f"every stage holds a copy of the same weight, and it is {' and '.join(shown)}"
                raise ModelError(f"on_every_stage with {name!r}", rule, "Name it in every stage's module")
    return frozenset(expected)


def _names_in(module: nn.Module, shared: Collection[str]) -> frozenset[str]:
    """The names by which `module` lists its copies of the weights `shared`: it may hold one under several."""
    copies = {id(copy_of(module, name)) for name in shared}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in copies)


def _check_offloading(offloading: Offloading, provided: Iterable[nn.Module], everyone: Ranks) -> None:
    """Raise ConfigError, on every rank, for a module that no layer of any rank has. Collective."""
    names = activation_offloading.names_in(layer for module in provided for _, layer in layers_of(module))
    everywhere = {name for each in everyone.gather(sorted(names)) for name in each}
    activation_offloading.check_names(offloading, everywhere)


def _modules(stages: Sequence[Stage]) -> Mapping[int, nn.Module]:
    """By stage. Raises ModelError for a weight of two stages: it would be stepped and clipped twice."""
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
