"""The executor: it follows a plan, one action after the other, and decides nothing.

Everything that could go wrong with the order was ruled out when the schedule was proven and lowered.
What is left here is to give each action its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from penstock.runtime.loss import Loss
from penstock.runtime.lower import Compute, Free, Hand, Message, Plan, Post, Send, Wait
from penstock.runtime.recorder import Recorder
from penstock.runtime.shapes import EdgeSpecs, Microbatch, check, gradient_specs, microbatch_key
from penstock.runtime.stage import Stage
from penstock.runtime.transport import Transport
from penstock.schedule import Op

# (stage, microbatch) -> what goes from that stage to the next
EdgeShapes = Callable[[int, Microbatch], EdgeSpecs]


@dataclass(frozen=True)
class StepInput:
    """What a step works on; every rank has all of it."""

    microbatches: Sequence[Microbatch]
    weight: int  # valid items over all microbatches: what the loss is divided by

    @cached_property
    def shapes(self) -> tuple[int, ...]:
        """A number for each microbatch, equal where all shapes and dtypes are."""
        numbers: dict[object, int] = {}
        return tuple(numbers.setdefault(microbatch_key(mb), len(numbers)) for mb in self.microbatches)


@dataclass
class Executor:
    """Runs one rank's plan. `inbox`, `outbox` and the stages' live activations are empty between steps."""

    plan: Plan
    stages: Mapping[int, Stage]
    edges: EdgeShapes
    loss: Loss
    transport: Transport
    recorder: Recorder
    inbox: dict[Op, tuple[Tensor, ...]] = field(default_factory=dict)  # by the op that made it
    outbox: dict[Op, tuple[Tensor, ...]] = field(default_factory=dict)
    totals: list[Tensor] = field(default_factory=list)  # loss of each microbatch, on the last stage's rank
    shares: list[Tensor] = field(default_factory=list)  # those of the step's loss, once it has ended
    seed: Tensor | None = None  # the loss's own gradient, 1 / weight
    peak_live: int = 0
    peak_deferred_bytes: int = 0  # held between I and W
    current: Op | None = None
    expected: dict[tuple[int, int, str], EdgeSpecs] = field(default_factory=dict)  # of one step, see _specs

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        return self.plan.schedule.split

    def run(self, step: StepInput) -> Iterator[Message]:
        """One step. Yields the message that another rank of this process must send first."""
        self.recorder.begin_step()
        self.totals, self.shares, self.seed, self.expected = [], [], None, {}
        self.peak_live = self.peak_deferred_bytes = 0
        for action in self.plan.actions:
            match action:
                case Compute(op, takes, gives):
                    result = self._compute(op, takes, step)
                    if gives:
                        self.outbox[op] = result
                    del result  # what nobody takes goes now
                case Post(message):
                    self.transport.post(message, self._specs(message, step))
                case Wait(message):
                    while (tensors := self.transport.receive(message)) is None:
                        yield message
                    self.inbox[message.op] = tensors
                    del tensors  # or the last message would live on here while this rank waits
                case Hand(message):
                    self.inbox[message.op] = tuple([t.detach() for t in self.outbox.pop(message.op)])
                case Send(message):
                    tensors = self.outbox.pop(message.op)
                    check(message.op, tensors, self._specs(message, step))
                    self.transport.send(message, tensors)
                    del tensors
                case Free(message):
                    self.transport.free(message)
        if self.totals:
            self.shares = list(torch._foreach_div(self.totals, step.weight))
            self.totals = []

    def _compute(self, op: Op, takes: Op | None, step: StepInput) -> tuple[Tensor, ...]:
        """Its result for another stage."""
        self.current = op
        received = () if takes is None else self.inbox.pop(takes)
        start = self.recorder.now()
        match op.kind:
            case "F":
                result = self._forward(op, received, step)
            case "B":
                result = self.stages[op.stage].backward(op.microbatch, self._gradients(op, received, step))
            case "I":
                gradients = self._gradients(op, received, step)
                result = self.stages[op.stage].input_backward(op.microbatch, gradients)
                self._count_deferred()
            case "W":
                self.stages[op.stage].weight_backward(op.microbatch)
                result = ()
        self.recorder.add(op, start, self.recorder.now())
        self.current = None
        return result

    def _forward(self, op: Op, received: tuple[Tensor, ...], step: StepInput) -> tuple[Tensor, ...]:
        """What goes to the next stage."""
        stage, microbatch = self.stages[op.stage], step.microbatches[op.microbatch]
        if not self.plan.peak_live:  # no backward will come: hold nothing
            outputs = stage.infer(received, microbatch)
            if op.stage in self.last:
                with torch.no_grad():
                    self.totals.append(self.loss.total(outputs[0], microbatch))
                return ()
            return outputs
        split = (op.stage, op.microbatch) in self.split
        if op.stage in self.last:
            self.totals.append(stage.forward_loss(op.microbatch, received, microbatch, self.loss, split))
            outputs = ()
        else:
            outputs = stage.forward(op.microbatch, received, microbatch, split)
        self._count_live()
        return outputs

    def _gradients(self, op: Op, received: tuple[Tensor, ...], step: StepInput) -> tuple[Tensor, ...]:
        """Those of the stage's outputs: received, or of the step's loss, the totals' sum over the weight."""
        if op.stage not in self.last:
            return received
        if self.seed is None:
            self.seed = torch.full_like(self.totals[0], 1 / step.weight)
        return (self.seed,)

    @cached_property
    def last(self) -> frozenset[int]:
        """The stages whose output goes into the loss."""
        placement = self.plan.schedule.placement
        return frozenset(filter(placement.is_last, range(placement.stages)))

    def _specs(self, message: Message, step: StepInput) -> EdgeSpecs:
        """What the message holds; looked up once a step for all microbatches of one shape."""
        op = message.op
        key = (step.shapes[op.microbatch], op.stage, op.kind)
        if (known := self.expected.get(key)) is not None:
            return known
        behind = min(op.stage, message.target) % self.plan.schedule.placement.depth
        edge = self.edges(behind, step.microbatches[op.microbatch])
        self.expected[key] = edge if op.kind == "F" else gradient_specs(edge)
        return self.expected[key]

    def _count_live(self) -> None:
        live = sum([stage.held for stage in self.stages.values()])
        self.peak_live = max(self.peak_live, live)
        assert live <= self.plan.peak_live, f"{live} live activations, {self.plan.peak_live} proven"

    def _count_deferred(self) -> None:
        held = sum([put_off.nbytes for stage in self.stages.values() for put_off in stage.deferred.values()])
        self.peak_deferred_bytes = max(self.peak_deferred_bytes, held)

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return len(self.inbox) + len(self.outbox) + sum(s.held for s in self.stages.values())

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        self.current = None
        self.inbox.clear()
        self.outbox.clear()
        for stage in self.stages.values():
            stage.reset()


def run_together(executors: Sequence[Executor], step: StepInput) -> None:
    """Run the plans of all ranks that live in this process, each as far as it can get, in turn."""
    running = {executor.plan.rank: executor.run(step) for executor in executors}
    awaited: dict[int, Message] = {}  # by rank, what it stood waiting for in the round before
    while running:
        before, awaited = awaited, {}
        for rank, run in list(running.items()):
            try:
                awaited[rank] = next(run)
            except StopIteration:
                del running[rank]
        assert not running or awaited != before, f"nobody can go on: {awaited}"
