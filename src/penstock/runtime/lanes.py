"""How a channel is addressed, and messages each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.reaper import Work


class Lane(NamedTuple):
    """A channel's way: in `group`, from rank `source` of it to rank `target`, under `tag`."""

    group: dist.ProcessGroup
    source: int
    target: int
    tag: int


class Carrier(Protocol):
    """Sends and receives tensors over lanes; on each lane they pair up in the order in which they are given.

    Raises RuntimeError where a connection is gone.
    """

    def send(self, lane: Lane, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """What to wait for until they are gone."""

    def receive(self, lane: Lane, buffers: Sequence[Tensor]) -> Sequence[Work]:
        """What to wait for until they are here."""

    def start(self, in_line: bool) -> None:
        """Begin what was given since the last call, at the latest. in_line: it may wait until that is over"""


class OneByOne:
    """Each tensor is on its way as soon as it is given."""

    def send(self, lane: Lane, tensors: Sequence[Tensor]) -> list[Work]:
        return [lane.group.send([tensor], lane.target, lane.tag) for tensor in tensors]

    def receive(self, lane: Lane, buffers: Sequence[Tensor]) -> list[Work]:
        return [lane.group.recv([buffer], lane.source, lane.tag) for buffer in buffers]

    def start(self, in_line: bool) -> None:
        """Nothing to do: all have begun."""
