"""All ranks of a pipeline in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.runtime.lower import Message
from penstock.runtime.step import StepInput

if TYPE_CHECKING:
    from penstock.runtime.executor import Executor


def run_together(executors: Sequence[Executor], step: StepInput) -> None:
    """Run the plans of all ranks that live in this process, each as far as it can get, in turn."""
    arrived = executors[0].transport.arrived  # they share it
    running = {executor.plan.rank: executor.run(step) for executor in executors}
    awaited: dict[int, Message] = {}  # by rank, what it stood waiting for in the round before
    while running:
        before, awaited = awaited, {}
        for rank, run in list(running.items()):
            message = before.get(rank)
            if message is not None and not arrived(message):  # cheaper than to ask the rank
                awaited[rank] = message
                continue
            try:
                awaited[rank] = next(run)
            except StopIteration:
                del running[rank]
        assert not running or awaited != before, f"nobody can go on: {awaited}"
