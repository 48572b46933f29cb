"""The second thread of an executor, for the backward of an overlapped pair."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.recorder import Mark
from penstock.runtime.sharded_weights import Sharding
from penstock.runtime.stage import Stage
from penstock.schedule import Op

Gradients = tuple[Tensor, ...]


class Ran(NamedTuple):
    """What a backward in the second thread came to, and when it ran."""

    inputs: Gradients
    start: Mark
    end: Mark


class OverlapThread:
    """The second thread, and the backward that runs in it."""

    def __init__(self, stages: Mapping[int, Stage], now: Callable[[], Mark]) -> None:
        self._modules = {index: _Alone.of(stage) for index, stage in stages.items()}
        self._now = now
        self._thread: ThreadPoolExecutor | None = None  # ended by `close`, and by Python before it ends
        self._job: Future[Ran] | None = None
        self._passing: AbstractContextManager[None] = nullcontext()

    @property
    def busy(self) -> bool:
        return self._job is not None

    def may_begin(self, forward: Op, backward: Op) -> bool:
        """As far as the stages' modules and this thread tell."""
        ahead, behind = self._modules[forward.stage], self._modules[backward.stage]
        if ahead.compiled or behind.compiled or _is_watched():
            return False
        for each in (ahead, behind):
            if each.sharding.any and not (each.own_shards and each.sharding.is_whole):
                return False
        return ahead is not behind or ahead.sharding.is_plain

    def begin(self, forward: Op, backward: Op, work: Callable[[], Gradients]) -> None:
        """work: the backward's"""
        shared = self._modules[forward.stage] if forward.stage == backward.stage else None
        self._passing = nullcontext() if shared is None else shared.sharding.unheeded()
        self._passing.__enter__()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-backward")
        threads, context, begun = torch.get_num_threads(), contextvars.copy_context(), Event()
        self._job = self._thread.submit(context.run, self._run, work, threads, begun)
        begun.wait()  # most often it is the longer of the two; the forward would keep Python's lock from it

    def _run(self, work: Callable[[], Gradients], threads: int, begun: Event) -> Ran:
        try:
            if torch.get_num_threads() != threads:  # each thread has its own number
                torch.set_num_threads(threads)
            start = self._now()
        finally:
            begun.set()
        with torch.enable_grad():
            inputs = work()
        return Ran(inputs, start, self._now())

    def result(self) -> Ran:
        """Raises what the backward raised."""
        assert self._job is not None
        try:
            return self._job.result()
        finally:
            self._over()

    def join(self) -> BaseException | None:
        """Wait for it where the step has failed; what it raised.

        Its own exchanges go on as long as the other ranks take part, and break off by their process group's
        time limit at the latest.
        """
        if self._job is None:
            return None
        try:
            return self._job.exception()
        finally:
            self._over()

    def _over(self) -> None:
        self._job = None
        self._passing.__exit__(None, None, None)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None


class _Alone(NamedTuple):
    """Why a stage's ops may have to run alone.

    own_shards: whether it is penstock that spreads its weights; a user's own way is not known well enough
    """

    sharding: Sharding
    own_shards: bool
    compiled: bool

    @classmethod
    def of(cls, stage: Stage) -> _Alone:
        compiled = any(part._compiled_call_impl is not None for part in stage.module.modules())
        compiled |= any(isinstance(part, _compiled_modules()) for part in stage.module.modules())
        return cls(Sharding(stage.module), stage.shards is not None, compiled)


def _compiled_modules() -> type[nn.Module]:
    from torch._dynamo import OptimizedModule

    return OptimizedModule


def _is_watched() -> bool:
    """Whether the thread is in a mode that sees its ops, and would not see the other thread's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(
        torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or hooks is not None
    )


class Draws:
    """Tells whether random numbers were drawn since it was made.

    The generator is one for all threads: activation checkpointing sets it back while it runs a forward again,
    and what another thread draws meanwhile would not be what it draws alone.
    """

    def __init__(self) -> None:
        self._before = torch.get_rng_state()

    def happened(self) -> bool:
        return not torch.equal(self._before, torch.get_rng_state())
