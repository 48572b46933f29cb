"""The second thread of an executor, which runs the backward of an overlapped pair.

The gain is the time that the two ops wait for other ranks within themselves, as experts do whose tokens
travel: meanwhile the other op computes.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.private import (
    len_torch_dispatch_stack,
    len_torch_function_stack,
    top_saved_tensors_default_hooks,
)
from penstock.runtime.device.stream import Time
from penstock.runtime.sharded_weights import Sharding
from penstock.runtime.split_backward.modules import is_compiled
from penstock.runtime.stage import Stage

Gradients = tuple[Tensor, ...]


class Overlapped(NamedTuple):
    """The result of an overlapped backward: the input gradients, and when it ran."""

    inputs: Gradients
    start: Time
    end: Time


class OverlapThread:
    """A thread that runs one backward at a time, begun by the first one."""

    def __init__(self, stages: Mapping[int, Stage], now: Callable[[], Time]) -> None:
        self._held, self._now = stages, now
        self._stages: dict[int, _Restrictions] = {}
        self._thread: ThreadPoolExecutor | None = None  # ended by `close`, or by Python at exit
        self._job: Future[Overlapped] | None = None
        self._bypass: AbstractContextManager[None] = nullcontext()

    @property
    def busy(self) -> bool:
        return self._job is not None

    def may_begin(self, forward: int, backward: int) -> bool:
        """Whether the modules of these two stages, and the modes of this thread, allow an overlap."""
        if not self._stages:  # not earlier: the user may have wrapped modules since the build
            self._stages = {index: _Restrictions.of(stage) for index, stage in self._held.items()}
        stages = self._stages[forward], self._stages[backward]
        if any(stage.compiled for stage in stages) or _is_watched():
            return False
        for stage in stages:
            if stage.sharding.any and not (stage.by_penstock and stage.sharding.is_whole):
                return False
        return forward != backward or stages[0].sharding.is_plain

    def begin(self, forward: int, backward: int, work: Callable[[], Gradients]) -> None:
        """Start `work`, the backward of stage `backward`; the forward of stage `forward` comes next here."""
        self._bypass = self._stages[forward].sharding.bypassed() if forward == backward else nullcontext()
        self._bypass.__enter__()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-backward")
        threads, context, begun = torch.get_num_threads(), contextvars.copy_context(), Event()
        self._job = self._thread.submit(context.run, self._run, work, threads, begun)
        begun.wait()  # the backward is usually longer; the forward would keep Python's lock from it

    def _run(self, work: Callable[[], Gradients], threads: int, begun: Event) -> Overlapped:
        try:
            if torch.get_num_threads() != threads:  # torch keeps the number per thread
                torch.set_num_threads(threads)
            start = self._now()
        finally:
            begun.set()
        with torch.enable_grad():
            inputs = work()
        return Overlapped(inputs, start, self._now())

    def result(self) -> Overlapped:
        """Wait for the backward. Raises what it raised."""
        assert self._job is not None
        try:
            return self._job.result()
        finally:
            self._end()

    def join(self) -> BaseException | None:
        """Wait for a backward that still runs after the step failed; returns its error.

        Its own collectives go on as long as the other ranks take part, and break off by their process group's
        timeout at the latest.
        """
        if self._job is None:
            return None
        try:
            return self._job.exception()
        finally:
            self._end()

    def _end(self) -> None:
        self._job = None
        self._bypass.__exit__(None, None, None)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._thread, self._stages = None, {}


class _Restrictions(NamedTuple):
    """Why a stage's ops may have to run alone.

    by_penstock: whether penstock sharded its weights; a user's own sharding is not known well enough
    """

    sharding: Sharding
    by_penstock: bool
    compiled: bool

    @classmethod
    def of(cls, stage: Stage) -> _Restrictions:
        compiled = any(map(is_compiled, stage.module.modules()))
        return cls(Sharding(stage.module), stage.shards is not None, compiled)


def _is_watched() -> bool:
    """Whether this thread is in a mode that sees its ops: it would not see those of the second thread."""
    hooks = top_saved_tensors_default_hooks(True)
    return bool(len_torch_function_stack() or len_torch_dispatch_stack() or hooks is not None)
