"""How much memory a process can still take, by what Linux says of the machine and of its container."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from penstock.runtime.device import free_memory as memory

MACHINE = "MemTotal:  64 kB\nMemAvailable:  32 kB\n"


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a container that may take 20,000 bytes, on a machine with 32 KiB left."""
    (tmp_path / "meminfo").write_text(MACHINE)
    for name, text in {
        "max": "20000\n",
        "current": "15000\n",
        "stat": "file 4000\ninactive_file 3000\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


def test_the_least_of_machine_and_container_counts(container: Path) -> None:
    assert memory.free_memory() == 20_000 - 15_000 + 3_000  # files that the kernel would drop are free
    (container / "memory.max").write_text("max\n")
    assert memory.free_memory() == 32 * 1024
    assert memory.free_on(torch.device("cpu")) == memory.room_in_memory() == 32 * 1024


def test_a_container_that_is_over_its_limit_has_nothing_left(container: Path) -> None:
    (container / "memory.current").write_text("90000\n")
    assert memory.free_memory() == 0


def test_where_nothing_can_be_read_there_is_room(container: Path) -> None:
    (container / "meminfo").unlink()
    (container / "memory.max").unlink()
    assert memory.free_memory() is None
    assert memory.room_in_memory() == sys.maxsize
