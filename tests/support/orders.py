"""What the builders' tests compare with: torch's own orders."""

from __future__ import annotations

from typing import Any

from penstock.schedule import Op, Pair, Schedule, loop
from penstock.schedule.ops import wave


def torch_order(
    schedule_class: type[Any], ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The order of a schedule of torch.distributed.pipelining, made without stages or a process group.

    stages_per_rank: of an interleaved schedule; None for one with the V placement
    """
    maker: Any = object.__new__(schedule_class)
    maker.pp_group_size, maker.num_stages, maker._n_microbatches = ranks, 2 * ranks, microbatches
    if stages_per_rank is not None:
        maker.n_local_stages = stages_per_rank
        maker.number_of_rounds = max(1, microbatches // ranks)
        maker.microbatches_per_round = microbatches // maker.number_of_rounds
    programs, overlaps = [], set()
    for rank in range(ranks):
        program: list[Op] = []
        for action in filter(None, maker._calculate_single_rank_operations(rank)):
            ops = [
                Op(part.stage_index, part.computation_type.value, part.microbatch_index)
                for part in action.sub_actions or (action,)
            ]
            program += ops
            if len(ops) == 2:
                overlaps.add(Pair(*ops))
        programs.append(tuple(program))
    placement = wave(ranks) if stages_per_rank is None else loop(ranks, stages_per_rank)
    return Schedule(schedule_class.__name__, placement, microbatches, tuple(programs), frozenset(overlaps))


def torch_interleaves(ranks: int, microbatches: int) -> bool:
    """Do torch's interleaved schedules exist in this size?"""
    return microbatches % max(1, microbatches // ranks) == 0
