"""Values of one process arrive at all others in order, and nobody waits to send them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from penstock import AutoPipeline
from penstock.errors import PeerError
from penstock.runtime.ranks import Ranks
from support.families import tiny_model
from support.pool import Pool

SENT = [[1, 2, 3], [4], list(range(500)), [-5, 2**60]]


def test_in_order(pool: Pool) -> None:
    assert pool.run(3, moved) == [SENT, None, SENT]


def moved() -> list[list[int]] | None:
    """The values that this rank received from rank 1, which sends all before others receive any."""
    pipe = AutoPipeline(ranks=3, microbatches=2, timeout=20.0).build(tiny_model("llama"))
    way = pipe.processes.one_to_all(1)
    if dist.get_rank() == 1:
        for values in SENT:
            way.send(torch.tensor(values))
        pipe.processes.gather("sent")
        way.finish()
        return None
    pipe.processes.gather("sent")
    return [way.receive(len(values)).tolist() for values in SENT]


def test_a_source_that_sends_nothing(pool: Pool) -> None:
    late, source = pool.run(2, waiting)
    assert "the next tokens" in late
    assert source == "nothing"


def waiting() -> str:
    pipe = AutoPipeline(ranks=2, microbatches=2, timeout=2.0, transport="gloo").build(tiny_model("llama"))
    way = pipe.processes.one_to_all(1)
    heard = "nothing"
    if dist.get_rank() == 0:
        with pytest.raises(PeerError) as error:
            way.receive(3)
        heard = str(error.value)
    dist.barrier()  # the source is there for as long as the other waits for it
    return heard


def test_a_process_alone_sends_to_nobody() -> None:
    way = Ranks().one_to_all(0)
    way.send(torch.tensor([1]))
    way.finish()
    with pytest.raises(AssertionError, match="only process"):
        way.receive(1)
