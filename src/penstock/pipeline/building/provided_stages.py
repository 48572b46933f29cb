"""The stages of a user's own modules: each rank calls the provider for its stages only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from penstock.errors import ConfigError, InputError, ModelError
from penstock.models import activation_offloading
from penstock.models.activation_offloading import Offloading
from penstock.models.stage import Provider, StageInfo, declared_on_every_stage, provided_edges
from penstock.parallel.mesh_plan import MeshPlan
from penstock.parallel.world import World, close_on_error, open_world
from penstock.pipeline.building.split_module import layers_of
from penstock.pipeline.building.stages import (
    AddPart,
    BuiltStages,
    Lowering,
    StageWeights,
    make_stage,
    own_stages,
    recomputed_by,
    stage_parts,
)
from penstock.pipeline.options import Options
from penstock.runtime.health.agreement import named
from penstock.runtime.ranks import Ranks, compare_values
from penstock.runtime.shared_weights import copy_of, shared_by_replicas, shared_by_stages
from penstock.runtime.stage import Stage
from penstock.schedule import Schedule
from penstock.schedule.ops import Placement


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
    depth, mesh_plan = schedule.placement.depth, options.mesh_plan(world)
    provided = {
        index: provider(StageInfo(index % depth, depth)) for index in own_stages(schedule, world.ranks)
    }
    offloading, checkpointing = options.offloading(), options.checkpointing()
    _check_provided(provided, world, offloading, on_mesh=mesh_plan is not None)
    on_every_stage = _on_every_stage(provided, world.everyone)

    def make() -> tuple[list[Stage], Mapping[int, nn.Module], StageWeights]:
        parts = _parts(options, schedule, world.device, mesh_plan)
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
    ahead = None if offloading is None else offloading.ahead
    return BuiltStages(
        schedule,
        world,
        stages,
        {index: layers_of(module) for index, module in modules.items()},
        weights,
        edges,
        options.loss(),
        options.batch_splitter(),
        Lowering(options.schedules(schedule), recomputed_by(checkpointing), ahead),
        mesh_plan,
        options.trace_folder,
        options.autocast,
    )


def _parts(
    options: Options, schedule: Schedule, device: torch.device, mesh_plan: MeshPlan | None
) -> list[AddPart]:
    """The parts of a stage, and FSDP2 behind them."""
    parts = stage_parts(
        checkpointing=options.checkpointing(),
        offloading=options.offloading(),
        parallelize_fn=options.parallelize_fn,
        compile=options.layer_compiler(schedule, device),
    )
    if mesh_plan is not None:
        parts.append(lambda draft: mesh_plan.fully_shard(draft.module, draft.plain_layers))
    return parts


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
