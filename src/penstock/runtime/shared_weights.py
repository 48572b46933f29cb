"""Weights that several stages hold a copy of: an embedding tied to the head, or a second copy of the model.

The copies start alike. After each step every copy gets the sum of all their gradients, so they stay
alike under any optimizer. In the norm and in a checkpoint the first copy counts for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.runtime.sharded_weights import own
from penstock.runtime.transport.groups import Processes
from penstock.runtime.transport.interface import Transport
from penstock.schedule import Placement


@dataclass(frozen=True)
class SharedWeights:
    """Weights whose copies stand on the same ranks, and are summed together.

    ranks: those that hold copies, in order
    copies: of each weight, those of this process by where they are, such as "lm_head.weight of stage 1", in
        order of stage
    """

    ranks: tuple[int, ...]
    copies: tuple[Mapping[str, nn.Parameter], ...]


def place(name: str, stage: int) -> str:
    """Where a copy is, in words."""
    return f"{name} of stage {stage}"


def of_replicas(
    placement: Placement, modules: Mapping[int, nn.Module], leave_out: frozenset[str] = frozenset()
) -> Iterator[SharedWeights]:
    """What the copies of each stage share, where the placement has more than one.

    modules: this process's, by stage; leave_out: names of parameters that are shared otherwise
    """
    for first in range(placement.depth if placement.replicas > 1 else 0):
        stages = range(first, placement.stages, placement.depth)
        held = {stage: dict(modules[stage].named_parameters()) for stage in stages if stage in modules}
        names = [name for name in next(iter(held.values()), {}) if name not in leave_out]
        ranks = sorted({placement.rank_of[stage] for stage in stages})
        copies = [{place(name, stage): part[name] for stage, part in held.items()} for name in names]
        yield SharedWeights(tuple(ranks), tuple(copies))


class SharedGradients:
    """Adds up the gradients of shared weights over one step."""

    def __init__(self, shared: Sequence[SharedWeights], transport: Transport, processes: Processes) -> None:
        """Collective. Raises ModelError, on every rank, where some copies of a weight are frozen."""
        for group in shared:
            transport.share(group.ranks)
        self._shared = shared
        self._held = [
            (group.ranks, [tuple(copies.values()) for copies in group.copies])
            for group in shared
            if group.copies
        ]
        self._transport, self._processes = transport, processes
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []
        self._compared: list[bool] = []
        if shared:
            self.compare()

    def compare(self) -> None:
        """Raise ModelError, on every rank, where some copies of a weight are frozen. Collective.

        To be called where any rank has `changed`: one that skipped a sum would leave the others waiting.
        """
        told = self._processes.gather(
            [
                [{where: copy.requires_grad for where, copy in copies.items()} for copies in group.copies]
                for group in self._shared
            ]
        )
        for of_group in zip(*told, strict=True):
            for of_weight in zip(*filter(None, of_group), strict=True):  # from each process that has copies
                _refuse_some_frozen(dict(item for of_one in of_weight for item in of_one.items()))
        self._compared = self._trained()

    @property
    def changed(self) -> bool:
        """Whether a copy on this process was frozen or unfrozen since all were compared."""
        return self._trained() != self._compared

    def _trained(self) -> list[bool]:
        return [copy.requires_grad for copy in self._copies()]

    def _copies(self) -> Iterator[nn.Parameter]:
        return (copy for _, weights in self._held for copies in weights for copy in copies)

    @torch.no_grad()
    def make_alike(self, owned: Sequence[nn.Parameter]) -> None:
        """Give every copy the values of the first one; `owned` are those of this process. Collective."""
        first = set(map(id, owned))
        for copy in self._copies():
            if id(copy) not in first:
                copy.zero_()
        for ranks, weights in self._held:
            values = [[own(copy.data) for copy in copies] for copies in weights]
            self._transport.sum_shared(ranks, values)

    def begin_step(self) -> None:
        """Lay aside what earlier steps accumulated: it is summed already."""
        self._before = [(copy, copy.grad) for copy in self._copies() if copy.requires_grad]
        for copy, _ in self._before:
            copy.grad = None

    def restore(self) -> None:
        """After a step that failed: what earlier steps accumulated is there again."""
        for copy, before in self._before:
            copy.grad = before
        self._before = []

    @torch.no_grad()
    def end_step(self) -> None:
        for ranks, weights in self._held:
            self._sum([copies for copies in weights if copies[0].requires_grad], ranks)
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


def _refuse_some_frozen(trained: Mapping[str, bool]) -> None:
    """trained: of each copy of one weight, by where it is"""
    if len(set(trained.values())) == 1:
        return
    frozen = [where for where in trained if not trained[where]]
    others = [where for where in trained if trained[where]]
    raise ModelError(
        f"{', '.join(frozen)} frozen, and {', '.join(others)} not",
        "they are copies of one weight, which would go apart",
        "Freeze every copy, on whatever rank its stage is, or none",
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
