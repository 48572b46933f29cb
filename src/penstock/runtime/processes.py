"""The processes that one pipeline runs in: one a rank, or a single one that holds all ranks."""

from __future__ import annotations

from typing import Any, Protocol


class Processes(Protocol):
    """What code above the executor needs of the other processes."""

    @property
    def index(self) -> int:
        """This process, from 0. Process 0 writes what is written once."""

    @property
    def count(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (JSON must hold it), in order, on every process. All must call it."""


class OneProcess:
    """All ranks live in this process."""

    index = 0
    count = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]
