"""A file is what safetensors writes, and its entry is what is in it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, load_file, save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.weights import folder, tensor_file
from penstock.models.weights.reading import HostReader
from penstock.models.weights.tensor_file import TensorFile, widest_first, write_tensors
from support.refusals import refuses

HELD = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "long": torch.arange(5),
}


def assert_written(file: Path, held: Mapping[str, Tensor]) -> None:
    read = load_file(file)
    assert read.keys() == held.keys()
    for name, value in held.items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=0)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("held", [HELD, {}], ids=["tensors", "none"])
def test_safetensors_reads_the_file_that_the_entry_describes(tmp_path: Path, held: dict[str, Tensor]) -> None:
    entry = write_tensors(tmp_path / "file", widest_first(held))
    content = (tmp_path / "file").read_bytes()
    assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert_written(tmp_path / "file", held)


def expected_digest(content: bytes, piece: int) -> str:
    hashes = [hashlib.sha256(content[at : at + piece]).digest() for at in range(0, len(content), piece)]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


@pytest.fixture
def piece(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a piece: small ones, which tensors cross."""
    for module in (tensor_file, folder):
        monkeypatch.setattr(module, "PIECE", 1 << 12)
    return 1 << 12


# _describe makes an entry of a manifest from a file alone
def test_a_file_of_several_pieces_has_the_hash_of_their_hashes(tmp_path: Path, piece: int) -> None:
    """0.5.0: one thread hashed a file from its first byte to its last, at 1.1 GB/s, and the disk waited."""
    numbers = torch.arange(3_000)
    held = {"first": numbers, "small": numbers[:3], "second": numbers.flip(0), "last": numbers.double()}
    entry = write_tensors(tmp_path / "file", widest_first(held))
    content = (tmp_path / "file").read_bytes()
    assert entry == {"size": len(content), "sha256": expected_digest(content, piece), "piece": piece}
    assert folder.sha256_of(tmp_path / "file", piece) == entry["sha256"]
    assert folder._describe(tmp_path / "file") == entry
    assert_written(tmp_path / "file", held)


class Slow:
    """SHA-256 of which early pieces take longer than those after them, and that counts bytes."""

    hashed = 0

    def __init__(self, *content: bytes) -> None:
        self._digest = hashlib.sha256(*content)
        self._wait = 0.05 if not Slow.hashed else 0.0

    def update(self, data: memoryview) -> None:
        time.sleep(self._wait)
        Slow.hashed += len(data)
        self._digest.update(data)

    def digest(self) -> bytes:
        return self._digest.digest()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def test_each_byte_is_written_and_hashed_once_from_where_it_lies(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And read once to be checked. Pieces end in any order."""
    held = {"first": torch.arange(3_000), "second": torch.arange(3_000).flip(0)}
    owned = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in held.values()]
    written, read, copied = [0], [0], [0]
    pwrite, preadv = os.pwrite, os.preadv

    def write(file: int, data: memoryview, at: int) -> int:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(data)) if not data.readonly else 0
        copied[0] += len(data) * (not any(begin in memory for memory in owned))
        count = pwrite(file, data, at)
        written[0] += count
        return count

    def fill(file: int, buffers: list[memoryview], at: int) -> int:
        count = preadv(file, buffers, at)
        read[0] += count
        return count

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", fill)
    with monkeypatch.context() as patched:
        patched.setattr(tensor_file, "hashlib", Mock(sha256=Slow))
        Slow.hashed = 0
        entry = write_tensors(tmp_path / "file", held)
    content = (tmp_path / "file").read_bytes()
    header = len(content) - sum(tensor.nbytes for tensor in held.values())
    assert entry["sha256"] == expected_digest(content, piece)
    assert (written[0], copied[0], Slow.hashed) == (len(content), header, len(content))
    folder.sha256_of(tmp_path / "file", piece)
    assert read[0] == len(content)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-piece"]


def test_a_full_disk_is_the_error_and_leaves_no_thread(piece: int) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(Path("/dev/full"), {"first": torch.zeros(1 << 20)})
    assert workers() == []


def test_a_piece_that_cannot_be_read_is_the_error(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    (tmp_path / "file").write_bytes(bytes(3 * piece))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        folder.sha256_of(tmp_path / "file", piece)
    assert workers() == []


def test_a_process_that_may_start_no_thread_writes_the_same(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of threads starts none when Python ends: a checkpoint that was still being written was lost."""
    held = {"first": torch.arange(3_000), "second": torch.arange(3_000).flip(0)}
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    entry = write_tensors(tmp_path / "file", widest_first(held))
    assert entry["sha256"] == expected_digest((tmp_path / "file").read_bytes(), piece)
    assert folder.sha256_of(tmp_path / "file", piece) == entry["sha256"]
    assert_written(tmp_path / "file", held)


def test_values_are_made_one_after_the_other(tmp_path: Path) -> None:
    layout = widest_first({name: value.to("meta") for name, value in HELD.items()})
    assert [value.itemsize for value in layout.values()] == [8, 4, 4, 4, 2, 1]
    write_tensors(tmp_path / "file", layout, ((name, HELD[name]) for name in layout))
    assert_written(tmp_path / "file", HELD)
    with pytest.raises(AssertionError, match="in the place of long"):
        write_tensors(tmp_path / "file", layout, HELD.items())


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with refuses(CheckpointError, "odd of torch.complex128", "such dtype"):
        write_tensors(tmp_path / "file", {"odd": torch.zeros(2, dtype=torch.complex128)})


@pytest.mark.parametrize("dtype", _TYPES.values(), ids=str)
def test_a_dtype_that_safetensors_writes_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    written = torch.arange(6).reshape(2, 3).to(dtype)
    save_file({"one": written}, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file:
        read = file.read("one", HostReader())
    assert (read.dtype, read.shape) == (dtype, written.shape)
    assert torch.equal(read.view(torch.uint8), written.view(torch.uint8))


NOT_FINITE = {
    "nan": torch.tensor([1.0, float("nan")]),
    "inf": torch.tensor([float("-inf"), 1.0], dtype=torch.bfloat16),
    "both": torch.tensor([float("inf"), float("-inf")], dtype=torch.float64),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_the_entry_names_a_tensor_that_is_not_finite(tmp_path: Path, name: str) -> None:
    """0.5.0: nothing looked at the values."""
    held = widest_first({**HELD, name: NOT_FINITE[name]})
    assert write_tensors(tmp_path / "file", held)["not_finite"] == name
    assert "not_finite" not in write_tensors(tmp_path / "file", held, buffers=[name])


def test_a_sum_that_is_too_large_is_no_value_that_is(tmp_path: Path) -> None:
    large = {
        dtype: torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
        for dtype in (torch.float32, torch.float16)
    }
    large[torch.float8_e4m3fn] = torch.ones(4).to(torch.float8_e4m3fn)
    held = widest_first({str(dtype): value for dtype, value in large.items()})
    assert "not_finite" not in write_tensors(tmp_path / "file", held)
