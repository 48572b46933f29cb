"""Where the tensors of a microbatch are: looked at on the host, computed with on a device.

A host that looks at a value on a GPU waits until the GPU has run all that is queued. So a batch is checked,
split, padded and counted on the host. A GPU then gets copies of the microbatches, each of which knows what it
is a copy of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from penstock.batch.shapes import Microbatch


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
            copies[id(tensor)] = to_device(tensor, device)
        return copies[id(tensor)]

    def copy(value: Any) -> Any:
        own = getattr(value, "to_device", None)  # an entry that the pipeline added
        return tree_map_only(Tensor, moved, value) if own is None else own(device)

    return [OnDevice({name: copy(value) for name, value in each.items()}, each) for each in microbatches]


def host_values(microbatch: Microbatch) -> Microbatch:
    """The microbatch whose values can be read without waiting: what `microbatch` is a copy of, or itself."""
    return microbatch.host if isinstance(microbatch, OnDevice) else microbatch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the host goes on, and a GPU copies when its stream comes to it.

    From memory that is not pinned the driver may wait for the stream first.
    """
    if device.type != "cuda" or not tensor.is_cpu or tensor.requires_grad:
        return tensor.to(device, non_blocking=device.type == "cuda")
    return tensor.pin_memory().to(device, non_blocking=True)
