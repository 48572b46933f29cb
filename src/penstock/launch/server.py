"""The process that ranks are forked from: it has imported their modules, and rehearsed their start.

    launcher  ["torch", ...]                        the server imports these, if it has not
              Rehearsal("module", "function", 1)    it calls this, for what that leaves in caches
              RankProcess(0, environment, command)  it forks: the child is the rank
    server    (0, "pid", 123)   (0, "code", -9)     at a rank's start, and at its end

Most of a start is the import of torch and transformers, and the trace of the model. Forked ranks share both:
each start takes moments, and memory holds the modules once.

The server is itself a fork of its launcher, if that has imported torch anyway, or begins by exec.

A fork is safe here: the server has one thread, no process group and no GPU in use. If an import has begun a
thread or opened a GPU's driver, or the command is not `python -P -m MODULE`, the rank begins anew by exec.

No process stays: the kernel kills the server when its launcher ends, and a rank when the server ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from penstock.launch.stop import leave

_PARENT_ENDS, _NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME
_DRIVERS = ("/dev/nvidia", "/dev/kfd")  # of GPUs
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # that the launcher passes on
_libc = ctypes.CDLL(None)


class RankProcess(NamedTuple):
    """A rank to start. environment: the whole one; command: a program's, or `python -P -m MODULE ...`"""

    rank: int
    environment: dict[str, str]
    command: list[str]

    @property
    def is_module(self) -> bool:
        return self.command[:3] == [sys.executable, "-P", "-m"]


class Rehearsal(NamedTuple):
    """A call whose result is dropped: ranks have what it leaves in caches. It changes nothing else."""

    module: str
    function: str
    argument: Any


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also where its parent has not asked for its exit code yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    try:
        return bool(ended.poll(0))
    finally:
        os.close(descriptor)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal and has not gone on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


def serve(connection: Connection) -> RankProcess | None:
    """Serve the launcher until it is gone. Returns None in the server, and in each child its rank."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    server, ranks = os.getpid(), dict[int, int]()
    while True:
        if reading in wait([connection, reading]):
            with suppress(BlockingIOError):
                os.read(reading, 4096)
            _tell_ends(connection, ranks)
        if not connection.poll():
            continue
        try:
            request = connection.recv()
        except EOFError:
            return None
        if isinstance(request, Rehearsal):
            _rehearse(request)
            continue
        if not isinstance(request, RankProcess):
            _import_all(request)
            continue
        forks = request.is_module and is_clean()
        pid = os.fork()
        if not pid:
            connection.close()
            signal.set_wakeup_fd(-1)
            return _become(request, server, forks)
        ranks[pid] = request.rank
        connection.send((request.rank, "pid", pid))


def _tell_ends(connection: Connection, ranks: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            connection.send((ranks.pop(pid), "code", os.waitstatus_to_exitcode(status)))


def _import_all(names: Sequence[str]) -> None:
    gc.disable()  # what modules make stays: to look for garbage in it took a seventh of the imports' time
    for name in names:
        with suppress(Exception):  # the rank imports it again, and raises the error
            importlib.import_module(name)
    gc.enable()
    _freeze()


def _rehearse(call: Rehearsal) -> None:
    """Make the call, unless there is a GPU: a trace asks torch for it, which opens its driver.

    No fork would be safe then.
    """
    if any(str(device).startswith(_DRIVERS) for device in Path("/dev").iterdir()):
        return
    with _silence(), suppress(Exception):  # the rank makes the same call, and raises the error
        getattr(importlib.import_module(call.module), call.function)(call.argument)
    _freeze()


@contextmanager
def _silence() -> Iterator[None]:
    """What is printed in the block, also by a library in C, goes nowhere: the launcher says the same."""
    spoken = [(stream, os.dup(stream)) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream, _ in spoken:
            os.dup2(nowhere, stream)
        yield
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    finally:
        for stream, kept in spoken:
            os.dup2(kept, stream)
            os.close(kept)
        os.close(nowhere)


def _freeze() -> None:
    """Exempt all objects from garbage collection: one in a rank would write to all shared pages.

    Without one here: to find the little garbage that imports leave took .35 s of a run's start.
    """
    gc.freeze()


def is_clean() -> bool:
    """Whether a fork is safe: this process has one thread, and no open driver of a GPU."""
    opened = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{name}"))
    drivers = any(name.startswith(_DRIVERS) for name in opened)
    return len(os.listdir("/proc/self/task")) == 1 and not drivers


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; end now if it is gone."""
    _libc.prctl(_PARENT_ENDS, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(rank: RankProcess, server: int, forks: bool) -> RankProcess:
    """Turn this process into a rank, in a session of its own: Ctrl-C in a terminal is for the launcher."""
    _end_with(server)
    os.setsid()
    for signum in (*SIGNALS, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(rank.environment)
    if not forks:
        os.execvp(rank.command[0], rank.command)
    _libc.prctl(_NAME, f"rank-{rank.rank}".encode())  # as `top` shows it
    return rank


def _run(rank: RankProcess) -> None:
    sys.orig_argv, sys.argv = rank.command, rank.command[3:]
    runpy.run_module(rank.command[3], run_name="__main__", alter_sys=True)


def main() -> None:
    """The server's main program: `python -P -c ... CONNECTION LAUNCHER`, a descriptor and a process id."""
    _end_with(int(sys.argv[2]))
    rank = serve(Connection(int(sys.argv[1])))
    if rank is not None:
        _run(rank)


class ForkedServer:
    """A server that is a fork of this process. It has what `start.Server` calls of subprocess.Popen.

    Call it where `is_clean`, in the main thread: the kernel ends the server with the thread that made it.
    """

    def __init__(self, ours: Connection, theirs: Connection) -> None:
        """ours: this process's end of the connection"""
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # else the server would write it again
        launcher = os.getpid()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _lead(theirs, launcher)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _lead(connection: Connection, launcher: int) -> NoReturn:
    """Serve in a fork of the launcher, of whose frames none may go on: this process and ranks end here."""
    code = 1
    try:
        _end_with(launcher)
        os.setsid()
        if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]  # as -P does
        _freeze()
        rank = serve(connection)
        if rank is not None:
            _run(rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)
