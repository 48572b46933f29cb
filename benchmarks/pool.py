"""Processes that stay up over a whole benchmark: starting torch takes longer than what is measured."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

START_SECONDS = 120.0


class Rank:
    """One process of the pool, as the functions that run in it see it. `kept` lasts from call to call."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.kept: dict[Any, Any] = {}

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class Pool:
    """`ranks` processes with one thread each, joined by gloo over 127.0.0.1.

    A rank without a call waits in a blocking read and takes no time from the others. Nobody outlives the
    pool: a failure or a time-out in one process ends all, and a process ends when its parent is gone.

    Args:
        join: whether the processes make up a process group
        method: how a process starts: "spawn", or "forkserver" where its server has imported torch already.
            Not with a GPU, which no fork may use once CUDA has been asked for it.
    """

    def __init__(self, ranks: int, join: bool = True, method: str = "spawn") -> None:
        self._join = join
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = multiprocessing.get_context(method)
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # the processes inherit them
        self._connections: list[Connection] = []
        self._calls = 0
        self._processes = []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, self._store.port, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        self.run(_join if self._join else _started, timeout=START_SECONDS)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def pause(self) -> None:
        """Stop the processes, threads that only poll included, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None:
                os.kill(process.pid, number)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        on: Sequence[int] | None = None,
        timeout: float = 60.0,
        silent: Sequence[int] = (),
    ) -> list[Any]:
        """What `function(rank, *args)` returns on each rank of `on` (None: on all), run at the same time.

        After a call that raised, the answers of ranks that were still at it are left out.

        silent: ranks that run it too, and are not waited for, as they end or stop in it
        """
        ranks = range(len(self._connections)) if on is None else on
        self._calls += 1
        for rank in (*ranks, *silent):
            self._connections[rank].send((self._calls, function, args))
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout
        while len(results) < len(ranks):
            waiting = {self._connections[r]: r for r in ranks if r not in results}
            ready = wait(list(waiting), timeout=max(end - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(
                    f"{function.__name__} on ranks {sorted(waiting.values())}: {timeout:.0f} s passed"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                call, result = self._answer(connection, rank, function)
                if call == self._calls:
                    results[rank] = result
        return [results[rank] for rank in ranks]

    def _answer(self, connection: Connection, rank: int, function: Callable[..., Any]) -> tuple[int, Any]:
        """The number of a call, and its result. Raises RuntimeError for a failure of this call."""
        try:
            call, failure, result = connection.recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} died in {function.__name__}") from None
        if failure and call == self._calls:
            raise RuntimeError(f"rank {rank} failed in {function.__name__}:\n{failure}")
        return call, result


def _serve(index: int, count: int, port: int, connection: Connection) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    rank = Rank(index, count)
    rank.kept["port"] = port
    while True:
        try:
            call, function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((call, None, function(rank, *args)))
        except Exception:
            connection.send((call, traceback.format_exc(), None))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _started(_: Rank) -> None:
    """Answers once the process is up."""


def _join(rank: Rank) -> None:
    limit = datetime.timedelta(seconds=60)
    store = TCPStore("127.0.0.1", rank.kept.pop("port"), is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.count, timeout=limit)
    dist.barrier()
