"""One function over many arguments, in processes that are forked from this one.

A fork has what this process has measured, the model and the caches, none of which a message could carry as
fast. What runs there touches no GPU, no process group and no thread: it plans.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from penstock.errors import RunError

A = TypeVar("A")
R = TypeVar("R")

_FORK = get_context("fork")
_MOST = 8  # processes: beyond it they wait for one another


def processors() -> int:
    """How many processes a search may use here."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(_MOST, count)


class _Outcome(NamedTuple, Generic[R]):
    """What a process answers. error: in place of a result"""

    result: R | None
    error: Exception | None = None


@contextmanager
def forked(work: Callable[[A], R], processes: int) -> Iterator[Callable[[Sequence[A]], list[R]]]:
    """A function that maps `work` over arguments, each in the first process that is free.

    It returns the results in the arguments' order, and raises the error of the first argument that has one.
    With one process all runs in this one, and where a forked one could run no backward: torch refuses that
    where it has threads for devices, after this process's first backward. `work` is what it is now: what
    changes in this process later is not seen.
    """
    if processes < 2 or not _forks_run_backwards():
        yield lambda arguments: list(map(work, arguments))
        return
    ours, children = list[Connection](), []
    for _ in range(processes):
        our_end, its_end = _FORK.Pipe()
        children.append(_started(_serve, work, its_end))
        its_end.close()
        ours.append(our_end)
    try:
        yield lambda arguments: _gathered(ours, arguments)
    finally:
        for child in children:
            child.kill()  # it waits for arguments, and has nothing to save
            child.join()


def _started(target: Callable[..., None], *arguments: Any) -> ForkProcess:
    child = _FORK.Process(target=target, args=arguments, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        child.start()
    return child


def _forks_run_backwards() -> bool:
    child = _started(_run_backward)
    child.join()
    return child.exitcode == 0


def _run_backward() -> None:
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        os._exit(1)  # without its traceback


def _gathered(ends: Sequence[Connection], arguments: Sequence[A]) -> list[R]:
    waiting, free, busy = list(enumerate(arguments))[::-1], list(ends), dict[Connection, int]()
    outcomes = dict[int, _Outcome[R]]()
    while waiting or busy:
        while waiting and free:
            index, argument = waiting.pop()
            free[-1].send(argument)
            busy[free.pop()] = index
        for end in cast(list[Connection], wait(list(busy))):
            outcomes[busy.pop(end)] = _received(end)
            free.append(end)
    in_order = [outcomes[index] for index in range(len(arguments))]
    for outcome in in_order:
        if outcome.error is not None:
            raise outcome.error
    return [cast(R, outcome.result) for outcome in in_order]


def _received(end: Connection) -> _Outcome[Any]:
    try:
        outcome: _Outcome[Any] = end.recv()
    except EOFError:
        rule = "it ended before it answered; most often the machine's memory runs out"
        raise RunError("a process of the search", rule, "Take a machine with more free memory") from None
    return outcome


def _serve(work: Callable[[A], R], end: Connection) -> None:
    """Answer until the other end is closed, which the end of its process does, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that forked this one
    torch.set_num_threads(1)  # OpenMP's threads, if this process's parent has any, are not forked
    while True:
        try:
            argument: A = end.recv()
        except EOFError:
            return
        try:
            outcome = _Outcome(work(argument))
        except Exception as error:
            outcome = _Outcome(None, error)
        end.send(outcome)
