"""The executor: it follows a plan, one action after the other, and decides nothing.

Everything that could go wrong with the order was ruled out when the schedule was proven and lowered.
What is left here is to give each action its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.batch.loss import Loss
from penstock.batch.microbatches import StepInput
from penstock.batch.payload import Payload
from penstock.batch.shapes import EdgeShapes
from penstock.runtime.health.progress import Progress
from penstock.runtime.ops import Ops, Task
from penstock.runtime.overlap import Begin, End, OverlappedPairs
from penstock.runtime.plan import (
    Action,
    Compute,
    Exchange,
    Free,
    Hand,
    Message,
    Plan,
    Post,
    Reduce,
    Send,
    Wait,
)
from penstock.runtime.recorder import Mark, Recorder
from penstock.runtime.stage import Stage
from penstock.runtime.transport.interface import Transport, of_their_own
from penstock.schedule import Op

# what gives an action its effect; None for a wait, which may have to let other ranks go first
Effect = Callable[[Any, StepInput], None] | None


class Executor:
    """Runs one rank's plan. `inbox` and `outbox` are empty between steps.

    edges: None where each message tells itself what it is
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
        self.stages, self._told = stages, edges is None
        self.ops = Ops(plan, stages, edges, loss, recorder.device, lambda: transport.buffer_bytes)
        self._by_kind = self.ops.by_kind
        self.inbox: dict[Op, Payload] = {}  # by the op that made it
        self.outbox: dict[Op, Payload] = {}
        self.current: Op | None = None
        self.pairing: OverlappedPairs | None = None  # of a step whose pairs run side by side
        self._effects: list[tuple[Effect, Any]] | None = None

    def run(self, step: StepInput) -> Iterator[Message]:
        """One step. Yields the message that another rank of this process must send first."""
        if self._effects is None:
            if self.transport.overlap and self.plan.schedule.overlaps:
                self.pairing = OverlappedPairs(self)
            actions = self.plan.actions if self.pairing is None else self.pairing.actions
            self._effects = list(self._bound(actions))
        try:
            yield from self._run(self._effects, step)
        except BaseException as error:
            beside = None if self.pairing is None else self.pairing.join()
            if beside is not None:  # which may be the cause of this one
                error.add_note(f"the backward beside it failed too: {type(beside).__name__}: {beside}")
            if self.current is not None and isinstance(error, RuntimeError):
                typed = self.transport.broke_off(self.current, error)
                if typed is not error:
                    raise typed from error
            raise

    def _run(self, effects: Iterable[tuple[Effect, Any]], step: StepInput) -> Iterator[Message]:
        self.recorder.begin_step()
        self.ops.begin_step()
        for effect, action in effects:
            if effect is not None:
                effect(action, step)
                continue
            began = self.recorder.now()
            while not self._arrived(action.message, began):
                yield action.message
        self.ops.end_step(step)

    def _bound(self, actions: Iterable[Action | Begin | End]) -> Iterator[tuple[Effect, Any]]:
        """Each action's effect, found once for all steps."""
        effects: Mapping[type, Effect] = {
            Post: self._post, Wait: None, Hand: self._hand, Send: self._send, Exchange: self._exchange,
            Free: self._free, Reduce: self._reduce, Begin: self._begin, End: self._end,
        }  # fmt: skip
        for action in actions:
            if isinstance(action, Compute):
                yield self.compute, self.ops.tasks[action.op]
            elif type(action) not in self.transport.needless:
                yield effects[type(action)], action

    def compute(self, task: Task, step: StepInput) -> None:
        op, takes = task.op, task.takes
        self.current = op
        received = None if takes is None else self.inbox.pop(takes)
        now = self.recorder.now
        start = now()
        result = self._by_kind[op.kind](task, received, step)
        self.recorder.add(op, takes, start, now())
        self.current = None
        if task.gives:
            assert result is not None
            self.outbox[op] = result

    def _arrived(self, message: Message, began: Mark) -> bool:
        """Whether the message is here; waits for it unless another rank of this process has to send it.

        began: when the rank began to wait for it
        """
        payload = self.transport.receive(message)
        if payload is None:
            return False
        self.recorder.waited(message.op, began, self.recorder.now())
        self.ops.ledger.receive(payload)
        self.inbox[message.op] = payload
        return True

    def _post(self, action: Post, step: StepInput) -> None:
        self.transport.post(action.message, self.ops.specs(action.message, step))

    def _hand(self, action: Hand, step: StepInput) -> None:
        op = action.message.op
        given = self.outbox.pop(op)
        self.ops.ledger.receive(given)
        self.inbox[op] = Payload(of_their_own(given.tensors, given.specs), given.specs)

    def _send(self, action: Send, step: StepInput) -> None:
        message = action.message
        self.transport.send(message, self.outbox.pop(message.op), self._told)

    def _exchange(self, action: Exchange, step: StepInput) -> None:
        self.transport.start(action.in_line)

    def _free(self, action: Free, step: StepInput) -> None:
        self.transport.free(action.message)

    def _reduce(self, action: Reduce, step: StepInput) -> None:
        start = self.recorder.now()
        try:
            self.stages[action.stage].reduce()
        except RuntimeError as error:
            typed = self.transport.broke_off(f"the reduction of stage {action.stage}", error)
            if typed is error:
                raise
            raise typed from error
        self.recorder.reduced(action.stage, start, self.recorder.now())

    def _begin(self, action: Begin, step: StepInput) -> None:
        assert self.pairing is not None
        self.pairing.begin(self.ops.tasks[action.compute.op], self.ops.tasks[action.forward], step)

    def _end(self, action: End, step: StepInput) -> None:
        assert self.pairing is not None
        self.pairing.end(self.ops.tasks[action.compute.op], step)

    @property
    def progress(self) -> Progress:
        """Any thread may ask."""
        return Progress(self.plan.schedule.programs[self.plan.rank], self.recorder.done, self.current)

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return len(self.inbox) + len(self.outbox) + sum(stage.left_over for stage in self.stages.values())

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        if self.pairing is not None:
            self.pairing.close()
        self.current = self.pairing = self._effects = None
        self.inbox.clear()
        self.outbox.clear()
        self.ops.reset()


# ---- All ranks of a pipeline in one process.


def run_together(executors: Sequence[Executor], step: StepInput) -> None:
    """Run the plans of all ranks that live in this process, each as far as it can get, in turn.

    After a rank that waits comes the one that has to send: to ask all of them in turn costs more than an op.
    """
    running = {executor.plan.rank: executor.run(step) for executor in executors}
    hosts = executors[0].plan.schedule.placement.rank_of
    arrived = executors[0].transport.arrived  # they share it
    awaited: dict[int, Message] = {}
    rank, stuck = executors[0].plan.rank, set[int]()
    while running:
        assert rank in running, f"rank {rank} has ended, and somebody waits for it: {awaited}"
        message = awaited.get(rank)
        if message is not None and not arrived(message):
            assert rank not in stuck, f"nobody can go on: {awaited}"
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
