"""How a run resumes, which checkpoints it keeps, and what a removal cut short leaves."""

from __future__ import annotations

import json
import shutil
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.optimizer_state import OptimizerState
from penstock.errors import CheckpointError, ConfigError, FolderInUseError, RunError, UnfitError
from penstock.models.weights.folder import MANIFEST, Hashed, leftovers, write_folder
from penstock.models.weights.saved import SavedModel
from penstock.runtime.ranks import Ranks
from penstock.train import loop
from penstock.train.between_steps import Checkpoints, HeldOutEvaluation
from penstock.train.checkpoints import (
    NEWEST,
    best_link,
    checkpoint_folder,
    link_best,
    newest_checkpoint,
    prune,
)
from penstock.train.config.output import KeepSection
from penstock.train.config.sections import TrainConfig
from penstock.train.owner import owned
from penstock.train.part import TrainStep
from penstock.train.preflight import preflight
from penstock.train.run import run
from penstock.train.state import UNNAMED, read_state
from support.covering import every
from support.folders import check_folder, flip, relist
from support.refusals import refuses
from support.tiny import QWEN3, assert_same_tensors, checkpoint, config, metrics


def write(output: Path, *steps: int, run: str = UNNAMED) -> Path:
    """Write folders that pass for checkpoints of ours; the last one's path."""

    def write_state(folder: Path) -> None:
        state = {"step": step, "run": run, "config": {}, "versions": {}}
        (folder / "state.json").write_text(json.dumps(state))

    for step in steps:
        path = checkpoint_folder(output, step)
        write_folder(path, write_state, Ranks())
    return path


def left(output: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (None, None, [1, 2, 3, 4, 5, 6]),
        (1, None, [6]),
        (2, None, [5, 6]),
        (1, 2, [2, 4, 6]),
        (3, 3, [3, 4, 5, 6]),
        (9, None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_rules_of_keep(tmp_path: Path, last: int | None, every: int | None, kept: list[int]) -> None:
    written = write(tmp_path, 1, 2, 3, 4, 5, 6)
    prune(written, UNNAMED, KeepSection(last=last, every=every))
    assert left(tmp_path) == kept
    for step in kept:
        check_folder(checkpoint_folder(tmp_path, step))
    assert not [name for name in names(written.parent) if name.startswith(".")]


@pytest.mark.parametrize(
    ("keys", "best", "saved_every", "kept"),
    [
        ({}, (3,), None, [3, 6]),
        ({}, (3,), 2, [2, 3, 4, 6]),  # those of checkpoint_every stay, as without a best one
        ({"last": 1}, (3, 1), 2, [1, 3, 6]),
        ({"last": 2, "every": 2}, (3,), None, [2, 3, 4, 5, 6]),
    ],
)
def test_the_best_checkpoints_stay_too(
    tmp_path: Path, keys: dict[str, Any], best: tuple[int, ...], saved_every: int | None, kept: list[int]
) -> None:
    written = write(tmp_path, 1, 2, 3, 4, 5, 6)
    prune(written, UNNAMED, KeepSection(**keys), best, saved_every)
    assert left(tmp_path) == kept


def test_the_link_names_the_best_checkpoint_and_replaces_no_folder(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    link = best_link(tmp_path)
    for step in (1, 2, 9):  # there is no step 9
        link_best(tmp_path, step)
    assert link.resolve() == checkpoint_folder(tmp_path, 2)
    assert names(link.parent) == {"best", "step-00000001", "step-00000002"}
    link.unlink()
    link.mkdir()
    link_best(tmp_path, 1)
    assert not link.is_symlink()


def test_only_complete_checkpoints_of_ours_are_removed_and_counted(tmp_path: Path) -> None:
    written = write(tmp_path, 1, 2, 3, 4, 5, 6)
    folder = written.parent
    (folder / "step-00000001" / "notes.txt").write_text("the good one")
    (folder / "step-00000003" / "state.json").write_text("torn")
    (folder / "step-notes").mkdir()
    (folder / "step-00000000").mkdir()
    (folder / "step-00000000" / "thesis.tex").write_text("years of work")
    (folder / "best").symlink_to(folder / "step-00000002")
    (folder / "step-00000009").symlink_to(folder / "step-00000002")
    prune(written, UNNAMED, KeepSection(last=2))
    numbered = {f"step-0000000{step}" for step in (0, 1, 3, 5, 6, 9)}
    assert names(folder) == {*numbered, "step-notes", "best"}
    assert (folder / "step-00000000" / "thesis.tex").read_text() == "years of work"
    assert (folder / "step-00000001" / "notes.txt").read_text() == "the good one"


def test_later_steps_belong_to_another_run(tmp_path: Path) -> None:
    """As after resuming from an older checkpoint; the newest complete one is never removed."""
    write(tmp_path, 1, 2, 8)
    prune(checkpoint_folder(tmp_path, 2), UNNAMED, KeepSection(last=1))
    assert left(tmp_path) == [2, 8]


def test_other_runs_checkpoints_are_neither_removed_nor_resumed_from(tmp_path: Path) -> None:
    """0.5.0: a run knew no checkpoint from another's: it removed an older run's, and, killed before its first
    one, it was resumed from that run's newest."""
    old = write(tmp_path, 1, 2, 8, run="old")
    write(tmp_path, 3, 4, run="new")
    assert newest_checkpoint(tmp_path).path == old  # nobody says which run was the last
    with owned(tmp_path, "new", print):
        assert newest_checkpoint(tmp_path).passed == [
            f"{old}: it is of run old, and the last one here was new"
        ]
        prune(checkpoint_folder(tmp_path, 4), "new", KeepSection(last=1))
    assert left(tmp_path) == [1, 2, 4, 8]
    assert newest_checkpoint(tmp_path).path == checkpoint_folder(tmp_path, 4)


@pytest.mark.fault("two jobs and one output folder", "a fresh run is killed where an older run was")
def test_a_killed_fresh_run_starts_again_where_an_older_run_was(
    tmp_path: Path, two_checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: `--resume` went on with the older run, under its own config, and said nothing of it."""
    shutil.copytree(two_checkpoints / "out", tmp_path / "out")
    older = read_state(checkpoint(tmp_path, 2)).run
    with owned(tmp_path / "out", "killed", print):
        pass
    prepared = preflight(config(tmp_path, steps=2, checkpoint_every=1), NEWEST)
    assert prepared.start.done == 0
    assert f"passed over {checkpoint(tmp_path, 2)}: it is of run {older}, and the last" in prepared.notes[0]
    assert prepared.notes[-1].endswith("holds no checkpoint of its last run: starting from the beginning")
    named = preflight(config(tmp_path, steps=3), str(checkpoint(tmp_path, 2)))
    assert (named.start.done, named.start.state.run) == (2, older)
    run(named)
    assert {row["run"] for row in metrics(tmp_path)} == {older}
    resumed = preflight(config(tmp_path, steps=4), NEWEST)
    assert (resumed.start.done, resumed.start.state.run) == (3, older)


@pytest.mark.parametrize(
    "name", ["step-old", "step-00000009.bak", "step-9", "step-000000009", "step-00000009"]
)
@pytest.mark.fault("foreign names in the output folder", "step-old, step-00000009.bak and the like")
def test_only_a_checkpoint_s_own_name_counts(tmp_path: Path, two_checkpoints: Path, name: str) -> None:
    """0.5.0: whatever began with `step-` was a checkpoint, and the last by its letters was resumed from."""
    shutil.copytree(two_checkpoints / "out", tmp_path / "out")
    foreign = checkpoint(tmp_path, 2).with_name(name)
    shutil.copytree(checkpoint(tmp_path, 1), foreign)
    newest = newest_checkpoint(tmp_path / "out")
    assert newest.path == checkpoint(tmp_path, 2)
    own = name == "step-00000009"
    assert newest.passed == [f"checkpoint {foreign}: its state is of step 1. Rename it"] * own


def test_a_removal_cut_short_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path, 1, 2)

    def cut_short(path: Path) -> None:
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            prune(written, UNNAMED, KeepSection(last=1))
    assert left(tmp_path) == [2]
    assert len(leftovers(written.parent)) == 1
    assert newest_checkpoint(tmp_path) == (
        written,
        [],
        False,
    )  # the other was finished once, and is not wanted
    prune(written, UNNAMED, KeepSection(last=1))
    assert names(written.parent) == {"step-00000002"}


def test_what_killed_runs_left_unfinished_is_removed(tmp_path: Path) -> None:
    written = write(tmp_path, 1, 2)
    unfinished = written.parent / ".step-00000002.writing-0a1b2c3d"
    for folder in (unfinished, written.parent / ".notes.writing-0a1b2c3d"):
        folder.mkdir()
        (folder / "model.safetensors").write_text("torn")
    assert newest_checkpoint(tmp_path)[1] == [f"{unfinished} was never finished"]
    prune(written, UNNAMED, KeepSection(last=1))
    assert names(written.parent) == {"step-00000002", ".notes.writing-0a1b2c3d"}


def test_a_killed_replacement_is_removed_once_the_new_one_is_there(tmp_path: Path) -> None:
    """0.5.0 kept it for ever, and said at every resume that it was never finished."""
    replaced = write(tmp_path, 2).rename(tmp_path / "checkpoints" / ".step-00000002.replaced-0a1b2c3d")
    written = write(tmp_path, 1, 3)
    passed = f"{written.with_name('step-00000002')} was being replaced: {replaced} holds the older one"
    assert newest_checkpoint(tmp_path)[1] == [passed]
    prune(written, UNNAMED, KeepSection(last=2))
    check_folder(replaced)
    write(tmp_path, 2)
    assert newest_checkpoint(tmp_path)[1] == []
    (checkpoint_folder(tmp_path, 2) / MANIFEST).unlink()
    prune(written, UNNAMED, KeepSection(last=2))
    check_folder(replaced)
    shutil.rmtree(checkpoint_folder(tmp_path, 2))
    write(tmp_path, 2)
    prune(written, UNNAMED, KeepSection(last=2))
    assert not replaced.exists()
    assert left(tmp_path) == [2, 3]


def test_a_run_goes_on_from_the_older_folder_of_a_killed_replacement(tmp_path: Path) -> None:
    """0.5.0: it started from an older one, or from the beginning: what had been moved out of the way, whole,
    counted for nothing. The next checkpoint of that step then removed it."""
    replaced = write(tmp_path, 1, 2).rename(tmp_path / "checkpoints" / ".step-00000002.replaced-0a1b2c3d")
    assert newest_checkpoint(tmp_path).path == replaced
    assert newest_checkpoint(tmp_path, before=replaced).path == checkpoint_folder(tmp_path, 1)
    (replaced / "state.json").unlink()
    assert newest_checkpoint(tmp_path).path == checkpoint_folder(tmp_path, 1)
    (tmp_path / "checkpoints" / ".step-old.replaced-0a1b2c3d").mkdir()  # nobody's
    assert newest_checkpoint(tmp_path).path == checkpoint_folder(tmp_path, 1)


def test_a_run_does_not_go_on_from_older_than_what_came_while_it_started(
    tmp_path: Path, two_checkpoints: Path
) -> None:
    """0.5.0: a run that another one overtook between its look and its first write trained steps anew."""
    shutil.copytree(two_checkpoints / "out", tmp_path / "out")
    prepared = preflight(config(tmp_path, steps=4), NEWEST)
    write(tmp_path / "out", 3)
    with refuses(RunError, "step-00000003", "another run wrote"):
        run(prepared)
    assert left(tmp_path / "out") == [1, 2, 3]


def kept(folder: Path, **keep: Any) -> TrainConfig:
    return config(folder, keys={"output.keep": keep}, steps=6, checkpoint_every=1)


def test_a_pruning_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the run in 0.4.0, and said that the checkpoint was not written."""

    def failing(path: Path) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr("penstock.train.checkpoints.remove_folder", failing)
    run(preflight(kept(tmp_path, last=1)))
    assert left(tmp_path / "out") == [1, 2, 3, 4, 5, 6]
    assert "were not removed: read-only file system" in capsys.readouterr().out


DEEP = "[" * 100_000 + "]" * 100_000
UNREADABLE: dict[str, tuple[str, str]] = {  # what is written into which file of the newest checkpoint
    "a manifest nested too deeply": ("manifest.json", DEEP),
    "an endless file": ("manifest.json", '{"files": {"a": {"size": Infinity, "sha256": ""}}}'),
    "a name too long for the disk":
        ("manifest.json", json.dumps({"files": {"a" * 300: {"size": 1, "sha256": "0" * 64}}})),
    "a state nested too deeply": ("state.json", DEEP),
    "an endless step": ("state.json", '{"step": Infinity, "config": {}, "versions": {}}'),
    "a config nested too deeply": ("config.json", DEEP),
    "an optimizer's file nested too deeply": ("optimizer-00001-of-00001.json", DEEP),
}  # fmt: skip


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(preflight(config(folder, steps=2, checkpoint_every=1)))
    return folder


VALUES = [
    ("step", -5), ("step", 1.5), ("step", True), ("skipped", -1), ("skipped", 9), ("data", [1]),
    ("best", [float("nan"), 1, 0]), ("best", [1.0, 7, 0]), ("best", [1.0, 1, -1]), ("best", ["low", 1, 0]),
    ("config", []), ("versions", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), VALUES)
@pytest.mark.fault("a checkpoint's files change", "values of state.json out of range")
def test_a_value_that_no_run_has_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    """0.5.0: a step of -5 was gone on from, and 1.5 was step 1."""
    state: dict[str, Any] = {
        "step": 2,
        "skipped": 0,
        "data": None,
        "best": [5.5, 1, 0],
        "config": {},
        "versions": {},
    }
    path = write(tmp_path, 2)
    (path / "state.json").write_text(json.dumps(state))
    relist(path)
    read_state(path)
    (path / "state.json").write_text(json.dumps({**state, name: value}))
    relist(path)
    with refuses(CheckpointError, f"state.json: {name}=", "no run has such a value"):
        read_state(path)


def test_a_changed_byte_of_the_state_is_noticed_before_it_is_used(tmp_path: Path) -> None:
    """0.5.0: the run was planned with the changed step, and the byte noticed when the weights were there."""
    path = write(tmp_path, 1, 2)
    flip(path / "state.json", 10)
    newest, torn, _ = newest_checkpoint(tmp_path)
    assert newest == checkpoint_folder(tmp_path, 1)
    assert "state.json: its contents differ" in torn[0]


@pytest.mark.parametrize("case", UNREADABLE)
@pytest.mark.fault("a checkpoint's files change", "deep JSON, endless numbers, names too long")
def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    tmp_path: Path, two_checkpoints: Path, case: str
) -> None:
    """0.5.0: `--resume` ended with RecursionError, OverflowError or OSError; only some errors of a file that
    is damaged counted as such."""
    shutil.copytree(two_checkpoints / "out", tmp_path / "out")
    name, content = UNREADABLE[case]
    last = checkpoint(tmp_path, 2)
    (last / name).write_text(content)
    if name != MANIFEST:
        relist(last)
    prepared = preflight(config(tmp_path, steps=3), NEWEST)
    assert prepared.start.done == 1
    assert prepared.notes[0].startswith(f"penstock: warning: passed over checkpoint {last}")


@pytest.mark.parametrize("damage", ["manifest", "another file"])
def test_a_checkpoint_that_may_not_be_replaced_is_set_aside(
    tmp_path: Path, two_checkpoints: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """0.5.0: the run went on from the checkpoint before, and ended with exit code 2 when it wrote that step:
    every restart did so. Only a whole checkpoint may be replaced, and nothing moved this one.
    """
    shutil.copytree(two_checkpoints / "out", tmp_path / "out")
    last = checkpoint(tmp_path, 2)
    file = last / (MANIFEST if damage == "manifest" else "notes.txt")
    file.write_text("mine")
    run(preflight(config(tmp_path, steps=2, checkpoint_every=1), NEWEST))
    check_folder(last)
    (aside,) = last.parent.glob("step-00000002.damaged-*")
    assert (aside / file.name).read_text() == "mine"
    assert f"{aside.name} was step-00000002, which this run will write: " in capsys.readouterr().out


def test_where_no_checkpoint_can_be_written_no_run_begins(tmp_path: Path) -> None:
    """0.5.0: a file in the place of the folder of checkpoints ended the run at the first one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").touch()
    with refuses(ConfigError, rule="checkpoints is no folder"):
        preflight(config(tmp_path))


@pytest.mark.fault("a disk fails", "as a checkpoint is read")
def test_a_disk_that_fails_while_tensors_are_read_costs_one_checkpoint(
    tmp_path: Path, two_checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: `--resume` ended with OSError: only an altered file made the run take the checkpoint before."""
    shutil.copytree(two_checkpoints / "out", tmp_path / "out")
    load = SavedModel.load

    def failing(saved: SavedModel, folder: Path, stages: Any) -> None:
        if folder == checkpoint(tmp_path, 2):
            raise OSError(5, "Input/output error")
        load(saved, folder, stages)

    monkeypatch.setattr(SavedModel, "load", failing)
    with refuses(CheckpointError, "its tensors", "read (Input"):
        run(preflight(config(tmp_path, steps=3), str(checkpoint(tmp_path, 2))))  # which was asked for
    run(preflight(config(tmp_path, steps=3), NEWEST))
    said = capsys.readouterr().out
    passed = f"passed over checkpoint {checkpoint(tmp_path, 2)}: its tensors: it cannot be read (Input/output"
    assert passed in said
    assert f"going on from {checkpoint(tmp_path, 1)}" in said


def test_a_checkpoint_of_another_model_is_not_passed_over(tmp_path: Path, two_checkpoints: Path) -> None:
    """With an older one of the same model the run would go on no better, and the user would not notice."""
    shutil.copytree(two_checkpoints / "out", tmp_path / "out")
    with refuses(UnfitError, "intermediate_size=32", "model has 64"):
        preflight(config(tmp_path, {**QWEN3, "intermediate_size": 64}, steps=3), NEWEST)


def test_a_run_keeps_what_its_config_says_and_resumes_from_it(tmp_path: Path) -> None:
    run(preflight(kept(tmp_path, last=2, every=3)))
    assert left(tmp_path / "out") == [3, 5, 6]
    shutil.rmtree(checkpoint(tmp_path, 6))
    resumed = preflight(kept(tmp_path, last=1), NEWEST)
    assert resumed.start.done == 5
    run(resumed)
    assert left(tmp_path / "out") == [6]


def test_a_failed_write_leaves_all_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning comes after a publication only; the run says at its next checkpoint what went wrong."""
    written = OptimizerState.write

    def write(self: OptimizerState, folder: Path, index: int, count: int) -> Hashed:
        if "step-00000003" in folder.name:
            raise OSError("disk full")
        return written(self, folder, index, count)

    monkeypatch.setattr(OptimizerState, "write", write)
    with refuses(RunError, "step-00000003", "it could not be written in the background"):
        run(preflight(kept(tmp_path, last=1)))
    assert left(tmp_path / "out") == [2]
    assert newest_checkpoint(tmp_path / "out")[1] == []


def test_a_failed_write_is_raised_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: at the next checkpoint, maybe hours later, and never if the run was killed before it."""

    within_step = threading.Event()

    def failing(*_: Any) -> Hashed:
        within_step.wait()
        raise OSError("disk full")

    def ended(*_: Any) -> None:  # within the step after the save, so that the next one finds the failure
        for thread in threading.enumerate():
            if thread.name.startswith("penstock-checkpoint"):
                within_step.set()
                thread.join()

    monkeypatch.setattr(OptimizerState, "write", failing)
    monkeypatch.setattr(loop, "seed_step", ended)
    with refuses(RunError, "step-00000002", "it could not be written in the background") as caught:
        run(preflight(config(tmp_path, steps=8, checkpoint_every=2)))
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2, 3]
    assert not getattr(caught.value, "__notes__", [])


def test_the_owner_of_a_folder_clears_what_killed_runs_left(tmp_path: Path) -> None:
    """0.5.0: each kill in a write left a checkpoint's bytes on the disk, unless `output.keep` was set."""
    old = checkpoint(tmp_path, 2).with_name(".step-00000002.writing-0a1b")
    foreign = old.with_name(".notes.writing-0a1b")
    for folder in (old, foreign):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("torn")
    prepared = preflight(config(tmp_path, steps=1))
    assert old.exists()  # another run may be writing it
    with owned(tmp_path / "out", "first", print), pytest.raises(FolderInUseError):
        run(prepared)
    assert old.exists()
    run(prepared)
    assert not old.exists()
    assert foreign.exists()


@pytest.mark.parametrize(
    ("what", "value"),
    every(3, [*product(["weight", "optimizer"], [float("nan"), float("inf")])]),
)
@pytest.mark.fault("a number is spoilt in memory", "a weight or a moment, as a checkpoint is written")
def test_a_checkpoint_with_values_that_are_not_finite_is_marked_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, what: str
) -> None:
    """0.5.0: it was resumed from, again and again: nothing looked at the values, which make each loss NaN."""
    saved = Checkpoints.save

    def spoiled(part: Checkpoints, step: TrainStep) -> Path:
        if step.number == 2:
            with torch.no_grad():
                weight = next(part.run.pipe.parameters())
                tensor = weight if what == "weight" else part.run.optimizers[0].state[weight]["exp_avg"]
                tensor.view(-1)[3] = value
        return saved(part, step)

    monkeypatch.setattr(Checkpoints, "save", spoiled)
    monkeypatch.setattr(HeldOutEvaluation, "evaluation", lambda *_: {"held_out_loss": 1.0})
    run(preflight(config(tmp_path, steps=2, checkpoint_every=1)))
    resumed = preflight(config(tmp_path, steps=3), NEWEST)
    assert resumed.start.checkpoint == checkpoint(tmp_path, 1)
    assert "holds NaN or infinity" in resumed.notes[0]
    assert str(checkpoint(tmp_path, 2)) in resumed.notes[0]
    named = preflight(config(tmp_path, steps=3), str(checkpoint(tmp_path, 2)))
    assert named.start.checkpoint == checkpoint(tmp_path, 2)
    assert "holds NaN or infinity" in named.notes[0]


def test_the_background_changes_nothing(tmp_path: Path) -> None:
    found = []
    for background in (True, False):
        folder = tmp_path / str(background)
        folder.mkdir()
        run(preflight(config(folder, checkpoint_every=2, checkpoint_background=background)))
        files = (folder / "out" / "checkpoints").glob("*/*.safetensors")
        found.append({(file.parent.name, file.name): file.read_bytes() for file in files})
    assert len(found[0]) > 4
    assert found[0] == found[1]


def test_a_checkpoint_of_0_3_0_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Its optimizer files have no index, and no random state is there."""
    made = config(tmp_path, checkpoint_every=2)
    run(preflight(made))
    half, last, before = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4), tmp_path / "before"
    shutil.copytree(last, before)
    for file in (*half.glob("optimizer-*.json"), *half.glob("random-*")):
        file.unlink()
    (half / MANIFEST).unlink()
    old = half.rename(half.with_name("old"))

    def copy(folder: Path) -> None:
        shutil.copytree(old, folder, dirs_exist_ok=True)

    write_folder(half, copy, Ranks())
    run(preflight(made, str(half)))
    assert_same_tensors(before, last)
