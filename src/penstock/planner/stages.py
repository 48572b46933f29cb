"""The stages of a candidate: what F, I and W of each take, by roofline and collectives, and what they hold.

F = ops of its parts + collectives of tp, cp and ep in between
I = the same of its input gradients; with the forwards that recomputation runs again
W = ops of its weight gradients
B = I and W; but for the first microbatch autograd adds each gradient by an op of its own

Collectives of an axis that a run hides beside ops (practice.py) count as far as they are longer than these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

from penstock.models.activation_offloading import Offloading
from penstock.models.split.balanced_split import LayerCosts
from penstock.planner.communication import Group
from penstock.planner.hardware import Cluster, Device
from penstock.planner.practice import AXES, Axis
from penstock.planner.roofline import seconds
from penstock.planner.tracing import Measurement
from penstock.planner.traffic import Collective, Traffic, collective_seconds
from penstock.planner.work import ModelWork, OpKind, PartBytes, PartWork

T = TypeVar("T")
_BESIDE: Mapping[Axis, tuple[OpKind, ...]] = {
    "tp": ("matmul",),
    "cp": ("attention",),
    "ep": ("matmul", "attention", "other"),
}


class PartSeconds(NamedTuple):
    """Seconds of one microbatch on a part, collectives included.

    whole_grad: of W in a whole backward, which adds to the gradients of an earlier one
    recomputed: what I takes longer where the layer runs again
    within: the collectives among them, by axis: of a forward, an input gradient, a recomputed forward
    """

    forward: float
    input_grad: float
    weight_grad: float
    whole_grad: float
    recomputed: float
    within: tuple[dict[Axis, float], dict[Axis, float], dict[Axis, float]]

    @classmethod
    def of(
        cls,
        work: PartWork,
        collectives: Sequence[Collective],
        groups: Mapping[str, Group],
        cluster: Cluster,
        overlapped: Sequence[Axis] = (),
    ) -> PartSeconds:
        """overlapped: axes whose collectives run beside ops"""
        device = cluster.device
        forward, backward = (
            collective_seconds(collectives, groups, cluster, backward=backward) for backward in (False, True)
        )
        for axis in overlapped:
            share = _exposed(forward.get(axis, 0.0) + backward.get(axis, 0.0), work, axis, device)
            for spent in (forward, backward):
                if axis in spent:
                    spent[axis] *= share
        again = forward if work.recomputed else {}
        return cls(
            seconds(work.forward, device) + sum(forward.values()),
            seconds(work.input_grad, device) + sum(backward.values()),
            seconds(work.weight_grad, device),
            seconds(work.whole_grad, device),
            seconds(work.recomputed, device) + sum(again.values()),
            (forward, backward, again),
        )

    def total(self, recomputed: bool) -> float:
        """Of F, I and W."""
        return self.forward + self.input_grad + self.weight_grad + (self.recomputed if recomputed else 0.0)


def _exposed(collectives: float, work: PartWork, axis: Axis, device: Device) -> float:
    """The share of a part's collectives in F, I and W that the ops they run beside do not hide."""
    ops = (op for ops in (work.forward, work.input_grad, work.weight_grad) for op in ops)
    beside = seconds((op for op in ops if op.kind in _BESIDE[axis]), device)
    return max(0.0, 1 - beside / collectives) if collectives else 0.0


@dataclass(frozen=True)
class Parts:
    """The parts of a model: their work on one process, and how long it takes. shared: as in `nbytes`"""

    work: ModelWork
    shared: int
    kinds: tuple[PartSeconds, ...]
    embedding: PartSeconds
    head: PartSeconds

    @classmethod
    def of(
        cls,
        measured: Measurement,
        sent: Traffic,
        groups: Mapping[str, Group],
        cluster: Cluster,
        overlapped: Sequence[Axis] = (),
    ) -> Parts:
        """overlapped: as in `PartSeconds.of`"""

        def timed(part: PartWork, collectives: Sequence[Collective]) -> PartSeconds:
            return PartSeconds.of(part, collectives, groups, cluster, overlapped)

        work, shared = measured
        return cls(
            work,
            shared,
            tuple(map(timed, work.kinds, sent.kinds)),
            timed(work.embedding, sent.embedding),
            timed(work.head, sent.head),
        )

    def layer_costs(self, recomputed: bool) -> LayerCosts:
        """Seconds of a step's share of each part, for a balanced split."""
        kinds = [part.total(recomputed) for part in self.kinds]
        ends = self.embedding.total(recomputed), self.head.total(recomputed)
        return LayerCosts([kinds[kind] for kind in self.work.layers], *ends)

    def whole(self, recomputed: bool) -> float:
        """Seconds of a microbatch on all parts."""
        costs = self.layer_costs(recomputed)
        return sum(costs.layers) + costs.embedding + costs.head

    def stages(self, split: Sequence[range]) -> list[StageParts]:
        """The first holds the embedding and the last the head, whatever layers they hold."""
        last = len(split) - 1
        return [
            StageParts(
                tuple(self._parts(self.work.embedding, self.work.kinds, self.work.head, layers, at, last)),
                tuple(self._parts(self.embedding, self.kinds, self.head, layers, at, last)),
                slice(int(at == 0), int(at == 0) + len(layers)),
            )
            for at, layers in enumerate(split)
        ]

    def _parts(
        self, embedding: T, kinds: Sequence[T], head: T, layers: range, stage: int, last: int
    ) -> list[T]:
        inner = [kinds[self.work.layers[layer]] for layer in layers]
        return [*([embedding] if stage == 0 else []), *inner, *([head] if stage == last else [])]


@dataclass(frozen=True)
class StageParts:
    """The parts of one stage, in the order of a forward. inner: which of them are layers"""

    works: tuple[PartWork, ...]
    times: tuple[PartSeconds, ...]
    inner: slice

    @property
    def layers(self) -> tuple[PartSeconds, ...]:
        return self.times[self.inner]

    @cached_property
    def forward(self) -> float:
        return sum(part.forward for part in self.times)

    @cached_property
    def input_grad(self) -> float:
        return sum(part.input_grad for part in self.times)

    @cached_property
    def weight_grad(self) -> float:
        return sum(part.weight_grad for part in self.times)

    def grad_of(self, splits: bool, microbatches: int) -> float:
        """Of W, or of what it does within a whole backward: a mean over the microbatches of a step."""
        if splits:
            return self.weight_grad
        added = sum(part.whole_grad for part in self.times) - self.weight_grad
        return self.weight_grad + added * (microbatches - 1) / microbatches

    @cached_property
    def recomputed(self) -> float:
        return sum(part.recomputed for part in self.times)

    def within(self, again: float) -> dict[Axis, float]:
        """Collectives of one microbatch by axis. again: the share of microbatches that are recomputed"""
        spent = dict.fromkeys(AXES, 0.0)
        for part in self.times:
            for share, taken in zip((1.0, 1.0, again), part.within, strict=True):
                for axis, time in taken.items():
                    spent[axis] += share * time
        return {axis: time for axis, time in spent.items() if time}

    def nbytes(
        self, recomputed: bool, split: bool, shared: int = 0, offloading: Offloading | None = None
    ) -> PartBytes:
        """Bytes of one microbatch on the stage.

        A part's forward peak comes on top of what the parts before it keep. In a backward that is split the
        parts behind it keep what they hold for W.

        shared: bytes that all layers of a stage read, such as the angles of rotary positions; they stay
        offloading: where layers are offloaded, and backwards are whole
        """
        parts = [work.nbytes for work in self.works]
        if offloading is not None:
            parts = [_as_offloaded(part, recomputed, offloading) for part in parts]
        if recomputed:
            parts = list(map(_as_recomputed, parts))
        kept = [*accumulate((part.activation for part in parts), initial=0)]
        deferred = (part.for_weight if split else 0 for part in reversed(parts))
        for_weight = [*accumulate(deferred, initial=0)][::-1]
        shared = shared if self.layers else 0
        forward = [before + part.forward_peak for before, part in zip(kept, parts, strict=False)]
        backward = [
            before + part.backward_peak + behind
            for before, part, behind in zip(kept, parts, for_weight[1:], strict=False)
        ]
        return PartBytes(
            kept[-1] + shared,
            for_weight[0],
            max(forward, default=0) + shared,
            max(backward, default=0) + shared,
            kept[-1] + shared,
            max(backward, default=0) + shared,
            parts[-1].sent if parts else 0,
            self._offloaded(parts),
        )

    def _offloaded(self, parts: Sequence[PartBytes]) -> int:
        """Of all layers; the stage's input stays."""
        layers = parts[self.inner]
        entering = layers[0].offloaded_input if layers and not self.inner.start else 0
        return sum(part.offloaded for part in layers) - entering


def _as_offloaded(part: PartBytes, recomputed: bool, offloading: Offloading) -> PartBytes:
    """A layer that runs again saves its input alone, which is as large as its result."""
    if not recomputed:
        return part._replace(backward_peak=max(part.backward_peak, part.offloaded_backward_peak))
    nbytes = part.sent if part.sent >= offloading.min_bytes else 0
    return part._replace(offloaded=nbytes, offloaded_input=nbytes)


def _as_recomputed(part: PartBytes) -> PartBytes:
    """A layer that runs again: its forward holds no more than its backward, in which it runs as if kept."""
    return part._replace(
        activation=part.recomputed_activation,
        forward_peak=min(part.forward_peak, part.recomputed_backward_peak),
        backward_peak=part.recomputed_backward_peak,
    )
