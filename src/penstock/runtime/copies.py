"""Copies between a GPU and pinned host memory, on streams of their own: the GPU computes meanwhile.

A copy runs after the call that asks for it has returned. Until its `Moment` is over, host memory has to live,
what is read must not be written to, and what is written must not be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.runtime.stream import CudaStream, Moment


class Copies(Protocol):
    """Copies to and from one device."""

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> Moment:
        """Copy `tensors` to host memory, once the compute stream has made them."""

    def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Moment]:
        """Copies on the device, for which the compute stream waits."""

    def fill(self, tensor: Tensor, host: Tensor) -> Moment:
        """Copy `host` into `tensor`, which the compute stream may have used before and uses after."""


class CudaCopies:
    """Copies to and from a GPU, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._moments = device, CudaStream(device)
        self._downs, self._ups = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> Moment:
        self._downs.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._downs):
            for tensor, host in zip(tensors, hosts, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._downs)  # freed by then, its memory is kept until the copy is over
            return self._moments.now()

    def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Moment]:
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._ups):  # whose own memory they get: the compute stream is not waited for
            copies = tuple([host.to(self._device, non_blocking=True) for host in hosts])
            moment = self._moments.now()
        computing.wait_stream(self._ups)
        for copy in copies:
            copy.record_stream(computing)
        return copies, moment

    def fill(self, tensor: Tensor, host: Tensor) -> Moment:
        computing = torch.cuda.current_stream(self._device)
        self._ups.wait_stream(computing)
        with torch.cuda.stream(self._ups):
            tensor.copy_(host, non_blocking=True)
            moment = self._moments.now()
        computing.wait_stream(self._ups)
        return moment


def pin(host: Tensor) -> None:
    """Pin host memory that torch has not allocated, such as that of a file, as long as the process lives.

    Where the system refuses, copies are as correct and take longer.
    """
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)  # type: ignore[no-untyped-call]
