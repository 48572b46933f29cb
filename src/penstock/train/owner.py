"""One run at a time owns an output folder: owner.json names it, and the time of that file is its heartbeat.

    who comes    reads owner.json   ended, or its process is gone   takes the folder over
                                    a process that lives            is refused, before anything is written
    who owns     a thread touches the file every 2 s, and stops the run once the file names another

Nobody compares clocks. On the machine that wrote the file its process is looked up, with its start time, as a
number of a process is used again. Elsewhere the reader looks on whether the file changes.

The file stays when the run has ended: it says whose checkpoints `--resume` goes on from.
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
from penstock.models.weights.folder import UNREADABLE
from penstock.reading import open_regular, parse_json, read_bytes
from penstock.runtime.health.notes import ProcessId, lives, this_process
from penstock.runtime.transport.groups import Processes

OWNER = "owner.json"
BEAT = 2.0  # seconds between two touches
PATIENCE = 20.0  # seconds without one after which an owner on another machine is taken for dead
_LARGEST = 64 << 10  # bytes of the file
_SETTLED = 0.2  # seconds after which no other that came at the same moment writes its own name

OwnerFacts = dict[str, Any]


def new_run() -> str:
    """The identity of a run that starts afresh; it keeps it when it is resumed."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def last_run(output: Path) -> str | None:
    """The run that owns the folder, or was the last to do so; None where that is unknown."""
    with suppress(OSError):
        run = _facts(_content(output / OWNER)).get("run")
        return run if isinstance(run, str) else None
    return None


def check_shared(output: Path, processes: Processes) -> None:
    """Raise ConfigError on all processes where one does not see what the first writes there. Collective."""
    probe = output / f".shared-{secrets.token_hex(4)}"  # a name that no file system remembers as missing
    if processes.index == 0:
        with suppress(OSError):  # of a full disk: what writes there next names it
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
    """Own the folder in the block. One process of a run calls it, before it writes there.

    Args:
        say: shows a line, where the folder is taken over from a run that did not end

    Raises FolderInUseError where another run owns it and lives; ConfigError where no file can be written.
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
    """This process owns the folder of `file`, whose content is `mine`, until `release`."""

    def __init__(self, file: Path, mine: OwnerFacts, beat: float) -> None:
        self.run: str = mine["run"]
        self._file, self._mine, self._every = file, mine, beat
        self._other: OwnerFacts | None = None
        self._touched, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RunError where another run has taken the folder over, as when this machine stood still."""
        if time.monotonic() - self._touched > 2 * self._every:
            self._touch()
        if self._other is not None:
            raise RunError(
                f"output.folder={self._file.parent}",
                f"run {self._other.get('run')}, process {self._other.get('pid')} on "
                f"{self._other.get('host')}, has taken it over while this process stood still",
                "Let that one go on; what this run wrote before is there",
            )

    def release(self) -> None:
        """Say that this run writes nothing more."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            if self._is_mine():
                _replace(self._file, self._mine | {"ended": True})

    def _beat(self) -> None:
        while not self._ended.wait(self._every) and self._other is None:
            self._touch()

    def _touch(self) -> None:
        with suppress(OSError):  # a disk that does not answer now may do so at the next beat
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
    file, mine = output / OWNER, {"run": run, **_here(), "token": secrets.token_hex(8), "ended": False}
    while True:  # again where somebody removes the file meanwhile
        content = _content(file)
        if content is None:
            if _create(file, mine):
                return Owner(file, mine, beat)
            continue
        facts = _facts(content)
        if not facts.get("ended"):
            if how := _alive(file, facts, beat, patience):
                raise _in_use(output, facts, how)
            say(f"{output}: taken over from {_words(facts)}, which did not end and is gone")
        if _content(file) == content:
            _replace(file, mine)
            time.sleep(_SETTLED)
        content = _content(file)
        if content == _text(mine):
            return Owner(file, mine, beat)
        if content is not None:
            raise _in_use(output, _facts(content), "it came at the same moment")


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
    """This process, in a form by which others on this machine can tell whether it is still there."""
    return {"host": socket.gethostname(), **this_process()._asdict()}


def _alive(file: Path, facts: OwnerFacts, beat: float, patience: float) -> str:
    """How it is known that the owner lives, in words; empty where it does not."""
    pid, began, machine = (facts.get(key) for key in ("pid", "began", "machine"))
    if type(machine) is str and type(pid) is int and type(began) is int:
        alive = lives(ProcessId(machine, pid, began))
        if alive is not None:
            return "that process lives" if alive else ""
    seen, end = _seen(file), time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(beat / 2)
        if _seen(file) != seen:
            return "its heartbeat moves"
    return ""


def _seen(file: Path) -> tuple[bytes | None, int]:
    """What changes at a beat. The file is opened first: a network file system then asks the server."""
    with suppress(OSError), open_regular(file) as opened:
        return opened.read(_LARGEST), os.fstat(opened.fileno()).st_mtime_ns
    return None, 0


# ---- The file


def _text(facts: OwnerFacts) -> bytes:
    return json.dumps(facts).encode() + b"\n"


def _content(file: Path) -> bytes | None:
    try:
        return read_bytes(file, _LARGEST)
    except FileNotFoundError:
        return None


def _facts(content: bytes | None) -> OwnerFacts:
    """What the file says; nothing of one that a crash cut short."""
    try:
        return dict(parse_json(content or b"{}"))
    except UNREADABLE:
        return {}


def _create(file: Path, facts: OwnerFacts) -> bool:
    """Whether the file was made: another process may do so at the same moment."""
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
