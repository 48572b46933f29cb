"""Microbatches of a pipeline on a mesh: refused by all ranks or by none, and cut along the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import InputError
from penstock.parallel.beside import Beside
from penstock.runtime.microbatch import fingerprint
from penstock.runtime.shapes import Microbatch
from penstock.runtime.step import Collect
from penstock.runtime.world import World
from penstock.steps import Cutter, Given


class MeshCutter(Cutter):
    """Each pipeline has data of its own, and what one of them refuses the others would wait for."""

    beside: Beside

    @classmethod
    def around(cls, cutter: Cutter, beside: Beside) -> MeshCutter:
        made = cls(*cutter[:3], beside.cut)
        made.beside = beside
        return made

    def cut(self, given: Given, count: int, world: World) -> list[Microbatch]:
        """As Cutter has it. Collective over the whole mesh."""
        refusal, microbatches = None, list[Microbatch]()
        try:
            microbatches = super().cut(given, count, world)
            self.beside.prepare(microbatches)
        except InputError as error:
            refusal = error
        world.sums.accepted(count, refusal)
        if world.processes.count == 1:  # else a step asks this with more, once it knows more
            parts = [given] if isinstance(given, Mapping) else given
            world.sums.alike(*fingerprint(parts, count, 0))
        return microbatches

    def joining(self, collect: Collect) -> Collect:
        """Given outputs of whole sequences."""

        def joined(output: Any, number: int) -> Any:
            return collect(self.beside.joined(output, number), number)

        return joined
