"""How much memory a process can still take, in bytes."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2; a container sees its own limits here


def free_on(device: torch.device) -> int | None:
    """Free bytes of `device`, or of the host for the CPU; None where they cannot be read."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


def room_in_memory() -> int:
    """`free_memory`, or more than any machine has where it cannot be read."""
    free = free_memory()
    return sys.maxsize if free is None else free


def free_memory() -> int | None:
    """Bytes that both the machine and its container have left. None on other systems than Linux."""
    return min((free for free in (_of_machine(), _of_container()) if free is not None), default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError):
        for line in MEMINFO.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    return None


def _of_container() -> int | None:
    """Free bytes of the container; None where it has no limit."""
    with suppress(OSError, ValueError):
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # the kernel counts cached files as used, and drops those not read lately when room is needed
        return max(0, int(limit) - int(used) + int(counts.get("inactive_file", 0)))
    return None
