"""The interleaved orders of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

from penstock.schedule import Op, Schedule, loop


def torch_takes(ranks: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


def torch_interleaved(
    schedule_class: type[Any], ranks: int, microbatches: int, stages_per_rank: int
) -> Schedule:
    """What torch's schedule of this class runs, made without stages or a process group."""
    maker: Any = object.__new__(schedule_class)
    maker.pp_group_size, maker.n_local_stages, maker._n_microbatches = ranks, stages_per_rank, microbatches
    maker.number_of_rounds = max(1, microbatches // ranks)
    maker.microbatches_per_round = microbatches // maker.number_of_rounds
    programs = (
        tuple(
            Op(action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in maker._calculate_single_rank_operations(rank)
            if action is not None
        )
        for rank in range(ranks)
    )
    return Schedule(schedule_class.__name__, loop(ranks, stages_per_rank), microbatches, tuple(programs))
