"""Ranks of one host: what they exchange through shared memory, and when they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock import Axes
from penstock.runtime.shared_memory import processes as shared_processes
from penstock.runtime.shared_memory import segment as shared
from penstock.runtime.shared_memory.messages import SharedMessages
from penstock.runtime.transport.channels import Channels
from penstock.runtime.transport.distributed import DistributedTransport
from support import jobs_channels as jobs
from support.families import tiny_model
from support.mesh import batch, build_whole, own_part, worst_gradient
from support.pool import Pool
from support.reference import plain_step


# _world, _everyone: values between ranks, without a step
def gathered(rounds: int, slot: int) -> list[list[list[float]]]:
    """Vectors of all lengths, each of a rank and a round.

    slot: the most bytes of one that go through shared memory
    """
    pipe = jobs.pipeline()
    transport = pipe._world.transport
    assert isinstance(transport, DistributedTransport)
    everyone = transport.ranks.patient  # without the number of a call, in front of each vector
    assert isinstance(transport.messages, SharedMessages)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_processes, "SLOT", slot)
        for number in range(rounds):
            # what goes over gloo is as long on all ranks
            length = (7 * number + (3 * transport.rank if slot == shared.SLOT else 0)) % 11
            mine = torch.full((length,), 10.0 * number + transport.rank, dtype=torch.float64)
            found.append([each.tolist() for each in everyone.all_gather(mine)])
    pipe.close()
    return found


def test_everyone_gets_every_vector(pool: Pool) -> None:
    first, *others = pool.run(4, gathered, 200, shared.SLOT)
    assert all(other == first for other in others)
    for number, vectors in enumerate(first):
        for rank, vector in enumerate(vectors):
            assert vector == [10.0 * number + rank] * ((7 * number + 3 * rank) % 11)


# _HEAD: a slot that is just too small is in bytes
def test_what_has_no_room_goes_over_gloo(pool: Pool) -> None:
    first, *others = pool.run(2, gathered, 20, shared_processes._HEAD + 5 * 8)
    assert others == [first]
    assert [len(vectors[1]) for vectors in first] == [7 * number % 11 for number in range(20)]


# _world: which transport a pipeline took
def messages_of(options: Mapping[str, Any]) -> str:
    """After two steps with the loss and the gradients of one process."""
    model, whole = tiny_model("llama", torch.float64, layers=2), batch()
    loss, expected = plain_step(model, whole)
    pipe = build_whole(model, 2, **{"axes": None, **options})
    for _ in range(2):
        pipe.zero_grad()
        assert pipe.step(own_part(whole, *pipe.batch_part)).loss == pytest.approx(loss, rel=1e-10)
        assert worst_gradient(pipe, expected)[0] < 1e-10
    messages = pipe._world.transport.messages
    assert pipe.summary().endswith(f"\nmessages between ranks: {messages.carried_by}")
    pipe.close()
    return type(messages).__name__


# _create stands for a system without shared memory
def without_segments(*ranks: int, **options: Any) -> str:
    """As if the hosts of these ranks had none."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in ranks:
            patch.setattr(shared, "_create", lambda token: -1)
        return messages_of(options)


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, SharedMessages), ({"transport": "gloo"}, Channels), ({"exchange": "batched"}, SharedMessages)],
)
def test_shared_memory_is_taken_where_all_ranks_have_it(
    pool: Pool, options: Mapping[str, Any], name: type[object]
) -> None:
    assert set(pool.run(2, messages_of, options)) == {name.__name__}


def test_gloo_is_taken_by_all_ranks_where_one_has_no_shared_memory(pool: Pool) -> None:
    assert pool.run(2, without_segments, 1) == ["Channels"] * 2


def one_pipeline_without() -> list[str]:
    """Of a mesh with two pipelines, {0, 2} and {1, 3}, one has no shared memory."""
    return [without_segments(3, axes=Axes(dp_shard=2)) for _ in range(2)]


@pytest.mark.sweep
def test_pipelines_of_a_mesh_choose_each_for_itself(pool: Pool) -> None:
    """They hung in making the mesh's next group: those with gloo had made one more."""
    taken = pool.run(4, one_pipeline_without)
    assert taken == [["SharedMessages"] * 2, ["Channels"] * 2] * 2
