"""A run that is stopped and gone on with elsewhere is the same run, and writing does not stand in its way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, AdamW

from penstock import AutoPipeline
from penstock.checkpoint import save_load
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint, save_checkpoint
from penstock.errors import AlteredError, CheckpointError, ModelError, RunError, UnfitError
from penstock.models.weights import folder as folders
from penstock.models.weights.folder import Hashed
from penstock.models.weights.saved import SavedModel
from penstock.pipeline import model_files
from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.device import copies as device_copies
from penstock.runtime.device.copies import BackgroundCopies
from support import zoo
from support.families import ragged_batch, tiny_model
from support.folders import check_folder, flip, relist
from support.jobs_checkpoint import advance, assert_same_run, begin, go_on, make
from support.refusals import refuses
from support.writing import Made, writers


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_goes_on_at_another_size_and_schedule_as_if_never_split(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    before = begin(4, "zb_v", "llama", str(path))
    after = go_on(2, "1f1b", "llama", str(path))
    assert_same_run("llama", path, before, after)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes begin once it is set."""
    go, written = threading.Event(), SavedModel.write

    def slowly(*arguments: Any) -> Hashed:  # the weights are written first
        assert go.wait(30)
        return written(*arguments)

    monkeypatch.setattr(SavedModel, "write", slowly)
    return go


def test_what_is_written_in_the_background_is_what_was_there_at_save(
    tmp_path: Path, gate: threading.Event
) -> None:
    """The very same bytes as written at once, whatever training has done since."""
    pipe, optimizers = make(2, "1f1b", "mixtral")
    advance(pipe, optimizers, 1, 1)
    state = {"step": 1, "names": ["a", "b"], "rate": 1e-3, "best": None}
    torch.manual_seed(7)
    gate.set()
    save_checkpoint(tmp_path / "at once", pipe, optimizers, state)
    gate.clear()
    then: list[str] = []
    with CheckpointWriter(pipe) as writer:
        writer.save(
            tmp_path / "later", optimizers, state,
            then=lambda: then.append((tmp_path / "later" / "state.json").read_text()),
        )  # fmt: skip
        state["step"] = 2
        advance(pipe, optimizers, 2, 3)
        torch.rand(5)
        assert not (tmp_path / "later").exists()
        assert len(writers()) == 1
        gate.set()
    assert writers() == []
    assert len(then) == 1
    assert files(tmp_path / "at once") == files(tmp_path / "later")


# _is_on_host: the host stands for a GPU
class LateCopies:
    """Copies from a GPU that read its memory once somebody waits for them, and no sooner.

    waited: whether anybody did
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited, self.asked = threading.Event(), 0
        waits = BackgroundCopies.wait

        def wait(copies: BackgroundCopies) -> None:
            self.waited.set()
            waits(copies)

        monkeypatch.setattr(BackgroundCopies, "wait", wait)
        monkeypatch.setattr(device_copies, "_is_on_host", lambda tensor: not tensor.ndim)

        def unpinned(device: torch.device, kept: bool) -> BackgroundCopies:
            return BackgroundCopies(self, kept=kept, pinned=False)

        monkeypatch.setattr(model_files, "background_copies", unpinned)

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor], *, made: bool = False) -> Any:
        self.asked += sum(host.nbytes for host in hosts)

        def synchronize() -> None:
            assert self.waited.wait(30)
            for tensor, host in zip(tensors, hosts, strict=True):
                host.copy_(tensor)

        return SimpleNamespace(query=lambda: False, synchronize=synchronize)

    def up(self, hosts: Sequence[Tensor]) -> Any:
        raise AssertionError("nothing is received")

    fill: Any = up


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    return LateCopies(monkeypatch)


def of_training(folder: Path) -> dict[str, bytes]:
    """The files of weights and optimizer state, without what follows random numbers."""
    return {name: content for name, content in files(folder).items() if name.startswith(("model", "optim"))}


def test_the_next_change_of_weights_waits_for_the_copies_and_nothing_else_does(
    alone: Made, tmp_path: Path, late: LateCopies
) -> None:
    """0.5.0: `save` returned when 49 GB were copied, after 37 s, most of them to pin the memory."""
    pipe, optimizers = alone
    advance(pipe, optimizers, 1, 1)
    save_checkpoint(tmp_path / "at once", pipe, optimizers)
    with CheckpointWriter(pipe) as writer:
        writer.save(tmp_path / "later", optimizers)
        pipe.zero_grad()
        pipe.step(ragged_batch(8, 9))
        pipe.clip_grad_norm_(1.0)
        assert not late.waited.is_set()
        for optimizer in optimizers:
            optimizer.step()
        assert late.waited.is_set()
    assert of_training(tmp_path / "later") == of_training(tmp_path / "at once")
    weights = sum(parameter.nbytes for parameter in pipe.parameters())
    assert late.asked == 3 * weights  # each once, with both moments


CHANGES: dict[str, Callable[[CheckpointWriter, Pipeline, Path], None]] = {
    "load_weights": lambda writer, pipe, folder: pipe.load_weights(folder),
    "by hand": lambda writer, pipe, folder: writer.settle(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_of_weights_wait_too(
    alone: Made, tmp_path: Path, late: LateCopies, change: str
) -> None:
    pipe, optimizers = alone
    save_checkpoint(tmp_path / "first", pipe, optimizers)
    advance(pipe, optimizers, 1, 1)
    save_checkpoint(tmp_path / "at once", pipe, optimizers)
    with CheckpointWriter(pipe) as writer:
        writer.save(tmp_path / "later", optimizers)
        CHANGES[change](writer, pipe, tmp_path / "first")
        with torch.no_grad():
            torch._foreach_zero_(list(pipe.parameters()))
    assert of_training(tmp_path / "later") == of_training(tmp_path / "at once")


# _take runs out of memory
def test_what_cannot_be_copied_is_told_by_the_write_and_training_goes_on(
    alone: Made, tmp_path: Path, late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, optimizers = alone
    writer = CheckpointWriter(pipe)
    late.waited.set()
    with monkeypatch.context() as patched:
        patched.setattr(device_copies, "_take", Mock(side_effect=MemoryError("no room")))
        patched.setattr(device_copies, "_PINNED", 10_000)  # what fails gives no piece back
        writer.save(tmp_path / "checkpoint", optimizers)
        advance(pipe, optimizers, 1, 1)
        with refuses(RunError, rule="MemoryError: no room"):
            writer.wait()
    assert list(tmp_path.iterdir()) == []
    writer.save(tmp_path / "checkpoint", optimizers)
    writer.wait()
    check_folder(tmp_path / "checkpoint")


# one pinned piece, and _write, which a thread runs
def test_copies_that_are_given_up_leave_neither_thread_nor_checkpoint(
    alone: Made, tmp_path: Path, late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, optimizers = alone
    monkeypatch.setattr(device_copies, "_PINNED", 1)
    writer = CheckpointWriter(pipe)
    writer.save(tmp_path / "checkpoint", optimizers)
    write = writer._write
    assert write is not None
    writer.drop(0)
    late.waited.set()
    write.join(30)
    for thread in threading.enumerate():
        if thread.name == "penstock-copy":  # it tells the write of its error, and then ends
            thread.join(30)
            assert not thread.is_alive()
    assert not (tmp_path / "checkpoint").exists()
    advance(pipe, optimizers, 1, 1)


def test_a_host_without_memory_for_copies_writes_while_training_stands(
    alone: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """0.5.0: the system killed a process that copied more than its host has."""
    pipe, optimizers = alone
    advance(pipe, optimizers, 1, 1)
    save_checkpoint(tmp_path / "at once", pipe, optimizers)
    held = sum(parameter.nbytes for parameter in pipe.parameters())
    for room in (2 * held, 4 * held):
        monkeypatch.setattr(save_load, "room_in_memory", lambda room=room: room)
        writer = CheckpointWriter(pipe)
        writer.save(tmp_path / f"{room}", optimizers)
        assert bool(writers()) <= (room > 3 * held)
        writer.wait()
        assert of_training(tmp_path / f"{room}") == of_training(tmp_path / "at once")
    assert [record.message.partition(": ")[2][:31] for record in caplog.records] == [
        "training waits until it is writ"
    ]


def test_a_pipeline_of_one_s_own_modules_says_that_it_cannot(tmp_path: Path) -> None:
    pipe = Pipeline.from_provider(lambda stage: torch.nn.Linear(2, 2), schedule="1f1b", ranks=2,
                                  microbatches=2, loss_fn=lambda output, _: output.mean())  # fmt: skip
    with refuses(ModelError, "a pipeline made by from_provider", "provider knows"):
        save_checkpoint(tmp_path / "checkpoint", pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))


def each(pipe: Pipeline) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in pipe.parameters()]


def test_an_altered_byte_is_found_while_files_are_read(tmp_path: Path, alone: Made) -> None:
    """No step can go on silently with what was read: weights are NaN until a good checkpoint is loaded."""
    pipe, optimizers = alone
    save_checkpoint(tmp_path / "good", pipe, optimizers)
    saved = each(pipe)
    for name in (
        "model*.safetensors",
        "optimizer-*.safetensors",
        "optimizer-*.json",
        "random-*",
        "state.json",
    ):
        save_checkpoint(tmp_path / "checkpoint", pipe, optimizers, {"step": 1})
        (altered,) = (tmp_path / "checkpoint").glob(name)
        flip(altered)
        advance(pipe, optimizers, 1, 1)
        with refuses(AlteredError, rule="contents differ") as caught:
            load_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
        assert altered.name in caught.value.value
        assert all(bool(weight.isnan().all()) for weight in each(pipe))
        load_checkpoint(tmp_path / "good", pipe, optimizers)
        assert all(map(torch.equal, saved, each(pipe)))


def test_tensors_are_hashed_as_they_are_written_and_each_file_is_flushed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0 read every file again to hash it."""
    read: list[str] = []
    flushed: list[str] = []
    sha256_of, fsync = folders.sha256_of, os.fsync

    def noted(file: Path, *more: Any) -> str:
        read.append(file.name)
        return sha256_of(file, *more)

    def flush(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(folders, "sha256_of", noted)
    monkeypatch.setattr(os, "fsync", flush)
    save_checkpoint(tmp_path / "checkpoint", *make(2, "1f1b", "mixtral"))
    names = sorted(files(tmp_path / "checkpoint"))
    assert sorted(read) == [name for name in names if name.endswith(".json") and name != "manifest.json"]
    assert sorted(name for name in flushed if name in names) == names
    check_folder(tmp_path / "checkpoint")


# --- what is refused, and what it leaves ---


def test_weights_under_names_of_an_adapter_are_refused(tmp_path: Path) -> None:
    """0.4.0 wrote a folder that no from_pretrained opens, where save_pretrained refused."""
    pipe, optimizers = make(2, "1f1b")
    layer = pipe.modules[0].get_submodule("model.layers.0.mlp")
    layer.down_proj = nn.Sequential(layer.get_submodule("down_proj"))
    for background in (False, True):
        with refuses(ModelError, "down_proj", "from_pretrained reads"):
            CheckpointWriter(pipe, background=background).save(tmp_path / "checkpoint", optimizers)
    assert list(tmp_path.iterdir()) == []


def test_weights_sharded_over_another_mesh_are_refused(tmp_path: Path, one_process: None) -> None:
    pipe = AutoPipeline(ranks=1, microbatches=8, transport="local").build(tiny_model("llama"))
    mesh = init_device_mesh("cpu", (1,))
    norm = pipe.modules[0].get_submodule("model.norm")
    norm.weight = nn.Parameter(distribute_tensor(norm.get_parameter("weight").detach(), mesh, [Shard(0)]))
    optimizer = AdamW(pipe.parameters())
    writes: list[Callable[[], None]] = [
        lambda: save_checkpoint(tmp_path / "checkpoint", pipe, optimizer),
        lambda: pipe.save_pretrained(tmp_path / "weights"),
    ]
    for write in writes:
        with refuses(CheckpointError, "model.norm.weight, a DTensor", "sharded over another"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """0.4.0 put some of the layers into a model of fewer, and weights of other heads of the same shapes."""
    pipe, optimizers = make(2, "1f1b")
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    auto = AutoPipeline(ranks=2, microbatches=8)
    for changes, value, rule in (
        ({"layers": 3}, "num_hidden_layers=4", "the model has 3"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps=", "the model has 0.001"),
    ):
        other = auto.build(tiny_model("llama", **changes))
        before, random = each(other), torch.get_rng_state()
        with refuses(UnfitError, value, rule):
            load_checkpoint(tmp_path / "checkpoint", other, AdamW(other.parameters()))
        assert all(map(torch.equal, before, each(other)))
        assert torch.equal(random, torch.get_rng_state())
    other = auto.build(tiny_model("qwen3"))
    with refuses(UnfitError, "model_type=llama", "the model has qwen3"):
        load_checkpoint(tmp_path / "checkpoint", other, AdamW(other.parameters()))


def test_a_config_with_infinity_comes_back(tmp_path: Path) -> None:
    """0.5.0: a checkpoint of Mamba-2 could not be resumed: its config was read as plain JSON."""
    batch, model = zoo.tiny_batch("mamba2"), zoo.tiny_model("mamba2")
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    save_checkpoint(tmp_path / "one", pipe, AdamW(pipe.parameters()))
    wider = AutoPipeline(ranks=4, microbatches=2).build(tmp_path / "one")
    load_checkpoint(tmp_path / "one", wider, AdamW(wider.parameters()))
    wider.verify_against(model, batch)
    other = AutoPipeline(ranks=2, microbatches=2).build(zoo.tiny_model("mamba2", time_step_limit=(0.0, 1.0)))
    with refuses(UnfitError, "time_step_limit=", "the model has"):
        load_checkpoint(tmp_path / "one", other, AdamW(other.parameters()))


def test_parameters_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    pipe, optimizers = make(2, "1f1b")
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    (described,) = (tmp_path / "checkpoint").glob("optimizer-*.json")
    described.write_text(described.read_text().replace('"model.norm.weight"', '"model.norm.weight", "more"'))
    relist(tmp_path / "checkpoint")
    with refuses(UnfitError, "it holds more", "no such parameter"):
        load_checkpoint(tmp_path / "checkpoint", pipe, optimizers)


@pytest.mark.parametrize(
    ("what", "family", "kind", "value", "rule"),
    [
        ("optimizer", "llama", UnfitError, "was trained by AdamW", "SGD trains it"),
        ("missing", "mixtral", CheckpointError, "the weights in", "lacks 1 of"),
        ("shape", "llama", CheckpointError, "the weights in", "of another shape"),
    ],
)
def test_what_does_not_fit_is_found_before_any_weight_is_read(
    tmp_path: Path, what: str, family: str, kind: type[CheckpointError], value: str, rule: str
) -> None:
    """0.4.0 had replaced the weights when it looked at the optimizer."""
    pipe, optimizers = make(2, "1f1b", family)
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, pipe, optimizers, {"step": 1})
    given: Any = optimizers
    if what == "optimizer":
        given = SGD(pipe.parameters(), lr=0.1)
    else:
        file = max(folder.glob("model-*.safetensors"))
        held = load_file(file)
        name = "model.norm.weight"
        held = {key: value for key, value in held.items() if key != name}
        save_file(held if what == "missing" else held | {name: torch.ones(3)}, file)
        relist(folder)
    advance(pipe, optimizers, 1, 1)
    before = each(pipe)
    with refuses(kind, value, rule):
        load_checkpoint(folder, pipe, given)
    assert all(map(torch.equal, before, each(pipe)))


def test_alone_a_writer_goes_on_after_it_gave_a_write_up(tmp_path: Path, alone: Made) -> None:
    pipe, optimizers = alone
    with CheckpointWriter(pipe) as writer:
        writer.save(tmp_path / "first", optimizers)
        writer.drop()
        writer.save(tmp_path / "second", optimizers)
    check_folder(tmp_path / "second")


class Kept:
    """A hook that cannot be copied, and keeps an output that cannot be either."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.output: Any = None

    def __call__(self, module: nn.Module, given: Any, output: Any) -> None:
        self.output = output


def test_modules_that_cannot_be_copied(tmp_path: Path) -> None:
    """0.4.0 made deep copies of modules with all that hung on them, to save and to load."""
    pipe, optimizers = make(2, "1f1b", "mixtral")
    for part in pipe.modules.values():
        part.lock = threading.Lock()  # type: ignore[assignment]
        for module in part.modules():
            module.register_forward_hook(Kept())
    advance(pipe, optimizers, 1, 1)
    with CheckpointWriter(pipe) as writer:
        writer.save(tmp_path / "checkpoint", optimizers)
        saved = each(pipe)
        advance(pipe, optimizers, 2, 2)
    load_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    assert all(map(torch.equal, saved, each(pipe)))
    assert all(len(module._forward_hooks) for part in pipe.modules.values() for module in part.modules())
    advance(pipe, optimizers, 2, 2)


def test_a_path_is_of_the_folder_and_home_at_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, alone: Made
) -> None:
    pipe, optimizers = alone
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with CheckpointWriter(pipe) as writer:
        writer.save("relative", optimizers)
        monkeypatch.chdir(tmp_path / "elsewhere")
        gate.set()
        writer.save("~/home", optimizers)
    check_folder(tmp_path / "relative")
    assert load_checkpoint("~/home", pipe, optimizers) == {}


def test_weights_of_no_folder(tmp_path: Path) -> None:
    pipe, _ = make(1, "1f1b")
    with refuses(CheckpointError, rule="there is no such folder"):
        pipe.load_weights(tmp_path / "none")


CHILD = """
import sys, threading
from pathlib import Path
from penstock.checkpoint.save_load import CheckpointWriter
from penstock.checkpoint.optimizer_state import OptimizerState
from penstock.models.weights import tensor_file
from support.jobs_checkpoint import make

tensor_file._HASHED_IN_THREAD = 0  # all that is written
pipe, optimizers = make(1, "1f1b", layers=1)
written, reached = OptimizerState.write, threading.Event()

def write(self, *place):
    reached.set()
    threading.Event().wait(1)
    return written(self, *place)

OptimizerState.write = write
CheckpointWriter(pipe).save(Path(sys.argv[1]) / "checkpoint", optimizers)
assert reached.wait(30)
"""


@pytest.mark.sweep
def test_the_end_of_python_finishes_a_write(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], env=environment, timeout=90, capture_output=True
    )
    assert (child.returncode, child.stderr) == (0, b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    check_folder(tmp_path / "checkpoint")
