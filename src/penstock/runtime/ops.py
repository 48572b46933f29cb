"""The ops of one rank: each runs its stage, and counts the memory that it holds or frees.

With short ops every Python call costs time. So the plan's `Compute` holds all that is known before the first
step, and facts about a shape are looked up once a step for all of its microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.batch.head_logits import whole
from penstock.batch.loss import Loss, total_of
from penstock.batch.microbatches import StepInput
from penstock.batch.payload import SINGLE, EdgeSpecs, Payload, flatten
from penstock.batch.shapes import EdgeShapes, check
from penstock.private import foreach_div
from penstock.runtime.device.footprints import Footprint, ForwardKey, footprint
from penstock.runtime.device.memory import Ledger, measuring
from penstock.runtime.plan import Compute, Plan
from penstock.runtime.stage import Stage
from penstock.runtime.transport.interface import Messages
from penstock.schedule import Op
from penstock.schedule.offload import HostCopy
from penstock.schedule.order import Message

_PLAIN = nullcontext()

# returns the payload for another stage
RunOp = Callable[[Compute, Payload | None, StepInput], Payload | None]


class Ops:
    """The ops of one rank's plan. Between steps no stage holds a live activation.

    Args:
        edges: what crosses each edge; None where each message carries its own specs.
        messages: those of the transport, for the bytes that it holds.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        edges: EdgeShapes | None,
        loss: Loss,
        device: torch.device,
        messages: Messages,
    ) -> None:
        self._plan, self._stages, self._edges, self._loss = plan, stages, edges, loss
        self._device, self._messages = device, messages
        self._repeated = _repeated(plan)
        self._held = [held for stage in stages.values() for held in (stage.live, stage.deferred)]
        self.begin_step()

    @property
    def by_kind(self) -> Mapping[str, RunOp]:
        if not self._plan.peak_live:  # no backward will come: hold nothing
            return {"F": self.infer}
        return {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weight_backward}

    def begin_step(self) -> None:
        self.totals: list[Tensor] = []  # loss of each microbatch, on the last stage's rank
        self.loss_shares: list[Tensor] = []  # the totals over the step's weight, once the step has ended
        self.results: dict[int, Any] = {}  # what `collect` returned, by microbatch
        self.ledger, self.peak_live = Ledger(), 0
        self._seed: Tensor | None = None  # the gradient of the loss itself, 1 / weight
        self._autocast = torch.is_autocast_enabled(self._device.type)
        # by shape within this step
        self._known: dict[object, Footprint] = {}
        self._for_weight: dict[object, int] = {}
        self._expected: dict[tuple[int, str, int], EdgeSpecs] = {}

    def end_step(self, step: StepInput) -> None:
        for stage in self._stages.values():
            stage.end_step()
        if self._autocast:
            torch.clear_autocast_cache()  # weights are about to change, and the region may go on
        if self.totals:
            self.loss_shares = list(foreach_div(self.totals, step.weight))
            self.totals = []

    # ---- forward

    def forward(self, compute: Compute, received: Payload | None, step: StepInput) -> Payload | None:
        known = self.footprint(compute, step)
        expected = None if compute.sends is None else self.specs(compute.sends, step)
        if known is None:
            known, result = self._measured(compute, received, expected, step)
        else:
            result = self._forward(compute, received, expected, step)
        ledger = self.ledger
        if received is not None:
            ledger.take(received)
        ledger.forward(compute.op, known, 0 if result is None else result.specs.nbytes)
        live = self.held
        if live > self.peak_live:
            assert live <= self._plan.peak_live, f"{live} live activations, {self._plan.peak_live} proven"
            self.peak_live = live
        ledger.sample(self._messages.buffer_bytes + known.output)
        return None if result is None else Payload(result.tensors, result.specs, known.output)

    def _forward(
        self, compute: Compute, received: Payload | None, expected: EdgeSpecs | None, step: StepInput
    ) -> Payload | None:
        (index, _, number), split, recompute = compute.op, compute.split, compute.recompute
        stage, microbatch = self._stages[index], step.microbatches[number]
        offload = compute.offload and stage.offload
        with offload.forward(number) if offload else _PLAIN:
            if not compute.is_last:
                return stage.forward(number, received, microbatch, expected, split, recompute)
            total = stage.forward_loss(number, received, microbatch, self._loss, split, recompute)
        self.totals.append(total)
        return None

    def footprint(self, compute: Compute, step: StepInput) -> Footprint | None:
        """The footprint of this microbatch's forward; None where it has to be measured."""
        step_key = compute.op.stage, step.shapes[compute.op.microbatch], compute.split, compute.recompute
        known = self._known.get(step_key)
        if known is None:
            entry = self._stages[compute.op.stage].footprints.find(self._key(compute, step))
            if entry is not None and not entry.provisional:
                known = self._known[step_key] = entry.footprint
        return known

    def _key(self, compute: Compute, step: StepInput) -> ForwardKey:
        stage, _, number = compute.op
        training = self._stages[stage].module.training
        return ForwardKey(step.keys[number], compute.split, compute.recompute, training, self._autocast)

    def _measured(
        self, compute: Compute, received: Payload | None, expected: EdgeSpecs | None, step: StepInput
    ) -> tuple[Footprint, Payload | None]:
        """Run a forward and measure its footprint.

        A stage's first forward in a step also allocates what later ones reuse: workspaces of cuBLAS, casts
        that torch keeps, tables that a module makes once. So its footprint is provisional: the next forward
        of that shape is measured too, and replaces it. Where that one comes next, the first is not measured
        at all: on CPUs that takes twice as long as the forward.
        """
        stage, key = compute.op.stage, self._key(compute, step)
        footprints = self._stages[stage].footprints
        before = footprints.find(key)
        provisional = before is None and not self.ledger.has_run(stage)
        if provisional and stage in self._repeated and len(set(step.shapes)) == 1:
            result = self._forward(compute, received, expected, step)
            new_footprint = self._footprint(compute, result)
        else:
            with measuring(self._device, lambda: self._stages[stage].shared_storages) as measured:
                result = self._forward(compute, received, expected, step)
            new_footprint = self._footprint(compute, result, measured.own_bytes)
        if before is not None:
            self.ledger.correct(before.footprint, new_footprint)
        footprints.add(key, new_footprint, provisional)
        return new_footprint, result

    def _footprint(self, compute: Compute, result: Payload | None, nbytes: int | None = None) -> Footprint:
        """The footprint of the forward that has just run. nbytes: what it left in memory, as measured"""
        stage, _, number = compute.op
        outputs = () if result is None else result.tensors
        return footprint(nbytes, self._stages[stage].live[number].inputs, outputs)

    def infer(self, compute: Compute, received: Payload | None, step: StepInput) -> Payload | None:
        """A forward that holds nothing."""
        stage, _, number = compute.op
        output = self._stages[stage].infer(received, step.microbatches[number])
        if received is not None:
            self.ledger.take(received)
        if not compute.is_last:
            return self._checked(compute, *flatten(output), step)
        with torch.no_grad():
            if step.collect is not None:
                self.results[number] = step.collect(whole(output), number)
            else:
                self.totals.append(total_of(self._loss, output, step.microbatches[number], number))
        return None

    # ---- backward

    def backward(self, compute: Compute, received: Payload | None, step: StepInput) -> Payload:
        """The gradients of the stage's inputs; none on the first stage."""
        stage, kind, number = compute.op
        of_stage = self._stages[stage]
        run = of_stage.input_backward if kind == "I" else of_stage.backward
        inputs = run(number, self._output_gradients(received, step))
        ledger = self.ledger
        if received is not None:
            ledger.take(received)
        ledger.backward(compute.op, self._deferred_bytes(compute.op, step))
        result = self._checked(compute, inputs, SINGLE, step)
        ledger.sample(self._messages.buffer_bytes + result.specs.nbytes)
        return result

    def _output_gradients(self, received: Payload | None, step: StepInput) -> tuple[Tensor, ...]:
        """The gradients of the stage's outputs: those received, or on the last stage that of its loss."""
        self.ledger.sample(self._messages.buffer_bytes)  # the gradients are here, and the activation still is
        if received is not None:
            return received.tensors
        if self._seed is None:
            self._seed = torch.full_like(self.totals[0], 1 / step.weight)
        return (self._seed,)

    def _deferred_bytes(self, op: Op, step: StepInput) -> int:
        """The bytes that the I `op` has left for W: as many as that of the step's first I of its shape."""
        deferred = self._stages[op.stage].deferred.get(op.microbatch)
        if deferred is None:
            return 0
        key = op.stage, step.shapes[op.microbatch]
        if key not in self._for_weight:
            self._for_weight[key] = deferred.nbytes
        return self._for_weight[key]

    def weight_backward(self, compute: Compute, received: Payload | None, step: StepInput) -> None:
        self._stages[compute.op.stage].weight_backward(compute.op.microbatch)
        self.ledger.weight_backward(compute.op)

    # ---- host memory

    def host_copy(self, copy: HostCopy, step: StepInput) -> None:
        """A step of the copies of a microbatch's activations to host memory and back."""
        stage, number = self._stages[copy.stage], copy.microbatch
        offload, ledger, place = stage.offload, self.ledger, (copy.stage, number)
        if offload is None:
            return
        match copy.step:
            case "offload":
                offload.offload(number, stage.staying(number, step.microbatches[number]))
            case "release":
                ledger.release(place, offload.release(number))
            case "reload":
                ledger.reload(place, offload.reload(number))
            case "restore":
                offload.restore(number)

    # ---- edges

    def specs(self, message: Message, step: StepInput) -> EdgeSpecs | None:
        """The specs of the message; looked up once a step for all microbatches of one shape."""
        if self._edges is None:
            return None
        stage, kind, number = message.op
        key = stage, kind, step.shapes[number]
        if (known := self._expected.get(key)) is not None:
            return known
        source = min(stage, message.target) % self._plan.schedule.placement.depth
        edge = self._edges(source, step.microbatches[number])
        self._expected[key] = edge if kind == "F" else edge.gradients
        return self._expected[key]

    def _checked(self, compute: Compute, tensors: tuple[Tensor, ...], form: Any, step: StepInput) -> Payload:
        expected = None if compute.sends is None else self.specs(compute.sends, step)
        if expected is None:
            return Payload(tensors, EdgeSpecs.of(tensors, form))
        check(compute.op, tensors, form, expected)
        return Payload(tensors, expected)

    @property
    def held(self) -> int:
        """Live activations."""
        return sum(map(len, self._held))

    def reset(self) -> None:
        """Forget a failed step."""
        self.totals, self.results = [], {}
        for stage in self._stages.values():
            stage.reset()


def _repeated(plan: Plan) -> frozenset[int]:
    """The stages whose first two forwards hold the same, if their microbatches have one shape."""
    forwards: dict[int, list[tuple[bool, bool]]] = {}
    for action in plan.actions:
        if isinstance(action, Compute) and action.op.kind == "F":
            forwards.setdefault(action.op.stage, []).append((action.split, action.recompute))
    return frozenset(stage for stage, kinds in forwards.items() if len(kinds) > 1 and kinds[0] == kinds[1])
