"""The parts of every step and evaluation: unchanged weights, edges, seeds, autocast."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.batch.shapes import Microbatch
from penstock.models.stage import DeclaredEdges
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.steps.step import Step, StepPart
from penstock.runtime.rng import StageRNG, draw_seed, next_seed, seeded_step
from penstock.runtime.sharded_weights import check_not_replaced
from penstock.runtime.stage import autocasting


class SameWeights(StepPart):
    """Refuses a stage whose parameters have been replaced since the build."""

    def __init__(self, built: BuiltStages) -> None:
        self._stages = built.stages

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        for stage in self._stages:
            check_not_replaced(stage.module, stage.index)


class Edges(StepPart):
    """Infers the shapes on the edges before the step, so that all ranks refuse a wrong shape together."""

    def __init__(self, built: BuiltStages) -> None:
        self._edges, self._world, self._depth = built.edges, built.world, built.schedule.placement.depth

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Infer the shapes on the edges, where other pipelines have other parts of the batch."""
        if self._edges is None or isinstance(self._edges, DeclaredEdges):
            return
        if self._depth > 1 and self._world.reductions.batch_part[1] > 1:
            for microbatch in microbatches:
                self._edges(0, microbatch)

    def begin(self, step: Step) -> None:
        """Compare the declared shapes of both ends of each edge, once per shape of microbatch. Collective."""
        if not isinstance(self._edges, DeclaredEdges):
            return
        edges = self._edges

        def compare() -> None:
            if unseen := edges.unseen(step.microbatches):
                self._world.processes.settle()  # else ranks with other batches would not take part below
                edges.agree(unseen, self._world.processes)

        self._world.reductions.everyone.attempt("declare the edges between its stages", compare)


class Seeds(StepPart):
    """Seeds the random numbers of a step, equally on every mesh.

    Attributes:
        draws: whether some rank has dropout
    """

    def __init__(self, built: BuiltStages) -> None:
        """Collective."""
        self._built, self._world = built, built.world
        self._rngs = [rng for stage in built.stages if (rng := stage.part(StageRNG)) is not None]
        self.draws: bool = any(built.world.processes.gather(bool(self._rngs)))

    def around(self, step: Step) -> AbstractContextManager[object]:
        """Collective over the mesh. Without a module in training mode, no number is drawn for the seed."""
        if not self.draws or not step.trains:
            return nullcontext()
        world, stages = self._world, self._built.stages
        training = any(module.training for stage in stages for module in stage.module.modules())
        local_seed = torch.tensor([next_seed() if training else 0], dtype=torch.float64)
        # all ranks have accepted the batch; users may seed ranks differently, but a step has one seed
        seeds = world.transport.all_gather([local_seed] * len(world.ranks))
        seed = world.reductions.max(int(max(seeds)))
        if not seed:
            return nullcontext()
        draw_seed()
        return seeded_step(self._rngs, seed, step.microbatches, step.input.microbatches)


class Autocast(StepPart):
    """Runs the ops under torch.autocast."""

    def __init__(self, built: BuiltStages) -> None:
        self._dtype, self._device = built.autocast, built.world.device

    def around(self, step: Step) -> AbstractContextManager[object]:
        return autocasting(self._dtype, self._device)
