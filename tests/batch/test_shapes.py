"""Shapes on the edges: inferred, declared, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from penstock import Pipeline
from penstock.batch.shapes import logits_in
from penstock.errors import BatchError, ShapeError
from support import jobs_edges as edges
from support.jobs_edges import MODES, Single, build, ragged
from support.pool import Pool
from support.refusals import refuses

SCHEDULES = (("1f1b", 3), ("zb_v", 2), ("dualpipe", 2))


def test_shapes_that_values_decide_cannot_be_learnt() -> None:
    pipe = build(edges.Chosen, "learnt", "1f1b", 3)
    with refuses(ShapeError, "stage 0 run without values", remedy="use shapes='exchanged', else") as raised:
        pipe.step(ragged())
    assert isinstance(raised.value.__cause__, RuntimeError)  # torch's own, which names the operation


def test_a_dimension_of_its_own_for_a_nest_of_tensors() -> None:
    """All its tensors are cut along it, and the rest goes whole to all."""
    seen = []

    class Reading(Single):
        def forward(self, x: Tensor, more: Any = None) -> Any:
            if self.info.is_last:
                seen.append((len(x), more["pair"][0].shape, more["pair"][1], more["deep"]["y"].shape))
            return super().forward(x)

    pipe = Pipeline.from_provider(
        Reading, schedule="gpipe", ranks=2, microbatches=2, loss_fn=lambda output, _: output.mean(),
        sharding={"more": 1},
    )  # fmt: skip
    more = {"pair": (torch.zeros(2, 5), 7), "deep": {"y": torch.ones(1, 5, 4)}}
    pipe.step({"x": torch.zeros(5, edges.WIDTH, dtype=edges.TYPE)}, more=more)
    assert seen == [(3, (2, 3), 7, (1, 3, 4)), (2, (2, 2), 7, (1, 2, 4))]


@pytest.mark.parametrize(("schedule", "ranks"), [*SCHEDULES, ("inference", 3)])
@pytest.mark.parametrize("mode", MODES)
def test_infer(mode: str, schedule: str, ranks: int) -> None:
    assert edges.inferred(ranks, mode, schedule) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("schedule", "ranks", "owner"), [("1f1b", 3, 2), ("inference", 2, 1), ("zb_v", 2, 0)]
)
def test_infer_on_the_rank_of_the_last_stage(schedule: str, ranks: int, owner: int, pool: Pool) -> None:
    answers = pool.run(ranks, edges.inferred, ranks, "learnt", schedule)
    assert answers == [[0, 1, 2, 3] if rank == owner else [] for rank in range(ranks)]


def test_a_failed_inference_leaves_nothing_behind() -> None:
    pipe = build(Single, "learnt", "1f1b", 2)

    def refuse(output: Any, number: int) -> Any:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        pipe.infer(ragged(), collect=refuse)
    assert all(module.training for module in pipe.modules.values())
    with refuses(BatchError, "a list of 0 microbatches"):
        pipe.infer([])
    assert list(pipe.infer(ragged())) == [0, 1, 2, 3]


def test_logits_are_all_of_an_output_or_its_entry_of_that_name() -> None:
    logits = torch.zeros(2, 3)
    assert logits_in(logits) is logits
    assert logits_in(CausalLMOutput(logits=logits, loss=torch.ones(()))) is logits
