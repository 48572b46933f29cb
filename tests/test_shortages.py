"""What a process has run out of, as the error that says so."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock import shortages
from penstock.errors import DataError
from penstock.shortages import out_of_memory_kills, shortage, too_many_files
from support.pool import start


def test_the_limit_of_descriptors_is_named() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    error = too_many_files("the launcher")
    assert error.value == f"ulimit -n {soft}"
    assert "the launcher has" in error.rule


@pytest.mark.parametrize(
    ("error", "value"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n "),
        (OSError(errno.ENFILE, "Too many open files in system"), "ulimit -n "),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:58] Too many open files"), "ulimit -n "),
        (MemoryError(), "memory of "),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory of "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), "memory of "),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/file"), "/tmp/file"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "a file"),
        (RuntimeError("can't start new thread"), ""),
    ],
)
def test_what_has_run_out_is_named(error: Exception, value: str) -> None:
    said = shortage(error)
    assert said is not None
    assert said.value.startswith(value)
    assert any(words in said.rule for words in (type(error).__name__, "open no more", "start no thread"))
    assert "()" not in str(said)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Too many open files"),
        RuntimeError("Connection closed by peer"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        DataError("a.jsonl", "it cannot be read (Too many open files)", "Mend it"),
    ],
)
def test_other_errors_are_none_of_them(error: Exception) -> None:
    assert shortage(error) is None


def test_an_error_that_another_one_has_caused_is_that_one() -> None:
    error = KeyError("layers.0")
    error.__cause__ = MemoryError()
    assert shortage(error) is not None


def test_the_room_that_is_left_is_said(tmp_path: Path) -> None:
    said = shortage(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "new" / "file")))
    assert f"; {tmp_path} has " in str(said)


# _address_space: the limit is above what the process has
def run_short(folder: str, hunger: Callable[[], object]) -> None:
    """In a process of 256 MiB more than it has."""
    taken = shortages._address_space()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 28), resource.RLIM_INFINITY))
    try:
        hunger()
    except Exception as error:
        Path(folder, "said").write_text(str(shortage(error)))


def of_python() -> object:
    return bytearray(1 << 30)


def of_torch() -> object:
    return torch.zeros(1 << 30)


@pytest.mark.parametrize("hunger", [of_python, of_torch])
def test_a_process_that_gets_no_more_memory_says_so(tmp_path: Path, hunger: Callable[[], object]) -> None:
    process = start(run_short, str(tmp_path), hunger)
    process.join(60)
    said = (tmp_path / "said").read_text()
    assert said.startswith("ulimit -v ")
    assert " MiB of addresses, and gets no more (" in said


# _COUNTS: files of another machine
def test_the_kills_of_the_machine_and_of_its_container_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 2\n")
    counts = tuple(tmp_path / name for name in ("vmstat", "memory.events", "none"))
    monkeypatch.setattr(shortages, "_COUNTS", counts)
    assert out_of_memory_kills() == 5
