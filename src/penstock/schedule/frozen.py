"""Stages that train nothing have no weight gradients: a split backward there is a whole one, without W.

0F0 0I0 0F1 0W0 0I1 0W1        stage 0 trains nothing:        0F0 0B0 0F1 0B1
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from penstock.schedule.ops import Op, Pair, Schedule


def without_weight_gradients(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule with B in the place of each I of `stages`, and without their W.

    Where a stage trains something after all, its B computes that gradient too.
    """
    if all(stage not in stages for stage, _ in schedule.split):
        return schedule

    def whole(op: Op) -> Op:
        return Op(op.stage, "B", op.microbatch) if op.stage in stages and op.kind == "I" else op

    programs = tuple(
        tuple(whole(op) for op in program if not (op.stage in stages and op.kind == "W"))
        for program in schedule.programs
    )
    overlaps = frozenset(Pair(pair.forward, whole(pair.backward)) for pair in schedule.overlaps)
    return replace(schedule, programs=programs, overlaps=overlaps)
