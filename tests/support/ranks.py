"""Ranks without process groups."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.ranks import Ranks


class GatheringRanks(Ranks):
    """Ranks that exchange all they exchange by `gather`, which a test writes."""

    def all_gather(self, mine: Tensor, waits_for: str = "") -> list[Tensor]:
        return [torch.tensor(theirs, dtype=mine.dtype) for theirs in self.gather(mine.tolist())]


class Threads(GatheringRanks):
    """Processes that are threads: enough to try what is collective."""

    def __init__(self, index: int, count: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.index, self.count, self._barrier, self._slots = index, count, barrier, slots

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.index] = json.loads(json.dumps(value))  # as between real processes
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values


def on_threads(count: int, work: Callable[[Ranks], None]) -> list[BaseException | None]:
    """Run `work` on `count` processes; what each raised."""
    barrier, slots = threading.Barrier(count, timeout=10), [None] * count
    raised: list[BaseException | None] = [None] * count

    def run(index: int) -> None:
        try:
            work(Threads(index, count, barrier, slots))
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
