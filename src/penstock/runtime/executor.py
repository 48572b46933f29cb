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
from penstock.runtime.lower import Compute, Free, Message, Plan, Post, Send, Wait
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
    current: Op | None = None
    expected: dict[tuple[int, int, str], EdgeSpecs] = field(default_factory=dict)  # of one step, see _specs

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        return self.plan.schedule.placement.rank_of

    @cached_property
    def last_stage(self) -> int:
        return self.plan.schedule.stages - 1

    def run(self, step: StepInput) -> Iterator[None]:
        """One step. Yields where another rank of this process must run first."""
        self.recorder.begin_step()
        self.totals, self.shares, self.seed, self.peak_live, self.expected = [], [], None, 0, {}
        for action in self.plan.actions:
            match action:
                case Compute(op):
                    self._compute(op, step)
                case Post(message):
                    self.transport.post(message, self._specs(message, step))
                case Wait(message):
                    while (tensors := self.transport.receive(message)) is None:
                        yield
                    self.inbox[message.op] = tensors
                case Send(message):
                    tensors = self.outbox.pop(message.op)
                    check(message.op, tensors, self._specs(message, step))
                    self.transport.send(message, tensors)
                case Free(message):
                    self.transport.free(message)
        if self.totals:
            self.shares = list(torch._foreach_div(self.totals, step.weight))
            self.totals = []

    def _compute(self, op: Op, step: StepInput) -> None:
        self.current = op
        start = self.recorder.now()
        match op.kind:
            case "F":
                result = self._forward(op, step)
            case "B":
                result = self._backward(op, step)
        self.recorder.add(op, start, self.recorder.now())
        self._pass_on(op, result)
        self.current = None

    def _forward(self, op: Op, step: StepInput) -> tuple[Tensor, ...]:
        stage, microbatch = self.stages[op.stage], step.microbatches[op.microbatch]
        received = self.inbox.pop(Op(op.stage - 1, "F", op.microbatch)) if op.stage else ()
        last = op.stage == self.last_stage
        if not self.plan.peak_live:  # no backward will come: hold nothing
            outputs = stage.infer(received, microbatch)
            if last:
                with torch.no_grad():
                    self.totals.append(self.loss.total(outputs[0], microbatch))
            return outputs
        if last:
            total = stage.forward_loss(op.microbatch, received, microbatch, self.loss)
            self.totals.append(total)
            outputs = (total,)
        else:
            outputs = stage.forward(op.microbatch, received, microbatch)
        self._count_live()
        return outputs

    def _backward(self, op: Op, step: StepInput) -> tuple[Tensor, ...]:
        if op.stage == self.last_stage:  # the step's loss is the sum of the totals, divided by the weight
            if self.seed is None:
                self.seed = torch.full_like(self.totals[0], 1 / step.weight)
            gradients: tuple[Tensor, ...] = (self.seed,)
        else:
            gradients = self.inbox.pop(Op(op.stage + 1, "B", op.microbatch))
        return self.stages[op.stage].backward(op.microbatch, gradients)

    def _pass_on(self, op: Op, result: tuple[Tensor, ...]) -> None:
        """Where the result goes: to a stage of this rank at once, to another rank when the plan says so."""
        target = op.stage + (1 if op.kind == "F" else -1)
        if 0 <= target <= self.last_stage:
            if self.hosts[target] == self.plan.rank:
                self.inbox[op] = tuple([tensor.detach() for tensor in result])
            else:
                self.outbox[op] = result

    def _specs(self, message: Message, step: StepInput) -> EdgeSpecs:
        """What the message holds; looked up once a step for all microbatches of one shape."""
        op = message.op
        key = (step.shapes[op.microbatch], op.stage, op.kind)
        if (known := self.expected.get(key)) is not None:
            return known
        edge = self.edges(min(op.stage, message.target), step.microbatches[op.microbatch])
        self.expected[key] = edge if op.kind == "F" else gradient_specs(edge)
        return self.expected[key]

    def _count_live(self) -> None:
        live = sum([len(stage.live) for stage in self.stages.values()])
        self.peak_live = max(self.peak_live, live)
        assert live <= self.plan.peak_live, f"{live} live activations, {self.plan.peak_live} proven"

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return len(self.inbox) + len(self.outbox) + sum(len(stage.live) for stage in self.stages.values())

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        self.inbox.clear()
        self.outbox.clear()
        for stage in self.stages.values():
            stage.live.clear()


def run_together(executors: Sequence[Executor], step: StepInput) -> None:
    """Run the plans of all ranks that live in this process, each as far as it can get, in turn."""
    running = {executor.plan.rank: executor.run(step) for executor in executors}
    while running:
        for rank, run in list(running.items()):
            try:
                next(run)
            except StopIteration:
                del running[rank]
