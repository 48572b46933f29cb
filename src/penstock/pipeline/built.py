"""What a pipeline is made of, and what is known of each of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import nn

from penstock.batch.loss import Loss
from penstock.batch.shapes import EdgeShapes
from penstock.models.stage import StageInfo
from penstock.models.weights.saved import SavedModel
from penstock.parallel.world import World
from penstock.pipeline.split_batch import BatchSplitter
from penstock.runtime.shared_weights import SharedWeights
from penstock.runtime.stage import Stage
from penstock.runtime.transport.groups import Processes
from penstock.schedule import Schedule
from penstock.schedule.ops import Placement
from penstock.schedule.recompute import Places

# by stage, its layers with their numbers in the whole model
Layers = Mapping[int, Sequence[tuple[int, nn.Module]]]


@dataclass(frozen=True)
class BuiltStages:
    """stages: this process's; edges: None where what crosses an edge tells itself what it is

    names: by stage of this process, those of the parameters that are saved
    recomputed: the (stage, microbatch) whose layers run again in the backward
    trace_folder: where each process writes the timeline so far when a step fails
    """

    schedule: Schedule
    world: World
    stages: Sequence[Stage]
    layers: Layers
    edges: EdgeShapes | None
    loss: Loss
    splitter: BatchSplitter
    shared: Sequence[SharedWeights] = ()
    saved: SavedModel | None = None
    names: Mapping[int, frozenset[str]] | None = None
    recomputed: Places = frozenset()
    trace_folder: str | Path | None = None


def names_in(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))


class StageFacts(NamedTuple):
    """What a stage is and holds.

    info: where it stands in its copy of the model; layers: their numbers in the whole model
    parameters, trainable: how many; bytes: of all of them
    """

    info: StageInfo
    rank: int
    layers: tuple[int, ...]
    parameters: int
    trainable: int
    bytes: int

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients, where weights that are trained and those that are not have one dtype."""
        return self.bytes * self.trainable // self.parameters if self.parameters else 0


def stage_facts(
    stages: Sequence[Stage], layers: Layers, placement: Placement, processes: Processes
) -> tuple[StageFacts, ...]:
    """Of all stages, on every process. Collective."""
    mine = []
    for stage in stages:
        held = list(stage.module.parameters())
        numbers = [number for number, _ in layers[stage.index]]
        trainable = sum(parameter.numel() for parameter in held if parameter.requires_grad)
        sizes = sum(p.numel() for p in held), trainable, sum(p.numel() * p.itemsize for p in held)
        mine.append((stage.index, numbers, *sizes))
    told = sorted(entry for process in processes.gather(mine) for entry in process)
    depth = placement.depth
    return tuple(
        StageFacts(StageInfo(index % depth, depth), placement.rank_of[index], tuple(numbers), *sizes)
        for index, numbers, *sizes in told
    )
