"""A pipeline of modules of one's own, each built by a provider on the rank that runs it."""

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
from penstock.pipeline.built import BuiltStages
from penstock.pipeline.checks import check_options
from penstock.pipeline.functional import layers_of, make_stage, own_stages
from penstock.pipeline.options import Options, recomputed_places
from penstock.runtime.health.agreement import compare_values, named
from penstock.runtime.shared_weights import of_replicas
from penstock.runtime.stage import Stage
from penstock.runtime.transport.groups import AllProcesses
from penstock.schedule import Schedule

P = ParamSpec("P")
T = TypeVar("T")


def taking(
    make: Callable[P, Options],
) -> Callable[
    [Callable[[type[T], Provider, Options], T]],
    Callable[Concatenate[type[T], Provider, P], T],
]:
    """Let a method that takes Options take, in their place, the keywords that `make` makes them of.

    Raises TypeError for others, with the nearest that there is.
    """
    known = [*signature(make).parameters]

    def decorate(
        method: Callable[[type[T], Provider, Options], T],
    ) -> Callable[Concatenate[type[T], Provider, P], T]:
        def take(cls: type[T], provider: Provider, /, *args: P.args, **kwargs: P.kwargs) -> T:
            _check_keywords(f"{cls.__name__}.{method.__name__}()", known, args, kwargs)
            return method(cls, provider, make(*args, **kwargs))

        update_wrapper(take, method)
        *own, _ = signature(method).parameters.values()
        named = [field.replace(kind=Parameter.KEYWORD_ONLY) for field in signature(make).parameters.values()]
        take.__signature__ = signature(method).replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        return take

    return decorate


def _check_keywords(
    name: str, known: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    if args:
        raise TypeError(f"{name} takes its options by keyword, such as {known[0]}={args[0]!r}")
    for key in kwargs:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(known)}"
            raise TypeError(f"{name} has no option {key!r}. {remedy}")


def provided_parts(provider: Provider, options: Options) -> BuiltStages:
    """The parts of Pipeline.from_provider. Collective."""
    schedule, how = options.chosen_schedule(), options.checkpointing()
    if how is not None and how.memory_limit is not None:
        rule = "what a module of one's own holds cannot be told before it runs"
        raise ConfigError("memory_limit with from_provider", rule, "Give in_flight; Pipeline.memory tells")
    if options.axes is not None and (options.axes.cp, options.axes.ep, options.axes.tp) != (1, 1, 1):
        raise ConfigError(
            f"{options.axes} with from_provider",
            "only a transformers model tells how sequences, experts and matrices are shared out",
            "Take dp_shard and dp_replicate, and do the rest in parallelize_fn",
        )
    check_options(options.axes or Axes(), options.sharded, options.loss())
    world = open_world(schedule, options.link(), {**options.facts(), "provider": named(provider)})
    with close_on_error(world.transport):
        return _parts_in(world, provider, options, schedule)


def _parts_in(world: World, provider: Provider, options: Options, schedule: Schedule) -> BuiltStages:
    how = options.checkpointing()
    depth = schedule.placement.depth
    beside = options.beside(world)
    built = {index: provider(StageInfo(index % depth, depth)) for index in own_stages(schedule, world.ranks)}
    if beside is not None:
        check_options(beside.axes, options.sharded, options.loss())
        (rank,) = world.ranks
        values = {f"{n} of stage {i}": p for i, made in built.items() for n, p in made.named_parameters()}
        compare_values(AllProcesses(options.timeout, world.device), rank, values, ())
    stages = [
        make_stage(
            index,
            module,
            world.device,
            checkpointing=how,
            parallelize_fn=options.parallelize_fn,
            place=index % depth,
            spread=None if beside is None else beside.fully_shard,
        )
        for index, module in built.items()
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
        options.splitter(beside),
        shared=list(of_replicas(schedule.placement, modules)),
        recomputed=recomputed_places(schedule, how),
        trace_folder=options.trace_folder,
    )


def _modules(stages: list[Stage]) -> Mapping[int, nn.Module]:
    """By stage. Raises ModelError for a weight of two stages, which would be stepped and clipped twice."""
    seen: dict[int, int] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if (other := seen.setdefault(id(parameter), stage.index)) != stage.index:
                raise ModelError(
                    f"the parameter {name} of stage {stage.index}",
                    f"it is the very one that stage {other} holds",
                    "Let the provider make modules of their own for each call",
                )
    return {stage.index: stage.module for stage in stages}
