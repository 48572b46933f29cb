"""The schedules of a pipeline by their number of microbatches: made when first needed, then kept.

    a new count      schedule -> verify -> forwards to recompute -> a plan and an executor for each rank
    a known count    the executors of the first time

Every rank makes schedules without communication, from options that the handshake has compared. The placement,
and so stages and channels, are the same for every count.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.pipeline.building.stages import BuiltStages
from penstock.runtime.executor import Executor
from penstock.runtime.plan import lower
from penstock.runtime.recorder import Recorder
from penstock.schedule import Proof, Schedule, verify
from penstock.schedule.builders.gpipe import forwards
from penstock.schedule.offload import HostCopies, host_copies
from penstock.schedule.order import exchanges
from penstock.schedule.simulation.recompute import StageMicrobatches

KEPT = 64  # the most recent schedules that train, and as many for evaluations


class LoweredSchedule(NamedTuple):
    """A schedule ready to run in this process; `number` is equal on ranks with the same schedule."""

    proof: Proof
    executors: list[Executor]
    number: int

    @property
    def schedule(self) -> Schedule:
        return self.proof.schedule


class Schedules:
    """The schedules that run on this process's stages.

    training: the pipeline's schedule for a number of microbatches; raises ConfigError where it has none
    forwards: the forwards of a number of microbatches alone
    """

    def __init__(self, built: BuiltStages) -> None:
        self._built, world = built, built.world
        stages = {stage.index: stage for stage in built.stages}
        placement = built.schedule.placement
        # shared by all executors of a rank
        self._stages = {rank: {s: stages[s] for s in placement.stages_of(rank)} for rank in world.ranks}
        self.recorders = {rank: Recorder(world.device, world.clock_offset) for rank in world.ranks}
        self.training = lru_cache(KEPT)(self._make_training)
        self.forwards = lru_cache(KEPT)(self._make_forwards)

    def _make_training(self, count: int) -> LoweredSchedule:
        built = self._built
        is_built = count == built.schedule.microbatches
        lowering = built.lowering
        schedule = built.schedule if is_built else lowering.make_schedule(count)
        assert schedule.placement == built.schedule.placement, f"{count} microbatches move stages"
        proof = verify(schedule)
        copies = None if lowering.ahead is None else host_copies(schedule, lowering.ahead)
        return self._lower(proof, lowering.recomputed(proof), copies)

    def _make_forwards(self, count: int) -> LoweredSchedule:
        return self._lower(verify(forwards(self._built.schedule.placement, count)))

    def _lower(
        self,
        proof: Proof,
        recomputed: StageMicrobatches = frozenset(),
        copies: Sequence[HostCopies] | None = None,
    ) -> LoweredSchedule:
        """
        recomputed: the (stage, microbatch) pairs whose layers run again in the backward
        copies: by rank, the copies of offloaded activations
        """
        built, schedule = self._built, proof.schedule
        world = built.world
        world.check(schedule)
        together = exchanges(proof) if world.batched else None
        reduced = frozenset(stage.index for stage in built.stages if stage.reduces)
        executors = []
        for rank, stages in self._stages.items():
            plan = lower(
                proof,
                rank,
                recomputed=recomputed,
                exchanges=together,
                reduced=reduced,
                copies=copies,
            )
            recorder = self.recorders[rank]
            executors.append(Executor(plan, stages, built.edges, built.loss, world.transport, recorder))
        return LoweredSchedule(proof, executors, zlib.crc32(str(schedule).encode()))
