"""What each op of one rank does: it runs its stage, and says what that leaves behind.

Every call between two ops counts where ops are short: what can be known before the first step is in `Task`,
what is the same for all microbatches of one shape is looked up once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batch.loss import Loss
from penstock.batch.microbatches import StepInput
from penstock.batch.payload import SINGLE, EdgeSpecs, Payload, take_apart
from penstock.batch.shapes import EdgeShapes, check
from penstock.runtime.memory import Footprint, Ledger, footprint, measuring
from penstock.runtime.overlap_thread import Draws
from penstock.runtime.plan import Compute, Message, Plan, Send
from penstock.runtime.stage import Stage
from penstock.schedule import Op

_REMEMBERED = 4096  # shapes whose footprints are known


class Task(NamedTuple):
    """An op, and all that is known of it before the first step.

    takes: the op of another stage whose result it needs; gives: whether another stage needs its own
    sends: the message that this becomes, where that stage is on another rank
    way: how its forward runs: whether its backward comes in two halves, and whether it runs again in there
    """

    op: Op
    takes: Op | None
    gives: bool
    stage: Stage
    sends: Message | None
    is_last: bool
    way: tuple[bool, bool]


Run = Callable[[Task, Payload | None, StepInput], Payload | None]  # returns what goes to another stage


class Ops:
    """Of one rank's plan. Between steps no stage holds a live activation.

    edges: None where each message tells itself what it is
    buffers: the bytes that the transport holds at the moment
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        edges: EdgeShapes | None,
        loss: Loss,
        device: torch.device,
        buffers: Callable[[], int],
    ) -> None:
        self._plan, self._stages, self._edges, self._loss = plan, stages, edges, loss
        self._device, self._buffers = device, buffers
        self._held = [held for stage in stages.values() for held in (stage.live, stage.deferred)]
        sends = {action.message.op: action.message for action in plan.actions if isinstance(action, Send)}
        computes = [action for action in plan.actions if isinstance(action, Compute)]
        self.tasks = {compute.op: self._task(compute, sends.get(compute.op)) for compute in computes}
        self._footprints: dict[object, Footprint] = {}  # of all shapes that were ever seen
        # live activations while a backward in another thread may have let go of its own or not
        self.beside: int | None = None
        self.begin_step()

    def _task(self, compute: Compute, sends: Message | None) -> Task:
        op, takes, gives = compute
        place = op.stage, op.microbatch
        way = place in self._plan.schedule.split, place in self._plan.recomputed
        is_last = self._plan.schedule.placement.is_last(op.stage)
        return Task(op, takes, gives, self._stages[op.stage], sends, is_last, way)

    @property
    def by_kind(self) -> Mapping[str, Run]:
        if not self._plan.peak_live:  # no backward will come: hold nothing
            return {"F": self.infer}
        return {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weight_backward}

    def begin_step(self) -> None:
        self.totals: list[Tensor] = []  # loss of each microbatch, on the last stage's rank
        self.shares: list[Tensor] = []  # those of the step's loss, once it has ended
        self.results: dict[int, Any] = {}  # what `collect` returned, by microbatch
        self.ledger, self.peak_live = Ledger(), 0
        self._seed: Tensor | None = None  # the loss's own gradient, 1 / weight
        self._casts = torch.is_autocast_enabled(self._device.type)
        # by shape within this step
        self._known: dict[object, Footprint] = {}
        self._expected: dict[tuple[int, str, int], EdgeSpecs] = {}

    def end_step(self, step: StepInput) -> None:
        if self.totals:
            self.shares = list(torch._foreach_div(self.totals, step.weight))
            self.totals = []

    # ---- forward

    def forward(self, task: Task, received: Payload | None, step: StepInput) -> Payload | None:
        known = self.footprint(task, step)
        expected = None if task.sends is None else self.specs(task.sends, step)
        if known is None:
            known, result = self._measured(task, received, expected, step)
        else:
            result = self._forward(task, received, expected, step)
        ledger = self.ledger
        if received is not None:
            ledger.take(received)
        ledger.forward(task.op, known, 0 if result is None else result.specs.nbytes)
        live = self.held if self.beside is None else self.beside
        if live > self.peak_live:
            assert live <= self._plan.peak_live, f"{live} live activations, {self._plan.peak_live} proven"
            self.peak_live = live
        ledger.sample(self._buffers() + known.output)
        return None if result is None else Payload(result.tensors, result.specs, known.output)

    def _forward(
        self, task: Task, received: Payload | None, expected: EdgeSpecs | None, step: StepInput
    ) -> Payload | None:
        number = task.op.microbatch
        microbatch = step.microbatches[number]
        if not task.is_last:
            return task.stage.forward(number, received, microbatch, expected, *task.way)
        self.totals.append(task.stage.forward_loss(number, received, microbatch, self._loss, *task.way))
        return None

    def footprint(self, task: Task, step: StepInput) -> Footprint | None:
        """What the forward of the task's microbatch leaves behind; None until it has run once."""
        op = task.op
        short = op.stage, step.shapes[op.microbatch], task.way
        known = self._known.get(short)
        if known is None and (known := self._footprints.get(self._key(task, step))) is not None:
            self._known[short] = known
        return known

    def _key(self, task: Task, step: StepInput) -> object:
        """Equal where forwards leave the same behind."""
        op, stage = task.op, task.stage
        return op.stage, step.keys[op.microbatch], task.way, stage.module.training, self._casts

    def _measured(
        self, task: Task, received: Payload | None, expected: EdgeSpecs | None, step: StepInput
    ) -> tuple[Footprint, Payload | None]:
        """A forward of a shape that was not seen before."""
        draws = Draws()
        with measuring(self._device) as measured:
            result = self._forward(task, received, expected, step)
        outputs = () if result is None else result.tensors
        inputs = task.stage.live[task.op.microbatch].inputs
        left = footprint(measured.nbytes, inputs, outputs)._replace(draws=draws.happened())
        if len(self._footprints) >= _REMEMBERED:
            self._footprints.pop(next(iter(self._footprints)))
        self._footprints[self._key(task, step)] = left
        return left, result

    def infer(self, task: Task, received: Payload | None, step: StepInput) -> Payload | None:
        """A forward that holds nothing."""
        number = task.op.microbatch
        output = task.stage.infer(received, step.microbatches[number])
        if received is not None:
            self.ledger.take(received)
        if not task.is_last:
            tensors, form = take_apart(output)
            return self._checked(task, tensors, form, step)
        with torch.no_grad():
            if step.collect is not None:
                self.results[number] = step.collect(output, number)
            else:
                self.totals.append(self._loss.total(output, step.microbatches[number]))
        return None

    # ---- backward

    def backward(self, task: Task, received: Payload | None, step: StepInput) -> Payload:
        """The gradients of what came in, none on the first stage."""
        self.before_backward()
        inputs = self.gradients(task, self.given(received, step))
        return self.after_backward(task, received, inputs, step)

    def before_backward(self) -> None:
        self.ledger.sample(self._buffers())  # the gradients are here, and the activation still is

    def given(self, received: Payload | None, step: StepInput) -> tuple[Tensor, ...]:
        """The gradients of what the stage gave; on the last stage that of the totals, whose sum over the
        weight is the step's loss."""
        if received is not None:
            return received.tensors
        if self._seed is None:
            self._seed = torch.full_like(self.totals[0], 1 / step.weight)
        return (self._seed,)

    def gradients(self, task: Task, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of what the stage received. May run in another thread: it touches nothing but the stage."""
        stage, op = task.stage, task.op
        return (stage.input_backward if op.kind == "I" else stage.backward)(op.microbatch, given)

    def after_backward(
        self, task: Task, received: Payload | None, inputs: tuple[Tensor, ...], step: StepInput
    ) -> Payload:
        ledger = self.ledger
        if received is not None:
            ledger.take(received)
        deferred = task.stage.deferred.get(task.op.microbatch)
        ledger.backward(task.op, 0 if deferred is None else deferred.nbytes)
        result = self._checked(task, inputs, SINGLE, step)
        ledger.sample(self._buffers() + result.specs.nbytes)
        return result

    def weight_backward(self, task: Task, received: Payload | None, step: StepInput) -> None:
        task.stage.weight_backward(task.op.microbatch)
        self.ledger.weight_backward(task.op)

    # ---- what crosses an edge

    def specs(self, message: Message, step: StepInput) -> EdgeSpecs | None:
        """What the message holds; looked up once a step for all microbatches of one shape."""
        if self._edges is None:
            return None
        op = message.op
        key = op.stage, op.kind, step.shapes[op.microbatch]
        if (known := self._expected.get(key)) is not None:
            return known
        behind = min(op.stage, message.target) % self._plan.schedule.placement.depth
        edge = self._edges(behind, step.microbatches[op.microbatch])
        self._expected[key] = edge if op.kind == "F" else edge.gradients
        return self._expected[key]

    def _checked(self, task: Task, tensors: tuple[Tensor, ...], form: Any, step: StepInput) -> Payload:
        """As another stage gets it: what its rank expects, if it is on another one."""
        expected = None if task.sends is None else self.specs(task.sends, step)
        if expected is None:
            return Payload(tensors, EdgeSpecs.of(tensors, form))
        check(task.op, tensors, form, expected)
        return Payload(tensors, expected)

    @property
    def held(self) -> int:
        """Live activations."""
        return sum(map(len, self._held))

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        self.totals, self.results, self.beside = [], {}, None
        for stage in self._stages.values():
            stage.reset()
