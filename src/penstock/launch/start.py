"""Starts every rank on this machine, passes signals on, and reports the first cause of a failure.

    launch       starts the ranks, waits, and prints one summary of their failures (failures.py)
    Launcher     the same, attempt after attempt, from a process that has imported their modules (server.py)
    relaunch     starts the calling script again, once for each rank

A rank has the environment that torchrun gives it. The launcher hosts the store of each attempt, so that the
ranks' notes outlive them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import NamedTuple, Self

from penstock.launch import failures
from penstock.launch.folder import attempt_folder
from penstock.launch.server import (
    SIGNALS,
    ForkedServer,
    RankProcess,
    Rehearsal,
    has_ended,
    is_clean,
    is_stopped,
)
from penstock.launch.stop import LAUNCHER, fail, follow_parent, handle, said, under_torchrun
from penstock.launch.store import GuardedStore
from penstock.shortages import out_of_memory_kills, too_many_files

_LOOKS = 0.1  # seconds between two polls
_SILENCE = 3.0  # seconds that the server may be silent about a rank
_DYING = 10.0  # seconds from SIGKILL to the end of a rank: the kernel frees its memory first


class Ended(NamedTuple):
    """How ranks ended.

    Attributes:
        code: the exit code
        cause: the first failure, or how they stopped, in words; empty without either
        asked: whether this launcher got a signal to end them
    """

    code: int
    cause: str = ""
    asked: bool = False


def launch(ranks: int, command: list[str]) -> int:
    """Run `ranks` copies of `command` on this machine, with the environment that torchrun gives them.

    The ranks' output passes through. As soon as one rank fails all are ended, and the first cause is printed
    once on stderr. Ctrl-C, SIGTERM and SIGUSR1 are passed on to the ranks; a second signal kills them. Call
    it from the main thread, as it handles signals.

    Returns: the exit code: that of the first cause, 130 after Ctrl-C, 143 after SIGTERM, 75 if all ranks have
    saved after a signal.
    """
    with Server() as server, Launcher(server) as launcher:
        return launcher.attempt(ranks, command).code


def relaunch(ranks: int) -> None:
    """Run the calling script in `ranks` processes.

    In the parent it never returns: it exits with the ranks' code. In a rank it returns at once, and from then
    on an exception that the script does not catch ends the rank instead of leaving it to wait for its peers.
    """
    if under_torchrun():
        follow_parent()
        sys.excepthook = lambda _, error, __: fail(error)
        return
    sys.exit(launch(ranks, [sys.executable, *sys.orig_argv[1:]]))


# the environment of ranks, where the user's has none of these
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # penstock.parallel.nccl says why
}


def take_defaults() -> None:
    """Give this process, too, what is the default for ranks. They may be forked from it by `Server`.

    Call it before numpy and torch are imported, which read their number of threads once.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


class Server:
    """The process that ranks are forked from, which ends with this object or with this process.

    Ranks get one thread each unless OMP_NUM_THREADS is set. Make it in the main thread.

    Args:
        imports: modules that it imports ahead, for ranks that run `python -P -m MODULE`
        forks: make it by a fork of this process, where that is safe, so that it has what is imported here.
            This process has called `take_defaults`
    """

    def __init__(self, imports: Sequence[str] = (), *, forks: bool = False) -> None:
        self.environment = {**_DEFAULTS, **os.environ}
        self._forks = forks
        self._imports, self._known = [*imports], {*sys.modules}
        self._rehearsals: list[Rehearsal] = []
        self._start()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._process: ForkedServer | subprocess.Popen[bytes]
        if self._forks and is_clean():
            self._process = ForkedServer(self._connection, theirs)
        else:
            main, descriptor = "from penstock.launch.server import main; main()", theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", main, str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                start_new_session=True,
                env=self.environment,
            )
        theirs.close()
        for ahead in (self._imports, *self._rehearsals):
            self._connection.send(ahead)

    @property
    def pid(self) -> int:
        return self._process.pid

    def follow(self, packages: Sequence[str]) -> None:
        """Import in the server the modules of these packages that this process has imported since then."""
        names = [name for name in sys.modules if name.partition(".")[0] in packages]
        more = [name for name in names if name not in self._known]
        self._imports += more
        self._connection.send(more)

    def rehearse(self, call: Rehearsal) -> None:
        """Make this call in the server ahead of the ranks, if there is no GPU. Its errors are ignored."""
        self._rehearsals.append(call)
        self._connection.send(call)

    def open(self) -> None:
        """Start the server again if it has ended."""
        if self._process.poll() is not None:
            self._connection.close()
            self._start()

    def start(self, rank: RankProcess) -> None:
        self._connection.send(rank)

    def look(self, seconds: float) -> list[tuple[int, str, int]]:
        """The starts and ends of ranks, after a wait for the first. Raises EOFError if the server is gone."""
        events: list[tuple[int, str, int]] = []
        while self._connection.poll(0 if events else seconds):
            events.append(self._connection.recv())
        return events

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._connection.close()

    def end(self) -> None:
        """End the server, and with it the remaining ranks."""
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """End it from a signal's handler: a call that waits for it raises ConnectionError or EOFError."""
        os.kill(self.pid, signal.SIGKILL)


class _Attempt:
    """The ranks of one attempt.

    Attributes:
        failures: of those that did not end with 0, by rank
        silent: why the server was ended here, in words; empty if it was not
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._pids: dict[int, int] = {}
        self._left: set[int] = set()
        self._killed: set[int] = set()
        # since when the server is silent about a rank: see `_is_unheard`
        self._unheard: dict[int, float] = {}
        self.failures: dict[int, failures.Failure] = {}
        self.silent = ""
        self._kills = out_of_memory_kills()

    def start(self, ranks: int, command: list[str], environment: dict[str, str]) -> None:
        self._left = {*range(ranks)}
        for rank in self._left:
            file = self._file(rank)
            file.parent.mkdir()
            by_rank = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            variables = {**self._server.environment, **environment, **by_rank, failures.ERROR_FILE: str(file)}
            self._server.start(RankProcess(rank, variables, command))

    def _file(self, rank: int) -> Path:
        return self._folder / str(rank) / "error.json"

    @property
    def running(self) -> bool:
        return bool(self._left)

    @property
    def started(self) -> bool:
        return self._left <= self._pids.keys()

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, other than by a stop after a signal."""
        return any(failure.code != failures.STOPPED for failure in self.failures.values())

    def look(self, seconds: float) -> None:
        for rank, event, value in self._server.look(seconds):
            if event == "pid":
                self._pids[rank] = value
                continue
            self._left.discard(rank)
            if value:
                for_memory = out_of_memory_kills() > self._kills
                file, killed = self._file(rank), rank in self._killed
                self.failures[rank] = failures.Failure(value, time.time(), file, killed, for_memory)

    def end_silent_server(self, overdue: bool) -> None:
        """End a server, as one that was stopped, that has not told the end of a rank for too long.

        overdue: whether all ranks must have ended by now
        """
        now = time.monotonic()
        self._unheard = {rank: self._unheard.get(rank, now) for rank in self._left if self._is_unheard(rank)}
        if overdue or any(now - since > _SILENCE for since in self._unheard.values()):
            self.silent = "did not say how they ended, and was killed"
            self._server.end()

    def _is_unheard(self, rank: int) -> bool:
        """Whether the server has not told a rank's end, or, while it is stopped, not its start."""
        pid = self._pids.get(rank)
        return is_stopped(self._server.pid) if pid is None else has_ended(pid)

    def send(self, signum: int) -> None:
        """Send a signal to each rank, and not to its children, which it may need to save."""
        for rank in self._left & self._pids.keys():
            failures.asked_file(str(self._file(rank))).touch()
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], signum)

    def end(self) -> None:
        """Send SIGTERM to the ranks and their children: they must end at once."""
        for rank in self._left & self._pids.keys():
            failures.ending_file(str(self._file(rank))).touch()
            self._signal_group(rank, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL: a stopped rank ignores every other signal."""
        for rank in self._left & self._pids.keys():
            self._killed.add(rank)
            self._signal_group(rank, signal.SIGKILL)

    def _signal_group(self, rank: int, signum: int) -> None:
        for send in (os.killpg, os.kill):  # both, as the rank may not have made its session yet
            with suppress(ProcessLookupError):
                send(self._pids[rank], signum)


class Launcher:
    """Starts ranks on this machine, attempt after attempt. A context manager: it handles signals meanwhile.

    Args:
        server: from which ranks are forked
        stop_seconds: for ranks to save after a signal; they have `failures.GRACE_SECONDS` more to end
    """

    def __init__(self, server: Server, stop_seconds: float = 0.0) -> None:
        self._server, self._seconds = server, stop_seconds + failures.GRACE_SECONDS
        self._signals: list[int] = []
        self._starting = False

    def __enter__(self) -> Self:
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [signum for signum in SIGNALS if signum != signal.SIGHUP or not nohup]
        self._restore = handle(handled, self._take)
        return self

    def _take(self, signum: int, frame: object) -> None:
        self._signals.append(signum)
        if self._starting and len(self._signals) > 1:
            self._server.kill()  # which may be stopped: then the call that starts a rank would wait for it

    def __exit__(self, *_: object) -> None:
        self._restore()

    @property
    def _asked(self) -> int:
        """The first signal that this launcher got; 0 for none."""
        return self._signals[0] if self._signals else 0

    def wait(self, seconds: float) -> int:
        """Wait, at most until a signal comes. Returns its number, or 0."""
        end = time.monotonic() + seconds
        while not self._asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOKS))
        return self._asked

    def attempt(self, ranks: int, command: list[str], restarts: int = 0) -> Ended:
        """Run `ranks` copies of `command`. restarts: the number of earlier attempts"""
        # a store for each attempt, as all attempts use the same keys
        with attempt_folder() as folder, GuardedStore(ranks) as store:
            attempt = _Attempt(self._server, folder)
            try:
                self._starting = True
                self._server.open()
                attempt.start(ranks, command, _environment(ranks, store.port, restarts))
                self._starting = False
                self._follow(attempt, store)
            except (EOFError, ConnectionError):
                return self._without_server(attempt)
            code, words = failures.report(attempt.failures, self._asked) if attempt.failures else (0, "")
            return Ended(code, words, bool(self._asked))

    def _without_server(self, attempt: _Attempt) -> Ended:
        self._server.end()
        how = attempt.silent or "was killed"
        words = f"process {self._server.pid}, which started the ranks, {how}, and they with it"
        print(f"penstock: error: {words}", file=sys.stderr)
        return Ended(128 + (self._asked or signal.SIGKILL), words, bool(self._asked))

    def _follow(self, attempt: _Attempt, store: GuardedStore) -> None:
        """Wait until all ranks have ended. After a failure or a signal, end those that are too slow."""
        passed_on, ending, end = False, False, float("inf")
        while attempt.running:
            attempt.look(_LOOKS)
            if store.full:
                raise too_many_files("the launcher")
            if self._asked and attempt.started and not passed_on:
                passed_on = True
                if self._seconds > failures.GRACE_SECONDS:
                    print(said(self._asked), file=sys.stderr, flush=True)
                attempt.send(signal.SIGTERM if self._asked == signal.SIGHUP else self._asked)
            if (self._asked or attempt.failures) and end == float("inf"):
                end = time.monotonic() + self._seconds
            if attempt.failed and not ending:
                ending, end = True, min(end, time.monotonic() + failures.GRACE_SECONDS)
                attempt.end()
            if len(self._signals) > 1:
                end = min(end, time.monotonic())
            if time.monotonic() >= end:
                attempt.kill()
            patience = _DYING if attempt.started else 0.0
            attempt.end_silent_server(overdue=time.monotonic() > end + patience)


def _environment(ranks: int, port: int, restarts: int) -> dict[str, str]:
    """The environment that torchrun gives each rank, without the rank's number."""
    return {
        LAUNCHER: str(os.getpid()),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"penstock-{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
