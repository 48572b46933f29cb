"""Shards of in-memory checkpoints: files in host memory, which outlives the process that wrote them.

/dev/shm/penstock-<run>/        one host's shards of one run; PENSTOCK_MEMORY names another folder in memory
    host                        a name of this memory, drawn at random, and the run's output folder
    rank-00001.0                a shard: the bytes of all tensors that rank 1 had after a step
    rank-00001.0.whole          its description; written last, by a rename
    rank-00001.1 ...            the shard before it: the two are written in turn

Any user may write to /dev/shm. So a folder counts only if this user made it and alone may change it.

A shard is whole if its description lies next to it. The description is removed before the bytes change, so a
process that is killed at any moment leaves a whole shard. It has a checksum of the bytes, and of itself.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import CheckpointError, ConfigError, RunError
from penstock.models.weights.folder import UNREADABLE
from penstock.reading import LARGEST_JSON, MIB, check_private, open_private
from penstock.runtime.transport.checksums import checksum

_ROOT = "PENSTOCK_MEMORY"
_WHOLE = ".whole"
_HOST = "host"
_PATIENCE = 10.0  # seconds for a process of the last attempt to end


class Mark(NamedTuple):
    """Shards of one mark, one of each rank, make a checkpoint.

    attempt: drawn at each start of the run: after a restart a step may come again, from other weights
    """

    step: int
    attempt: str


@dataclass(frozen=True)
class HeldShard:
    """A whole shard, by its description.

    size: bytes; checksum: of them; content: the writer's own entries
    written: seconds of time.time()
    """

    file: Path
    rank: int
    world: int
    mark: Mark
    size: int
    checksum: int
    content: Mapping[str, Any]
    written: float = 0.0

    def read(self) -> Tensor:
        """The bytes. Raises CheckpointError if they are not what was written."""
        shard_bytes = self.mapped()
        if shard_bytes.numel() != self.size or checksum(shard_bytes) != self.checksum:
            rule = "its contents differ from what was written (checksum)"
            raise CheckpointError(f"{self.file}, of step {self.mark.step}", rule, "An older one is loaded")
        return shard_bytes

    def mapped(self) -> Tensor:
        """The bytes, mapped into memory; a tensor of another size if they cannot be read."""
        with suppress(OSError, ValueError), open_private(self.file) as opened:
            # private, as torch accepts writable memory only
            mapped = mmap.mmap(opened.fileno(), self.size, mmap.MAP_PRIVATE)
            return torch.frombuffer(mapped, dtype=torch.uint8)
        return torch.zeros(8, dtype=torch.uint8)  # which can be sent, too


# ---- a host's memory


def memory_root() -> Path:
    """The folder in memory under which each run has its own."""
    return Path(os.environ.get(_ROOT) or "/dev/shm")


def folder_of(run: str) -> Path:
    """Where this host keeps the shards of `run`."""
    return memory_root() / f"penstock-{run}"


class HostMemory:
    """The folder of a run on this host, held open by this process. name: the same on all its processes"""

    def __init__(self, run: str, output: Path) -> None:
        """Raises ConfigError if nothing can be written there."""
        self.folder = folder_of(run)
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            check_private(self.folder)
            _create(self.folder / _HOST, {"name": secrets.token_hex(8), "output": str(output.absolute())})
            self._lock = open_private(self.folder / _HOST)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # `remove_superseded` sees that a process uses the folder
            self.name: str = json.loads(self._lock.read())["name"]
        except (OSError, ValueError) as error:
            rule = f"no checkpoint can be kept there ({error})"
            remedy = f"Name a folder in memory by {_ROOT}, or leave train.memory_checkpoint_every out"
            raise ConfigError(f"memory at {self.folder.parent}", rule, remedy) from error

    def forget(self, kept: Mark | None = None) -> None:
        """Remove all shards but those of one mark."""
        for shard in shards_in(self.folder):
            if shard.mark != kept:
                shard.file.with_name(shard.file.name + _WHOLE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Free the memory: the run has ended. Other processes of this host may do so too."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self._lock.close()


def remove_superseded(last_run: Any) -> None:
    """Remove this host's shards of killed runs whose output folder is gone, or belongs to another run by now.

    last_run: function from an output folder to the run that owns it or owned it last, or None
    """
    for folder in memory_root().glob("penstock-*"):
        with suppress(*UNREADABLE):
            check_private(folder)
            with open_private(folder / _HOST) as host:
                fcntl.flock(host, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where a process of that run lives
                output = Path(json.loads(host.read())["output"])
                owner, gone = last_run(output), output.parent.is_dir() and not output.exists()
                if gone or (owner is not None and f"penstock-{owner}" != folder.name):
                    shutil.rmtree(folder, ignore_errors=True)


def shards_in(folder: Path) -> list[HeldShard]:
    """The whole shards of a folder, by their descriptions. A damaged description is skipped."""
    shards = list[HeldShard]()
    with suppress(OSError):
        check_private(folder)
        shards += _whole_in(folder)
    return shards


def _whole_in(folder: Path) -> Iterator[HeldShard]:
    for path in sorted(folder.glob(f"rank-*{_WHOLE}")):
        with suppress(*UNREADABLE):
            yield _described(path)


def newest_in(run: str) -> tuple[int, float] | None:
    """Step and time of the newest checkpoint of `run` that is whole on this host alone; None without one."""
    by_mark: dict[Mark, dict[int, HeldShard]] = {}
    for shard in shards_in(folder_of(run)):
        by_mark.setdefault(shard.mark, {})[shard.rank] = shard
    whole = [
        (mark.step, max(shard.written for shard in by_rank.values()))
        for mark, by_rank in by_mark.items()
        if is_whole(by_rank, next(iter(by_rank.values())).world)
    ]
    return max(whole, default=None)


def is_whole(ranks: Iterable[int], world: int) -> bool:
    """Whether each rank of `world` is among `ranks`."""
    return set(ranks) >= set(range(world))


def _described(path: Path) -> HeldShard:
    """Raises one of UNREADABLE."""
    with open_private(path) as file:
        check, _, text = file.read(LARGEST_JSON).partition(b" ")
    if int(check, 16) != zlib.crc32(text):
        raise ValueError("its checksum differs")
    known = json.loads(text)
    mark = Mark(known.pop("step"), known.pop("attempt"))
    return HeldShard(file=path.with_suffix(""), mark=mark, written=path.stat().st_mtime, **known)


def _create(file: Path, content: Any) -> None:
    """Make a file with this content, unless another process has made it."""
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    fresh.write_text(json.dumps(content), encoding="utf-8")
    with suppress(FileExistsError):
        os.link(fresh, file)
    fresh.unlink()


# ---- one rank's files


class ShardFiles:
    """The two files of one rank's shards on this host. Only this process writes them."""

    def __init__(self, memory: HostMemory, rank: int, world: int) -> None:
        """Raises RunError if a process of an earlier attempt lives, which may still write them."""
        self._folder, self._rank, self._world = memory.folder, rank, world
        self._names = [f"rank-{rank:05d}.{slot}" for slot in (0, 1)]
        self._mapped: dict[str, Tensor] = {}
        self._lock = (self._folder / f"rank-{rank:05d}.lock").open("w")
        self._take()

    def _take(self) -> None:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() > end:
                    self._lock.close()
                    rule = f"another process writes the checkpoints of rank {self._rank} there"
                    remedy = "End the processes that the last attempt left"
                    raise RunError(str(self._folder), rule, remedy) from error
                time.sleep(0.05)

    def close(self) -> None:
        self._mapped = {}
        self._lock.close()

    def begin(self, size: int) -> tuple[str, Tensor]:
        """The name and the bytes of the next shard, in place of the older one. size: a multiple of 8

        Raises ConfigError if the memory has too little room for both.
        """
        older, newer = sorted(self._names, key=self._written)
        (self._folder / f"{older}{_WHOLE}").unlink(missing_ok=True)
        self._reserve(older, size)
        if not self._written(newer):
            self._reserve(newer, size)
        return older, self._mapped[older]

    def _written(self, name: str) -> int:
        """When a shard became whole; 0 where it is not."""
        with suppress(FileNotFoundError):
            return (self._folder / f"{name}{_WHOLE}").stat().st_mtime_ns
        return 0

    def _reserve(self, name: str, size: int) -> None:
        """Allocate a file of `size` bytes. A write to memory that is not allocated would kill the process."""
        if name in self._mapped and self._mapped[name].numel() == size:
            return
        file = self._folder / name
        file.unlink(missing_ok=True)  # not truncated: a process may still read the old file
        with file.open("x+b") as opened:
            try:
                os.posix_fallocate(opened.fileno(), 0, size)
            except OSError as error:
                file.unlink()
                raise self._no_room(size, error) from error
            self._mapped[name] = torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)

    def _no_room(self, size: int, error: OSError) -> ConfigError:
        root = self._folder.parent
        others = [folder.name for folder in root.glob("penstock-*") if folder != self._folder]
        left = f"; {', '.join(sorted(others))} may be left by killed runs" if others else ""
        return ConfigError(
            "train.memory_checkpoint_every",
            f"rank {self._rank} keeps two shards of {size / MIB:,.0f} MiB in {root}, which has "
            f"{shutil.disk_usage(root).free / MIB:,.0f} MiB left ({error.strerror}){left}",
            f"Give it more (docker run --shm-size=...), name another folder in memory by {_ROOT}, or leave "
            "train.memory_checkpoint_every out",
        )

    def commit(self, name: str, mark: Mark, content: Mapping[str, Any], known_sum: int | None = None) -> None:
        """Make the bytes of `name`, which are complete, a shard.

        known_sum: their checksum, where it is known
        """
        data = self._mapped[name]
        known = {"rank": self._rank, "world": self._world, "step": mark.step, "attempt": mark.attempt}
        sums = {"size": data.numel(), "checksum": checksum(data) if known_sum is None else known_sum}
        text = json.dumps({**known, **sums, "content": content}).encode()
        fresh = self._folder / f".{name}{_WHOLE}"
        fresh.write_bytes(f"{zlib.crc32(text):08x} ".encode() + text)
        os.replace(fresh, self._folder / f"{name}{_WHOLE}")


def laid_out(tensors: Mapping[str, Tensor]) -> tuple[list[list[Any]], int]:
    """The layout of a shard: (name, dtype, shape, first byte) of each tensor, and the bytes in all."""
    table, end = [], 0
    for name, tensor in tensors.items():
        table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.nbytes // 64) * 64
    return table, max(end, 64)


def views(data: Tensor, table: Iterable[list[Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie in `data`, by name."""
    for name, kind, shape, begin in table:
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel() * dtype.itemsize
        yield name, data[begin : begin + count].view(dtype).view(shape)
