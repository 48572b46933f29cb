"""An emulated network, slower than the real one, to try schedules on.

It makes `simulate`'s communication real: a message is available latency + bytes / bandwidth after its
producer's op ended, or when it has really arrived if that is later. Messages do not slow each other down.
The sender's clock travels ahead of the tensors, so all ranks must be on one machine, whose processes share
it, and compute on the CPU, where an op has ended when its call returns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.batch.payload import TensorSpec
from penstock.errors import ConfigError

STAMP = TensorSpec((1,), torch.float64)


@dataclass(frozen=True)
class Network:
    """A slower network. latency: seconds; bandwidth: bytes a second, None: no limit. Raises ConfigError."""

    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.latency < float("inf"):
            rule = "a message takes a time"
            raise ConfigError(f"latency={self.latency}", rule, "Give seconds, 0 or more")
        if self.bandwidth is not None and not self.bandwidth > 0:
            rule = "a network moves some bytes a second"
            raise ConfigError(f"bandwidth={self.bandwidth}", rule, "Give more than 0, or None for no limit")

    def delay(self, nbytes: int) -> float:
        """Seconds that a message of that size travels."""
        return self.latency + (nbytes / self.bandwidth if self.bandwidth is not None else 0.0)

    def stamp(self) -> Tensor:
        """The time now, to send ahead of a message."""
        return torch.tensor([time.perf_counter()], dtype=STAMP.dtype)

    def hold_back(self, stamp: Tensor, nbytes: int) -> None:
        """Wait until a message of `nbytes` that was sent at `stamp` is available."""
        left = float(stamp) + self.delay(nbytes) - time.perf_counter()
        if left > 0:
            time.sleep(left)
