"""The steps in which a pipeline is built, each to be had alone, for models and loops of one's own.

    names   = names_per_stage(model, stages)        which modules stand on which stage
    part    = split(model, names, stage)            a copy of the model that holds no more than these
    stage   = make_stage(stage, part, device)       ready to run: checkpointed, wrapped as the user likes
    schedule = make_schedule("1f1b", ranks, microbatches)

AutoPipeline and Pipeline.from_provider are made of them. `provider_of` puts the first two together, so that a
model of one's own that is a chain goes into a pipeline as it is:

    names = names_per_stage(model, stages=4)
    pipe = Pipeline.from_provider(provider_of(model, names), schedule="1f1b", ranks=4, microbatches=8)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.errors import ModelError, PartitionError
from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.models.module_names import ModuleNames, Names, check_names, names_in_order
from penstock.models.partition import LayerCosts, partition
from penstock.models.stage import ProvidedCall, Provider, StageInfo, own_layers
from penstock.models.tracing.chain import find_chain
from penstock.pipeline.options import Parallelize
from penstock.runtime.rng import Seeded, StageRNG, dropouts
from penstock.runtime.stage import RoutedStage, Routing, Shards, Stage, StageCall
from penstock.schedule import Schedule
from penstock.schedule.choose import chosen_schedule as make_schedule

# ---- What a user's `parallelize_fn` makes of a stage's module.


def wrap(part: nn.Module, parallelize_fn: Parallelize | None, stage: int) -> tuple[nn.Module, nn.Module]:
    """The module that holds the stage's parameters, and the one to be called: most often the same.

    Where `part` comes back inside of another module (torch.compile, a wrapper of one's own), that one is
    called, and the parameters keep the names that they have in `part`.
    Raises ModelError for what is no module, and where names are lost or parameters left out.
    """
    if parallelize_fn is None:
        return part, part
    names = {name for name, _ in part.named_parameters()}
    made = parallelize_fn(part)
    if not isinstance(made, nn.Module):
        raise _refusal(
            stage, f"a {type(made).__name__}", "Return the module, also where it is altered in place"
        )
    if made is part or all(module is not part for module in made.modules()):
        kept = {name for name, _ in made.named_parameters()} & names
        if names and not kept:
            shown = next((name for name, _ in made.named_parameters()), "none")
            raise _refusal(
                stage,
                f"parameters such as {shown}",
                f"Keep names such as {min(names)}, or put the stage's module into the one returned",
            )
        return made, made
    inside = set(map(id, part.parameters()))
    if beside := [name for name, parameter in made.named_parameters() if id(parameter) not in inside]:
        raise _refusal(
            stage,
            f"a module with {beside[0]} beside the stage's own parameters",
            "Put it into the stage's module",
        )
    return part, cast(nn.Module, _CalledBy(made, part))


def _refusal(stage: int, returned: str, remedy: str) -> ModelError:
    return ModelError(
        f"parallelize_fn, which returned {returned} for stage {stage}",
        "it returns the stage's module, or one around it, with the parameters under their names",
        remedy,
    )


class _CalledBy:
    """A stage's module to all who ask, but for being called: then `outer` runs, which holds it."""

    def __init__(self, outer: nn.Module, inner: nn.Module) -> None:
        self._outer, self._inner = outer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)


__all__ = [
    "Absent",
    "layers_of",
    "make_schedule",
    "make_stage",
    "module_names",
    "names_per_stage",
    "own_stages",
    "provider_of",
    "split",
]

Spread = Callable[[nn.Module, Sequence[nn.Module]], Shards | None]


def module_names(model: nn.Module, layers: str | None = None) -> ModuleNames:
    """The names of the model's modules, in the order in which they run.

    A transformers model tells it by itself. Of any other the order is that in which modules were assigned,
    and its layers are those of its one ModuleList, ModuleDict or Sequential. Activations, dropout and the
    like are among them; modules of buffers alone (tables of positions) are not, and are on every stage.
    layers: the name of that list, where there are several; "" for the model itself
    Raises ModelError.
    """
    if isinstance(model, PreTrainedModel):
        return ModuleNames.of(find_chain(model))
    return names_in_order(model, layers)


def names_per_stage(
    model: nn.Module,
    stages: int,
    *,
    layers: str | None = None,
    layout: str | None = None,
    layers_per_stage: int | Sequence[int] | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    balance: LayerCosts | Sequence[float] | None = None,
    embedding_weight: int = 1,
    head_weight: int = 1,
) -> list[tuple[str, ...]]:
    """For each stage the names of the modules that it holds: layers dealt out as `partition` says, evenly by
    default; what stands before them is on the first stage, and what stands after them on the last.

    layers: see `module_names`

    What the model's own forward does between its modules is not divided: see `split`.
    Raises ModelError, PartitionError, ConfigError.
    """
    names = module_names(model, layers)
    shares = partition(
        len(names.layers),
        stages,
        layout=layout,
        layers_per_stage=layers_per_stage,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        balance=balance,
        embedding_weight=embedding_weight,
        head_weight=head_weight,
    )
    return names.per_stage(shares)


class Absent(nn.Module):
    """Stands for a module of another stage: it gives back the first argument that it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(iter((*args, *kwargs.values())), None)


def split(
    model: nn.Module, names: Names, stage: int, *, absent: Literal["identity", "none"] = "identity"
) -> nn.Module:
    """A copy of `model` that holds the modules of one stage; `model` is left as it was.

    names: for each stage those of its modules, and of parameters that stand in no module of their own;
        every parameter of the model is named once. Modules without parameters that are not named are on
        every stage.
    absent: what stands in the place of the others. "identity": a module that gives back its first argument,
        which suits a forward that calls one module after the other. "none": None; out of lists and
        dicts they are taken, where the rest keep their names.

    Only modules are divided: arithmetic that the model's own forward does between them (a scale, a residual,
    a skip) runs on every stage, and is not seen. ``pipe.verify_against(model, batch)`` tells.

    What belongs to other stages is never copied, and on the meta device (`torch.device("meta")`) nothing is.
    Raises PartitionError for names that do not fit the model, ModelError for a weight of two stages.
    """
    if isinstance(model, PreTrainedModel):
        raise ModelError(
            f"split() of a {type(model).__name__}",
            "a transformers model keeps its own forward, which needs more than its modules",
            "Use AutoPipeline(modules_per_stage=names).build(model)",
        )
    check_names(model, names)
    own = set(names[stage])
    others = [name for of in names for name in of if name not in own]
    memo: dict[int, Any] = {}
    gone = [name for name in others if _is_module(model, name)]
    for name in gone:
        memo[id(model.get_submodule(name))] = Absent()
    for name in others:
        if name not in gone:
            memo[id(model.get_parameter(name))] = nn.Parameter(torch.empty(0), requires_grad=False)
    if torch.get_default_device().type == "meta":
        memo |= {id(tensor): _empty(tensor) for tensor in (*model.parameters(), *model.buffers())}
    part = copy.deepcopy(model, memo)
    for name in others:
        around, last = _holder(part, name)
        if name not in gone:
            around._parameters[last] = None
        elif absent == "none":
            _take_out(around, last)
    return part


def provider_of(
    model: nn.Module, names: Names, *, absent: Literal["identity", "none"] = "identity"
) -> Provider:
    """For Pipeline.from_provider: each stage's part of `model`, as `split` makes it. Raises as it does.

    What the model's own forward does between its modules is not divided: see `split`.
    """
    check_names(model, names)

    def provider(info: StageInfo) -> nn.Module:
        if info.stages != len(names):
            raise PartitionError(
                f"names of {len(names)} stages",
                f"the schedule has {info.stages}",
                f"Give {info.stages} lists",
            )
        return split(model, names, info.stage, absent=absent)

    return provider


def layers_of(part: nn.Module) -> list[tuple[int, nn.Module]]:
    """The layers that a stage holds, with their numbers in the whole model."""
    return [(number, layer) for number, layer in own_layers(part) if not isinstance(layer, Absent)]


def make_stage(
    index: int,
    part: nn.Module,
    device: torch.device,
    *,
    layers: Sequence[tuple[int, nn.Module]] | None = None,
    checkpointing: Checkpointing | None = None,
    parallelize_fn: Parallelize | None = None,
    call: Callable[[nn.Module], StageCall] = ProvidedCall,
    spread: Spread | None = None,
    placed: bool = False,
    routing: Routing | None = None,
    after: Mapping[str, nn.Module] | None = None,
    place: int | None = None,
) -> Stage:
    """Stage `index`, ready to run: on its device, its layers checkpointed, wrapped as the user likes.

    layers: those of `part`, with their numbers; None looks for its lists
    parallelize_fn: see penstock.pipeline.options.Options
    call: how to run what `parallelize_fn` returned
    spread: called last, with the module and its layers, to spread its weights over a mesh
    placed: whether all of `part` is where it is to be; on the meta device what `spread` will give values
    routing: what records and replays the choices of its routers, if anything does
    after: by name, the modules of `part` that run after all layers of the model
    place: its number within its copy of the model, where a pipeline has two; None takes the index
    Raises ModelError.
    """
    at = index if place is None else place
    own = layers_of(part) if layers is None else layers
    places = _places_within(part, own, at) if layers is None else [(f"layer {n}", each) for n, each in own]
    switch = None if checkpointing is None else install(own, checkpointing)
    module, called = wrap(part if placed else part.to(device), parallelize_fn, index)
    drops = next(dropouts(module), None) is not None  # adapters may
    chance = StageRNG(at, device, [*places, *(after or {}).items()]) if drops else None
    shards = None if spread is None else spread(module, [layer for _, layer in own])
    runs = call(called)
    runs = Seeded(runs, chance) if chance else runs
    if routing is None:
        stage = Stage(index, module, runs, switch, shards)
    else:
        stage = RoutedStage(index, module, runs, routing, switch, shards)
    stage.chance = chance
    return stage


def _places_within(
    part: nn.Module, layers: Sequence[tuple[int, nn.Module]], stage: int
) -> list[tuple[str, nn.Module]]:
    """By the stage and their names in it: how they are numbered over all stages is not known."""
    names = {id(module): name for name, module in part.named_modules()}
    return [(f"stage {stage}, {names[id(layer)]}", layer) for _, layer in layers]


def own_stages(schedule: Schedule, ranks: Sequence[int]) -> list[int]:
    """The stages that these ranks host."""
    return [stage for rank in ranks for stage in schedule.placement.stages_of(rank)]


def _is_module(model: nn.Module, name: str) -> bool:
    holder, last = _holder(model, name)
    return last in holder._modules


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    before, _, last = name.rpartition(".")
    return model.get_submodule(before), last


def _take_out(holder: nn.Module, name: str) -> None:
    if isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        del holder._modules[name]  # not by index: those that stay keep their numbers
    else:
        setattr(holder, name, None)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
