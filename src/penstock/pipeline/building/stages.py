"""Make modules into stages that are ready to run. `BuiltStages` has all parts of a Pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.batch.loss import Loss
from penstock.batch.shapes import EdgeShapes
from penstock.errors import ModelError
from penstock.models import activation_offloading
from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.models.activation_offloading import Offloading
from penstock.models.stage import ProvidedCall, StageInfo
from penstock.models.weights.saved import SavedModel
from penstock.parallel.mesh_plan import MeshPlan
from penstock.parallel.world import World
from penstock.pipeline.building.split_module import layers_of
from penstock.pipeline.options import Parallelize
from penstock.pipeline.steps.split_batch import BatchSplitter
from penstock.runtime.device.offload import Offload
from penstock.runtime.ranks import Ranks
from penstock.runtime.rng import StageRNG, dropouts
from penstock.runtime.sharded_weights import local_shard
from penstock.runtime.shared_weights import SharedWeights
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


def recomputed_by(checkpointing: Checkpointing | None) -> Callable[[Proof], StageMicrobatches]:
    """`Lowering.recomputed`, for a number of microbatches in flight or for all."""
    if checkpointing is None:
        return lambda proof: frozenset()
    return lambda proof: first_in_flight(proof.schedule, checkpointing.in_flight)


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
