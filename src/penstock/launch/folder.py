"""The folder of an attempt, in the temporary folder: what ranks record of their end.

A launcher that is killed cannot remove its folder. It holds a lock on it while it lives, so that a later
launcher of this user sees which folders nobody needs any more, and removes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "penstock-attempt-"
_YOUNG = 60.0  # seconds in which a folder may not be locked yet


@contextmanager
def attempt_folder() -> Iterator[Path]:
    """A new folder, which is removed at the end, and with it those of launchers that were killed."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # a file system without locks: then nobody removes what is left
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_left() -> None:
    """Remove the folders of this user whose launchers have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Raises OSError for a folder that is in use, or another user's, or a link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
