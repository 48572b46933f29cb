"""Ranks: the processes of a pipeline, and how an error of one of them reaches the others.

A rank that raises alone leaves the others waiting. Two verbs prevent that:

    rank 0   same("build()", {"microbatches": "4"})    one exchange; then HandshakeError on both,
    rank 1   same("build()", {"microbatches": "8"})    which shows the value of each rank

    rank 0   attempt("read x", read)   returns         one exchange; then CheckpointError on both,
    rank 1   attempt("read x", read)   CheckpointError  which names process 1

`same` compares the inputs of a call that all ranks make. After it, an error that depends on these inputs
alone needs no exchange: every rank raises it. `attempt` is for work whose outcome depends on more than the
inputs: on a disk, on a device, on a rank's part of the batch. A rank whose process ends sends nothing; the
others learn of that from its notes (penstock.runtime.health.watch).

`Ranks` alone is one process, which holds all ranks. `GroupRanks` are the processes of a process group.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import errors
from penstock.batch.microbatches import checksums
from penstock.batch.placement import to_device
from penstock.errors import (
    BatchError,
    ConfigError,
    HandshakeError,
    PeerError,
    PenstockError,
    RunError,
)
from penstock.private import set_pg_timeout
from penstock.runtime.health.agreement import Facts, differences, digest, number_of
from penstock.runtime.health.limits import is_late
from penstock.runtime.health.watch import Watch
from penstock.runtime.transport.groups import backend_for, naming_peers, never_free
from penstock.runtime.transport.one_to_all import GroupOneToAll, OneToAll

_PATIENCE = datetime.timedelta(hours=1)  # a disk may be slow; a rank that dies closes its connections at once
_ON_HOST = torch.device("cpu")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Gathering(Protocol):
    """An all-gather that has begun."""

    def wait(self, timeout: datetime.timedelta) -> object:
        """Raises RuntimeError where a process is late or gone."""


Started = tuple[Gathering, list[Tensor]]  # an exchange under way, and every process's tensor once it is over


class Ranks:
    """One process, which holds all ranks.

    Attributes:
        index: of this process, from 0. Process 0 writes files that are written once.
        count: the number of processes
    """

    index = 0
    count = 1

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (anything that JSON can hold), in order, on every process. Collective."""
        self._check()
        return [value]

    def all_gather(self, mine: Tensor, waits_for: str = "") -> list[Tensor]:
        """Every process's tensor, in order; all have one shape and dtype. Collective.

        waits_for: what the exchange waits for, for an error
        """
        self._check()
        return [mine]

    # ---- how an error of one rank reaches the others

    def same(self, call: str, facts: Facts | None = None) -> None:
        """Raise the same error on all ranks where their calls differ, or the facts of one call.

        Collective: one exchange, and a second one for the error.

        Args:
            call: of this rank, such as "step()"
            facts: what must be equal on all ranks

        Raises ConfigError where the calls differ, HandshakeError where the facts do.
        """
        facts = dict(facts or {})
        mine = torch.tensor([call_number(call), number_of(facts)], dtype=torch.float64)
        waits_for = "the handshake" if facts else f"the other ranks to call {call}"
        if len({tuple(theirs.tolist()) for theirs in self.all_gather(mine, waits_for)}) == 1:
            return
        calls, all_facts = zip(*self.gather([call, facts]), strict=True)
        if len(set(calls)) > 1:
            raise _different_calls(calls)
        lines = "".join(f"\n  {line}" for line in differences(all_facts))
        raise HandshakeError(
            "ranks that were started on different things",
            f"all ranks of a pipeline run the same{lines}",
            "\nStart every rank with the same versions, config and arguments",
        )

    def attempt(self, action: str, work: Callable[[], T], only: type[Exception] = Exception) -> T:
        """Call `work`; return its result once no rank has failed. Collective: one exchange.

        A typed error of one rank is raised on all, and names that rank. After any other error that rank
        raises its own, and the others a RunError that names the rank, the action and the error. Of several
        errors, the others raise the first rank's. A rank that has lost another one does not wait for the
        rest.

        Args:
            action: what `work` does, for the error: "read checkpoint 3"
            only: errors that reach the other ranks. This rank raises any other at once, and ends: for work
                in which the others may wait for this rank.
        """
        failure: Exception | None = None
        try:
            result = work()
        except PeerError:
            raise
        except only as error:
            failure = error
        failed = torch.tensor([failure is not None], dtype=torch.float64)
        try:
            if not any(map(bool, self.all_gather(failed))):
                return result
            words = self.gather(None if failure is None else self._words(failure, action))
        except Exception as lost:
            if failure is None:
                raise
            raise lost from failure  # others may have waited for this rank because of it
        if failure is not None and (self.count == 1 or not isinstance(failure, PenstockError)):
            raise failure
        first = first_error(dict(enumerate(words)), "on process")
        assert first is not None
        raise first from failure

    def _words(self, error: Exception, action: str) -> Words:
        """The error that other ranks raise when this one fails."""
        if isinstance(error, PenstockError):
            return in_words(error)
        rule = f"it could not {action}: {type(error).__name__}: {error}"
        return in_words(RunError(f"process {self.index}", rule, "Fix that first"))

    def fail(self, reason: str) -> None:
        """Leave a note with the reason of this rank's failure, for other ranks that may wait for it."""

    # ---- the same processes, with other limits

    @property
    def patient(self) -> Self:
        """Waits up to an hour, for a disk say, unless a process ends or is stuck. Not on NCCL."""
        return self

    def checked(self, check: Callable[[], None]) -> Self:
        """Calls `check`, which may raise, before each exchange."""
        ranks = copy.copy(self)
        ranks._check = check  # type: ignore[method-assign]
        return ranks

    def _check(self) -> None:
        pass

    def in_background(self) -> Ranks:
        """For use in another thread, and `patient`. Collective over all processes of the job."""
        return self

    def one_to_all(self, source: int) -> OneToAll:
        """A way for values of process `source` to all others. Collective over all processes of the job."""
        return OneToAll()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Raise the typed error, which names a process, if the block fails while it waits for `what`."""
        return nullcontext()

    # ---- calls: methods that all ranks make together

    call = ""  # the one that this process is in
    mesh: Ranks | None = None  # all processes of the mesh, which compare their calls before each one

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Inside, this rank is in the call of this name. Of nested calls the outermost counts.

        The ranks of one pipeline notice different calls in their first exchange. On a mesh, different calls
        may wait in different process groups: there all ranks compare their calls first.
        """
        named_call(name)
        if self.call:
            yield
            return
        self.call = name
        try:
            if self.mesh is not None:
                self.mesh.same(name)
            yield
        finally:
            self.call = ""

    def begin(self, fingerprint: int, description: str) -> None:
        """Begin to compare fingerprints; `settle` raises where they differ. Does not wait.

        description: of the batch, for the error
        """

    def settle(self) -> None:
        """Wait for the result of `begin`. Raises BatchError on all ranks, ConfigError for different calls."""


# The tensors of the latest collectives. One of gloo's threads drops its references shortly after it reports
# the collective complete. To drop the last one it would need Python, which may be ending by then: that aborts
# the process.
_LATEST: deque[tuple[Tensor, list[Tensor]]] = deque(maxlen=16)


class GroupRanks(Ranks):
    """The processes of a process group.

    Args:
        limit: the longest wait for the other processes
        device: where the group's tensors have to be
        watch: makes the typed error for a process that is late or gone; without it, RuntimeError
        waits_for: what an exchange waits for, for an error, unless its caller names it
        numbered: whether each exchange carries the number of the call that this process is in
        another: makes one more group of the same processes; collective over all processes of the job
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        limit: datetime.timedelta,
        device: torch.device = _ON_HOST,
        watch: Watch | None = None,
        waits_for: str = "an answer",
        *,
        numbered: bool = False,
        another: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        self.index, self.count = group.rank(), group.size()
        self.watch = watch
        # sends a vector through shared memory; returns None if it has no room there
        self.shared: Callable[[Tensor], Started | None] = lambda mine: None
        self._group, self._limit, self._device, self._waits_for = group, limit, device, waits_for
        self._patient, self._numbered, self._another = False, numbered, another
        self._on_stream = backend_for(group, device.type) == "nccl"
        self.begun: tuple[Started, str] | None = None

    @property
    def patient(self) -> Self:
        ranks = copy.copy(self)
        ranks._patient, ranks._numbered, ranks.begun = True, False, None
        return ranks

    def in_background(self) -> Ranks:
        # one group serves one thread only
        return GroupRanks(self._new_group(), self._limit, watch=self.watch).patient

    def one_to_all(self, source: int) -> OneToAll:
        assert self.watch is not None
        return GroupOneToAll(self._new_group(), source, self._limit, self.watch)

    def _new_group(self) -> dist.ProcessGroup:
        assert self._another is not None
        assert self.watch is not None
        with naming_peers(self.watch, "the making of a process group"):
            return self._another()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.waiting(what, None)

    def fail(self, reason: str) -> None:
        if self.watch is not None:
            self.watch.failed(reason)

    # ---- exchanges

    def gather(self, value: Any) -> list[Any]:
        """By way of all-gathers of float64 vectors of one length. Raises StalledPeerError, PeerLostError."""
        text = json.dumps(value).encode()
        length = torch.tensor([len(text)], dtype=torch.float64)
        longest = int(max(size.item() for size in self.all_gather(length)))
        padded = torch.zeros(longest, dtype=torch.float64)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = self.all_gather(padded)
        return [json.loads(bytes(t.to(torch.uint8).tolist()).rstrip(b"\0")) for t in received]

    def all_gather(self, mine: Tensor, waits_for: str = "") -> list[Tensor]:
        self._check()
        self.settle()
        # not for bytes, which a call sends only after float64 vectors
        numbered = self._numbered and mine.dtype == torch.float64
        if numbered:  # a vector of one entry gets the length of that of `begin`, which it may meet
            mine = torch.cat([mine.new_full((1,), call_number(self.call)), mine])
        everyone = self._wait_patiently(mine) if self._patient else self._wait(mine, waits_for)
        if numbered:
            _check_calls(everyone)
        return [vector[1:] for vector in everyone] if numbered else everyone

    def _wait(self, mine: Tensor, waits_for: str) -> list[Tensor]:
        with self.waiting(waits_for or self._waits_for):
            work, everyone = self._start(mine)
            self._finish(work)
        return everyone

    def _wait_patiently(self, mine: Tensor) -> list[Tensor]:
        assert self.watch is not None
        with self._limited(_PATIENCE):
            work, everyone = self._start(mine)
        try:
            self.watch.wait_patiently("what is read or written", work.wait, _PATIENCE)
        except PeerError:
            never_free(self._group)
            raise
        return everyone

    def _start(self, mine: Tensor) -> Started:
        """Begin an all-gather."""
        if (started := self.shared(mine)) is not None:
            return started
        mine = to_device(mine, self._device)
        everyone = list(mine.new_empty((self.count, *mine.shape)).unbind())
        work = dist.all_gather(everyone, mine, self._group, async_op=True)
        assert work is not None
        if self._on_stream:  # the GPU's stream waits, before another group may be used
            work.wait()
        _LATEST.append((mine, everyone))
        return work, everyone

    def _finish(self, work: Gathering) -> None:
        """Wait for an exchange under way. Raises RuntimeError if a process is late or gone."""
        try:
            work.wait(self._limit)
        except RuntimeError as cause:
            # A collective is under way that may not complete. To free its group, gloo would wait for that up
            # to the group's own limit, which is 30 minutes for the group of the job.
            if is_late(cause):
                never_free(self._group)
            raise

    @contextmanager
    def _limited(self, limit: datetime.timedelta) -> Iterator[None]:
        """Collectives begun in the block may take up to `limit`; then gloo closes their connections."""
        backend: Any = self._group._get_backend(_ON_HOST)
        before = backend.options._timeout
        set_pg_timeout(limit, self._group)
        try:
            yield
        finally:
            set_pg_timeout(before, self._group)

    # ---- the start of a step

    def begin(self, fingerprint: int, description: str) -> None:
        mine = torch.tensor([call_number(self.call), fingerprint], dtype=torch.float64)
        with self.waiting("the start of the step"):
            self.begun = self._start(mine), description

    def settle(self) -> None:
        if self.begun is None:
            return
        (work, everyone), description = self.begun
        self.begun = None
        with self.waiting("the start of the step"):
            self._finish(work)
        _check_calls(everyone)
        if len({int(fingerprint) for _, fingerprint in everyone}) == 1:
            return
        raise BatchError(
            "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.gather(description))),
            "all ranks of a pipeline step on the same batch, split and schedule",
            "Give every rank the same batch, e.g. by drawing it from the same seed and step",
        )


# ---- the same values


def compare_values(ranks: Ranks, part: int, values: Mapping[str, Tensor], shared: Collection[str]) -> None:
    """Raise HandshakeError on every process where copies or shards of one weight have different values.

    For example, each process may have made its model at random. Collective.

    Args:
        part: which part of the model this process has.
        values: the weights of that part, by name.
        shared: the names that occur in several parts: a tied weight, or all where there are two copies of
            the model.
    """
    sums = {name: f"{checksums([value])[0]:08x}" for name, value in values.items()}
    in_parts = {name: sums[name] for name in sorted(sums.keys() & set(shared))}
    gathered = ranks.gather([part, digest(json.dumps(sorted(sums.items()))), in_parts])
    distinct_sums: set[tuple[int | str, str]] = {(part, text) for part, text, _ in gathered}
    distinct_sums |= {pair for *_, pairs in gathered for pair in pairs.items()}
    if len(distinct_sums) == len({key for key, _ in distinct_sums}):
        return
    everyone = ranks.gather(sums)
    lines: list[str] = []
    for name in sorted({name for sums_of in everyone for name in sums_of}):
        lines += differences([{name: sums_of[name]} if name in sums_of else None for sums_of in everyone])
    more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise HandshakeError(
        "ranks whose models have different values",
        "copies and shards of one weight begin with the same values"
        + "".join(f"\n  sum of {line}" for line in lines[:5])
        + more,
        "\nGive every rank the same seed before the model is made, or give its config or folder",
    )


# ---- errors in words


Words = Sequence[str]  # an error's type, value, rule and remedy


def in_words(error: PenstockError) -> Words:
    """The error in a form for JSON; a type whose constructor takes more becomes its nearest base."""
    kind = next(base for base in type(error).__mro__ if "__init__" not in vars(base))
    return [kind.__name__, error.value, error.rule, error.remedy]


def first_error(by_rank: Mapping[int, Words | None], who: str) -> PenstockError | None:
    """The first error, with the ranks that share it, unless all do or it names one; None without an error.

    who: the words before the ranks, such as "given to process"
    """
    error_words = {rank: words for rank, words in by_rank.items() if words is not None}
    if not error_words:
        return None
    first = next(iter(error_words.values()))
    ranks = [str(rank) for rank, words in error_words.items() if words == first]
    kind, value, rule, remedy = first
    error: type[PenstockError] = getattr(errors, kind, BatchError)
    said = len(ranks) == len(by_rank) or re.search(r"\bprocess \d", value)  # by a nested attempt
    return error(value if said else f"{value}, {who} {', '.join(ranks)}", rule, remedy)


# ---- calls in numbers


_NAMES: dict[int, str] = {}  # number of a call -> its name


def named_call(name: str) -> str:
    """Register the name of a collective call, so that errors can find it by its number."""
    _NAMES[call_number(name)] = name
    return name


def call_number(name: str) -> int:
    """A hash of a call's name, which ranks compare in each exchange."""
    return zlib.crc32(name.encode()) if name else 0


def _check_calls(everyone: Sequence[Tensor]) -> None:
    """Raise ConfigError where the first entries of the ranks' vectors are numbers of different calls."""
    called = [int(vector[0]) for vector in everyone]
    if len(set(called)) > 1:
        raise _different_calls([_NAMES.get(call, "another call") for call in called])


def _different_calls(names: Sequence[str]) -> ConfigError:
    """names: by rank"""
    return ConfigError(
        ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(names)),
        "these methods are collective: every rank calls the same ones in the same order",
        "Call it on every rank, and print on one of them",
    )


class _CallsTogether(Protocol):
    @property
    def processes(self) -> Ranks: ...


def collective(method: F) -> F:
    """Mark a method of a pipeline that every rank calls."""
    name = named_call(f"{method.__name__}()")

    @functools.wraps(method)
    def called(self: _CallsTogether, /, *args: Any, **kwargs: Any) -> Any:
        with self.processes.calling(name):
            return method(self, *args, **kwargs)

    return cast(F, called)
