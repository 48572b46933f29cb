"""Microbatches of a pipeline on a mesh: cut along the sequence, and put together again."""

from __future__ import annotations

from typing import Any

from penstock.cutter import Cutter, Given
from penstock.parallel.beside import Beside
from penstock.runtime.shapes import Microbatch
from penstock.runtime.step import Collect
from penstock.runtime.world import World


class MeshCutter(Cutter):
    """Prepares each rank's part of every microbatch as well."""

    beside: Beside

    @classmethod
    def around(cls, cutter: Cutter, beside: Beside) -> MeshCutter:
        made = cls(*cutter[:3], beside.cut)
        made.beside = beside
        return made

    def cut(self, given: Given, count: int, world: World) -> list[Microbatch]:
        """As Cutter has it."""
        microbatches = super().cut(given, count, world)
        self.beside.prepare(microbatches)
        return microbatches

    def joining(self, collect: Collect) -> Collect:
        """Given outputs of whole sequences."""

        def joined(output: Any, number: int) -> Any:
            return collect(self.beside.joined(output, number), number)

        return joined
