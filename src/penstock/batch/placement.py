"""The tensors of a microbatch on the host, where values are read, and on a device, which computes with them.

A host that reads a value on a GPU waits until the GPU has run all that is queued. So a batch is checked,
split, padded and counted on the host. A GPU then gets copies of the microbatches, each with a reference to
the microbatch on the host. Tensors can be sent ahead, while the previous step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from penstock.batch.shapes import Microbatch
from penstock.private import tree_leaves, tree_map_only

# storage of a tensor that was sent ahead -> its copy, and the tensor's version when it was sent. Microbatches
# are new tensors, which share nothing but the storage with the tensor that was sent
_sent: WeakKeyDictionary[UntypedStorage, tuple[Tensor, int]] = WeakKeyDictionary()


class OnDevice(dict[str, Any]):
    """A copy of the microbatch `host` on a GPU."""

    def __init__(self, entries: Microbatch, host: Microbatch) -> None:
        super().__init__(entries)
        self.host = host


def placed(microbatches: Sequence[Microbatch], device: torch.device) -> Sequence[Microbatch]:
    """Copies on `device`, without waiting for it; on the CPU the microbatches themselves."""
    if device.type == "cpu":
        return microbatches
    copies: dict[int, Tensor] = {}  # several microbatches may have one tensor

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            sent = sent_ahead(tensor, device)
            copies[id(tensor)] = to_device(tensor, device) if sent is None else sent
        return copies[id(tensor)]

    def copy(value: Any) -> Any:
        own = getattr(value, "to_device", None)  # an entry that the pipeline added
        return tree_map_only(Tensor, moved, value) if own is None else own(device)

    return [OnDevice({name: copy(value) for name, value in host.items()}, host) for host in microbatches]


def host_values(microbatch: Microbatch) -> Microbatch:
    """The microbatch whose values can be read without waiting: the host's if `microbatch` is a copy."""
    return microbatch.host if isinstance(microbatch, OnDevice) else microbatch


Up = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], object]]


def send_ahead(batch: Any, up: Up) -> None:
    """Begin to copy the tensors of `batch`, in pinned memory, to a GPU that may run a step meanwhile.

    The copies live as long as the batch. Microbatches that are views of it get views of them.

    Args:
        up: copies tensors to the GPU on a stream of its own, as CudaCopies.up does
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and _fills_its_memory(leaf)]
    made, _ = up(tensors)
    for host, copy in zip(tensors, made, strict=True):
        _sent[host.untyped_storage()] = copy, host._version


def sent_ahead(tensor: Tensor, device: torch.device) -> Tensor | None:
    """The copy of `tensor` sent ahead to `device`; None without one, or if `tensor` has changed since."""
    if not _sent:  # a user's tensor may have no storage, such as a sparse one
        return None
    copy, version = _sent.get(tensor.untyped_storage(), (None, 0))
    if copy is None or copy.dtype != tensor.dtype or version != tensor._version or tensor.requires_grad:
        return None
    if copy.device.type != device.type or device.index not in (None, copy.device.index):
        return None
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _fills_its_memory(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the host goes on, and a GPU copies when its stream comes to it.

    From memory that is not pinned the driver may wait for the stream first.
    """
    if device.type != "cuda" or not tensor.is_cpu or tensor.requires_grad:
        return tensor.to(device, non_blocking=device.type == "cuda")
    return tensor.pin_memory().to(device, non_blocking=True)
