"""The executor: it follows a plan, one action after the other, and decides nothing.

Everything that could go wrong with the order was ruled out when the schedule was proven and lowered.
What is left here is to give each action its effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.loss import Loss
from penstock.runtime.lower import Compute, Exchange, Free, Hand, Message, Plan, Post, Reduce, Send, Wait
from penstock.runtime.memory import Footprint, Ledger, footprint, measuring
from penstock.runtime.pairs import Actions, Begin, End, Pairing
from penstock.runtime.parcel import SINGLE, EdgeSpecs, Parcel, gradient_specs, take_apart
from penstock.runtime.partner import Draws
from penstock.runtime.progress import Progress
from penstock.runtime.recorder import Recorder
from penstock.runtime.shapes import EdgeShapes, check
from penstock.runtime.stage import Stage
from penstock.runtime.step import Collect as Collect
from penstock.runtime.step import StepInput as StepInput
from penstock.runtime.together import run_together as run_together
from penstock.runtime.transport import Transport, of_their_own
from penstock.schedule import Op

_UNMEASURED = nullcontext()
_REMEMBERED = 4096  # shapes whose footprints are known


@dataclass
class Executor:
    """Runs one rank's plan. `inbox`, `outbox` and the stages' live activations are empty between steps.

    edges: None where each message tells itself what it is
    """

    plan: Plan
    stages: Mapping[int, Stage]
    edges: EdgeShapes | None
    loss: Loss
    transport: Transport
    recorder: Recorder
    inbox: dict[Op, Parcel] = field(default_factory=dict)  # by the op that made it
    outbox: dict[Op, Parcel] = field(default_factory=dict)
    totals: list[Tensor] = field(default_factory=list)  # loss of each microbatch, on the last stage's rank
    shares: list[Tensor] = field(default_factory=list)  # those of the step's loss, once it has ended
    results: dict[int, Any] = field(default_factory=dict)  # what `collect` returned, by microbatch
    seed: Tensor | None = None  # the loss's own gradient, 1 / weight
    peak_live: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    current: Op | None = None
    pairing: Pairing | None = None  # of a step whose pairs run side by side
    expected: dict[tuple[int, int, str], EdgeSpecs] = field(default_factory=dict)  # of one step, see _specs
    footprints: dict[object, Footprint] = field(default_factory=dict)  # of all that were ever seen

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        return self.plan.schedule.split

    def run(self, step: StepInput) -> Iterator[Message]:
        """One step. Yields the message that another rank of this process must send first."""
        if self.pairing is None and self.transport.overlap and self.plan.schedule.overlaps:
            self.pairing = Pairing(self)
        try:
            yield from self._run(self.plan.actions if self.pairing is None else self.pairing.actions, step)
        except BaseException as error:
            if self.pairing is not None:
                self.pairing.join()
            if self.current is not None and isinstance(error, RuntimeError):
                typed = self.transport.broke_off(self.current, error)
                if typed is not error:
                    raise typed from error
            raise

    def _run(self, actions: Actions, step: StepInput) -> Iterator[Message]:
        self.recorder.begin_step()
        self.totals, self.shares, self.results, self.seed, self.expected = [], [], {}, None, {}
        self.peak_live, self.ledger = 0, Ledger()
        told = self.edges is None
        for action in actions:
            match action:
                case Compute(op, takes, gives):
                    result = self.compute(op, takes, step)
                    if gives:
                        assert result is not None
                        self.outbox[op] = result
                    del result  # what nobody takes goes now
                case Post(message):
                    self.transport.post(message, self._specs(message, step))
                case Wait(message):
                    began = self.recorder.now()
                    while (parcel := self.transport.receive(message)) is None:
                        yield message
                    self.recorder.waited(message.op, began, self.recorder.now())
                    self.ledger.receive(parcel)
                    self.inbox[message.op] = parcel
                    del parcel  # or the last message would live on here while this rank waits
                case Hand(message):
                    given = self.outbox.pop(message.op)
                    tensors = of_their_own(given.tensors, given.specs)
                    self.inbox[message.op] = Parcel(tensors, given.specs)
                    del tensors
                    self.ledger.receive(given)
                    del given
                case Send(message):
                    self.transport.send(message, self.outbox.pop(message.op), told)
                case Exchange(_, in_line):
                    self.transport.start(in_line)
                case Free(message):
                    self.transport.free(message)
                case Reduce(index):
                    self.stages[index].reduce()
                case Begin(Compute(op, takes, _), forward):
                    assert self.pairing is not None
                    self.pairing.begin(op, takes, forward, step)
                case End(Compute(op, takes, gives)):
                    assert self.pairing is not None
                    result = self.pairing.end(op, takes, step)
                    if gives:
                        self.outbox[op] = result
                    del result
        if self.totals:
            self.shares = list(torch._foreach_div(self.totals, step.weight))
            self.totals = []

    def compute(self, op: Op, takes: Op | None, step: StepInput) -> Parcel | None:
        """Its result for another stage."""
        self.current = op
        received = None if takes is None else self.inbox.pop(takes)
        start = self.recorder.now()
        match op.kind:
            case "F":
                result = self._forward(op, received, step)
            case "W":
                self.stages[op.stage].weight_backward(op.microbatch)
                self.ledger.weight_backward(op.stage, op.microbatch)
                result = None
            case _:
                result = self._backward(op, received, step)
        self.recorder.add(op, takes, start, self.recorder.now())
        self.current = None
        return result

    def _forward(self, op: Op, received: Parcel | None, step: StepInput) -> Parcel | None:
        """What goes to the next stage."""
        if not self.plan.peak_live:  # no backward will come: hold nothing
            return self._infer(op, received, step)
        number, microbatch = op.microbatch, step.microbatches[op.microbatch]
        stage, place = self.stages[op.stage], (op.stage, op.microbatch)
        key = self.key(op, step)
        *_, split, recompute, _, _ = key
        known = self.footprints.get(key)
        draws = None if known is not None else Draws()
        expected = self._expected(op, step)  # which may have to be learnt: no part of what the forward leaves
        with _UNMEASURED if known is not None else measuring(self.recorder.device) as measured:
            if op.stage in self.last:
                total = stage.forward_loss(number, received, microbatch, self.loss, split, recompute)
                self.totals.append(total)
                result = None
            else:
                result = stage.forward(number, received, microbatch, expected, split, recompute)
        if known is None:
            assert measured is not None
            outputs = () if result is None else result.tensors
            if len(self.footprints) >= _REMEMBERED:
                self.footprints.pop(next(iter(self.footprints)))
            left = footprint(measured.nbytes, stage.live[number].inputs, outputs)
            known = self.footprints[key] = left._replace(draws=draws is not None and draws.happened())
        self.ledger.take(received)
        self.ledger.forward(*place, known, result)
        self._count(known.output)
        return None if result is None else result._replace(loose=known.output)

    def key(self, op: Op, step: StepInput) -> tuple[int, object, bool, bool, bool, bool]:
        """Of a microbatch on a stage, equal where its forward leaves the same behind."""
        place = op.stage, op.microbatch
        split, recompute = place in self.split, place in self.plan.recomputed
        casts = torch.is_autocast_enabled(self.recorder.device.type)
        training = self.stages[op.stage].module.training
        return op.stage, step.keys[op.microbatch], split, recompute, training, casts

    def _infer(self, op: Op, received: Parcel | None, step: StepInput) -> Parcel | None:
        """What goes to the next stage, of a forward that holds nothing."""
        stage, microbatch = self.stages[op.stage], step.microbatches[op.microbatch]
        output = stage.infer(received, microbatch)
        self.ledger.take(received)
        if op.stage not in self.last:
            tensors, form = take_apart(output)
            if (expected := self._expected(op, step)) is not None:
                check(op, tensors, form, expected)
            return Parcel(tensors, expected or EdgeSpecs.of(tensors, form))
        with torch.no_grad():
            if step.collect is not None:
                self.results[op.microbatch] = step.collect(output, op.microbatch)
            else:
                self.totals.append(self.loss.total(output, microbatch))
        return None

    def _backward(self, op: Op, received: Parcel | None, step: StepInput) -> Parcel:
        """The gradients of what came in, none on the first stage."""
        self._count()  # the gradients are here, and the activation still is
        inputs = self.gradients(op, (self.loss_gradient(step),) if received is None else received.tensors)
        return self.after_backward(op, received, inputs, step)

    def gradients(self, op: Op, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of a backward, which may run in another thread: it touches nothing but the stage."""
        stage = self.stages[op.stage]
        return (stage.input_backward if op.kind == "I" else stage.backward)(op.microbatch, gradients)

    def after_backward(
        self, op: Op, received: Parcel | None, inputs: tuple[Tensor, ...], step: StepInput
    ) -> Parcel:
        stage, number = self.stages[op.stage], op.microbatch
        self.ledger.take(received)
        deferred = stage.deferred.get(number)
        self.ledger.backward(op.stage, number, 0 if deferred is None else deferred.nbytes)
        self._count(sum([gradient.nbytes for gradient in inputs]))
        expected = self._expected(op, step)
        if expected is not None:
            check(op, inputs, SINGLE, expected)
        return Parcel(inputs, expected or EdgeSpecs.of(inputs, SINGLE))

    def loss_gradient(self, step: StepInput) -> Tensor:
        """The gradient of the totals, whose sum over the weight is the step's loss."""
        if self.seed is None:
            self.seed = torch.full_like(self.totals[0], 1 / step.weight)
        return self.seed

    @cached_property
    def last(self) -> frozenset[int]:
        """The stages whose output goes into the loss."""
        placement = self.plan.schedule.placement
        return frozenset(filter(placement.is_last, range(placement.stages)))

    @cached_property
    def crossing(self) -> dict[Op, Message]:
        """By op, what it sends to another rank."""
        return {action.message.op: action.message for action in self.plan.actions if isinstance(action, Send)}

    def _expected(self, op: Op, step: StepInput) -> EdgeSpecs | None:
        """What the rank that waits for the result of `op` expects; None where it is told with it."""
        message = self.crossing.get(op)
        return None if message is None else self._specs(message, step)

    def _specs(self, message: Message, step: StepInput) -> EdgeSpecs | None:
        """What the message holds; looked up once a step for all microbatches of one shape."""
        if self.edges is None:
            return None
        op = message.op
        key = (step.shapes[op.microbatch], op.stage, op.kind)
        if (known := self.expected.get(key)) is not None:
            return known
        behind = min(op.stage, message.target) % self.plan.schedule.placement.depth
        edge = self.edges(behind, step.microbatches[op.microbatch])
        self.expected[key] = edge if op.kind == "F" else gradient_specs(edge)
        return self.expected[key]

    def _count(self, made: int = 0) -> None:
        """Live activations, and bytes, where either may be at its peak.

        made: bytes of a result that is yet to be sent
        """
        live = self.held
        if self.pairing is not None and self.pairing.busy:  # the backward may have let go of its own by now
            live = self.pairing.held
        self.peak_live = max(self.peak_live, live)
        assert live <= self.plan.peak_live, f"{live} live activations, {self.plan.peak_live} proven"
        self.ledger.sample(self.transport.buffer_bytes + made)

    @property
    def progress(self) -> Progress:
        """Any thread may ask."""
        return Progress(self.plan.schedule.programs[self.plan.rank], self.recorder.done, self.current)

    @property
    def held(self) -> int:
        """Live activations."""
        return sum([stage.held for stage in self.stages.values()])

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return len(self.inbox) + len(self.outbox) + self.held

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        if self.pairing is not None:
            self.pairing.close()
        self.current = self.pairing = None
        self.inbox.clear()
        self.outbox.clear()
        self.results = {}
        for stage in self.stages.values():
            stage.reset()
