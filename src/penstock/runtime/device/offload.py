"""Activation offloading of one stage: its activations are in host memory between forward and backward.

    forward   saved tensors -> one _SavedStorage for each storage; autograd holds a _Saved for each tensor
    offload   storages that only autograd holds -> host memory, on a stream of their own
    release   the compute stream has waited for the copies: the storages are freed
    reload    new storages, into which copies begin
    restore   the compute stream has waited for them
    backward  each _Saved is a tensor of its new storage, with the strides that it had

The plan decides when each happens (penstock.schedule.offload).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.batch.shapes import Microbatch
from penstock.private import FakeTensor, top_saved_tensors_default_hooks
from penstock.runtime.device.copies import HostLink, host_link
from penstock.runtime.stage_part import Forward, StagePart


class Offload(StagePart):
    """Moves activations of one stage to host memory and back.

    Args:
        device: of the stage.
        least: bytes; smaller storages stay on the device.
        link: None takes that of the device.
    """

    def __init__(self, device: torch.device, least: int, link: HostLink | None = None) -> None:
        self._device, self._least = device, least
        self._link = host_link(device) if link is None else link
        self._recording: _Storages | None = None
        # by microbatch. Weak: autograd alone keeps what it saved
        self._saved: dict[int, _Storages] = {}  # from the forward to `offload`
        self._away: dict[int, _Away] = {}  # from there to `restore`

    @property
    def left_over(self) -> int:
        """Microbatches between forward and backward: none between steps."""
        return len(self._saved) + len(self._away)

    # ---- in the forward

    def before_forward(self, index: int, microbatch: Microbatch, how: Forward) -> None:
        if how.offload:
            self._recording = self._saved[index] = WeakValueDictionary()

    def after_forward(self) -> None:
        self._recording = None

    @property
    def records(self) -> bool:
        """Whether to run a module under `saving`: not inside other hooks, such as those of checkpointing."""
        return (
            self._recording is not None
            and torch.is_grad_enabled()
            and top_saved_tensors_default_hooks(True) is None
        )

    def saving(self) -> saved_tensors_hooks:
        """A context in which the tensors that autograd saves may leave the device."""
        assert self._recording is not None
        storages = self._recording

        def pack(tensor: Tensor) -> _Saved | _Kept:
            if not self._may_leave(tensor):
                kept = tensor.detach()
                return _Kept(kept, kept._version)
            cdata = tensor.untyped_storage()._cdata
            storage = storages.get(cdata)
            if storage is None:
                storage = storages[cdata] = _SavedStorage(tensor)
            form = _Form(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())
            return _Saved(storage, form, _version_counter(tensor), tensor._version)

        return saved_tensors_hooks(pack, _unpack)

    def _may_leave(self, tensor: Tensor) -> bool:
        origin = tensor if tensor._base is None else tensor._base
        return (
            type(tensor) in (Tensor, FakeTensor)  # other subclasses have storages of their own
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and not (isinstance(origin, nn.Parameter) or (origin.is_leaf and origin.requires_grad))
            and tensor.untyped_storage().nbytes() >= self._least
        )

    # ---- between forward and backward

    def leaving(self, index: int, staying: Collection[int]) -> list[_SavedStorage]:
        """The storages that only autograd keeps alive. staying: storages that others keep alive"""
        return [storage for cdata, storage in self._saved[index].items() if cdata not in staying]

    def offload(self, index: int, staying: Collection[int]) -> None:
        """Begin to copy the storages that a forward has saved, all but `staying`, to host memory."""
        storages = self.leaving(index, staying)
        del self._saved[index]
        pinned = self._device.type == "cuda"
        for storage in storages:
            storage.device = _bytes(storage.here)
            storage.host = torch.empty(storage.nbytes, dtype=torch.uint8, pin_memory=pinned)
        copied = self._link.down([s.here for s in storages], [s.host for s in storages])
        self._away[index] = _Away(storages, copied)

    def release(self, index: int) -> int:
        """Free the device's memory. Returns the number of bytes freed."""
        storages, copied = self._away[index]
        self._link.wait(copied)
        for storage in storages:
            storage.device = None
        return sum(storage.nbytes for storage in storages)

    def reload(self, index: int) -> int:
        """Begin to copy back. Returns the number of bytes allocated on the device."""
        storages, _ = self._away[index]
        for storage in storages:
            storage.device = torch.empty(storage.nbytes, dtype=torch.uint8, device=self._device)
        copied = self._link.up([s.host for s in storages], [s.here for s in storages])
        self._away[index] = _Away(storages, copied)
        return sum(storage.nbytes for storage in storages)

    def restore(self, index: int) -> None:
        """Make the compute stream wait until all storages are back."""
        storages, copied = self._away.pop(index)
        self._link.wait(copied)
        for storage in storages:
            storage.host = _NOTHING

    def reset(self) -> None:
        """Forget a failed step. Copies that are under way end first."""
        for away in self._away.values():
            self._link.wait(away.copied)
        self._saved.clear()
        self._away.clear()
        self._recording = None


_NOTHING = torch.empty(0, dtype=torch.uint8)


class _SavedStorage:
    """Where the bytes of one storage are: on the device, in `host` memory, or in both while they are copied.

    It keeps a tensor, not the storage: users of a storage are counted (`is_held_elsewhere`), and Python has
    one object for each.

    device: a tensor on the device with this storage; None while the bytes are in host memory alone
    """

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = tensor.untyped_storage().nbytes()
        self.device: Tensor | None = tensor.detach()
        self.host = _NOTHING

    @property
    def here(self) -> Tensor:
        assert self.device is not None, "a backward runs before its activations are back"
        return self.device


_Storages = WeakValueDictionary[int, _SavedStorage]


class _Away(NamedTuple):
    """Storages of a microbatch in host memory, and the latest copies of them."""

    storages: list[_SavedStorage]
    copied: object


class _Kept(NamedTuple):
    """A saved tensor that stays on its device, with the version that was saved."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        _check(self.tensor, self.version, self.tensor.shape)
        return self.tensor


class _Form(NamedTuple):
    """A tensor's view of its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Saved(NamedTuple):
    """A saved tensor: a part of a storage that may leave the device.

    counter: a tensor that shares its version counter, but none of its memory
    """

    storage: _SavedStorage
    form: _Form
    counter: Tensor
    version: int

    def unpack(self) -> Tensor:
        (dtype, *within), here = self.form, self.storage.here
        _check(self.counter, self.version, self.form.size)
        tensor: Tensor = torch.empty(0, dtype=dtype, device=here.device).set_(here.untyped_storage(), *within)
        return tensor


def _unpack(saved: _Saved | _Kept) -> Tensor:
    return saved.unpack()


def _bytes(tensor: Tensor) -> Tensor:
    """The storage of `tensor` as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _version_counter(tensor: Tensor) -> Tensor:
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the counter stays
    return counter


def _check(tensor: Tensor, version: int, shape: torch.Size) -> None:
    """Raise autograd's error for a modified tensor: autograd itself does not check what hooks have packed."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a saved tensor of {tensor.dtype} and shape {list(shape)} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
