"""The memory that the ops of one rank take and free, over one step.

The executor calls it before and after each op. It measures the first forwards of each shape, and uses their
sizes for later ones. Facts about a shape are looked up once a step for all of its microbatches: with short
ops every Python call costs time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.batch.microbatches import StepInput
from penstock.batch.payload import Payload
from penstock.runtime.device.footprints import Footprint, ForwardKey, footprint
from penstock.runtime.device.memory import Ledger, Measured, MeasuredOnGPU, measuring
from penstock.runtime.plan import Compute, Plan
from penstock.runtime.stage import Stage
from penstock.runtime.transport.interface import Messages
from penstock.schedule import Op

_PLAIN = nullcontext()


class StepMemory:
    """Counts the bytes and the live activations of one rank.

    Args:
        stages: of the rank, by index.
        messages: of the transport, for the bytes of its buffers.

    Attributes:
        ledger: the bytes in the current step, or in the last one.
        peak_live: the most live activations in that step.
    """

    def __init__(
        self, plan: Plan, stages: Mapping[int, Stage], device: torch.device, messages: Messages
    ) -> None:
        self._stages, self._device, self._messages = stages, device, messages
        self._proven, self._repeated = plan.peak_live, _repeated(plan)
        self._caches = [cache for stage in stages.values() for cache in (stage.live, stage.deferred)]
        self.begin_step()

    def begin_step(self) -> None:
        self.ledger, self.peak_live = Ledger(), 0
        self._autocast = torch.is_autocast_enabled(self._device.type)
        # the footprint of the current forward, or the context that measures it
        self._footprint: Footprint | None = None
        self._measured: Measured | MeasuredOnGPU | None = None
        # by shape within this step
        self._known: dict[object, Footprint] = {}
        self._for_weight: dict[object, int] = {}

    @property
    def live(self) -> int:
        """The number of live activations."""
        return sum(map(len, self._caches))

    # ---- forward

    def forward(self, compute: Compute, step: StepInput) -> AbstractContextManager[object]:
        """A context for a forward, which measures it if its footprint is unknown.

        A stage's first forward in a step also allocates what later ones reuse: workspaces of cuBLAS, casts
        that torch keeps, tables that a module makes once. So its footprint is provisional: the next forward
        of that shape is measured too, and replaces it. Where that forward is the next one, the first is not
        measured at all, as on CPUs measuring takes twice as long as the forward.
        """
        index = compute.op.stage
        step_key = index, step.shapes[compute.op.microbatch], compute.how
        self._footprint, self._measured = self._known.get(step_key), None
        if self._footprint is not None:
            return _PLAIN
        stage = self._stages[index]
        entry = stage.footprints.find(self._key(compute, step))
        if entry is not None and not entry.provisional:
            self._footprint = self._known[step_key] = entry.footprint
            return _PLAIN
        is_first = entry is None and not self.ledger.has_run(index)
        if is_first and index in self._repeated and len(set(step.shapes)) == 1:
            return _PLAIN
        self._measured = measuring(self._device, lambda: stage.shared_storages)
        return self._measured

    def after_forward(
        self, compute: Compute, received: Payload | None, result: Payload | None, step: StepInput
    ) -> Payload | None:
        """Count the forward that has run. Returns `result` with the bytes that are kept only to be sent."""
        known = self._measure(compute, result, step) if self._footprint is None else self._footprint
        ledger = self.ledger
        if received is not None:
            ledger.take(received)
        ledger.forward(compute.op, known, 0 if result is None else result.specs.nbytes)
        live = self.live
        if live > self.peak_live:
            assert live <= self._proven, f"{live} live activations, {self._proven} proven"
            self.peak_live = live
        ledger.sample(self._messages.buffer_bytes + known.output)
        return None if result is None else Payload(result.tensors, result.specs, known.output)

    def _measure(self, compute: Compute, result: Payload | None, step: StepInput) -> Footprint:
        """The footprint of the forward that has run; keeps it for later ones."""
        index, _, number = compute.op
        stage, key = self._stages[index], self._key(compute, step)
        nbytes = None if self._measured is None else self._measured.own_bytes
        outputs = () if result is None else result.tensors
        measured = footprint(nbytes, stage.live[number].inputs, outputs)
        before = stage.footprints.find(key)
        provisional = before is None and not self.ledger.has_run(index)
        if before is not None:
            self.ledger.correct(before.footprint, measured)
        stage.footprints.add(key, measured, provisional)
        return measured

    def _key(self, compute: Compute, step: StepInput) -> ForwardKey:
        stage, _, number = compute.op
        training = self._stages[stage].module.training
        how = compute.how
        return ForwardKey(step.keys[number], how.split, how.recompute, training, self._autocast)

    # ---- backward

    def before_backward(self) -> None:
        """Count the gradients of the stage's outputs next to its activation."""
        self.ledger.sample(self._messages.buffer_bytes)

    def after_backward(self, op: Op, received: Payload | None, result: Payload, step: StepInput) -> None:
        """Count a B or an I that has run."""
        ledger = self.ledger
        if received is not None:
            ledger.take(received)
        ledger.backward(op, self._deferred_bytes(op, step))
        ledger.sample(self._messages.buffer_bytes + result.specs.nbytes)

    def _deferred_bytes(self, op: Op, step: StepInput) -> int:
        """The bytes that the I `op` keeps for W, measured at the step's first I of its shape."""
        deferred = self._stages[op.stage].deferred.get(op.microbatch)
        if deferred is None:
            return 0
        key = op.stage, step.shapes[op.microbatch]
        if key not in self._for_weight:
            self._for_weight[key] = deferred.nbytes
        return self._for_weight[key]


def _repeated(plan: Plan) -> frozenset[int]:
    """The stages whose first two forwards have one footprint, if their microbatches have one shape."""
    forwards: dict[int, list[tuple[bool, bool]]] = {}  # split, recompute
    for action in plan.actions:
        if isinstance(action, Compute) and action.op.kind == "F":
            forwards.setdefault(action.op.stage, []).append(action.how[:2])
    return frozenset(stage for stage, kinds in forwards.items() if len(kinds) > 1 and kinds[0] == kinds[1])
