"""Files that users hand in: regular, small enough, and JSON that stays so once it is parsed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import reading
from penstock.reading import (
    check_private,
    gib,
    json_at,
    open_private,
    open_regular,
    parse_json,
    parse_rate,
    parse_seconds,
    read_bytes,
    read_json,
    read_text,
)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """0.5.0: a pipe in place of a file was waited for without end, and a device filled the memory."""
    path = tmp_path / "file"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=f"it is {kind}, and no regular file"):
        open_regular(path)


@pytest.mark.parametrize(
    "path", ["/proc/self/pagemap", "/proc/meminfo", "/sys/kernel/mm/transparent_hugepage/enabled"]
)
def test_a_file_that_the_kernel_makes_is_not_opened(path: str) -> None:
    """Unreleased: it was read as data. The first has no end, and /proc/kmsg waits for a message."""
    if not Path(path).exists():
        pytest.skip(f"this system has no {path}")
    with pytest.raises(OSError, match="made by the kernel"):
        open_regular(path)


def test_a_pipe_that_takes_the_place_of_a_checked_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "file")
    monkeypatch.setattr(reading, "check_regular", lambda path: 0)
    with pytest.raises(OSError, match="it is a pipe, and no regular file"):
        open_regular(tmp_path / "file")


def test_of_this_user_is_a_file_that_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    with open_private(tmp_path / "file") as file:
        assert file.read() == b"text"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match=r"(?i)symbolic links"):
        open_private(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe"):
        open_private(tmp_path / "pipe")


def test_a_private_folder_is_one_that_no_other_user_may_change(tmp_path: Path) -> None:
    check_private(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="it is no folder"):
        check_private(tmp_path / "link")
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="other users may write there"):
        check_private(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_what_another_user_has_made_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "file").write_bytes(b"text")
    for name in ("folder", "file"):
        os.chown(tmp_path / name, 12345, 12345)
    with pytest.raises(OSError, match="belongs to another user, number 12345"):
        check_private(tmp_path / "folder")
    with pytest.raises(OSError, match="belongs to another user, number 12345"):
        open_private(tmp_path / "file")


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    """As in the folders of the Hugging Face cache."""
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "link") == "text"


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="it has more than 64 KiB"):
        read_bytes(tmp_path / "large", 1 << 16)
    (tmp_path / "whole").write_bytes(b"1" * 20)
    assert read_bytes(tmp_path / "whole", 20) == b"1" * 20


def nested(levels: int) -> str:
    return '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


@pytest.mark.parametrize("levels", [101, 900, 100_000])
def test_json_that_nests_too_deep_is_a_value_error(levels: int) -> None:
    """0.5.0: it was a RecursionError with its traceback, here or in whatever walked the value later."""
    for read in (parse_json, lambda text: parse_json(text.encode()), lambda text: json_at(text, 0)):
        with pytest.raises(ValueError, match="nest deeper than 100 levels"):
            read(nested(levels))


def test_json_within_the_limits_is_read_whole(tmp_path: Path) -> None:
    flat = "[" + ", ".join(["[]"] * 1000) + "]"
    assert parse_json(flat) == [[]] * 1000
    assert parse_json(nested(100))["a"]
    assert json_at('x [{"a": 1}], 2', 2) == ([{"a": 1}], 12)
    (tmp_path / "file").write_text(nested(3))
    assert read_json(tmp_path / "file") == {"a": [[]]}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_a_json_file_is_utf_8_without_a_mark(tmp_path: Path, encoding: str) -> None:
    """0.5.0: an index with a mark was read here, and ended `check` with a traceback of transformers, which
    takes UTF-8 alone. Python's json guesses the encoding of bytes.
    """
    (tmp_path / "file").write_text('{"a": 1}', encoding=encoding)
    with pytest.raises(ValueError, match=r"BOM|can't decode|Expecting"):
        read_json(tmp_path / "file")


# _MOST_NESTED: fewer lists are too many
def test_json_of_very_many_small_lists_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: 100 MB of empty lists took 2.6 GB."""
    monkeypatch.setattr(reading, "_MOST_NESTED", 10)
    with pytest.raises(ValueError, match="more than 10 lists and objects"):
        parse_json("[" * 11)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("3.35 TB/s", 3.35e12), ("450GB/s", 450e9), ("400 Gbit/s", 50e9), ("400 Gb/s", 50e9),
        ("400Gbps", 50e9), ("989 TFLOP/s", 989e12), ("2.25 PFLOP/s", 2.25e15), ("8 B/s", 8.0),
        ("450 gb/s", None), ("450 GB", None),
        ("-1 GB/s", None), ("989", None), ("1 XB/s", None), ("", None),
    ],
)  # fmt: skip
def test_rates_have_the_case_that_the_field_writes(text: str, rate: float | None) -> None:
    """A small b is a bit; gb could be either, and is neither."""
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2 us", 2e-6),
        ("2µs", 2e-6),
        ("1.5 ms", 1.5e-3),
        ("500 ns", 5e-7),
        ("3 s", 3.0),
        ("2", None),
        ("2 h", None),
    ],
)
def test_seconds_have_their_unit(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


def test_bytes_in_gib_have_as_many_digits_as_asked_for() -> None:
    assert (gib(3 * 2**29), gib(2**40), gib(2**28, 2)) == ("1.5", "1,024.0", "0.25")
