"""The executor: it follows a plan, one action after the other.

    schedule --verify, lower--> plan
                                  |  actions, in order
                                  v
    transport <--post, send--  executor  --compute--> ops --> stage (forward, backward)
        |                      ^      |
        +-------receive------- inbox outbox

One step on one rank: each action of the plan has one effect (`Executor._effects`). `Await` puts a payload
into the inbox; `Compute` takes it, runs its op and puts the result into the outbox; `Send` and `Deliver`
empty the outbox. Nothing can go wrong with the order: `verify` has proven it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.autograd import profiler

from penstock.batch.loss import Loss
from penstock.batch.microbatches import StepInput
from penstock.batch.payload import Payload
from penstock.batch.shapes import EdgeShapes
from penstock.runtime.device.stream import Time
from penstock.runtime.ops import Ops, RunOp
from penstock.runtime.plan import (
    Action,
    Await,
    Compute,
    Deliver,
    Exchange,
    Free,
    Message,
    Plan,
    Post,
    Reduce,
    Send,
)
from penstock.runtime.recorder import Progress, Recorder
from penstock.runtime.stage import Stage
from penstock.runtime.transport.interface import Transport, detached
from penstock.schedule import Op
from penstock.schedule.offload import HostCopy

# gives an action its effect; None for a wait, which may have to let other ranks of this process run first
Effect = Callable[[Any, StepInput], None] | None


class Executor:
    """Runs one rank's plan. `inbox` and `outbox` are empty between steps.

    Args:
        stages: the stages of this rank, by index.
        edges: what crosses each edge; None where each message carries its own specs.
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
        self.stages, self._with_specs = stages, edges is None
        self.ops = Ops(plan, stages, edges, loss, recorder.device, messages)
        self._by_kind: Mapping[str, RunOp] = {}
        self.inbox: dict[Op, Payload] = {}  # by the op that made it
        self.outbox: dict[Op, Payload] = {}
        self.current: Op | None = None
        self._bound: list[tuple[Effect, Any]] = []

    def run(self, step: StepInput) -> Iterator[Message]:
        """One step. Yields each message that another rank of this process must send first."""
        if not self._bound:
            self._bound = list(self._effects())
        try:
            yield from self._run(self._bound, step)
        except BaseException as error:
            if self.current is not None and isinstance(error, RuntimeError):
                self._raise_typed(self.current, error)
            raise

    def _run(self, bound: Iterable[tuple[Effect, Any]], step: StepInput) -> Iterator[Message]:
        self.recorder.begin_step(self._program)
        self.ops.begin_step()
        self._by_kind = self.ops.by_kind
        if profiler._is_profiler_enabled:  # asked once a step: without a profiler an op costs nothing more
            self._by_kind = {kind: _in_profile(run) for kind, run in self._by_kind.items()}
        for effect, action in bound:
            if effect is not None:
                effect(action, step)
                continue
            began = self.recorder.now()
            while not self._arrived(action.message, began):
                yield action.message
        self.messages.complete()
        self.ops.end_step(step)

    def _effects(self) -> Iterator[tuple[Effect, Any]]:
        """Each action with its effect, found once for all steps."""
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

    # ---- effects of the actions

    def compute(self, compute: Compute, step: StepInput) -> None:
        op, takes = compute.op, compute.takes
        self.current = op
        received = None if takes is None else self.inbox.pop(takes)
        recorder = self.recorder
        if recorder.holds_back:
            recorder.hold_back(op)
        now = recorder.now
        start = now()
        result = self._by_kind[op.kind](compute, received, step)
        recorder.add(op, takes, start, now())
        self.current = None
        if compute.gives:
            assert result is not None
            self.outbox[op] = result

    def _arrived(self, message: Message, began: Time) -> bool:
        """Receive the message into the inbox. Returns False if another rank of this process must run first.

        began: when this rank began to wait for it
        """
        payload = self.messages.receive(message)
        if payload is None:
            return False
        self.recorder.waited(message.op, began, self.recorder.now())
        self.ops.ledger.receive(payload)
        self.inbox[message.op] = payload
        return True

    def _settle(self, action: Action, step: StepInput) -> None:
        self.transport.settle()

    def _post(self, action: Post, step: StepInput) -> None:
        self.messages.post(action.message, self.ops.specs(action.message, step))

    def _deliver(self, action: Deliver, step: StepInput) -> None:
        op = action.message.op
        result = self.outbox.pop(op)
        self.ops.ledger.receive(result)
        self.inbox[op] = Payload(detached(result.tensors, result.specs), result.specs)

    def _send(self, action: Send, step: StepInput) -> None:
        self.messages.send(action.message, self.outbox.pop(action.message.op), self._with_specs)

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
        self.ops.host_copy(action, step)

    def _raise_typed(self, doing: Op | str, error: RuntimeError) -> None:
        """Raise `error`, or the typed error that says which other rank caused it."""
        typed = self.transport.broke_off(doing, error)
        if typed is error:
            raise error
        raise typed from error

    # ---- state

    @property
    def progress(self) -> Progress:
        """How far this rank is. Any thread may ask."""
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
        self.ops.reset()


def _in_profile(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which a profiler shows under the op's name; an NVTX range where that is what it asks for.

    Not by the name alone: torch takes 2F0 for a mangled name of C++, and shows F0.
    """

    def named(compute: Compute, *args: Any) -> Any:
        with profiler.record_function(f"op {compute.op}"):
            return run(compute, *args)

    return named


def run_together(executors: Sequence[Executor], step: StepInput) -> None:
    """Run the plans of all ranks that live in this process, each as far as it can get, in turn.

    After a rank that waits comes the one that has to send: to ask all of them in turn costs more than an op.
    """
    running = {executor.plan.rank: executor.run(step) for executor in executors}
    hosts = executors[0].plan.schedule.placement.rank_of
    arrived = executors[0].messages.arrived  # they share it
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
