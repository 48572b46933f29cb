"""train.profile writes a trace a process: every op, the optimizer, clip and data, of the steps asked for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.schedule import build
from penstock.train.config.sections import TrainConfig
from penstock.train.records.profile import StepProfiler, profile_note
from penstock.train.run import preflight, run
from runtime.test_profiled import OP
from support.jobs_train import trained
from support.pool import Pool
from support.tiny import checkpoint, config


def names_of(trace: Path) -> Counter[str]:
    """How often each range that someone named is in a trace; it is one that Chrome and Perfetto open."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in complete)
    return Counter(event["name"] for event in complete if event["cat"] == "user_annotation")


def ops_in(names: Counter[str]) -> Counter[str]:
    return Counter({found[1]: count for name, count in names.items() if (found := OP.fullmatch(name))})


def ops_of(rank: int | None, steps: int) -> Counter[str]:
    """Those of a rank, or of all, of the tiny run's schedule."""
    programs = build("zb_h1", ranks=2, microbatches=2).programs
    chosen = programs if rank is None else [programs[rank]]
    return Counter({str(op): steps for program in chosen for op in program})


def made(folder: Path, **train: Any) -> TrainConfig:
    keys = {"pipeline.schedule": "zb_h1"}
    return config(folder, keys=keys, evaluate_every=4, profile={"steps": [2, 3]}, **train)


def test_ranks_of_one_process_share_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(preflight(made(tmp_path)))
    folder = tmp_path / "out" / "profile"
    assert [path.name for path in folder.iterdir()] == ["rank-0.json.gz"]
    names = names_of(folder / "rank-0.json.gz")
    assert ops_in(names) == ops_of(None, steps=2)
    assert [names[name] for name in ("step 1", "step 2", "step 3", "step 4")] == [0, 1, 1, 0]
    assert names["data"] == names["clip"] == names["Optimizer.step#AdamW.step"] == 2
    assert f"profile of steps 2 to 3: {folder}" in capsys.readouterr().out


def test_each_process_has_a_trace_of_its_rank(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(2, trained, made(tmp_path).model_dump(mode="json"))
    assert [each["error"] for each in results] == ["", ""]
    for rank in range(2):
        names = names_of(tmp_path / "out" / "profile" / f"rank-{rank}.json.gz")
        assert ops_in(names) == ops_of(rank, steps=2)
        assert names["data"] == names["clip"] == names["Optimizer.step#AdamW.step"] == 2


def test_a_run_that_goes_on_within_the_steps_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = made(tmp_path).train
    assert [profile_note(section, done) for done in (0, 1)] == ["", ""]
    assert profile_note(section, 2).endswith("goes on after step 2, so the trace begins with step 3")
    assert profile_note(section, 3).endswith("goes on after step 3, so nothing is profiled")
    run(preflight(made(tmp_path, checkpoint_every=2)))
    (tmp_path / "out" / "profile" / "rank-0.json.gz").unlink()
    capsys.readouterr()
    run(preflight(made(tmp_path, checkpoint_every=2), str(checkpoint(tmp_path, 2))))
    assert profile_note(section, 2) in capsys.readouterr().out
    names = names_of(tmp_path / "out" / "profile" / "rank-0.json.gz")
    assert (names["step 2"], names["step 3"]) == (0, 1)
    assert ops_in(names) == ops_of(None, steps=1)


def test_a_run_that_fails_in_a_profiled_step_leaves_no_profiler_behind(tmp_path: Path) -> None:
    section, said = made(tmp_path).train, list[str]()
    for error in (ValueError, KeyError):  # torch has one profiler at a time
        with (
            pytest.raises(error),
            StepProfiler(section, tmp_path, device=torch.device("cpu"), say=said.append) as profiler,
            profiler.step(2),
        ):
            raise error
    assert said == []
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    with StepProfiler(made(tmp_path).train, tmp_path, torch.device("cpu"), print) as profiler:
        with profiler.step(2):
            pass
        with pytest.warns(RuntimeWarning, match="the profile was not written"), profiler.step(3):
            pass
