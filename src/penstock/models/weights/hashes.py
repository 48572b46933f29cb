"""Hash a folder's files while they are read: each file once a job, by threads of one process.

    process 0   reads its stages' tensors -------|
      thread    hashes model-1, optimizer-1 ---| |  all raise one error,
    process 1   reads its stages' tensors -----| |  or none does
      thread    hashes model-2, optimizer-2 -----|

Files of one kind, such as weights, are in the order of the stages that wrote them. Each process hashes the
next range of their bytes: with the same number of stages, these are the files that it reads itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from threading import Event

from penstock.errors import PeerError
from penstock.models.weights.folder import ManifestEntry, check_digest, read_manifest
from penstock.runtime.ranks import Ranks


@contextmanager
def hashed_meanwhile(path: Path, processes: Ranks) -> Iterator[None]:
    """Hash the files of `path` while the block reads them. Collective.

    The block raises an error on all processes or on none. An altered file may be the cause: that comes first.

    Raises, at the end of the block and on all processes, AlteredError if a file does not have the hash in the
    manifest; CheckpointError if it cannot be read.
    """
    stopped = Event()
    with ThreadPoolExecutor(1, "penstock-hash") as threads:
        hashing = threads.submit(_hash_share, path, processes.index, processes.count, stopped)
        try:
            yield
        except BaseException as error:
            if isinstance(error, PeerError) or not isinstance(error, Exception):
                stopped.set()  # do not wait for lost processes; Ctrl-C waits for none
            raise
        finally:
            if not stopped.is_set():
                processes.attempt("hash its files", hashing.result)


def _hash_share(path: Path, index: int, count: int, stopped: Event) -> None:
    files = read_manifest(path)
    for name in share(files, index, count):
        if not stopped.is_set():
            check_digest(path, name, files[name], stopped.is_set)


def share(files: Mapping[str, ManifestEntry], index: int, count: int) -> list[str]:
    """The files that process `index` of `count` hashes: of each kind, those in its range of bytes."""
    names = []
    for _, kind in groupby(sorted(files), key=lambda name: name.partition("-")[0]):
        sizes = {name: max(1, files[name]["size"]) for name in kind}
        total, begin = sum(sizes.values()), 0
        for name, size in sizes.items():
            middle = begin + size / 2
            begin += size
            if int(middle * count / total) == index:
                names.append(name)
    return names
