"""All ranks of a pipeline in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.runtime.lower import Message
from penstock.runtime.step import StepInput

if TYPE_CHECKING:
    from penstock.runtime.executor import Executor


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
