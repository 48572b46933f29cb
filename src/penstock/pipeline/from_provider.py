"""Build a pipeline of a user's own modules: each rank calls the provider for its stages only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import update_wrapper
from inspect import Parameter, signature
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn

from penstock.errors import ConfigError, ModelError
from penstock.models.stage import Provider, StageInfo, provided_edges
from penstock.parallel.mesh import Axes
from penstock.parallel.world import World, close_on_error, open_world
from penstock.pipeline.checks import check_options
from penstock.pipeline.options import Options, recomputed_places
from penstock.pipeline.split_module import layers_of
from penstock.pipeline.stages import BuiltStages, make_stage, own_stages
from penstock.runtime.health.agreement import compare_values, named
from penstock.runtime.shared_weights import shared_by_replicas
from penstock.runtime.stage import Stage
from penstock.runtime.transport.groups import AllProcesses
from penstock.schedule import Schedule

P = ParamSpec("P")
T = TypeVar("T")


def stages_from_provider(provider: Provider, options: Options) -> BuiltStages:
    """Call `provider` for this process's stages and make them ready to run. Collective.

    Raises what Pipeline.from_provider raises.
    """
    schedule, how = options.chosen_schedule(), options.checkpointing()
    if how is not None and how.memory_limit is not None:
        rule = "the memory that a user's own module takes is unknown before it runs"
        raise ConfigError("memory_limit with from_provider", rule, "Give in_flight, from Pipeline.memory")
    if options.axes is not None and (options.axes.cp, options.axes.ep, options.axes.tp) != (1, 1, 1):
        raise ConfigError(
            f"{options.axes} with from_provider",
            "only for a transformers model is it known how to shard sequences, experts and matrices",
            "Take dp_shard and dp_replicate, and do the rest in parallelize_fn",
        )
    check_options(options.axes or Axes(), options.sharded, options.loss())
    facts = {**options.facts(), "provider": named(provider)}
    world = open_world(schedule, options.world_options(), facts)
    with close_on_error(world.transport):
        return _stages_in(world, provider, options, schedule)


def _stages_in(world: World, provider: Provider, options: Options, schedule: Schedule) -> BuiltStages:
    depth = schedule.placement.depth
    mesh_plan = options.mesh_plan(world)
    provided = {
        index: provider(StageInfo(index % depth, depth)) for index in own_stages(schedule, world.ranks)
    }
    if mesh_plan is not None:
        check_options(mesh_plan.axes, options.sharded, options.loss())
        (rank,) = world.ranks
        values = {f"{n} of stage {i}": p for i, m in provided.items() for n, p in m.named_parameters()}
        compare_values(AllProcesses(options.timeout, world.device), rank, values, ())
    stages = [
        make_stage(
            index,
            module,
            world.device,
            checkpointing=options.checkpointing(),
            parallelize_fn=options.parallelize_fn,
            position=index % depth,
            shard=None if mesh_plan is None else mesh_plan.fully_shard,
        )
        for index, module in provided.items()
    ]
    modules = _modules(stages)
    edges = None
    if options.shapes != "exchanged":
        edges = provided_edges(provider, modules, depth, world.processes)
    return BuiltStages(
        schedule,
        world,
        stages,
        {index: layers_of(module) for index, module in modules.items()},
        edges,
        options.loss(),
        options.batch_splitter(),
        mesh_plan,
        shared=list(shared_by_replicas(schedule.placement, modules)),
        recomputed=recomputed_places(schedule, options.checkpointing()),
        trace_folder=options.trace_folder,
    )


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


def takes_options(
    make: Callable[P, Options],
) -> Callable[
    [Callable[[type[T], Provider, Options], T]],
    Callable[Concatenate[type[T], Provider, P], T],
]:
    """Let a method of (provider, options) take the keywords of `make` in place of `options`.

    So the options are stated once, and signature and types still name each of them. The method raises
    TypeError for any other keyword, and names the nearest one.
    """
    known = list(signature(make).parameters.values())

    def decorate(
        method: Callable[[type[T], Provider, Options], T],
    ) -> Callable[Concatenate[type[T], Provider, P], T]:
        def with_keywords(cls: type[T], provider: Provider, /, *args: P.args, **kwargs: P.kwargs) -> T:
            name = f"{cls.__name__}.{method.__name__}()"
            if args:
                raise TypeError(f"{name} takes its options by keyword, such as {known[0].name}={args[0]!r}")
            names = [option.name for option in known]
            for key in kwargs.keys() - set(names):
                near = get_close_matches(key, names, n=1)
                remedy = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(names)}"
                raise TypeError(f"{name} has no option {key!r}. {remedy}")
            return method(cls, provider, make(*args, **kwargs))

        update_wrapper(with_keywords, method)
        *leading, _ = signature(method).parameters.values()
        keywords = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in known]
        shown = signature(method).replace(parameters=[*leading, *keywords])
        with_keywords.__signature__ = shown  # type: ignore[attr-defined]
        return with_keywords

    return decorate
