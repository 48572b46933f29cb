"""Which part of a tensor a rank's shard is: as torch divides it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from penstock.runtime.sharded_weights import own_part, shard_like
from support.pool import Pool

SHAPES = [(8, 6), (5, 3), (1, 7), (3, 4, 2), (2,)]  # of most of which some ranks have less, or nothing


def compared() -> list[str]:
    """What differs from torch's own shards, over placements on a mesh of two dimensions."""
    mesh, wrong = init_device_mesh("cpu", (2, 2)), []
    kinds: list[Placement] = [Shard(0), Shard(1), Replicate()]
    strided = [(_StridedShard(0, split_factor=2), Shard(0))]  # as tp and then dp_shard divide rows
    for shape, placements in itertools.product(SHAPES, [*itertools.product(kinds, repeat=2), *strided]):
        if any(each.dim >= len(shape) for each in placements if isinstance(each, Shard)):
            continue
        value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        expected = distribute_tensor(value, mesh, placements, src_data_rank=None)
        found = shard_like(value, torch.empty_like(expected))
        same = torch.equal(found.to_local(), expected.to_local())  # type: ignore[attr-defined]
        if not same or found.shape != expected.shape or found.placements != expected.placements:  # type: ignore[attr-defined]
            wrong.append(f"{shape} {placements}")
        own = own_part(expected)
        if (own is None) != ((placements,) == (strided[0],)):
            wrong.append(f"{shape} {placements}: {own}")
        if own is not None and not torch.equal(value[own], expected.to_local()):
            wrong.append(f"{shape} {placements}: {own}")
        if shard_like(expected, torch.empty_like(expected)) is not expected:
            wrong.append(f"{shape} {placements}: a shard is not returned as it is")
    return wrong


@pytest.mark.timeout(60)
def test_a_shard_is_the_part_that_torch_gives_the_rank(pool: Pool) -> None:
    assert pool.run(4, compared) == [[]] * 4
