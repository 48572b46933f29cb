"""A run that is stopped and gone on with elsewhere is the same run, and writing does not stand in its way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint
from penstock.commit import check_folder
from penstock.errors import CheckpointError, ModelError, RunError
from penstock.models.saved import SavedModel
from penstock.optimizer_state import OptimizerState
from penstock.pipeline import Pipeline
from support.families import ragged_batch
from support.jobs_checkpoint import (
    SAVED,
    advance,
    begin,
    failing_writes,
    failure_in_the_background,
    go_on,
    make,
    whole_run,
)
from support.pool import Pool


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-checkpoint")]


def assert_same_run(
    family: str, path: Path, before: list[float], after: list[float], expected: tuple[list[float], Any]
) -> None:
    losses, model = expected
    assert before == pytest.approx(losses[: SAVED + 1], rel=1e-5)
    assert after == pytest.approx(losses[SAVED:], rel=1e-5)
    opened = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
    batch = ragged_batch()["input_ids"]
    model.eval()
    # AdamW's first steps are as large for a gradient that is all rounding as for any other
    torch.testing.assert_close(opened(batch).logits, model(batch).logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_run_goes_on_at_another_size_and_schedule_as_if_never_split(tmp_path: Path, family: str) -> None:
    path = tmp_path / "checkpoint"
    before = begin(4, "zb_v", family, str(path))
    after = go_on(2, "1f1b", family, str(path))
    assert_same_run(family, path, before, after, whole_run(family))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_processes_go_on_where_others_were(pool: Pool, tmp_path: Path, family: str) -> None:
    path = tmp_path / "checkpoint"
    before = pool.run(4, begin, 4, "zb_v", family, str(path))
    after = pool.run(2, go_on, 2, "1f1b", family, str(path))
    assert all(losses == before[0] for losses in before)
    assert all(losses == after[0] for losses in after)
    assert_same_run(family, path, before[0], after[0], whole_run(family))
    names = {file.name for file in path.iterdir()}
    assert {f"random-{n:05d}-of-00004.safetensors" for n in range(1, 5)} <= names


def test_what_is_written_in_the_background_is_what_was_there_at_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very same bytes as written at once, whatever training has done since."""
    pipe, optimizers = make(2, "1f1b", "mixtral")
    advance(pipe, optimizers, 1, 1)
    state = {"step": 1, "names": ["a", "b"], "rate": 1e-3, "best": None}
    torch.manual_seed(7)
    save_checkpoint(tmp_path / "at once", pipe, optimizers, state)

    go, written = threading.Event(), SavedModel.write

    def slowly(*arguments: Any) -> None:  # of all that is written, the first
        assert go.wait(30)
        written(*arguments)

    monkeypatch.setattr(SavedModel, "write", slowly)
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
        go.set()
    assert writers() == []
    assert len(then) == 1
    assert files(tmp_path / "at once") == files(tmp_path / "later")


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    pipe, optimizers = make(1, "1f1b")
    with CheckpointWriter(pipe) as writer:
        for number in range(3):
            writer.save(tmp_path / str(number), optimizers, {"number": number})
            assert len(writers()) <= 1
            if number:
                check_folder(tmp_path / str(number - 1))
    for number in range(3):
        assert load_checkpoint(tmp_path / str(number), pipe, optimizers) == {"number": number}


def test_the_state_comes_back_and_so_do_random_numbers(tmp_path: Path) -> None:
    pipe, optimizers = make(2, "1f1b")
    state = {"step": 3, "data": {"file": "a", "row": [1, 2.5, None, True]}}
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizers, state)
    drawn = torch.rand(3)
    assert load_checkpoint(tmp_path / "checkpoint", pipe, optimizers) == state
    assert torch.equal(torch.rand(3), drawn)

    (random,) = (tmp_path / "checkpoint").glob("random-*")
    random.rename(random.with_name("random-00001-of-00002.safetensors"))  # as two processes write it
    (tmp_path / "checkpoint" / "manifest.json").write_text('{"files": {}}')
    before = torch.get_rng_state()
    load_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"milestones": {10: 1}}, r"state\['milestones'\]: the key 10"),
        ({"losses": [torch.zeros(1)]}, r"state\['losses'\]\[0\] is a Tensor"),
    ],
)
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, Any], found: str) -> None:
    pipe, optimizers = make(1, "1f1b")
    with pytest.raises(CheckpointError, match=found):
        CheckpointWriter(pipe).save(tmp_path / "checkpoint", optimizers, state)
    assert list(tmp_path.iterdir()) == []


def test_a_pipeline_of_one_s_own_modules_says_that_it_cannot(tmp_path: Path) -> None:
    pipe = Pipeline.from_provider(lambda stage: torch.nn.Linear(2, 2), schedule="1f1b", ranks=2,
                                  microbatches=2, loss_fn=lambda output, _: output.mean())  # fmt: skip
    with pytest.raises(ModelError, match="only its provider knows its files"):
        save_checkpoint(tmp_path / "checkpoint", pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))


def alter(folder: Path, name: str) -> None:
    file = next(folder.glob(name))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model*.safetensors", "optimizer-*.safetensors", "optimizer-*.json",
                                  "random-*", "state.json"])  # fmt: skip
def test_an_altered_byte_is_told_before_anything_is_changed(tmp_path: Path, name: str) -> None:
    pipe, optimizers = make(1, "1f1b")
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizers, {"step": 1})
    alter(tmp_path / "checkpoint", name)
    advance(pipe, optimizers, 1, 1)
    before = [p.detach().clone() for p in pipe.parameters()]
    with pytest.raises(CheckpointError, match="contents differ from what was written"):
        load_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    assert all(map(torch.equal, before, pipe.parameters()))


@pytest.mark.parametrize("how", ["next", "wait", "context"])
def test_a_failure_in_the_background_is_told(tmp_path: Path, how: str) -> None:
    pipe, optimizers = make(1, "1f1b")
    path = tmp_path / "checkpoint"
    save_checkpoint(path, pipe, optimizers, {"step": 1})
    writer = CheckpointWriter(pipe)

    def leave() -> None:
        with writer:
            pass

    told: dict[str, Callable[[], None]] = {
        "next": lambda: writer.save(path, optimizers), "wait": writer.wait, "context": leave,
    }  # fmt: skip
    with failing_writes(0):
        writer.save(path, optimizers, {"step": 2})
        with pytest.raises(RunError, match="could not be written in the background: OSError: disk full"):
            told[how]()
    assert load_checkpoint(path, pipe, optimizers) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    writer.save(path, optimizers, {"step": 3})  # the failure was told, and this one is another
    writer.wait()
    assert load_checkpoint(path, pipe, optimizers) == {"step": 3}


def test_a_failure_on_one_process_is_told_on_all(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(3, failure_in_the_background, str(tmp_path / "checkpoint"))
    assert [len(errors) for errors in told] == [2, 2, 2]
    for rank, errors in enumerate(told):
        for error in errors:
            assert "OSError: disk full" in error
            assert ("process 1" in error) == (rank != 1)
    check_folder(tmp_path / "checkpoint")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_elsewhere_lets_a_whole_checkpoint_end_and_ctrl_c_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    pipe, optimizers = make(1, "1f1b")
    go, written = threading.Event(), OptimizerState.write

    def slowly(self: OptimizerState, folder: Path, index: int, count: int) -> None:
        assert go.wait(0.5) or error is KeyboardInterrupt
        written(self, folder, index, count)

    monkeypatch.setattr(OptimizerState, "write", slowly)
    threading.Timer(0.1, go.set).start()
    with pytest.raises(error), CheckpointWriter(pipe) as writer:  # noqa: PT012
        writer.save(tmp_path / "checkpoint", optimizers)
        raise error
    assert writers() == []
    assert [entry.name for entry in tmp_path.iterdir()] == (
        [] if error is KeyboardInterrupt else ["checkpoint"]
    )


CHILD = """
import os, sys, threading
from pathlib import Path
from penstock.checkpoint import CheckpointWriter, save_checkpoint
from penstock.optimizer_state import OptimizerState
from support.jobs_checkpoint import make

folder, end = Path(sys.argv[1]), sys.argv[2]
pipe, optimizers = make(1, "1f1b")
save_checkpoint(folder / "older", pipe, optimizers)
written, reached = OptimizerState.write, threading.Event()

def write(self, *place):
    written(self, *place)
    reached.set()
    threading.Event().wait(60 if end == "killed" else 1)

OptimizerState.write = write
CheckpointWriter(pipe).save(folder / "newer", optimizers)
assert reached.wait(30)
if end == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["killed", "over"])
def test_the_end_of_python_finishes_a_write_and_a_kill_leaves_the_older_checkpoint(
    tmp_path: Path, end: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), end], env=environment, timeout=90, capture_output=True
    )
    check_folder(tmp_path / "older")
    names = sorted(entry.name for entry in tmp_path.iterdir())
    if end == "killed":
        assert child.returncode == -9
        assert names[1:] == ["older"]
        assert names[0].startswith(".newer.writing-")
    else:
        assert (child.returncode, child.stderr) == (0, b"")
        assert names == ["newer", "older"]
        check_folder(tmp_path / "newer")
