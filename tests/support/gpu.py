"""Emulated GPUs with NCCL between them, on the CPU: each rank is a thread of this process.

gloo does not show what NCCL does. Here

- a host queues ops and goes on: a tensor has its values when its stream comes to the op. Until then it holds
  NaN (0 where it is of integers), and so it does from the moment on that its last user has dropped it;
- each communicator has a stream. A message begins when the one before is complete, and what its rank had
  queued before it; it is complete when it has begun at both ends, at any time after; until then what is sent
  is read, and it never is where the other end is missing;
- `work.wait()` makes the compute stream wait, and `work.wait(limit)` the host;
- the first message between two ranks on a communicator holds up both hosts until they have come to it;
- streams share hardware queues, each of which begins its entries in order;
- to destroy a group waits for what is under way, and to abort it ends that, and returns a minute later;
- each rank counts as a process of one machine, and no connection breaks where one is killed.

One thread at a time runs: a rank's host, until it communicates or waits, or the GPUs. A seed chooses which,
and which entry of which queue is next. So a run can be repeated, and one that cannot go on is known at once.
Time goes by where all that is left to do is to look again whether something has happened: no test depends on
how busy the machine is. With `costs`, clocks are of numbers alone: a launch takes its host's time, a kernel
its GPU's, and a GPU runs behind its host, or waits for it.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.parallel import world
from penstock.parallel.reductions import Reductions
from penstock.parallel.world import World, WorldOptions, close_on_error, goes_in_batches
from penstock.pipeline import auto_pipeline
from penstock.pipeline.building import provided_stages
from penstock.private import get_default_store
from penstock.runtime.device import stream
from penstock.runtime.health import notes, watch
from penstock.runtime.health.notes import ProcessId
from penstock.runtime.transport import distributed, stream_channels
from penstock.runtime.transport import groups as groups_of
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.groups import Groups
from penstock.schedule import Schedule

T = TypeVar("T")
_COMPUTE = "compute"
_STOPS = 0.05  # how often a GPU stops between two ops that it could run
# seconds of the cluster that a look takes where nobody else can go on. Short unless a host is to wait until
# its time is over: with 8 ranks most looks are of those whose turn is far off
_TICK, _SHORT_TICK = 0.1, 0.001
_PATIENCE = 50.0  # seconds
_ABORT = 60.0  # seconds of the cluster that NCCL's abort takes after a rank was killed or stopped
_LOST = 60.0  # seconds after which a thread that has not come back fails the test


class HangError(RuntimeError):
    """No host and no GPU can go on."""


class Cluster:
    """The GPUs of all ranks.

    Args:
        connections: hardware queues of each GPU
        patient: whether a host that looks again and again does so until its own time is over; else it raises
            HangError as soon as nothing else can go on
        costs: seconds of the next launch on a rank, and of its kernel; None for the clock of this machine
    """

    def __init__(self, ranks: int, seed: int = 0, connections: int = 32, patient: bool = False,
                 costs: Callable[[int], tuple[float, float]] | None = None) -> None:  # fmt: skip
        self.connections, self._patient, self.costs = connections, patient, costs
        self.store = HashStore()
        self.gpus = [GPU(self, rank) for rank in range(ranks)]
        self.hung = ""  # where everyone was
        self.clock = 0.0  # seconds
        self.held_up = Counter[str]()  # by op, the waits with a limit: of hosts that stood still
        self._rng = random.Random(seed)
        self._looks = Counter[int]()  # by rank, since anything went on
        self._communicators: dict[object, Communicator] = {}
        self._hosts_pause = threading.Semaphore(0)  # released by each host that pauses or ends

    def run(self, job: Callable[[int], T]) -> list[T | BaseException]:
        """What `job` returns or raises on each rank."""
        found: list[Any] = [None] * len(self.gpus)
        self._until = time.monotonic() + _PATIENCE

        def host(gpu: GPU) -> None:
            try:
                self.pause(gpu)
                with gpu:
                    found[gpu.rank] = job(gpu.rank)
                    gpu.synchronize()
            except BaseException as error:
                found[gpu.rank] = error
            finally:
                gpu.ended = True
                self._hosts_pause.release()

        for gpu in self.gpus:
            gpu.ended = False
            threading.Thread(target=host, args=(gpu,), daemon=True).start()
        for _ in self.gpus:
            self._await_host()
        with torch.no_grad():
            while not all(gpu.ended for gpu in self.gpus):
                self._go_on().turn.release()
                self._await_host()
        return found

    def _await_host(self) -> None:
        assert self._hosts_pause.acquire(timeout=_LOST), "an emulated rank does not come back"

    def communicator(self, key: object) -> Communicator:
        return self._communicators.setdefault(key, Communicator())

    # ---- whose turn it is

    def pause(self, gpu: GPU, until: Callable[[], bool] = lambda: True, *, polls: bool = False) -> None:
        """In a rank's host: let others run. Returns when it is this rank's turn, and `until` holds.

        polls: whether the host looks again and again: then others come first
        """
        gpu.until, gpu.polls = until, polls
        self._hosts_pause.release()
        gpu.turn.acquire()
        if self.hung and (not gpu.knows or (polls and not self._patient)):
            gpu.knows = True
            raise HangError(self.hung)

    def _go_on(self) -> GPU:
        """Run entries of the GPUs until it is a host's turn."""
        while True:
            entries = [entry for gpu in self.gpus for entry in gpu.ready()]
            hosts = [gpu for gpu in self.gpus if not gpu.ended and gpu.until()]
            first = [gpu for gpu in hosts if not gpu.polls]
            if entries or first:
                self._looks.clear()
            elif self._patient and not hosts and time.monotonic() < self._until:
                time.sleep(1e-3)  # another thread may end what holds them up
                continue
            elif not hosts or (not self._patient and all(self._looks[gpu.rank] > 1 for gpu in hosts)):
                self._hang()
                continue
            options: list[Entry | GPU] = [*entries, *first]
            chosen = self._rng.choice(options or [*hosts])
            if isinstance(chosen, GPU):
                self._looks[chosen.rank] += 1
                self.clock += 0.0 if options else _TICK if self._patient else _SHORT_TICK
                return chosen
            self._run(chosen)

    def _run(self, entry: Entry) -> None:
        """Run an entry, and mostly what comes next on the compute stream."""
        entry.go_on()
        while entry.stream == _COMPUTE and (following := entry.gpu.next_compute()) is not None:
            if self._rng.random() < _STOPS:
                return
            following.go_on()

    def _hang(self) -> None:
        self.hung = "; ".join(str(gpu) for gpu in self.gpus)
        self._looks.clear()
        for gpu in self.gpus:
            gpu.until, gpu.polls = (lambda: True), False


class Entry:
    """An op on a stream. needs: entries, of any stream, that have to be done first"""

    def __init__(self, gpu: GPU, stream: object, name: str, run: Callable[[], None] | None,
                 needs: Sequence[Entry]) -> None:  # fmt: skip
        self.gpu, self.stream, self.name, self._run, self._needs = gpu, stream, name, run, needs
        self.begun = self.done = False
        self.error = ""
        self.seconds = 0.0
        self.at = self.queued = gpu.now  # when it ended, and when its host queued it
        self.moves: list[Move] = []

    @property
    def may_go_on(self) -> bool:
        if not self.begun:
            return all(need.done for need in self._needs)
        return any(move.may_go_on for move in self.moves)

    def go_on(self) -> None:
        if not self.begun:
            self.begun = True
            self.at = max([self.at, *(need.at for need in self._needs)])
            self.gpu.begin(self)
            if self._run is not None:
                self._run()
        else:
            next(move for move in self.moves if move.may_go_on).go_on()
        self.end_if_over()

    def end_if_over(self) -> None:
        if self.begun and all(move.done for move in self.moves):
            self.end()

    def end(self, error: str = "") -> None:
        if not self.done:
            self.done, self.error = True, error
            self.at = self.at + self.seconds if self.gpu.cluster.costs else time.perf_counter()
            self._run, self._needs, self.moves = None, (), []
            self.gpu.running.discard(self)


class Move:
    """What happens when all its ends have begun: a message, or a collective."""

    def __init__(self, ends: int, run: Callable[[list[Any]], None]) -> None:
        self._ends, self._run = ends, run
        self._entries: dict[int, tuple[Entry, Any]] = {}
        self.done = False

    def join(self, index: int, entry: Entry, memory: Any) -> None:
        assert index not in self._entries
        self._entries[index] = entry, memory
        entry.moves.append(self)

    def joined(self, index: int) -> bool:
        return index in self._entries

    @property
    def may_go_on(self) -> bool:
        entries = [entry for entry, _ in self._entries.values()]
        return not self.done and len(entries) == self._ends and all(e.begun and not e.done for e in entries)

    def go_on(self) -> None:
        self._run([memory for _, (_, memory) in sorted(self._entries.items())])
        self.done = True
        at = max(entry.at for entry, _ in self._entries.values())
        for entry, _ in self._entries.values():
            entry.at = at
            entry.end_if_over()


class GPU:
    """The GPU of one rank. Inside of it, tensors of this thread are on it."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.memory = Memory(self)
        self.running: set[Entry] = set()
        self.kernels = self.held = 0.0  # seconds so far, of kernels and of standing still
        self._host = 0.0  # the host's clock, where launches have costs
        self.turn = threading.Semaphore(0)
        self.until: Callable[[], bool] = lambda: True
        self.polls = self.ended = self.knows = False
        self.killed = False  # whether its process counts as gone
        _PROCESSES[id(self)] = self
        self._queues: list[deque[Entry]] = [deque() for _ in range(cluster.connections)]
        self._streams: dict[object, int] = {}
        self._last: dict[object, Entry] = {}
        self._modes: tuple[Any, ...] = ()

    def queue(self, stream: object, name: str, run: Callable[[], None] | None = None,
              needs: Iterable[Entry] = ()) -> Entry:  # fmt: skip
        last, seconds = self._last.get(stream), 0.0
        before = [need for need in (last, *needs) if need is not None]
        if stream == _COMPUTE and run is not None and name != "free" and self.cluster.costs is not None:
            launch, seconds = self.cluster.costs(self.rank)
            self._host += launch
            self.kernels += seconds
        entry = self._last[stream] = Entry(self, stream, name, run, before)
        entry.seconds = seconds
        number = self._streams.setdefault(stream, len(self._streams))
        self._queues[number % len(self._queues)].append(entry)
        return entry

    @property
    def now(self) -> float:
        """Its host's clock."""
        return time.perf_counter() if self.cluster.costs is None else self._host

    def wait(self, entry: Entry) -> None:
        """Hold up the host until the entry is done."""
        if not entry.done:
            self.cluster.pause(self, lambda: entry.done)
        self._host = max(self._host, entry.at)

    def ready(self) -> list[Entry]:
        heads = [queue[0] for queue in self._queues if queue]
        return [entry for entry in (*heads, *self.running) if entry.may_go_on]

    def next_compute(self) -> Entry | None:
        """The compute stream's next entry, if it may begin."""
        queue = self._queues[self._streams[_COMPUTE] % len(self._queues)]
        return queue[0] if queue and queue[0].stream == _COMPUTE and queue[0].may_go_on else None

    def begin(self, entry: Entry) -> None:
        for queue in self._queues:
            if queue and queue[0] is entry:
                queue.popleft()
        self.running.add(entry)

    def last(self, stream: object = _COMPUTE) -> Entry | None:
        return self._last.get(stream)

    @property
    def open_streams(self) -> list[object]:
        """Those with entries that are not done."""
        return [entry.stream for queue in (*self._queues, self.running) for entry in queue]

    def abort(self, streams: Callable[[object], bool]) -> None:
        for queue in self._queues:
            for entry in [entry for entry in queue if streams(entry.stream)]:
                queue.remove(entry)
                entry.end("NCCL communicator was aborted on this rank")
        for entry in [entry for entry in self.running if streams(entry.stream)]:
            entry.end("NCCL communicator was aborted on this rank")

    def sleep(self) -> None:
        """In place of time.sleep: let others go on, threads that are no ranks too."""
        self.cluster.pause(self, polls=True)
        time.sleep(1e-4)
        last = self.last()
        if last is not None and last.done:  # who looks again and again sees the end of what is done
            self._host = max(self._host, last.at)

    def synchronize(self) -> None:
        last = self.last()
        if last is not None:
            self.wait(last)

    def __enter__(self) -> None:
        _HERE.gpu = self
        self._modes = Queued(self), Read(self)
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*raised)
        _HERE.gpu = None

    def __str__(self) -> str:
        heads = [f"{queue[0].name} and {len(queue) - 1} more" for queue in self._queues if queue]
        running = ", ".join(sorted(entry.name for entry in self.running))
        return f"rank {self.rank}: queued {', '.join(heads)}, begun {running}"


_HERE = threading.local()
_PROCESSES: weakref.WeakValueDictionary[int, GPU] = weakref.WeakValueDictionary()


def _lives(process: ProcessId) -> bool:
    gpu = _PROCESSES.get(process.pid)
    return gpu is None or not gpu.killed


# ---- Memory and compute


class Memory:
    """The memory of a GPU: blocks that outlive their tensors, so that it is seen who reads them too late."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu
        self._blocks: dict[int, tuple[bytearray, int]] = {}  # by address

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape without values."""
        filled = 0xFF if tensor.is_floating_point() else 0
        nbytes = tensor.untyped_storage().nbytes()
        block = bytearray([filled]) * (nbytes + 64)
        offset = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % 64
        storage = torch.frombuffer(block, dtype=torch.uint8, offset=offset).untyped_storage()
        address = storage.data_ptr()
        self._blocks[address] = block, offset
        weakref.finalize(storage, self._free, address)
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _free(self, address: int) -> None:
        block, _ = self._blocks.pop(address)

        def fill() -> None:
            block[:] = b"\xff" * len(block)

        self._gpu.queue(_COMPUTE, "free", fill)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._blocks

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory, without counting as a user of the tensor."""
        found = self._blocks.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor.detach()
        block, offset = found
        storage = torch.frombuffer(block, dtype=torch.uint8, offset=offset).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


_AT_ONCE = {"set_", "_unsafe_view", "detach", "lift_fresh", "lift_fresh_copy", "alias"}
_BY_VALUE = {"nonzero", "masked_select", "equal", "_local_scalar_dense"}  # the host needs the values


class Queued(TorchDispatchMode):
    """Queues the ops of this thread on its GPU. Views are made at once, as they compute nothing."""

    supports_higher_order_operators = True

    def __init__(self, gpu: GPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name, schema = dict(kwargs or {}), func._overloadpacket.__name__, func._schema
        held = _tensors((args, kwargs))
        aliases = [returned.alias_info for returned in schema.returns]
        views = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
        if views or name in _AT_ONCE or (held and not any(map(self._gpu.memory.holds, held))):
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in held):
            return func(*args, **kwargs)
        masks = name == "index" and any(t.dtype == torch.bool for t in held)
        draws = schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags  # the host's generator
        if name in _BY_VALUE or masks or draws:
            self._gpu.synchronize()
        if name in {"equal", "_local_scalar_dense"} or draws:
            return func(*args, **kwargs)
        read = _mapped(self._gpu.memory.alias, (args, kwargs))
        if schema.is_mutable:
            self._gpu.queue(_COMPUTE, name, lambda: _call(func, read, ()))
            return None if not aliases else kwargs.get("out", args[0])
        without_values = func(*args, **kwargs)
        if any(tensor.is_meta for tensor in _tensors(without_values)):
            return without_values
        made = _mapped(self._gpu.memory.like, without_values)
        written = list(map(self._gpu.memory.alias, _tensors(made)))
        if name.startswith(("empty", "new_empty")):
            return made
        if held:
            self._gpu.queue(_COMPUTE, name, lambda: _call(func, read, written))
        else:  # it depends on nothing, but may draw random numbers
            _call(lambda: without_values, ((), {}), written)
        return made


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, each) for each in value])
    return {k: _mapped(change, v) for k, v in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def _call(func: Any, read: Any, written: Sequence[Tensor]) -> None:
    args, kwargs = read
    results = _tensors(func(*args, **kwargs))
    for into, result in zip(written, results if written else (), strict=True):
        into.copy_(result)


class Read(TorchFunctionMode):
    """Waits for the GPU where a host reads a tensor."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            self._gpu.synchronize()
        return func(*args, **(kwargs or {}))


class Mark:
    """A point in the compute stream."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu, self._entry = gpu, gpu.queue(_COMPUTE, "mark")
        self.queued = self._entry.queued

    def query(self) -> bool:
        return self._entry.done and self._entry.at <= self._gpu.now

    def synchronize(self) -> None:
        self._gpu.wait(self._entry)

    def elapsed_time(self, end: Mark) -> float:
        return (end._entry.at - self._entry.at) * 1e3


class ComputeStream:
    runs_behind = True

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu

    def begin_step(self) -> None:
        """There is one."""

    def now(self) -> Mark:
        return Mark(self._gpu)

    def hold(self, seconds: float) -> None:
        self._gpu.queue(_COMPUTE, "hold").seconds = seconds
        self._gpu.held += seconds

    def anchor(self) -> tuple[float, Mark]:
        mark = self.now()
        mark.synchronize()
        return mark._entry.at, mark


# ---- NCCL


class Communicator:
    """What the ranks of a process group have in common.

    met: the ranks that have come to each connection
    """

    def __init__(self) -> None:
        self.met: defaultdict[object, set[int]] = defaultdict(set)
        self._moves: defaultdict[object, list[Move]] = defaultdict(list)

    def move(self, key: object, index: int, ends: int, run: Callable[[list[Any]], None]) -> Move:
        """The first one of that kind which this end has not joined."""
        moves = self._moves[key]
        found = next((move for move in moves if not move.joined(index)), None)
        if found is None:
            found = Move(ends, run)
            moves.append(found)
        return found


class Work:
    """on_stream: whether to wait for it is up to the GPU"""

    def __init__(self, entry: Entry, on_stream: bool = True) -> None:
        self._entry, self._on_stream = entry, on_stream

    def is_completed(self) -> bool:
        return self._entry.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        entry, gpu = self._entry, self._entry.gpu
        gpu.cluster.pause(gpu)
        if self._on_stream:
            gpu.queue(_COMPUTE, f"wait for {entry.name}", needs=[entry])
        if timeout is not None:
            gpu.cluster.held_up[entry.name] += 1
        began = gpu.cluster.clock
        while timeout is not None and not self.is_completed():
            if gpu.cluster.clock - began > timeout.total_seconds():
                raise dist.DistBackendError(
                    f"[Rank {gpu.rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
                    f"OpType={entry.name}, Timeout(ms)=600000) ran for 1001 milliseconds before timing out."
                )
            gpu.sleep()
        if entry.error:
            raise dist.DistBackendError(entry.error)
        return True


class Group(dist.ProcessGroup):
    """A process group of NCCL; of gloo, it moves values of the host. ranks: of the cluster, in order"""

    def __init__(
        self, gpu: GPU, ranks: Sequence[int], name: str, communicator: Communicator, backend: str = "nccl"
    ) -> None:
        super().__init__(list(ranks).index(gpu.rank), len(ranks))  # type: ignore[call-arg]
        self._aborted = False
        self._gpu, self._name, self._communicator, self._backend = gpu, name, communicator, backend
        dist.distributed_c10d._world.pg_group_ranks[self] = {rank: at for at, rank in enumerate(ranks)}

    # ---- the first contact

    def _meet(self, connections: Sequence[tuple[object, int]]) -> None:
        """Hold up this host until as many ranks as it takes have come to each connection."""
        if self._aborted:
            raise dist.DistBackendError("NCCL communicator was aborted on this rank")
        met = self._communicator.met
        for key, _ in connections:
            met[key].add(self.rank())
        gpu = self._gpu
        gpu.cluster.pause(gpu, lambda: all(len(met[key]) >= count for key, count in connections))

    # ---- messages

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:  # type: ignore[override]
        return self._alone((True, tensors[0], dst))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:  # type: ignore[override]
        return self._alone((False, tensors[0], src))

    def _alone(self, message: tuple[bool, Tensor, int]) -> Work:
        """NCCL has a communicator for each pair of ranks whose messages go one by one."""
        pair = frozenset((self.rank(), message[2]))
        self._meet([(pair, 2)])
        return self._start((self, pair), [message])

    def batch(self, ops: Sequence[dist.P2POp]) -> list[Work]:
        assert self._communicator.met[None], "the first call in a group is one of all its ranks"
        return [self._start((self, None), [(op.op is dist.isend, op.tensor, op.group_peer) for op in ops])]

    def _start(self, stream: object, messages: Sequence[tuple[bool, Tensor, int]]) -> Work:
        me, gpu = self.rank(), self._gpu
        ends = [(me, peer) if sends else (peer, me) for sends, _, peer in messages]
        kind = stream[1]  # type: ignore[index]
        self._meet([((kind, pair), 2) for pair in ends])
        last = gpu.last()
        shown = ", ".join(f"{self._name} {source} to {target}" for source, target in ends)
        entry = gpu.queue(stream, shown, needs=[last] if last is not None else [])
        for (sends, tensor, _), pair in zip(messages, ends, strict=True):
            assert tensor.is_contiguous()
            move = self._communicator.move((kind, pair), 1 - sends, 2, _copy)
            move.join(1 - sends, entry, gpu.memory.alias(tensor))
        return Work(entry)

    # ---- collectives

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self._all("allgather", ([inputs[0]], outputs[0]), _gather)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        return self._all("allreduce", (tensors, tensors), _sum)

    def _all(self, name: str, memory: tuple[list[Tensor], list[Tensor]], run: Callable[[Any], None]) -> Work:
        self._meet([(None, self.size())])
        last = self._gpu.last()
        entry = self._gpu.queue((self, None), f"{self._name} {name}", needs=[last] if last else [])
        aliases = tuple([self._gpu.memory.alias(tensor) for tensor in each] for each in memory)
        self._communicator.move(name, self.rank(), self.size(), run).join(self.rank(), entry, aliases)
        return Work(entry, on_stream=self._backend == "nccl")

    # ---- the end

    def _mine(self, stream: object) -> bool:
        return isinstance(stream, tuple) and stream[0] is self

    def abort(self) -> None:
        self._aborted = True
        self._gpu.abort(self._mine)
        if _here() is not None:  # else a thread beside the host waits for it
            self._gpu.cluster.clock += _ABORT

    def destroy(self) -> None:
        self._gpu.cluster.pause(self._gpu, lambda: not any(map(self._mine, self._gpu.open_streams)))

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(_group_start=lambda: None, _group_end=lambda: None, name=lambda: self._backend)


def _copy(ends: list[Tensor]) -> None:
    source, target = ends
    target.copy_(source)


def _gather(ends: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    for _, outputs in ends:
        for output, (inputs, _) in zip(outputs, ends, strict=True):
            output.copy_(inputs[0])


def _sum(ends: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    total = torch.stack([inputs[0] for inputs, _ in ends]).sum(0)
    for _, outputs in ends:
        outputs[0].copy_(total)


class EmulatedGroups(Groups):
    """The process groups of a rank."""

    def __init__(self, gpu: GPU, timeout: float) -> None:
        self.rank, self.limit, self.backend = gpu.rank, timedelta(seconds=timeout), "nccl"
        self._gpu, self._counts = gpu, Counter[object]()
        self._members = list(range(len(gpu.cluster.gpus)))
        self._pipelines: list[list[int]] = [self._members]
        self._made: list[dist.ProcessGroup] = []
        self.pipeline = self._make(self._members, "pp", messages=False, backend="nccl")
        self.host = self.new_on_host("pp values")

    def _make(self, ranks: list[int], name: str, messages: bool, backend: str) -> dist.ProcessGroup:
        key = name, tuple(ranks)
        self._counts[key] += 1
        if self.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[return-value]
        communicator = self._gpu.cluster.communicator((*key, self._counts[key]))
        return Group(self._gpu, ranks, name, communicator, backend)


def _open_world(schedule: Schedule, options: WorldOptions, facts: Mapping[str, str] | None = None) -> World:
    gpu: GPU = _HERE.gpu
    options.check()
    device, groups = torch.device("cpu"), EmulatedGroups(gpu, options.timeout)
    transport = DistributedTransport(groups, device, options.timeout)
    batched = goes_in_batches(options, "nccl", schedule)
    with close_on_error(transport):
        transport.open(schedule, options.wire, batched=batched)
    mesh: Any = SimpleNamespace(size=lambda: groups.size)
    return World((gpu.rank,), device, transport, transport.ranks, 0.0, batched, mesh, Reductions())


def _here() -> GPU | None:
    return getattr(_HERE, "gpu", None)


@contextmanager
def emulated() -> Iterator[None]:
    """Inside, pipelines that an emulated rank builds are on its GPU."""
    real_stream, real_open = stream.stream_of, world.open_world
    real_store, real_destroy, real_sleep = (
        get_default_store,
        dist.destroy_process_group,
        time.sleep,
    )
    real_process = notes.this_process

    here = _here

    def begun(what: str, call: Callable[[], None]) -> Callable[[timedelta], None]:
        gpu, _HERE.gpu = here(), None
        call()
        _HERE.gpu = gpu
        return lambda limit: None

    def open_world(schedule: Schedule, *args: Any) -> World:
        return real_open(schedule, *args) if here() is None else _open_world(schedule, *args)

    def stream_of(device: torch.device) -> stream.Stream:
        return real_stream(device) if (gpu := here()) is None else ComputeStream(gpu)

    def store() -> Any:
        return real_store() if (gpu := here()) is None else gpu.cluster.store

    def sleep(seconds: float) -> None:
        real_sleep(seconds) if (gpu := here()) is None else gpu.sleep()

    def clock() -> float:
        return time.monotonic() if (gpu := here()) is None else gpu.cluster.clock

    def destroy(group: Any = None) -> None:
        group.destroy() if isinstance(group, Group) else real_destroy(group)

    with pytest.MonkeyPatch.context() as patch:

        def this_process() -> ProcessId:
            return real_process() if (gpu := here()) is None else ProcessId("emulated", id(gpu), None)

        patch.setattr(notes, "this_process", this_process)
        patch.setattr(watch, "lives", _lives)
        patch.setattr(provided_stages, "open_world", open_world)
        patch.setattr(auto_pipeline, "open_world", open_world)
        patch.setattr(stream, "stream_of", stream_of)
        patch.setattr(distributed, "get_default_store", store)
        patch.setattr(groups_of, "begun", begun)
        patch.setattr(groups_of, "within", lambda seconds, what, call: call())  # in the thread of the rank
        patch.setattr(stream_channels, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
        patch.setattr(dist, "batch_isend_irecv", lambda ops: ops[0].group.batch(ops))
        patch.setattr(dist, "destroy_process_group", destroy)
        for name in [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]:
            patch.setattr(_python_dispatch, name, False)
        groups = dict(dist.distributed_c10d._world.pg_group_ranks)
        yield
        dist.distributed_c10d._world.pg_group_ranks.clear()
        dist.distributed_c10d._world.pg_group_ranks.update(groups)
    # torch notes for the whole process whether a thread is in a mode, and threads leave theirs in any order;
    # the end of another tells dynamo, which would compile anew at each call
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        pass
