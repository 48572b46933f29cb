"""How much memory is there to be had, in bytes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2; a container sees its own limits here


def free_memory() -> int | None:
    """What a process can still take without the machine, or its container, running short.

    None where only Linux could tell.
    """
    found = [free for free in (_of_machine(), _of_container()) if free is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError):
        for line in MEMINFO.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    return None


def _of_container() -> int | None:
    """None where no limit is set."""
    with suppress(OSError, ValueError):
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # files read and not used lately count as used, and go as soon as somebody needs the room
        return max(0, int(limit) - int(used) + int(counts.get("inactive_file", 0)))
    return None
