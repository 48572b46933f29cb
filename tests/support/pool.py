"""One pool of worker processes, reused by all tests: starting torch is the slow part.

A job runs on the first few workers as the ranks of a gloo world that lives for this job only. It is any
function at the top of a module, in tests/support or next to the test itself.

The workers are forked from a server process that has imported `PRELOADED` once, so that they start in
a fraction of a second and share its memory.
"""

from __future__ import annotations

import datetime
import functools
import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

JOB_TIMEOUT = 90.0  # seconds
MOST_THREADS = 96
PRELOADED = [
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers.generation",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.mixtral.modeling_mixtral", "penstock.train.run", "support.jobs",
]  # fmt: skip


class JobError(AssertionError):
    pass


def start(target: Callable[..., None], *args: Any, name: str | None = None) -> Any:
    """Start a process that has torch already. It ends with this one at the latest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=args, name=name, daemon=True)
    process.start()
    return process


class Pool:
    """`size` worker processes, started by the first job and again after a job that failed."""

    def __init__(self, size: int, folder: Path, timeout: float = JOB_TIMEOUT) -> None:
        self._size, self._timeout = size, timeout
        self._folder = folder
        self._jobs = 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, ranks: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `job(*args)` on each of `ranks` ranks and return the results by rank.

        Raises JobError with the tracebacks of the ranks that failed, or when one takes too long.
        """
        if not self._workers:
            self._workers = [self._start(index) for index in range(self._size)]
        self._jobs += 1
        store = str(self._folder / f"store-{self._jobs}")
        for rank, (_, connection) in enumerate(self._workers[:ranks]):
            connection.send_bytes(pickle.dumps((store, rank, ranks, job, args)))
        results: list[Any] = []
        failures: list[str] = []
        for rank, (_, connection) in enumerate(self._workers[:ranks]):
            if not connection.poll(self._timeout):
                self.close()
                raise JobError(f"rank {rank} did not answer within {self._timeout} s")
            good, value = connection.recv()
            (results if good else failures).append(value if good else f"rank {rank}:\n{value}")
        if failures:
            self.close()  # a failed job may leave anything behind in its processes
            raise JobError("\n".join(failures))
        for _, connection in self._workers[:ranks]:
            connection.send_bytes(b"over")  # only now: none breaks a connection that another still opens
        return results

    def _start(self, index: int) -> tuple[Any, Connection]:
        here, there = multiprocessing.Pipe()
        process = start(_work, there, name=f"rank-{index}")
        there.close()
        return process, here

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def alive(pid: int) -> bool:
    """Does this process run? A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _work(connection: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from support.remembered import share_again

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    share_again()
    caches = _caches()
    gc.freeze()  # what is imported: a collection takes a tenth of the time without it
    while True:
        try:
            content = connection.recv_bytes()
        except EOFError:
            return
        try:
            store, rank, ranks, job, args = pickle.loads(content)
            dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks,
                                    timeout=datetime.timedelta(seconds=60))  # fmt: skip
            answer: tuple[bool, Any] = (True, job(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
        try:
            connection.recv_bytes()
        except EOFError:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
            _forget_meshes()
            if len(os.listdir("/proc/self/task")) > MOST_THREADS:
                _free_process_groups(caches)


def _forget_meshes() -> None:
    """Clear DTensor's caches of redistributions.

    Their keys are meshes, and a later mesh of the same ranks is equal: DTensor would use the process groups
    of a mesh that is gone.
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _free_process_groups(caches: list[Any]) -> None:
    """Free process groups that reference cycles and torch's caches keep.

    Each group has threads that poll, and a few hundred of them slow every test down.
    """
    from torch.distributed.device_mesh import DeviceMesh

    for each in (*caches, *_caches()):
        each.cache_clear()
    gc.collect()
    for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()  # torch 2.11: its C++ caches never free the mesh
    gc.collect()


def _caches() -> list[Any]:
    """The caches of torch.distributed that the garbage collector sees."""
    everything = gc.get_objects()  # not isinstance, which asks a weak proxy for an object that may be gone
    found = (each for each in everything if type(each) is functools._lru_cache_wrapper)
    return [each for each in found if each.__module__.startswith("torch.distributed.")]
