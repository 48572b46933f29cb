"""The footprints of forwards: when one is measured."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from penstock import AutoPipeline
from penstock.runtime import step_memory
from penstock.runtime.device import memory
from support.families import tiny_model
from support.ragged import tokens


@pytest.mark.parametrize(("lengths", "measured"), [([9, 9, 9, 9], 1), ([9, 5, 9, 5], 3)])
def test_a_forward_is_measured_until_its_shape_is_known(lengths: list[int], measured: int) -> None:
    """On CPUs that takes twice as long as the forward. What a first one allocates for all does not count."""
    pipe = AutoPipeline(ranks=2, microbatches=4, shapes="inferred").build(tiny_model("llama"))
    batch = [{"input_ids": tokens(2, n, n), "labels": tokens(2, n, n)} for n in lengths]
    with patch.object(step_memory, "measuring", wraps=memory.measuring) as measuring:
        pipe.step(batch)
        assert measuring.call_count == measured * len(pipe.stages)
        pipe.step(batch)
        assert measuring.call_count == measured * len(pipe.stages)
