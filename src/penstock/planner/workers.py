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
from multiprocessing.connection import Connection
from typing import Generic, NamedTuple, TypeVar

import torch

from penstock.errors import RunError

A = TypeVar("A")
R = TypeVar("R")

_MOST = 8  # processes: beyond it they wait for one another


def processors() -> int:
    """How many processes a search may use here."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(_MOST, count)


class _Outcome(NamedTuple, Generic[R]):
    """What a process answers. error: in place of results"""

    results: list[R]
    error: Exception | None


@contextmanager
def forked(work: Callable[[A], R], processes: int) -> Iterator[Callable[[Sequence[A]], list[R]]]:
    """A function that maps `work` over arguments, the i-th in process i modulo `processes`.

    It returns the results in the arguments' order, and raises the first error that a process met. With one
    process all runs in this one, and where there is an accelerator: autograd starts threads for it at the
    first backward, and refuses one in a process that is forked after that. `work` is what it is now: what
    changes in this process later is not seen.
    """
    if processes < 2 or torch.accelerator.is_available():
        yield lambda arguments: list(map(work, arguments))
        return
    context, ours, children = get_context("fork"), list[Connection](), []
    for _ in range(processes):
        our_end, its_end = context.Pipe()
        child = context.Process(target=_serve, args=(work, its_end), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
            child.start()
        its_end.close()
        ours.append(our_end)
        children.append(child)
    try:
        yield lambda arguments: _gathered(ours, arguments)
    finally:
        for child in children:
            child.kill()  # it waits for arguments, and has nothing to save
            child.join()


def _gathered(ends: Sequence[Connection], arguments: Sequence[A]) -> list[R]:
    shares = [list(arguments[index :: len(ends)]) for index in range(len(ends))]
    busy = [(end, share) for end, share in zip(ends, shares, strict=True) if share]
    for end, share in busy:
        end.send(share)
    try:
        outcomes: list[_Outcome[R]] = [end.recv() for end, _ in busy]
    except EOFError:
        rule = "it ended before it answered; most often the machine's memory runs out"
        raise RunError("a process of the search", rule, "Take a machine with more free memory") from None
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    results = [outcome.results for outcome in outcomes]
    return [results[index % len(ends)][index // len(ends)] for index in range(len(arguments))]


def _serve(work: Callable[[A], R], end: Connection) -> None:
    """Answer until the other end is closed, which the end of its process does, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that forked this one
    torch.set_num_threads(1)  # OpenMP's threads, if this process's parent has any, are not forked
    while True:
        try:
            arguments: list[A] = end.recv()
        except EOFError:
            return
        try:
            outcome = _Outcome(list(map(work, arguments)), None)
        except Exception as error:
            outcome = _Outcome([], error)
        end.send(outcome)
