"""One run at a time owns an output folder: owner.json names it, and the time of that file is its heartbeat.

    a new run    reads owner.json   ended, or its process is gone   takes the folder over
                                    its process lives               is refused, before it writes anything
    the owner    a thread touches the file every 2 s, and stops the run once the file names another run

A launcher that starts a failed run again keeps the folder meanwhile: it counts as the owner's process.

Clocks are not compared. On the owner's machine its process is looked up by number and start time, as numbers
of processes are used again. On another machine the new run watches whether the file changes.

The file stays when the run has ended: it names the run whose checkpoints `--resume` goes on from.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, FolderInUseError, RunError
from penstock.launch.stop import LAUNCHER
from penstock.models.weights.folder import UNREADABLE
from penstock.reading import open_regular, parse_json, read_bytes
from penstock.runtime.health.notes import ProcessId, began, lives, machine, this_process
from penstock.runtime.ranks import Ranks

OWNER = "owner.json"
BEAT = 2.0  # seconds between two touches
PATIENCE = 20.0  # seconds without a touch after which an owner on another machine counts as dead
_LARGEST = 64 << 10  # bytes of the file
_SETTLED = 0.2  # seconds after which another run that came at the same moment has written its name

_ABSENT: tuple[bytes | None, int] = (None, 0)  # what `_seen` gives without a file

OwnerFacts = dict[str, Any]


def new_run() -> str:
    """The identity of a run that starts afresh. A resumed run keeps it."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def last_run(output: Path) -> str | None:
    """The run that owns the folder, or owned it last; None if that is unknown."""
    with suppress(OSError):
        run = _facts(_content(output / OWNER)).get("run")
        return run if isinstance(run, str) else None
    return None


def check_shared(output: Path, processes: Ranks) -> None:
    """Raise ConfigError on all processes if one does not see a file that the first writes. Collective."""
    probe = output / f".shared-{secrets.token_hex(4)}"  # a new name, which no file system caches as missing
    if processes.index == 0:
        with suppress(OSError):  # of a full disk: the next write there raises it
            probe.touch()
    name = processes.gather(probe.name)[0]
    (first, written), *others = processes.gather([str(output.absolute()), (output / name).exists()])
    if processes.index == 0:
        probe.unlink(missing_ok=True)
    for index, (path, seen) in enumerate(others, start=1):
        if written and not seen:
            rule = f"process {index} does not see in {path} what process 0 writes into {first}"
            remedy = "Name a folder on a file system that all processes share, by its whole path"
            raise ConfigError(f"output.folder={output}", rule, remedy)


@contextmanager
def owned(
    output: Path, run: str, say: Callable[[str], None], *, beat: float = BEAT, patience: float = PATIENCE
) -> Iterator[Owner]:
    """Own the folder in the block. One process of a run calls it, and `settle` before it writes there.

    Args:
        say: shows a line, if the folder is taken over from a run that did not end

    Raises FolderInUseError if another run owns it and lives; ConfigError if no file can be written.
    """
    try:
        owner = _take(output, run, say, beat, patience)
    except OSError as error:
        rule = f"{OWNER} cannot be written there ({error.strerror})"
        raise ConfigError(f"output.folder={output}", rule, "Name a folder that you may write") from error
    try:
        yield owner
    finally:
        owner.release()


class Owner:
    """The ownership of the folder of `file`, whose content is `mine`, by this process, until `release`.

    settles: seconds until no other run that came at the same moment can take it
    """

    def __init__(self, file: Path, mine: OwnerFacts, beat: float, settles: float = 0.0) -> None:
        self.run: str = mine["run"]
        self._file, self._mine, self._every = file, mine, beat
        self._other: OwnerFacts | None = None
        self._settled = time.monotonic() + settles
        self._touched, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-owner", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until no other run that came at the same moment can take the folder.

        Call it as late as possible: work before it shortens the wait. Raises FolderInUseError if one has.
        """
        time.sleep(max(0.0, self._settled - time.monotonic()))
        with suppress(OSError):  # a disk that fails now may work at the next beat
            if not self._is_mine():
                raise _in_use(self._file.parent, self._other or {}, "it came at the same moment")

    def check(self) -> None:
        """Raise RunError if another run has taken the folder over, as after a halt of this machine."""
        if time.monotonic() - self._touched > 2 * self._every:
            self._touch()
        if self._other is not None:
            raise RunError(
                f"output.folder={self._file.parent}",
                f"run {self._other.get('run')}, process {self._other.get('pid')} on "
                f"{self._other.get('host')}, has taken it over while this process stood still",
                "Let that run go on; the files that this run wrote before stay",
            )

    def release(self) -> None:
        """Mark the run as ended: it writes nothing more."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            if self._is_mine():
                _replace(self._file, self._mine | {"ended": True})

    def _beat(self) -> None:
        while not self._ended.wait(self._every) and self._other is None:
            self._touch()

    def _touch(self) -> None:
        with suppress(OSError):  # a disk that fails now may work at the next beat
            if self._is_mine():
                os.utime(self._file)
                self._touched = time.monotonic()

    def _is_mine(self) -> bool:
        content = _content(self._file)
        if content is None:  # somebody removed it
            return _create(self._file, self._mine)
        if content != _text(self._mine):
            self._other = _facts(content)
        return self._other is None


def _take(output: Path, run: str, say: Callable[[str], None], beat: float, patience: float) -> Owner:
    file, launcher = output / OWNER, _launcher()
    mine = {"run": run, **_here(), "launcher": launcher, "token": secrets.token_hex(8), "ended": False}
    while True:  # again if somebody removes the file meanwhile
        content = _content(file)
        if content is None:
            if _create(file, mine):
                return Owner(file, mine, beat)
            continue
        facts = _facts(content)
        if launcher is not None and facts.get("launcher") == launcher and _process_lives(facts) is False:
            _replace(file, mine)  # an earlier attempt of this launcher, which nobody else could replace
            return Owner(file, mine, beat)
        if _process_lives(facts.get("launcher") or {}):
            raise _in_use(output, facts, "its launcher lives")
        if not facts.get("ended"):
            if how := _alive(file, facts, beat, patience):
                raise _in_use(output, facts, how)
            say(f"{output}: taken over from {_words(facts)}, which did not end and is gone")
        if _content(file) == content:
            _replace(file, mine)
            return Owner(file, mine, beat, _SETTLED)


def _in_use(output: Path, facts: OwnerFacts, how: str) -> FolderInUseError:
    return FolderInUseError(
        f"output.folder={output}",
        f"{_words(facts)} writes there: {how}",
        "End that process, or wait for its end, or name another output.folder",
    )


def _words(facts: OwnerFacts) -> str:
    if not facts:
        return "a run that was killed before it wrote its name"
    return f"run {facts.get('run')}, process {facts.get('pid')} on {facts.get('host')}"


# ---- Whether an owner lives


def _here() -> OwnerFacts:
    """This process, in a form by which others on this machine can check whether it lives."""
    return {"host": socket.gethostname(), **this_process()._asdict()}


def _launcher() -> OwnerFacts | None:
    """The process that has started this rank, and may start it again; None without one."""
    pid = int(os.environ.get(LAUNCHER) or 0)
    return ProcessId(machine(), pid, began(pid))._asdict() if pid else None


def _alive(file: Path, facts: OwnerFacts, beat: float, patience: float) -> str:
    """The evidence that the owner lives, in words; empty if it does not."""
    alive = _process_lives(facts)
    if alive is not None:
        return "that process lives" if alive else ""
    seen, end = _seen(file), time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(beat / 2)
        if _seen(file) not in (
            seen,
            _ABSENT,
        ):  # a removed file is no heartbeat: an owner that lives makes it anew
            return "its heartbeat moves"
    return ""


def _process_lives(facts: OwnerFacts) -> bool | None:
    """Whether the owner's process is alive; None where this process cannot see that."""
    pid, start, where = (facts.get(key) for key in ("pid", "began", "machine"))
    if type(where) is str and type(pid) is int and type(start) is int:
        return lives(ProcessId(where, pid, start))
    return None


class OwnerWatch:
    """Whether the run that owns `output` goes on, for a process that only looks on.

    patience: seconds without a heartbeat after which an owner whose process is not visible counts as dead
    """

    def __init__(self, output: Path, patience: float = PATIENCE) -> None:
        self._file, self._patience = output / OWNER, patience
        self._seen, self._changed = _ABSENT, time.monotonic()

    def goes_on(self) -> bool:
        """Whether it does, by now: ask again and again. Does not wait."""
        seen, now = _seen(self._file), time.monotonic()
        if seen != self._seen:
            self._seen, self._changed = seen, now
        facts = _facts(seen[0])
        if facts.get("ended"):
            return False
        alive = _process_lives(facts)
        return now - self._changed < self._patience if alive is None else alive


def _seen(file: Path) -> tuple[bytes | None, int]:
    """The content and time of the file, which a beat changes. To open it makes a network file system ask the
    server."""
    with suppress(OSError), open_regular(file) as opened:
        return opened.read(_LARGEST), os.fstat(opened.fileno()).st_mtime_ns
    return _ABSENT


# ---- The file


def _text(facts: OwnerFacts) -> bytes:
    return json.dumps(facts).encode() + b"\n"


def _content(file: Path) -> bytes | None:
    try:
        return read_bytes(file, _LARGEST)
    except FileNotFoundError:
        return None


def _facts(content: bytes | None) -> OwnerFacts:
    """The facts in the file; none if a crash cut it short."""
    try:
        return dict(parse_json(content or b"{}"))
    except UNREADABLE:
        return {}


def _create(file: Path, facts: OwnerFacts) -> bool:
    """Make the file. False if another process has made it at the same moment."""
    try:
        with file.open("xb") as created:
            created.write(_text(facts))
            created.flush()
            os.fsync(created.fileno())
    except FileExistsError:
        return False
    return True


def _replace(file: Path, facts: OwnerFacts) -> None:
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with fresh.open("xb") as created:
        created.write(_text(facts))
        created.flush()
        os.fsync(created.fileno())
    os.replace(fresh, file)
