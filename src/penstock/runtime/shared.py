"""Weights that several stages hold a copy of: an embedding tied to the head, or a second copy of the model.

The copies start alike. After each step every copy gets the sum of all their gradients, so they stay
alike under any optimizer. In the norm and in a checkpoint the first copy counts for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.runtime.spread import own
from penstock.runtime.transport import Transport
from penstock.schedule import Placement


@dataclass(frozen=True)
class SharedWeights:
    """Weights whose copies stand on the same ranks, and are summed together.

    ranks: those that hold copies, in order; copies: of each weight, those of this process, in order of stage
    """

    ranks: tuple[int, ...]
    copies: tuple[tuple[nn.Parameter, ...], ...]


def of_replicas(
    placement: Placement, modules: Mapping[int, nn.Module], leave_out: frozenset[str] = frozenset()
) -> Iterator[SharedWeights]:
    """What the copies of each stage share, where the placement has more than one.

    modules: this process's, by stage; leave_out: names of parameters that are shared otherwise
    """
    for first in range(placement.depth if placement.replicas > 1 else 0):
        stages = range(first, placement.stages, placement.depth)
        held = [dict(modules[stage].named_parameters()) for stage in stages if stage in modules]
        names = [name for name in (held[0] if held else ()) if name not in leave_out]
        ranks = sorted({placement.rank_of[stage] for stage in stages})
        yield SharedWeights(tuple(ranks), tuple(tuple(part[name] for part in held) for name in names))


class SharedGradients:
    """Adds up the gradients of shared weights over one step."""

    def __init__(self, shared: Sequence[SharedWeights], transport: Transport) -> None:
        for group in shared:
            transport.share(group.ranks)
        self._held = [group for group in shared if group.copies]
        self._transport = transport
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []

    @torch.no_grad()
    def make_alike(self, owned: Sequence[nn.Parameter]) -> None:
        """Give every copy the values of the first one; `owned` are those of this process. Collective."""
        first = set(map(id, owned))
        for group in self._held:
            for copies in group.copies:
                for copy in copies:
                    if id(copy) not in first:
                        copy.zero_()
            values = [[own(copy.data) for copy in copies] for copies in group.copies]
            self._transport.sum_shared(group.ranks, values)

    def begin_step(self) -> None:
        """Lay aside what earlier steps accumulated: it is summed already."""
        self._before = [
            (copy, copy.grad)
            for group in self._held
            for copies in group.copies
            for copy in copies
            if copy.requires_grad
        ]
        for copy, _ in self._before:
            copy.grad = None

    def restore(self) -> None:
        """After a step that failed: what earlier steps accumulated is there again."""
        for copy, before in self._before:
            copy.grad = before
        self._before = []

    @torch.no_grad()
    def end_step(self) -> None:
        for group in self._held:
            self._sum([copies for copies in group.copies if copies[0].requires_grad], group.ranks)
        for copy, before in self._before:
            if before is not None:
                copy.grad = before if copy.grad is None else copy.grad.add_(before)
        self._before = []

    def _sum(self, weights: list[tuple[nn.Parameter, ...]], ranks: tuple[int, ...]) -> None:
        """A weight that no copy's stage used has no gradient, as in a plain process."""
        if not weights:
            return
        used = torch.tensor([sum(copy.grad is not None for copy in copies) for copies in weights],
                            dtype=torch.float32, device=weights[0][0].device)  # fmt: skip
        # copies are spread alike, so that the parts of this rank and its peers belong together
        gradients = [[own(_gradient(copy)) for copy in copies] for copies in weights]
        self._transport.sum_shared(ranks, [*gradients, [used]])
        for copies, count in zip(weights, used.tolist(), strict=True):
            for copy in copies if count == 0 else ():
                copy.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
