"""Tensors read by way of two pieces of host memory, whose copies to the device run as late as they may."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from penstock import AutoPipeline
from penstock.errors import CheckpointError
from penstock.models.weights import files as weights
from penstock.models.weights import reading
from penstock.models.weights.reading import HostReader, PieceReader, reader_for
from penstock.models.weights.tensor_file import TensorFile
from support.refusals import refuses

CPU = torch.device("cpu")


class LateCopies:
    """Copies that run when they are waited for, in their order."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], Any]] = []
        self._run = 0
        self.waits = 0

    def fill(self, tensor: Tensor, host: Tensor) -> LateMoment:
        self._queue.append(lambda: tensor.copy_(host))
        return LateMoment(self, len(self._queue))

    def run(self, until: int) -> None:
        for copy in self._queue[self._run : until]:
            copy()
        self._run = max(self._run, until)

    def done(self, until: int) -> bool:
        return self._run >= until

    def run_all(self) -> None:
        self.run(len(self._queue))

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor], *, made: bool = False) -> LateMoment:
        raise AssertionError("nothing is sent")

    def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], LateMoment]:
        raise AssertionError("nothing is received")


class LateMoment:
    queued = 0.0

    def __init__(self, copies: LateCopies, end: int) -> None:
        self._copies, self._end = copies, end

    def query(self) -> bool:
        return self._copies.done(self._end)

    def synchronize(self) -> None:
        self._copies.waits += 1
        self._copies.run(self._end)

    def elapsed_time(self, end: Any) -> float:
        raise AssertionError("nobody times a copy")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(70, 30, generator=generator),
        "half": torch.randn(11, 13, generator=generator).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "long": torch.randn(4096, generator=generator).double(),
    }


@pytest.mark.parametrize("piece", [64, 1000, 1 << 20])
def test_tensors_are_read_as_they_were_written(piece: int, tmp_path: Path) -> None:
    """A piece is not written again before its copy is over: the copies run no earlier than that."""
    save_file(tensors(), tmp_path / "file")
    copies = LateCopies()
    reader = PieceReader(copies, CPU, pinned=False, piece=piece)
    with TensorFile(tmp_path / "file") as file:
        found = {name: file.read(name, reader) for name in file.names()}
        straight = {name: file.read(name, HostReader()) for name in file.names()}
    copies.run_all()
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert straight[name].dtype == tensor.dtype
        assert torch.equal(straight[name], tensor), name


def test_the_host_waits_for_a_piece_and_not_for_the_last_copy(tmp_path: Path) -> None:
    """While one piece is copied the other is read."""
    (tmp_path / "file").write_bytes(bytes(range(250)))
    copies = LateCopies()
    reader = PieceReader(copies, CPU, pinned=False, piece=50)
    into = torch.zeros(250, dtype=torch.uint8)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    reader.read(file, 0, into)
    os.close(file)
    assert copies.waits == 3  # five pieces, the first two of which are free
    assert into.tolist() == [*range(150), *itertools.repeat(0, 100)]
    copies.run_all()
    assert into.tolist() == [*range(250)]


def test_the_pieces_are_pinned_and_weights_for_a_gpu_go_by_way_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.5.0: a whole stage was read into pageable host memory, and copied tensor by tensor."""
    pinned: list[bool] = []
    devices: list[torch.device] = []
    empty: Any = torch.empty

    def noted(*sizes: int, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        made: Tensor = empty(*sizes, **options)
        return made

    monkeypatch.setattr(torch, "empty", noted)
    PieceReader(LateCopies(), CPU, piece=8)
    assert pinned == [True, True]

    def copies(device: torch.device) -> LateCopies:
        devices.append(device)
        return LateCopies()

    monkeypatch.setattr(reading, "CudaCopies", copies)
    monkeypatch.setattr(reading, "PieceReader", lambda copies, device: PieceReader(copies, device, piece=8))
    assert isinstance(reader_for(torch.device("cuda:1")), PieceReader)
    assert devices == [torch.device("cuda:1")]
    assert isinstance(reader_for(CPU), HostReader)


# _PIECE: smaller pieces, so that a small tensor is large
def test_the_pages_of_a_large_tensor_are_there_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.5.0: the kernel made them one by one while a tensor was read, a third of the time of the read."""
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("this kernel makes no pages ahead")
    monkeypatch.setattr(reading, "_PIECE", 100 * mmap.PAGESIZE)
    count = 4096
    made = HostReader().empty([count * mmap.PAGESIZE - 1], torch.uint8)
    resident = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None)
    libc.mincore(ctypes.c_void_p(made.data_ptr()), ctypes.c_size_t(made.nbytes), resident)
    assert sum(page & 1 for page in resident) == count


# _libc stands for another kernel
def test_a_kernel_that_makes_no_pages_ahead_makes_them_as_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = Mock(return_value=-1)
    monkeypatch.setattr(reading, "_libc", Mock(madvise=refused))
    made = HostReader().empty([1 << 20], torch.uint8)
    refused.assert_called_once()
    assert bool((made.fill_(1) == 1).all())


def test_pages_of_parts_serve_one_tensor_after_the_other() -> None:
    """A rank that has a shard of each tensor would else get pages for all of them, and give them back."""
    reader, count = HostReader(), 1 << 20

    def part_of(shape: list[int], begin: int, value: int) -> Tensor:
        made = reader.empty(shape, torch.float32, slice(begin, begin + count))
        assert made.is_contiguous()
        assert list(made.shape) == shape
        made.reshape(-1).view(torch.uint8)[begin : begin + count] = value
        return made

    first = part_of([1024, 1024], 3 << 20, 1)
    second = part_of([512, 1024], 1 << 20, 2)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert bool((first.view(torch.uint8)[768:] == 1).all()), "the first one is still held"
    place = first.untyped_storage().data_ptr()
    del first
    third = part_of([512, 600], 512 * 600 * 4 - count, 3)
    assert third.untyped_storage().data_ptr() == place
    assert bool((second.view(torch.uint8)[256:] == 2).all())
    larger = part_of([2048, 1024], 0, 4)
    assert larger.untyped_storage().data_ptr() not in (place, second.untyped_storage().data_ptr())
    assert bool((third.reshape(-1).view(torch.uint8)[-count:] == 3).all())


def test_some_rows_of_a_tensor_are_read(tmp_path: Path) -> None:
    values = {"large": torch.randn(700, 300), "small": torch.arange(12).reshape(4, 3), "none": torch.ones(0)}
    save_file(values, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file:
        copies = LateCopies()
        for reader in (HostReader(), PieceReader(copies, CPU, pinned=False, piece=512)):
            for name, rows in itertools.product(("large", "small"), (slice(1, 3), slice(0, 4), slice(4, 4))):
                read = file.read(name, reader, rows)
                copies.run_all()
                assert read.shape == values[name].shape
                assert torch.equal(read[rows], values[name][rows])
            assert torch.equal(file.read("none", reader, slice(0, 0)), values["none"])
        half = file.read("large", HostReader(), slice(5, 600), torch.bfloat16)
        assert torch.equal(half[5:600], values["large"][5:600].bfloat16())


def test_a_tensor_without_room_is_the_error_of_any_other_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before training leaves itself out where the whole model has no room."""
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError(errno.ENOMEM, "no memory")))
    with pytest.raises(MemoryError, match="no room for a tensor of 4 MiB"):
        HostReader().empty([1024, 1024], torch.float32)


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "file")
    with TensorFile(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", 1000)
        for reader in (HostReader(), PieceReader(LateCopies(), CPU, pinned=False)):
            with refuses(CheckpointError, rule="it ends too early"):
                file.read("long", reader)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48,
                    num_hidden_layers=2, vocab_size=64, tie_word_embeddings=True),
        MixtralConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48,
                      num_hidden_layers=2, vocab_size=64, num_local_experts=4),
    ],
    ids=["ties", "experts that are put together"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_read_to_a_device_has_the_same_values(
    config: PreTrainedConfig, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the CPU, by another name."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plan = AutoPipeline(ranks=2, microbatches=2, dtype=dtype).build_plan(tmp_path)
    ties = weights.tied_names(plan.source.model)
    expected, found = plan.model_of(1), plan.model_of(1)
    weights.load(expected, plan.source.files, ties)

    class Copies(LateCopies):
        def fill(self, tensor: Tensor, host: Tensor) -> LateMoment:
            moment = super().fill(tensor, host)
            self.run_all()  # what comes after it on the device's stream sees it
            return moment

    reader = PieceReader(Copies(), CPU, pinned=False, piece=512)
    monkeypatch.setattr(weights, "reader_for", lambda device: reader)
    weights.load(found, plan.source.files, ties, CPU)
    for name, parameter in expected.named_parameters():
        assert found.get_parameter(name).dtype == parameter.dtype
        assert torch.equal(found.get_parameter(name), parameter), name


def test_what_conversions_make_is_as_it_is_without_maps() -> None:
    """Joined, cast and copied; of two dtypes, of views, of none, and of such that stay small."""
    large, half = torch.randn(300, 512), torch.randn(300, 512).bfloat16()
    makes: list[Callable[[], Tensor]] = [
        lambda: torch.stack([large, large], 1),
        lambda: torch.cat([large, half], -1),
        lambda: torch.cat([large, torch.empty(0)]),
        lambda: large.t().contiguous(),
        lambda: large.t().to(torch.bfloat16),
        lambda: half[:, 1:].clone(),
        lambda: large[:2].double(),
        lambda: large.to("meta"),
    ]
    for make in makes:
        with reading.maps_for_results(CPU):
            found = make()
        expected = make()
        assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device)
        assert found.is_meta or torch.equal(found, expected)
