"""Interleaved 1F1B: several stages per rank, and microbatches in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter

from penstock.errors import ConfigError
from penstock.schedule.builders.one_f_one_b import row, turns
from penstock.schedule.ops import Kind, Op, Schedule, loop


def interleaved_1f1b(
    ranks: int, microbatches: int, stages_per_rank: int = 2, microbatch_group_size: int | None = None
) -> Schedule:
    """Interleaved 1F1B: one forward, one backward, with several stages a rank.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021
    (arXiv 2104.04473). P = 3 ranks, m = 3 microbatches, v = 2 stages a rank, a backward twice as long as a
    forward:

        rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2 .   .   .   .   3B0 3B0 .   3B1 3B1 .   3B2 3B2 0B0 0B0 0B1 0B1 0B2 0B2
        rank 1 | .   1F0 1F1 1F2 4F0 4F1 4F2 .   4B0 4B0 .   4B1 4B1 .   4B2 4B2 1B0 1B0 1B1 1B1 1B2 1B2 .   .
        rank 2 | .   .   2F0 2F1 2F2 5F0 5B0 5B0 5F1 5B1 5B1 5F2 5B2 5B2 2B0 2B0 2B1 2B1 2B2 2B2 .   .   .   .

    The microbatches go from stage to stage in groups; the largest holds g. A rank's forwards, F_0 to
    F_{vm-1}, go through the groups, for each through the rank's stages, for each through the group's
    microbatches; its backwards likewise, with the stages reversed. With w = 2(P - 1 - r) + (v-1) g warm-up
    forwards on rank r:

        warm-up    F_0 ... F_{w-1}
        steady     F_{w+k} B_k          for k = 0 ... vm-w-1
        cool-down  B_{vm-w} ... B_{vm-1}

    In a group of fewer than P microbatches the first one must return to rank 0 before the group can go
    on, and ranks idle. So m is divided evenly into as many groups as can have P each, as in torch. With
    microbatch_group_size (Megatron's microbatch_group_size_per_vp_stage) all groups have that size and the
    last takes the rest; P holds the fewest activations. Megatron forbids a last group of fewer than P,
    since it could deadlock; here it keeps the order of a full group, with gaps, and cannot. With one stage
    per rank, w is P - 1 - r and the schedule is 1F1B.

    The bubble is (P-1) / (v m + P-1) if no group has fewer than P. With m < P the makespan is 3(v P + m-1) in
    unit times. Rank r holds min(2(P-r) - 1 + (v-1) g, v m) live activations. A smaller last group takes and
    holds at most as much as a full one.
    """  # noqa: E501
    placement = loop(ranks, stages_per_rank)
    groups = microbatch_groups(ranks, microbatches, microbatch_group_size)
    laps_ahead = (stages_per_rank - 1) * max(map(len, groups))

    def program(rank: int) -> tuple[Op, ...]:
        stages = placement.stages_of(rank)
        # each rank after this one costs a turn there and a turn back; 1F1B, with one lap, needs only one
        hops = (ranks - 1 - rank) * (2 if stages_per_rank > 1 else 1)
        ops = turns(in_groups("F", stages, groups), in_groups("B", stages[::-1], groups), hops + laps_ahead)
        return existing(ops, microbatches)

    programs = tuple(program(rank) for rank in range(ranks))
    return Schedule("interleaved_1f1b", placement, microbatches, programs)


def microbatch_groups(ranks: int, microbatches: int, size: int | None) -> list[range]:
    """The microbatches that go from stage to stage together. The last group may have some that do not exist.

    Raises ConfigError for a group size that would deadlock.
    """
    if size is None:
        count = max(1, microbatches // ranks)
        bounds = [-(-microbatches * at // count) for at in range(count + 1)]
    elif ranks <= size <= max(ranks, microbatches):
        bounds = [*range(0, microbatches, size)]
        bounds.append(max(microbatches, bounds[-1] + ranks))
    else:
        allowed = f"{ranks} to {microbatches}" if microbatches > ranks else f"{ranks}"
        raise ConfigError(
            f"microbatch_group_size={size}",
            f"with {ranks} ranks and {microbatches} microbatches it is {allowed}: "
            "smaller groups deadlock, and a larger one cannot be filled",
            f"Give {allowed}, or leave it out",
        )
    return [range(*pair) for pair in pairwise(bounds)]


def in_groups(kind: Kind, stages: Sequence[int], groups: Iterable[range]) -> list[Op]:
    """Depth first: each group through all of `stages` before the next group."""
    return [op for group in groups for stage in stages for op in row(stage, kind, group)]


def existing(ops: tuple[Op, ...], microbatches: int) -> tuple[Op, ...]:
    """Drop the microbatches that only fill up the last group; that adds no deadlock."""
    if max(map(itemgetter(2), ops)) < microbatches:  # at most one group is filled up, and often none
        return ops
    return tuple(op for op in ops if op.microbatch < microbatches)
