"""The bytes that a rank holds during a step: activations, buffers, and what waits for W.

A forward is measured where its footprint is not known; later ones add the known sizes, which costs a few
additions a step. Weights, their casts under autocast, gradients, and temporary tensors of an op are not
counted.
"""

from __future__ import annotations

import resource
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from penstock.batch.payload import Payload
from penstock.private import TorchDispatchMode, tree_leaves
from penstock.runtime.device.footprints import Footprint
from penstock.schedule import Op

StageMicrobatch = tuple[int, int]  # stage and microbatch
Storages = Callable[[], Iterable[UntypedStorage]]

_BLOCK = 512  # bytes, to which the allocator of a GPU rounds
_GLOO_FREES = 0.005  # seconds after which no thread of gloo keeps a collective's tensors


class Held(NamedTuple):
    """Bytes in memory on one rank at one time.

    activations: of the live microbatches; buffers: received, posted or being sent; deferred: kept for W
    """

    activations: int = 0
    buffers: int = 0
    deferred: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class MicrobatchBytes(NamedTuple):
    """Bytes of one microbatch on one stage, in the terms of penstock.schedule.Costs."""

    activation: int
    sent: int
    buffer: int
    held_for_weight: int
    offloaded: int = 0


class PeakMemory(NamedTuple):
    """The most bytes that a process has held.

    allocated: by tensors on its GPU; reserved: by torch there. Both since torch.cuda.reset_peak_memory_stats,
        and 0 without a GPU
    resident: in host memory, since the process began
    """

    allocated: int = 0
    reserved: int = 0
    resident: int = 0

    @classmethod
    def now(cls, device: torch.device) -> PeakMemory:
        """The peaks up to now; does not wait for the GPU."""
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device.type != "cuda":
            return cls(resident=resident)
        known = torch.cuda.memory_stats_as_nested_dict(device)
        allocated, reserved = (known[f"{kind}_bytes"]["all"]["peak"] for kind in ("allocated", "reserved"))
        return cls(allocated, reserved, resident)


class Ledger:
    """The bytes that a rank holds over one step, and their peak."""

    def __init__(self) -> None:
        self.peak = Held()
        self.peak_deferred = 0
        self._activations = self._deferred = self._most = 0
        self._received = 0  # not yet taken by an op
        self._forwards: dict[StageMicrobatch, tuple[Footprint, int]] = {}
        self._live: dict[StageMicrobatch, int] = {}  # bytes of activations, from forward to backward
        self._for_weight: dict[StageMicrobatch, int] = {}
        self._offloaded: dict[StageMicrobatch, int] = {}

    def sample(self, buffers: int) -> None:
        total = self._activations + self._deferred + self._received + buffers
        if total > self._most:
            self._most = total
            self.peak = Held(self._activations, buffers + self._received, self._deferred)

    def receive(self, payload: Payload) -> None:
        self._received += payload.specs.nbytes

    def take(self, payload: Payload) -> None:
        """Count a received payload no longer: an op has used it, or keeps it as a part of its activation."""
        self._received -= payload.specs.nbytes

    def forward(self, op: Op, footprint: Footprint, result: int) -> None:
        """Count a forward. result: bytes for another stage"""
        key = op.stage, op.microbatch
        self._forwards[key] = footprint, result
        self._live[key] = footprint.activation
        self._activations += footprint.activation

    def has_run(self, stage: int) -> bool:
        """Whether the stage has run a forward in this step."""
        return any(key[0] == stage for key in self._forwards)

    def correct(self, wrong: Footprint, right: Footprint) -> None:
        """Count the forwards of this step that were counted as `wrong` as `right`."""
        for key, (footprint, result) in self._forwards.items():
            if footprint is wrong:
                self._forwards[key] = right, result
                if key in self._live:
                    self._live[key] += right.activation - wrong.activation
                    self._activations += right.activation - wrong.activation

    def release(self, key: StageMicrobatch, nbytes: int) -> None:
        """Count `nbytes` of an activation as moved to host memory."""
        self._offloaded[key] = nbytes
        self._live[key] -= nbytes
        self._activations -= nbytes

    def reload(self, key: StageMicrobatch, nbytes: int) -> None:
        """Count them as on the device again, where the copy back begins."""
        self._live[key] += nbytes
        self._activations += nbytes

    def backward(self, op: Op, deferred: int) -> None:
        """Count a backward. deferred: bytes still held for W"""
        key = op.stage, op.microbatch
        self._activations -= self._live.pop(key)
        if deferred:
            self._for_weight[key] = deferred
            self._deferred += deferred
            self.peak_deferred = max(self.peak_deferred, self._deferred)

    def weight_backward(self, op: Op) -> None:
        self._deferred -= self._for_weight.get((op.stage, op.microbatch), 0)

    @property
    def sizes(self) -> dict[StageMicrobatch, MicrobatchBytes]:
        """The bytes that each microbatch held on each stage."""
        return {
            key: MicrobatchBytes(
                footprint.activation,
                footprint.output,
                result,
                self._for_weight.get(key, 0),
                self._offloaded.get(key, 0),
            )
            for key, (footprint, result) in self._forwards.items()
        }


class Measured(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made under it and still alive.

    own_bytes: those at the end, without the memory that `others` returns then; peak: the most at one time

    The mode must keep no tensor alive. It does not ask autograd what was saved, because activation
    checkpointing keeps its inputs elsewhere.
    """

    supports_higher_order_operators = True  # as torch.cond; the tensors that they return are counted

    def __init__(self, others: Storages = tuple) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.own_bytes = self.peak = 0
        self._others = others
        mode = weakref.ref(self)

        def forget(reference: Any) -> None:
            if (alive := mode()) is not None:
                alive.nbytes -= alive._known.pop(reference.key)[0]

        self._forget = forget
        # address of a live storage -> its bytes, and a weak reference that removes the entry
        self._known: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}
        self._communicated = False

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._communicated:
            time.sleep(_GLOO_FREES)
        self.own_bytes = self.nbytes - sum(
            self._known[s._cdata][0] for s in self._others() if s._cdata in self._known
        )
        self._others = tuple

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch.compile gives up on whatever first runs under the mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._communicated |= getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        before = [_address(leaf) for leaf in _tensors((*args, *kwargs.values()) if kwargs else args)]
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else _tensors(result):
            storage = leaf.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in before:
                self._note(storage)
        return result

    def _note(self, storage: UntypedStorage) -> None:
        nbytes = storage.nbytes()
        reference = weakref.KeyedRef(storage, self._forget, storage._cdata)
        self._known[storage._cdata] = nbytes, reference
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)


class MeasuredOnGPU(AbstractContextManager["MeasuredOnGPU"]):
    """The same, from the allocator's own count."""

    def __init__(self, device: torch.device, others: Storages) -> None:
        self._device, self._others = device, others
        self._before = 0

    def __enter__(self) -> MeasuredOnGPU:
        self._before = self._now
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @property
    def own_bytes(self) -> int:
        return self._now - self._before

    @property
    def _now(self) -> int:
        others = sum(-(-storage.nbytes() // _BLOCK) * _BLOCK for storage in self._others())
        return torch.cuda.memory_allocated(self._device) - others


def measuring(device: torch.device, others: Storages) -> Measured | MeasuredOnGPU:
    """Measure a forward: its `own_bytes` are the bytes that it leaves behind. The result is not changed.

    others: memory that a forward may leave but that is no activation, such as gathered weights
    """
    return MeasuredOnGPU(device, others) if device.type == "cuda" else Measured(others)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors that an op takes or returns: mostly a flat sequence, for which a pytree is slow."""
    tensors = []
    for leaf in value if isinstance(value, tuple | list) else tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif not (leaf is None or isinstance(leaf, int | float)):
            tensors += [inner for inner in tree_leaves(leaf) if isinstance(inner, Tensor)]
    return tensors


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
