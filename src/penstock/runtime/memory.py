"""What a rank holds during a step, in bytes: activations, buffers, and what waits for W.

What a forward leaves behind is measured where a shape is seen for the first time, and counted from then on,
so that a step pays a few additions for it. Weights, gradients and what one op needs while it runs are not in
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.batch.payload import Payload
from penstock.schedule import Op

Place = tuple[int, int]  # stage and microbatch


class Footprint(NamedTuple):
    """What one microbatch's forward on one stage leaves behind.

    activation: bytes held until its backward: what came in, and all that autograd saved
    output: bytes of what goes to the next stage that are held for nothing but to be sent
    draws: whether it drew random numbers
    """

    activation: int
    output: int
    draws: bool = False


class Held(NamedTuple):
    """Bytes on one rank at one time.

    activations: of the live microbatches; buffers: received, posted or being sent; deferred: for W
    """

    activations: int = 0
    buffers: int = 0
    deferred: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Sizes(NamedTuple):
    """Of one microbatch on one stage, in bytes, as penstock.schedule.Costs has them."""

    activation: int
    sent: int
    buffer: int
    held_for_weight: int


class Ledger:
    """The sums over one step, and the most they came to."""

    def __init__(self) -> None:
        self.peak = Held()
        self.most_deferred = 0
        self._activations = self._deferred = self._most = 0
        self._received = 0  # not yet taken over by an op
        self._forwards: dict[Place, tuple[Footprint, int]] = {}
        self._for_weight: dict[Place, int] = {}

    def sample(self, buffers: int) -> None:
        total = self._activations + self._deferred + self._received + buffers
        if total > self._most:
            self._most = total
            self.peak = Held(self._activations, buffers + self._received, self._deferred)

    def receive(self, payload: Payload) -> None:
        self._received += payload.specs.nbytes

    def take(self, payload: Payload) -> None:
        """An op has used what was received up, or made it part of an activation."""
        self._received -= payload.specs.nbytes

    def forward(self, op: Op, left: Footprint, result: int) -> None:
        """result: bytes that another stage is given"""
        self._forwards[op.stage, op.microbatch] = left, result
        self._activations += left.activation

    def backward(self, op: Op, deferred: int) -> None:
        """deferred: bytes that are held on for W"""
        place = op.stage, op.microbatch
        self._activations -= self._forwards[place][0].activation
        if deferred:
            self._for_weight[place] = deferred
            self._deferred += deferred
            self.most_deferred = max(self.most_deferred, self._deferred)

    def weight_backward(self, op: Op) -> None:
        self._deferred -= self._for_weight.get((op.stage, op.microbatch), 0)

    @property
    def sizes(self) -> dict[Place, Sizes]:
        """What each microbatch held on each stage."""
        return {
            place: Sizes(left.activation, left.output, result, self._for_weight.get(place, 0))
            for place, (left, result) in self._forwards.items()
        }


class Measured(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made under it and are still there.

    What autograd saves cannot be asked of autograd: activation checkpointing holds what it needs elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._known: dict[int, int] = {}  # by address, for as long as the storage lives

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or torch.compile would give up on whatever first runs under this."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _address(leaf) not in before:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._known:
            self._known[address] = storage.nbytes()
            self.nbytes += storage.nbytes()
            weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self.nbytes -= self._known.pop(address)


class MeasuredOnGPU(AbstractContextManager["MeasuredOnGPU"]):
    """The same, as the allocator knows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> MeasuredOnGPU:
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before


def measuring(device: torch.device) -> Measured | MeasuredOnGPU:
    """Under this a forward gives what it would give without, and its `nbytes` tell what it left behind."""
    return MeasuredOnGPU(device) if device.type == "cuda" else Measured()


def footprint(left: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Footprint:
    """left: bytes that the forward left behind, its outputs among them; inputs: what it received"""
    loose = sum([output.nbytes for output in outputs if not is_held_elsewhere(output)])
    received = sum([tensor.untyped_storage().nbytes() for tensor in inputs])
    return Footprint(left - loose + received, loose)


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether anything but `tensor` itself keeps its memory, such as the graph that made it."""
    storage = tensor.untyped_storage()  # counts as well
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
