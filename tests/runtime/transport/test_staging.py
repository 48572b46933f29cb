"""Staging: host memory that a device reads or writes is used again when that is over, and not before.

Instead of a GPU there is a stream on paper, and "meta" as the device: what is copied there holds no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import pytest
import torch
from torch import Tensor

from penstock.batch.payload import TensorSpec
from penstock.runtime.transport.buffers import Pool, Staging

SPEC = TensorSpec((4,), torch.float32)


class Point:
    """A point in a stream that the device has yet to come to."""

    queued = 0.0

    def __init__(self) -> None:
        self.reached = Event()

    def synchronize(self) -> None:
        assert self.reached.wait(20), "the stream never came there"

    def query(self) -> bool:
        return self.reached.is_set()

    def elapsed_time(self, end: object) -> float:
        raise AssertionError("nobody times a copy")


class Stream:
    """Copies on paper, which end when `run` is called; with `ahead` at once."""

    def __init__(self, ahead: bool = False) -> None:
        self.moments: list[Point] = []
        self._ahead = ahead

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor], *, made: bool = False) -> Point:
        for tensor, host in zip(tensors, hosts, strict=True):
            host.copy_(tensor)
        return self._queued()

    def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Point]:
        return tuple([host.to("meta") for host in hosts]), self._queued()

    def fill(self, tensor: Tensor, host: Tensor) -> Point:
        raise AssertionError("nothing is read from files")

    def _queued(self) -> Point:
        self.moments.append(Point())
        if self._ahead:
            self.run()
        return self.moments[-1]

    def run(self) -> None:
        for moment in self.moments:
            moment.reached.set()


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def pool() -> Pool:
    return Pool(torch.device("cpu"))


@pytest.fixture
def staging(stream: Stream, pool: Pool) -> Staging:
    return Staging(pool, stream)


def address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def test_what_goes_down_is_a_copy_with_shape_and_dtype(staging: Staging) -> None:
    given = [torch.arange(6.0).view(2, 3).requires_grad_(), torch.arange(3), torch.ones(2).bfloat16()]
    copies, _ = staging.down(given)
    for copy, tensor in zip(copies, given, strict=True):
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.shape, copy.is_contiguous()) == (tensor.dtype, tensor.shape, True)
        assert address(copy) != address(tensor)
        assert not copy.requires_grad


def test_host_memory_is_not_used_again_while_the_device_reads_it(
    staging: Staging, stream: Stream, pool: Pool
) -> None:
    received = pool.take(SPEC)
    where = address(received)
    (made,) = staging.up([received])
    assert made.device.type == "meta"
    del received
    assert address(pool.take(SPEC)) != where
    stream.run()
    staging.up([])  # takes note of what the stream has done
    assert address(pool.take(SPEC)) == where


def test_settle_waits_for_the_device_and_frees_all_host_memory(
    staging: Staging, stream: Stream, pool: Pool
) -> None:
    staging.up([pool.take(SPEC), pool.take(SPEC)])
    assert pool.idle_bytes == 0
    waited: list[bool] = []
    stream.moments[0].synchronize = lambda: waited.append(True)  # type: ignore[method-assign]
    staging.settle()
    assert waited
    assert pool.idle_bytes == pool.nbytes == 2 * 64
