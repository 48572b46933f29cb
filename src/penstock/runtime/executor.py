"""The executor: it follows a plan, one action after the other.

    schedule --verify, lower--> plan
                                  |  actions, in order
                                  v
    transport <--post, send--  executor  --compute--> stage (forward, backward)
        |                      ^      |
        +-------receive------- inbox outbox

One step on one rank: each action of the plan has one effect (`Executor._effects`). `Await` puts a payload
into the inbox; `Compute` takes it, runs its op on a stage and puts the result into the outbox; `Send` and
`Deliver` empty the outbox. Nothing can go wrong with the order: `verify` has proven it.

With short ops every Python call costs time. So the plan's `Compute` holds all that is known before the first
step, and the specs of an edge are looked up once a step for all microbatches of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from penstock.batch.deferred_logits import whole
from penstock.batch.loss import Loss, total_of
from penstock.batch.microbatches import StepInput
from penstock.batch.payload import SINGLE, EdgeSpecs, Payload, flatten
from penstock.batch.shapes import EdgeShapes, check
from penstock.private import foreach_div
from penstock.runtime.device.offload import Offload
from penstock.runtime.device.stream import Time
from penstock.runtime.plan import (
    Action,
    Await,
    Compute,
    Deliver,
    Exchange,
    Free,
    Plan,
    Post,
    Reduce,
    Send,
)
from penstock.runtime.recorder import Progress, Recorder
from penstock.runtime.stage import Stage
from penstock.runtime.step_memory import StepMemory
from penstock.runtime.transport.interface import Transport, detached
from penstock.schedule import Op
from penstock.schedule.offload import HostCopy
from penstock.schedule.order import Message

# gives an action its effect; None for a wait, which may have to let other ranks of this process run first
Effect = Callable[[Any, StepInput], None] | None


class Executor:
    """Runs one rank's plan. Between steps `inbox` and `outbox` are empty, and no stage holds an activation.

    Args:
        stages: the stages of this rank, by index.
        edges: the specs of each edge; None where each message carries its own.

    Attributes:
        loss_shares: the loss of each microbatch over the step's weight, on the last stage's rank.
        results: what `collect` of the step's input returned, by microbatch.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        edges: EdgeShapes | None,
        loss: Loss,
        transport: Transport,
        recorder: Recorder,
    ) -> None:
        self.plan, self.transport, self.recorder = plan, transport, recorder
        self._program = plan.schedule.programs[plan.rank]
        self.messages = messages = transport.messages
        self.stages, self._edges, self._loss = stages, edges, loss
        self._trains = bool(plan.peak_live)  # else no backward follows, and no activation is kept
        self.memory = StepMemory(plan, stages, recorder.device, messages)
        self.inbox: dict[Op, Payload] = {}  # by the op that made it
        self.outbox: dict[Op, Payload] = {}
        self.current: Op | None = None
        self._bound: list[tuple[Effect, Any]] = []
        self.loss_shares: list[Tensor] = []
        self.results: dict[int, Any] = {}
        self._totals: list[Tensor] = []  # the loss of each microbatch so far
        self._seed: Tensor | None = None  # the gradient of the loss itself, 1 / weight
        self._expected: dict[tuple[int, str, int], EdgeSpecs] = {}  # by shape within this step

    def run(self, step: StepInput) -> Iterator[Message]:
        """One step. Yields each message that another rank of this process must send first."""
        self._begin_step()
        bound: Iterable[tuple[Effect, Any]] = self._bound
        if profiler._is_profiler_enabled:  # once a step, so that ops without a profiler cost no more
            bound = [
                (_in_profile(effect) if effect and type(action) is Compute else effect, action)
                for effect, action in bound
            ]
        try:
            for effect, action in bound:
                if effect is not None:
                    effect(action, step)
                    continue
                began = self.recorder.now()
                while not self._arrived(action.message, began):
                    yield action.message
            self.messages.complete()
        except RuntimeError as error:
            if self.current is not None:
                self._raise_typed(self.current, error)
            raise
        self._end_step(step)

    def _begin_step(self) -> None:
        if not self._bound:
            self._bound = list(self._effects())
        self.recorder.begin_step(self._program)
        self.memory.begin_step()
        self.loss_shares, self.results, self._totals, self._seed = [], {}, [], None
        self._expected = {}
        for stage in self.stages.values() if self._trains else ():
            stage.begin_step()

    def _end_step(self, step: StepInput) -> None:
        for stage in self.stages.values():
            stage.end_step()
            if not self._trains:
                stage.end_forwards()
        if torch.is_autocast_enabled(self.recorder.device.type):
            torch.clear_autocast_cache()  # weights are about to change, and the region may go on
        if self._totals:
            self.loss_shares, self._totals = list(foreach_div(self._totals, step.weight)), []

    def _effects(self) -> Iterator[tuple[Effect, Any]]:
        """Each action with its effect, looked up once for all steps."""
        effects: Mapping[type[Action], Effect] = {
            Post: self._post, Await: None, Compute: self.compute, Deliver: self._deliver, Send: self._send,
            Exchange: self._exchange, Free: self._free, Reduce: self._reduce, HostCopy: self._host_copy,
        }  # fmt: skip
        settled = False
        for action in self.plan.actions:
            if type(action) in self.messages.needless:
                continue
            # before the first message: a batch that another rank refuses leaves no message behind
            if not settled and isinstance(action, Post | Send):
                yield self._settle, action
                settled = True
            yield effects[type(action)], action

    # ---- the ops

    def compute(self, compute: Compute, step: StepInput) -> None:
        """Run one op, and record when it ran and which memory it takes or frees."""
        op, takes = compute.op, compute.takes
        index, kind, number = op
        self.current = op
        received = None if takes is None else self.inbox.pop(takes)
        stage, memory, recorder = self.stages[index], self.memory, self.recorder
        result: Payload | None = None
        if recorder.holds_back:
            recorder.hold_back(op)
        start = recorder.now()
        match kind:
            case "F" if not self._trains:
                result = self._infer(compute, received, step)
            case "F":
                expected = None if compute.sends is None else self._specs(compute.sends, step)
                loss = self._loss if compute.is_last else None
                with memory.forward(compute, step):
                    result = stage.forward(
                        number, received, step.microbatches[number], expected, compute.how, loss
                    )
                if loss is not None:  # detached, as it is kept to the end: its graph would keep the inputs
                    self._totals.append(result.tensors[0].detach())
                    result = None
                result = memory.after_forward(compute, received, result, step)
            case "B" | "I":
                memory.before_backward()
                backward = stage.backward if kind == "B" else stage.input_backward
                gradients = backward(number, self._output_gradients(received, step))
                result = self._checked(compute, gradients, SINGLE, step)
                memory.after_backward(op, received, result, step)
            case "W":
                stage.weight_backward(number)
                memory.ledger.weight_backward(op)
        recorder.add(op, takes, start, recorder.now())
        self.current = None
        if compute.gives:
            assert result is not None
            self.outbox[op] = result

    def _infer(self, compute: Compute, received: Payload | None, step: StepInput) -> Payload | None:
        """A forward that keeps no activation. Returns its result; the last stage records loss and outputs."""
        index, _, number = compute.op
        microbatch = step.microbatches[number]
        output = self.stages[index].infer(received, microbatch)
        if received is not None:
            self.memory.ledger.take(received)
        if not compute.is_last:
            return self._checked(compute, *flatten(output), step)
        with torch.no_grad():
            if step.collect is not None:
                output = whole(output)
            if step.scored:
                self._totals.append(total_of(self._loss, output, microbatch, number))
            if step.collect is not None:
                self.results[number] = step.collect(output, number)
        return None

    def _output_gradients(self, received: Payload | None, step: StepInput) -> tuple[Tensor, ...]:
        """The gradients of a stage's outputs: those received, or on the last stage that of its loss."""
        if received is not None:
            return received.tensors
        if self._seed is None:
            self._seed = torch.full_like(self._totals[0], 1 / step.weight)
        return (self._seed,)

    def _checked(self, compute: Compute, tensors: tuple[Tensor, ...], form: Any, step: StepInput) -> Payload:
        expected = None if compute.sends is None else self._specs(compute.sends, step)
        if expected is None:
            return Payload(tensors, EdgeSpecs.of(tensors, form))
        check(compute.op, tensors, form, expected)
        return Payload(tensors, expected)

    def _specs(self, message: Message, step: StepInput) -> EdgeSpecs | None:
        """The specs of the message; looked up once a step for all microbatches of one shape."""
        if self._edges is None:
            return None
        stage, kind, number = message.op
        key = stage, kind, step.shapes[number]
        if (known := self._expected.get(key)) is not None:
            return known
        source = min(stage, message.target) % self.plan.schedule.placement.depth
        edge = self._edges(source, step.microbatches[number])
        self._expected[key] = edge if kind == "F" else edge.gradients
        return self._expected[key]

    # ---- effects of the other actions

    def _arrived(self, message: Message, began: Time) -> bool:
        """Receive the message into the inbox. Returns False if another rank of this process must run first.

        began: when this rank began to wait for it
        """
        payload = self.messages.receive(message)
        if payload is None:
            return False
        self.recorder.waited(message.op, began)
        self.memory.ledger.receive(payload)
        self.inbox[message.op] = payload
        return True

    def _settle(self, action: Action, step: StepInput) -> None:
        self.transport.ranks.settle()

    def _post(self, action: Post, step: StepInput) -> None:
        self.messages.post(action.message, self._specs(action.message, step))

    def _deliver(self, action: Deliver, step: StepInput) -> None:
        op = action.message.op
        result = self.outbox.pop(op)
        self.memory.ledger.receive(result)
        self.inbox[op] = Payload(detached(result.tensors, result.specs), result.specs)

    def _send(self, action: Send, step: StepInput) -> None:
        self.messages.send(action.message, self.outbox.pop(action.message.op), self._edges is None)

    def _exchange(self, action: Exchange, step: StepInput) -> None:
        self.messages.start()

    def _free(self, action: Free, step: StepInput) -> None:
        self.messages.free(action.message)

    def _reduce(self, action: Reduce, step: StepInput) -> None:
        start = self.recorder.now()
        try:
            self.stages[action.stage].reduce()
        except RuntimeError as error:
            self._raise_typed(f"the reduction of stage {action.stage}", error)
        self.recorder.reduced(action.stage, start, self.recorder.now())

    def _host_copy(self, action: HostCopy, step: StepInput) -> None:
        """A step of the copies of a microbatch's activations to host memory and back."""
        number, key = action.microbatch, (action.stage, action.microbatch)
        stage, ledger = self.stages[action.stage], self.memory.ledger
        offload = stage.part(Offload)
        if offload is None:
            return
        match action.step:
            case "offload":
                offload.offload(number, stage.staying(number, step.microbatches[number]))
            case "release":
                ledger.release(key, offload.release(number))
            case "reload":
                ledger.reload(key, offload.reload(number))
            case "restore":
                offload.restore(number)

    def _raise_typed(self, doing: Op | str, error: RuntimeError) -> None:
        """Raise `error`, or the typed error that says which other rank caused it."""
        typed = self.transport.broke_off(doing, error)
        if typed is error:
            raise error
        raise typed from error

    # ---- state

    @property
    def progress(self) -> Progress:
        """How far this rank is. Any thread may read it."""
        # between steps it is the end of the last one, which may have had other microbatches
        return Progress(self.recorder.program or self._program, self.recorder.done, self.current)

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return len(self.inbox) + len(self.outbox) + sum(stage.left_over for stage in self.stages.values())

    def reset(self) -> None:
        """Forget a failed step."""
        self.current = None
        self.inbox.clear()
        self.outbox.clear()
        self._totals, self.results = [], {}
        for stage in self.stages.values():
            stage.reset()


def _in_profile(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which a profiler shows under the op's name, as an NVTX range where it records those.

    The label is more than the op's text: torch takes 2F0 for a mangled name of C++, and shows F0.
    """

    def named(compute: Compute, step: StepInput) -> None:
        with profiler.record_function(f"op {compute.op}"):
            run(compute, step)

    return named


def run_together(executors: Sequence[Executor], step: StepInput) -> None:
    """Run the plans of all ranks of this process in turn, each until it has to wait.

    After a rank that waits comes the one that has to send: trying all of them in turn costs more than an op.
    """
    running = {executor.plan.rank: executor.run(step) for executor in executors}
    hosts = executors[0].plan.schedule.placement.rank_of
    arrived = executors[0].messages.arrived  # the same for all ranks of the process
    awaited: dict[int, Message] = {}
    rank, stuck = executors[0].plan.rank, set[int]()
    while running:
        assert rank in running, f"rank {rank} has ended, and another one waits for it: {awaited}"
        message = awaited.get(rank)
        if message is not None and not arrived(message):
            assert rank not in stuck, f"no rank can go on: {awaited}"
            stuck.add(rank)
            rank = hosts[message.op.stage]
            continue
        stuck.clear()
        try:
            awaited[rank] = message = next(running[rank])
            rank = hosts[message.op.stage]
        except StopIteration:
            del running[rank]
            awaited.pop(rank, None)
            rank = next(iter(running), rank)
