"""Which checkpoints of a run are kept, which are never touched, and what a removal cut short leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.checkpoint.optimizer_state import OptimizerState
from penstock.errors import RunError
from penstock.models.weights.folder import MANIFEST, check_folder, leftovers, write_folder
from penstock.runtime.transport.groups import OneProcess
from penstock.train.checkpoints import NEWEST, checkpoint_folder, newest_checkpoint, prune
from penstock.train.config.sections import KeepSection, TrainConfig
from penstock.train.run import preflight, run
from support.tiny import config


def write_state(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def write(output: Path, *steps: int) -> Path:
    """Folders that pass for checkpoints of ours; the last one's path."""
    for step in steps:
        path = checkpoint_folder(output, step)
        write_folder(path, write_state, OneProcess())
    return path


def standing(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("last", "every", "left"),
    [
        (None, None, [1, 2, 3, 4, 5, 6]),
        (1, None, [6]),
        (2, None, [5, 6]),
        (1, 2, [2, 4, 6]),
        (3, 3, [3, 4, 5, 6]),
        (9, None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_is_kept(tmp_path: Path, last: int | None, every: int | None, left: list[int]) -> None:
    written = write(tmp_path, 1, 2, 3, 4, 5, 6)
    prune(written, KeepSection(last=last, every=every))
    assert standing(tmp_path) == left
    for step in left:
        check_folder(checkpoint_folder(tmp_path, step))
    assert all(not path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())


def test_what_is_not_a_whole_checkpoint_of_ours_is_neither_removed_nor_counted(tmp_path: Path) -> None:
    written = write(tmp_path, 1, 2, 3, 4, 5)
    folder = written.parent
    (folder / "step-00000003" / "state.json").write_text("torn")
    (folder / "step-notes").mkdir()
    (folder / "step-00000000").mkdir()
    (folder / "step-00000000" / "thesis.tex").write_text("years of work")
    (folder / "best").symlink_to(folder / "step-00000001")
    (folder / "step-00000009").symlink_to(folder / "step-00000002")
    prune(written, KeepSection(last=2))
    left = {path.name for path in folder.iterdir()}
    assert left == {"step-00000005", "step-00000004", "step-00000003", "step-notes", "step-00000000",
                    "best", "step-00000009"}  # fmt: skip
    assert (folder / "step-00000000" / "thesis.tex").read_text() == "years of work"


def test_a_note_left_in_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    written = write(tmp_path, 1, 2)
    note = checkpoint_folder(tmp_path, 1) / "notes.txt"
    note.write_text("the good one")
    prune(written, KeepSection(last=1))
    assert standing(tmp_path) == [1, 2]
    assert note.read_text() == "the good one"


def test_steps_after_the_one_just_written_are_another_run_s(tmp_path: Path) -> None:
    """As after going on from an older checkpoint; the newest whole one is never removed."""
    write(tmp_path, 1, 2, 8)
    prune(checkpoint_folder(tmp_path, 2), KeepSection(last=1))
    assert standing(tmp_path) == [2, 8]


def test_a_removal_cut_short_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path, 1, 2)

    def cut_short(path: Path) -> None:
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            prune(written, KeepSection(last=1))
    assert standing(tmp_path) == [2]
    assert len(leftovers(written.parent)) == 1
    assert newest_checkpoint(tmp_path) == (written, [])
    # it was finished once, and is wanted no more
    prune(written, KeepSection(last=1))
    assert [path.name for path in written.parent.iterdir()] == ["step-00000002"]


def test_what_killed_runs_left_unfinished_is_removed(tmp_path: Path) -> None:
    written = write(tmp_path, 1, 2)
    unfinished = written.parent / ".step-00000002.writing-0a1b2c3d"
    for folder in (unfinished, written.parent / ".notes.writing-0a1b2c3d"):
        folder.mkdir()
        (folder / "model.safetensors").write_text("torn")
    assert newest_checkpoint(tmp_path)[1] == [f"{unfinished} was never finished"]
    prune(written, KeepSection(last=1))
    left = {path.name for path in written.parent.iterdir()}
    assert left == {"step-00000002", ".notes.writing-0a1b2c3d"}


def test_what_a_killed_replacement_left_is_removed_where_the_new_one_stands(tmp_path: Path) -> None:
    """0.5.0 kept it for ever, and said at every resume that it was never finished."""
    replaced = write(tmp_path, 2).rename(tmp_path / "checkpoints" / ".step-00000002.replaced-0a1b2c3d")
    written = write(tmp_path, 1, 3)
    told = [f"{written.with_name('step-00000002')} was being replaced: {replaced} holds the older one"]
    assert newest_checkpoint(tmp_path)[1] == told
    prune(written, KeepSection(last=2))
    check_folder(replaced)
    write(tmp_path, 2)
    assert newest_checkpoint(tmp_path)[1] == []
    (checkpoint_folder(tmp_path, 2) / MANIFEST).unlink()
    prune(written, KeepSection(last=2))
    check_folder(replaced)
    shutil.rmtree(checkpoint_folder(tmp_path, 2))
    write(tmp_path, 2)
    prune(written, KeepSection(last=2))
    assert not replaced.exists()
    assert standing(tmp_path) == [2, 3]


def test_a_pruning_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the run in 0.4.0, and said that the checkpoint was not written."""

    def failing(path: Path) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr("penstock.train.checkpoints.remove_folder", failing)
    run(preflight(kept(tmp_path, last=1)))
    assert standing(tmp_path / "out") == [1, 2, 3, 4, 5, 6]
    assert "were not removed: read-only file system" in capsys.readouterr().out


def kept(folder: Path, **keep: Any) -> TrainConfig:
    made = config(folder, steps=6, checkpoint_every=1)
    return made.model_copy(update={"output": made.output.model_copy(update={"keep": KeepSection(**keep)})})


def test_a_run_keeps_what_it_was_told_to_and_goes_on_from_it(tmp_path: Path) -> None:
    run(preflight(kept(tmp_path, last=2, every=3)))
    assert standing(tmp_path / "out") == [3, 5, 6]
    shutil.rmtree(checkpoint_folder(tmp_path / "out", 6))
    resumed = preflight(kept(tmp_path, last=1), NEWEST)
    assert resumed.start.done == 5
    run(resumed)
    assert standing(tmp_path / "out") == [6]


def test_a_failed_write_leaves_all_that_stood_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning comes after a publication only; the run says at its next checkpoint what went wrong."""
    made, written = kept(tmp_path, last=1), OptimizerState.write

    def write(self: OptimizerState, folder: Path, index: int, count: int) -> None:
        if "step-00000003" in folder.name:
            raise OSError("disk full")
        written(self, folder, index, count)

    monkeypatch.setattr(OptimizerState, "write", write)
    with pytest.raises(RunError, match="step-00000003: it could not be written in the background"):
        run(preflight(made))
    assert standing(tmp_path / "out") == [2]
    assert newest_checkpoint(tmp_path / "out")[1] == []


def test_the_background_changes_nothing(tmp_path: Path) -> None:
    found = []
    for background in (True, False):
        folder = tmp_path / str(background)
        folder.mkdir()
        run(preflight(config(folder, steps=4, checkpoint_every=2, checkpoint_background=background)))
        checkpoints = (folder / "out" / "checkpoints").glob("*/*.safetensors")
        found.append({(p.parent.name, p.name): p.read_bytes() for p in checkpoints})
    assert len(found[0]) > 4
    assert found[0] == found[1]


def test_a_checkpoint_of_0_3_0_is_gone_on_from_bit_for_bit(tmp_path: Path) -> None:
    """Its optimizer files are alone, and no random state is there."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        run(preflight(config(tmp_path / name, steps=4, checkpoint_every=2)))
    half = checkpoint_folder(tmp_path / "parts" / "out", 2)
    for file in (*half.glob("optimizer-*.json"), *half.glob("random-*")):
        file.unlink()
    (half / MANIFEST).unlink()
    old = half.rename(half.with_name("old"))

    def copy(folder: Path) -> None:
        shutil.copytree(old, folder, dirs_exist_ok=True)

    write_folder(half, copy, OneProcess())
    run(preflight(config(tmp_path / "parts", steps=4), str(half)))
    last = [checkpoint_folder(tmp_path / name / "out", 4) for name in ("whole", "parts")]
    for file in last[0].glob("*.safetensors"):
        assert file.read_bytes() == (last[1] / file.name).read_bytes()


def test_a_keep_every_that_checkpoints_never_meet_is_refused() -> None:
    tree = {
        "model": {"config": {"model_type": "qwen3"}}, "data": {"path": "x", "tokenizer": "bytes"},
        "train": {"checkpoint_every": 30}, "output": {"keep": {"last": 1, "every": 100}},
    }  # fmt: skip
    with pytest.raises(
        ValidationError, match=r"keep\.every=100 is no multiple of train\.checkpoint_every=30"
    ):
        TrainConfig.model_validate(tree)
    tree["train"] = {"checkpoint_every": 50}
    assert TrainConfig.model_validate(tree).output.keep.every == 100
