"""What a candidate says of itself."""

from __future__ import annotations

import torch

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate


def test_a_candidate_counts_devices_and_rows() -> None:
    run = Candidate(4, Axes(dp_replicate=2, dp_shard=3, tp=2), rows=5, length=64, microbatches=7)
    assert (run.devices, run.batch, run.shape) == (48, 5 * 7 * 6, (5, 64))
    assert run.mesh == "pp=4 x dp_replicate=2 x dp_shard=3 x tp=2"
    assert run.sharded
    assert not Candidate(4, Axes(tp=2)).sharded


def test_a_candidate_makes_its_schedule_and_options() -> None:
    run = Candidate(2, schedule="1f1b", options=(("stages_per_rank", 2),), microbatches=4)
    assert (run.built().stages, run.built().microbatches, run.label) == (4, 4, "1f1b stages_per_rank=2")
    assert run.checkpointing() is None
    selective = Candidate(recomputed="selective", in_flight=(1, 0)).checkpointing()
    assert selective is not None
    assert (selective.save, selective.in_flight) == (
        ("matmul", "attention"),
        (1, 0),
    )
    assert Candidate(precision="mixed").parallel_options().autocast == torch.bfloat16
    assert Candidate(precision="bfloat16").parallel_options().autocast is None
