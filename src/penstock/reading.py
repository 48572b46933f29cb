"""Read files that users hand in, within limits: regular files, so many bytes, JSON that stays small and flat.

A path may name anything: a pipe that nobody writes to, a device without end, a text whose brackets take
gigabytes once parsed. The readers here refuse that at once, by the OSError and ValueError that every reader
of a file raises, with a sentence in place of the system's.

    open_regular    what the user names: links lead on, as in the cache of the Hugging Face Hub
    open_private    this user's own file in a folder where others may write, such as /dev/shm: no links
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

MIB = 1 << 20
LARGEST_JSON = 32 * MIB  # bytes: the index of a model with 200,000 tensors has 24 MiB
DEEPEST = 100  # brackets within each other; Python gives up at some 1,000
_LONGEST_NAME, _LONGEST_PATH = 255, 3000  # of Linux, with room for what is written below a folder
_MOST_NESTED = 1 << 20  # lists and objects: 90 MB of memory
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?))?B?\s*", re.IGNORECASE)
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTPE]?)(B|bit|b|FLOP)(?:/s|ps)\s*")
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([num\u00b5\u03bc]?)s\s*")
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")  # as shells have them
_DEEP = f"its lists and objects nest deeper than {DEEPEST} levels"

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def path_fault(text: str) -> str:
    """Why no file can have such a path, in words; empty where one can."""
    if not text.strip():
        return "an empty path would be the working folder"
    try:
        longest = max(len(os.fsencode(part)) for part in text.split("/"))
    except UnicodeEncodeError:
        return "it has half a surrogate pair, which no path has"
    if "\0" in text:
        return "it has a NUL, which no path has"
    if longest > _LONGEST_NAME or len(text) > _LONGEST_PATH:
        return f"a name has at most {_LONGEST_NAME} bytes, and a path {_LONGEST_PATH:,} characters"
    if os.path.expanduser(text).startswith("~"):
        return "there is no such user, whose home it names"
    if (variable := _VARIABLE.search(text)) and not os.path.lexists(text):
        return f"{variable[0]} would be a folder of that very name, as no variables are read here"
    return ""


def check_regular(path: str | Path) -> int:
    """Bytes of a regular file, or of one that a link leads to. Raises OSError for anything else."""
    return _regular(os.stat(path), path)


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file to read its bytes. Raises OSError, also for what is no regular file."""
    check_regular(path)  # before it is opened: to open a device may already act on it
    return _open(path, 0)


def open_private(path: str | Path) -> BufferedReader:
    """Open a file of this user, in a folder that passes `check_private`. Raises OSError, also for links."""
    file = _open(path, os.O_NOFOLLOW)
    try:
        _check_owner(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def check_private(folder: str | Path) -> None:
    """Raise OSError where this is no folder that this user alone may change. A link is none."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "it is no folder", str(folder))
    _check_owner(status, folder)
    if status.st_mode & 0o022:
        raise OSError(errno.EPERM, "other users may write there", str(folder))


def _open(path: str | Path, flags: int) -> BufferedReader:
    """Open a regular file, whatever the path has come to name since it was checked."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)  # a pipe would block
    try:
        _regular(os.fstat(file), path)
    except OSError:
        os.close(file)
        raise
    return os.fdopen(file, "rb")


def _regular(status: os.stat_result, path: str | Path) -> int:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        raise OSError(number, f"it is {_KINDS.get(kind, 'something else')}, and no regular file", str(path))
    if status.st_dev in _of_kernel():  # may block or have no end, and says that it has 0 bytes
        raise OSError(errno.EINVAL, "it is made by the kernel as it is read, and no regular file", str(path))
    return status.st_size


@functools.cache
def _of_kernel() -> set[int]:
    """The file systems whose files the kernel makes as they are read."""
    devices = set[int]()
    for mounted in ("/proc", "/sys"):
        with suppress(OSError):
            devices.add(os.stat(mounted).st_dev)
    return devices - {os.stat("/").st_dev}  # where a folder of that name is no mount


def _check_owner(status: os.stat_result, path: str | Path) -> None:
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to another user, number {status.st_uid}", str(path))


def read_bytes(path: str | Path, most: int = LARGEST_JSON) -> bytes:
    """All bytes of a file. Raises OSError, also for what is no regular file or has more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {size(most)}", str(path))
    return content


def size(count: int) -> str:
    """Bytes in words."""
    return f"{count // MIB} MiB" if count >= MIB else f"{count >> 10} KiB"


def gib(nbytes: float, digits: int = 1) -> str:
    """Bytes in GiB, as a number without its unit."""
    return f"{nbytes / 2**30:,.{digits}f}"


def parse_size(text: str) -> float | None:
    """The bytes that a text names: "4096", "5GB" (of 1000**3), "8 GiB" (of 1024**3); None for others."""
    if (match := _SIZE.fullmatch(text)) is None:
        return None
    digits, unit, binary = match.groups(default="")
    scale: int = (1024 if binary else 1000) ** " KMGTP".index(unit.upper() or " ")
    return float(digits) * scale


def parse_rate(text: str) -> float | None:
    """Bytes or FLOPs a second: "3.35 TB/s", "400 Gbit/s" (of bits, also Gb/s or Gbps), "989 TFLOP/s".

    None for others. Letters have the case that the field writes: a small b is a bit.
    """
    if (match := _RATE.fullmatch(text)) is None:
        return None
    digits, prefix, unit = match.groups()
    scale: int = 1000 ** " KMGTPE".index(prefix or " ")
    return float(digits) * scale / (8 if unit in ("b", "bit") else 1)


def parse_seconds(text: str) -> float | None:
    """The seconds that a text names: "2 us", "1.5 ms", "3 s"; None for others."""
    if (match := _TIME.fullmatch(text)) is None:
        return None
    digits, prefix = match.groups()
    return float(digits) / {"": 1, "m": 10**3, "n": 10**9}.get(prefix, 10**6)


def read_text(path: str | Path, most: int = LARGEST_JSON) -> str:
    """The text of a file. Raises OSError as `read_bytes`, and ValueError where it is not UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def read_json(path: str | Path, most: int = LARGEST_JSON) -> Any:
    """What a JSON file in UTF-8 holds. Raises OSError as `read_bytes`, and ValueError as `parse_json`."""
    return parse_json(
        read_text(path, most)
    )  # of bytes it would take UTF-16 and a mark, as transformers does not


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds. Raises ValueError, also where it nests deeper than 100 levels."""
    if isinstance(text, bytes):
        nested = text.count(b"[") + text.count(b"{")
    else:
        nested = text.count("[") + text.count("{")
    if nested > _MOST_NESTED:
        raise ValueError(f"it has more than {_MOST_NESTED:,} lists and objects")
    with _not_deep():
        value = json.loads(text)
    return _flat(value, nested)


def json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a place in a text, and where it ends. Raises as `parse_json`."""
    with _not_deep():
        value, end = _DECODER.raw_decode(text, at)
    return _flat(value, text.count("[", at, end) + text.count("{", at, end)), end


_DECODER = json.JSONDecoder()


@contextmanager
def _not_deep() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ValueError(_DEEP) from None


def _flat(value: Any, nested: int) -> Any:
    """`value`, of `nested` lists and objects. Raises ValueError where they nest too deep."""
    level = [value] if nested > DEEPEST and isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        outer = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for each in outer for inner in each if isinstance(inner, dict | list)]
    if level:
        raise ValueError(_DEEP)
    return value
