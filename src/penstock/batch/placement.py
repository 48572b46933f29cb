"""The tensors of a microbatch on the host, where values are read, and on a device, which computes with them.

A host that reads a value on a GPU waits until the GPU has run all that is queued. So a batch is checked,
split, padded and counted on the host. A GPU then gets copies of the microbatches, each with a reference to
the microbatch on the host. Tensors can be sent ahead, while the previous step runs.
"""

from __future__ import annotations

from collections import defaultdict
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
    moved = _Copies(microbatches, device).of

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):  # most are, and a look for a tree in each takes longer than an op
            return moved(value)
        own = getattr(value, "to_device", None)  # an entry that the pipeline added
        return tree_map_only(Tensor, moved, value) if own is None else own(device)

    return [OnDevice({name: copy(value) for name, value in host.items()}, host) for host in microbatches]


class _Copies:
    """Copies on a device of the tensors of microbatches, each made once.

    Tensors that fill a storage together, such as the rows of a batch, get views of one copy: a copy of each
    takes the host as long as an op of a narrow layer.
    """

    def __init__(self, microbatches: Sequence[Microbatch], device: torch.device) -> None:
        self._device = device
        self._of_tensor: dict[int, Tensor] = {}  # by id
        self._of_storage: dict[tuple[int, torch.dtype], Tensor] = {}  # by address
        views = defaultdict[tuple[int, torch.dtype], list[Tensor]](list)
        tensors = {id(leaf): leaf for leaf in tree_leaves(list(map(dict, microbatches))) if _is_plain(leaf)}
        for tensor in tensors.values():
            views[_storage_of(tensor)].append(tensor)
        for key, parts in views.items():
            nbytes = parts[0].untyped_storage().nbytes()
            if len(parts) > 1 and sum(part.nbytes for part in parts) >= nbytes:
                whole = parts[0].as_strided([nbytes // parts[0].itemsize], [1], 0)
                self._of_storage[key] = self._copy(whole)

    def of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._of_tensor:
            whole = self._of_storage.get(_storage_of(tensor)) if _is_plain(tensor) else None
            self._of_tensor[id(tensor)] = self._copy(tensor) if whole is None else _same_view(whole, tensor)
        return self._of_tensor[id(tensor)]

    def _copy(self, tensor: Tensor) -> Tensor:
        sent = sent_ahead(tensor, self._device)
        return to_device(tensor, self._device) if sent is None else sent


def _is_plain(leaf: object) -> bool:
    """Whether it is a tensor that copies of its bytes stand for."""
    return type(leaf) is Tensor and leaf.is_cpu and leaf.layout == torch.strided and not leaf.requires_grad


def _storage_of(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _same_view(copy: Tensor, tensor: Tensor) -> Tensor:
    """The view of `copy`, of a whole storage, that `tensor` is of its own."""
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


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
    return _same_view(copy, tensor)


def _fills_its_memory(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the host goes on, and a GPU copies when its stream comes to it.

    From memory that is not pinned the driver may wait for the stream first.
    """
    if device.type != "cuda" or not tensor.is_cpu or tensor.requires_grad:
        return tensor.to(device, non_blocking=device.type == "cuda")
    return tensor.pin_memory().to(device, non_blocking=True)
