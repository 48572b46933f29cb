"""What a process has run out of: descriptors of files, memory, disk. An error may name something else.

OSError, "Too many open files" of gloo              ulimit -n
MemoryError, "can't allocate memory" of torch       ulimit -v, or the memory of this machine
RuntimeError, "can't start new thread"              ulimit -u
OSError, "No space left on device"                  the disk, or the memory that is mounted there
SIGKILL                                             memory, if the kernel has counted a kill for it
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from penstock.errors import PenstockError, RunError

_MIB = 1 << 20
OUT_OF_MEMORY = ", as memory ran out: the kernel has killed a process of this machine for it"
_FILES, _MEMORY, _DISK = {errno.EMFILE, errno.ENFILE}, {errno.ENOMEM}, {errno.ENOSPC, errno.EDQUOT}
_THREADS = {errno.EAGAIN}
# of libraries in C++, whose errors have no number
_TEXTS = {
    errno.EMFILE: re.compile(r"too many open files", re.IGNORECASE),
    errno.ENOMEM: re.compile(r"(can't|cannot) allocate memory|bad_alloc", re.IGNORECASE),
    errno.ENOSPC: re.compile(r"no space left on device", re.IGNORECASE),
    errno.EAGAIN: re.compile(r"can't start new thread"),
}
# counts of processes that the kernel killed as memory ran out: of the machine, and of its control groups
_COUNTS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def shortage(error: BaseException) -> RunError | None:
    """The error that says what this process has run out of; None where `error` has another cause.

    None as well for a typed error, which names its cause itself.
    """
    if isinstance(error, PenstockError):
        return None
    for cause in _chain(error):
        number = _number(cause)
        for numbers, describe in _KINDS:
            if number in numbers:
                return describe(cause)
    return None


def too_many_files(who: str) -> RunError:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    rule = f"{who} has {most:,} files open, and may open no more"
    return RunError(
        f"ulimit -n {most}", rule, "Raise it (ulimit -n), or end the other processes of this user"
    )


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed so far, on this machine or in this container, for memory."""
    return sum(map(_count, _COUNTS))


def _count(file: Path) -> int:
    with suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from or after."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _number(error: BaseException) -> int | None:
    """The number of the system's error, as far as it is known."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno != errno.EAGAIN:  # which only means to try again
        return error.errno
    if isinstance(error, RuntimeError):
        return next((number for number, text in _TEXTS.items() if text.search(str(error))), None)
    return None


def _no_files(error: BaseException) -> RunError:
    return too_many_files("this process")


def _no_threads(error: BaseException) -> RunError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    value = "threads of this user" if limit < 0 else f"ulimit -u {limit}"
    rule = (
        "this process can start no thread: this user has too many, or its stack finds no memory (ulimit -v)"
    )
    return RunError(value, rule, "Raise the limit, or end other processes of this user")


def _no_memory(error: BaseException) -> RunError:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    value = f"memory of {socket.gethostname()}" if limit < 0 else f"ulimit -v {limit >> 10}"
    taken = f"this process has {_address_space() / _MIB:,.0f} MiB of addresses"
    rule = f"{taken}, and gets no more ({_said(error)})"
    return RunError(value, rule, "Give it more, or train a smaller part of the model on each rank")


def _no_disk(error: BaseException) -> RunError:
    value, room = "a file, or standard output", ""  # which has no name, or a number for one
    if isinstance(name := getattr(error, "filename", None), str | bytes | os.PathLike):
        value = os.fsdecode(name)
        room = _room(Path(value))
    return RunError(value, f"it cannot be written ({_said(error)}){room}", "Make room, or write elsewhere")


def _room(file: Path) -> str:
    """The room that is left where a file was to be written, in words."""
    with suppress(OSError):
        folder = next(parent for parent in file.absolute().parents if parent.is_dir())
        return f"; {folder} has {shutil.disk_usage(folder).free / _MIB:,.1f} MiB left"
    return ""


def _said(error: BaseException) -> str:
    """The first line of an error, which may be empty, with its type."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _address_space() -> int:
    """Bytes of addresses of this process; 0 where that is not known."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


_KINDS: tuple[tuple[set[int], Callable[[BaseException], RunError]], ...] = (
    (_FILES, _no_files), (_MEMORY, _no_memory), (_DISK, _no_disk), (_THREADS, _no_threads),
)  # fmt: skip
