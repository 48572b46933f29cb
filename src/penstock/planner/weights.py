"""The bytes of weights, gradients and optimizer's states of a model's parts on one process of a mesh.

They are those of the account of a build plan (pipeline/building/memory.py), of a pipeline with a stage for
the embedding, one for a layer of each kind, and one for the head. Sums of them make any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.models.source import Source
from penstock.models.tracing.chain import Chain
from penstock.parallel.axes import Axes
from penstock.parallel.mesh_plan import ParallelOptions
from penstock.pipeline.building.build_plan import BuildPlan, plan_stages
from penstock.pipeline.building.memory import Account, RankMemory
from penstock.schedule import build, verify


@dataclass(frozen=True)
class PartMemory:
    """Bytes without activations of each part of a model.

    layers: for each layer the index of its kind
    in_one_stage: makes those of all parts in one stage, where a tied weight counts once
    """

    kinds: tuple[RankMemory, ...]
    layers: tuple[int, ...]
    embedding: RankMemory
    head: RankMemory
    in_one_stage: Callable[[], RankMemory]

    @classmethod
    def of(
        cls, source: Source, chain: Chain, layers: Sequence[int], axes: Axes, options: ParallelOptions
    ) -> PartMemory:
        def memory(split: Sequence[range]) -> list[RankMemory]:
            schedule = build("gpipe", ranks=len(split), microbatches=1)
            stages = plan_stages(source.model, chain, schedule, split)
            plan = BuildPlan(schedule, verify(schedule), stages, source, chain)
            return Account(plan, axes, options).ranks()

        firsts = [layers.index(kind) for kind in range(max(layers) + 1)]
        split = [range(0), *(range(first, first + 1) for first in firsts), range(chain.count, chain.count)]
        embedding, *kinds, head = memory(split)
        return cls(tuple(kinds), tuple(layers), embedding, head, lambda: memory([range(chain.count)])[0])

    @cached_property
    def whole(self) -> RankMemory:
        """Of all parts in one stage."""
        return self.in_one_stage()

    def stages(self, split: Sequence[range]) -> list[list[RankMemory]]:
        """The parts of each stage, outside of layers first."""
        last = len(split) - 1
        layers = [[self.kinds[self.layers[layer]] for layer in of_stage] for of_stage in split]
        if not last:
            return [[_sum([self.whole, *map(_minus, layers[0])]), *layers[0]]]
        outside = ([self.embedding] * (at == 0) + [self.head] * (at == last) for at in range(len(split)))
        return [[_sum(ends), *inner] for ends, inner in zip(outside, layers, strict=True)]


def rank_memory(stages: Sequence[Sequence[RankMemory]], reshard: bool, ahead: Sequence[bool]) -> RankMemory:
    """The bytes of a rank that holds `stages`, without activations.

    Args:
        stages: the parts of each: outside of layers first, then its layers
        reshard: whether FSDP gathers weights layer by layer, and frees them
        ahead: for each stage, whether a layer is gathered while another microbatch lives
    """
    total = _sum(part for parts in stages for part in parts)
    if not reshard:
        return total
    throughout, working = 0, [0]
    for parts, lives in zip(stages, ahead, strict=True):
        outside, *layers = (part.gathered_weights for part in parts)
        largest = max(layers, default=0)
        throughout += outside + (largest if lives else 0)
        working.append(max(outside, largest) + largest)
    return total._replace(gathered_weights=throughout + max(working))


def _sum(parts: Iterable[RankMemory]) -> RankMemory:
    rows = [part._replace(activations=0) for part in parts]
    sums = RankMemory(*(sum(column) for column in zip(*rows, strict=True))) if rows else RankMemory(0, 0, 0)
    return sums._replace(activations=None)


def _minus(part: RankMemory) -> RankMemory:
    return RankMemory(*(-(nbytes or 0) for nbytes in part))
