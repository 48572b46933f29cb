"""Overlapped pairs: a forward, and beside it a backward in a second thread.

What is gained is what the two spend waiting for other ranks within themselves, as a mixture does whose tokens
travel to their experts: meanwhile the other one computes. So a plan for this begins the backward before the
forward, and takes its result after what the forward made is on its way:

    one after the other   wait 1F0   2F0   send 2F0   wait 3B1   2B1   send 2B1
    side by side          wait 1F0   wait 3B1   begin 2B1   2F0   send 2F0   end 2B1   send 2B1

Both ops' inputs are there before either begins, as `verify` has proven possible. Which thread adds to a
gradient does not change: backwards follow each other, in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from penstock.batch.microbatches import StepInput
from penstock.batch.payload import Payload
from penstock.runtime.ops import Ops, Task
from penstock.runtime.overlap_thread import OverlapThread
from penstock.runtime.plan import Action, Compute, Plan
from penstock.runtime.recorder import Recorder
from penstock.runtime.stage import Stage
from penstock.runtime.transport.interface import Transport
from penstock.schedule import Op


class Begin(NamedTuple):
    """Begin a backward in the second thread, if `forward`, which comes next, may run beside it."""

    compute: Compute
    forward: Op


class End(NamedTuple):
    """Wait for that backward, or run it now."""

    compute: Compute


Actions = tuple[Action | Begin | End, ...] | tuple[Action, ...]


def side_by_side(plan: Plan) -> Actions:
    """The actions of `plan`, whose pairs are one after the other, with its pairs side by side.

    What comes before the backward moves in front of the forward: posts, a wait, and the frees that this wait
    proves. What the forward sends is not among them: the backward's input cannot hang on it, or the two could
    not begin together.
    """
    forwards = {pair.forward: pair.backward for pair in plan.schedule.overlaps}
    actions: list[Action | Begin | End] = []
    rest = iter(plan.actions)
    for action in rest:
        if isinstance(action, Compute) and action.op in forwards:
            between, backward = _up_to(forwards[action.op], rest)
            given = [step for step in between if _made_by(step, action.op)]
            actions += [step for step in between if not _made_by(step, action.op)]
            actions += [Begin(backward, action.op), action, *given, End(backward)]
        else:
            actions.append(action)
    return tuple(actions)


def _up_to(op: Op, actions: Iterator[Action]) -> tuple[list[Action], Compute]:
    between: list[Action] = []
    for action in actions:
        if isinstance(action, Compute):
            assert action.op == op, f"{action.op} stands between the two ops of a pair"
            return between, action
        between.append(action)
    raise AssertionError(f"{op} is not in the plan")


def _made_by(action: Action, op: Op) -> bool:
    """Whether it passes the result of `op` on."""
    return getattr(getattr(action, "message", None), "op", None) == op


class RunsOps(Protocol):
    """The executor, as far as a pair needs it."""

    plan: Plan
    stages: Mapping[int, Stage]
    ops: Ops
    transport: Transport
    recorder: Recorder
    inbox: dict[Op, Payload]
    outbox: dict[Op, Payload]
    current: Op | None

    def compute(self, task: Task, step: StepInput) -> None: ...


class OverlappedPairs:
    """Runs the pairs of one executor's plan.

    A pair runs one after the other where nothing is known of one of the forwards yet (its first time), where
    one draws random numbers, and where the modules' own ways forbid it (`Partner.may_begin`).
    """

    def __init__(self, executor: RunsOps) -> None:
        self._executor = executor
        self._overlap_thread = OverlapThread(executor.stages, executor.recorder.now)
        self.actions = side_by_side(executor.plan)
        self.ran = 0  # pairs that ran side by side
        executor.transport.closers.append(self.close)

    @property
    def busy(self) -> bool:
        return self._overlap_thread.busy

    def begin(self, task: Task, forward: Task, step: StepInput) -> None:
        """The backward of a pair, in the second thread, if that may be."""
        executor, ops = self._executor, self._executor.ops
        known = [ops.footprint(each, step) for each in (forward, task)]
        if any(left is None or left.draws for left in known):
            return
        if not self._overlap_thread.may_begin(forward.op, task.op):
            return
        ops.before_backward()
        given = ops.given(None if task.takes is None else executor.inbox[task.takes], step)
        ops.beside = ops.held + 1  # the forward's own among them
        self.ran += 1
        self._overlap_thread.begin(forward.op, task.op, partial(ops.gradients, task, given))

    def end(self, task: Task, step: StepInput) -> None:
        """What its result is for another stage goes into the outbox; it runs now where it has not begun."""
        executor = self._executor
        if not self._overlap_thread.busy:
            executor.compute(task, step)
            return
        executor.current = task.op
        ran = self._overlap_thread.result()
        executor.ops.beside = None
        received = None if task.takes is None else executor.inbox.pop(task.takes)
        result = executor.ops.after_backward(task, received, ran.inputs, step)
        executor.recorder.add(task.op, task.takes, ran.start, ran.end)
        executor.current = None
        if task.gives:
            executor.outbox[task.op] = result

    def join(self) -> BaseException | None:
        """Leave no backward at work where the step has failed; what it raised itself."""
        return self._overlap_thread.join()

    def close(self) -> None:
        """End the thread."""
        self._overlap_thread.close()
