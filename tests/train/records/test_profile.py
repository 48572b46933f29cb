"""train.profile writes a trace a process: every op, the optimizer, clip and data, of the steps asked for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.schedule import build
from penstock.train.config.sections import TrainConfig
from penstock.train.part import Run
from penstock.train.preflight import preflight
from penstock.train.records.profile import StepProfiler
from penstock.train.run import run
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


def unprofiled(folder: Path, **train: Any) -> TrainConfig:
    return config(folder, keys={"pipeline.schedule": "zb_h1"}, evaluate_every=4, **train)


def made(folder: Path, **train: Any) -> TrainConfig:
    return unprofiled(folder, profile={"steps": [2, 3]}, **train)


def profiler_of(config: TrainConfig, done: int = 0, say: Callable[[str], None] = print) -> StepProfiler:
    assert config.train.profile is not None
    run = SimpleNamespace(
        config=config, start=SimpleNamespace(done=done), display=SimpleNamespace(say=say),
        pipe=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    return StepProfiler(cast(Run, run), config.train.profile)


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
    config = made(tmp_path)
    assert [profiler_of(config, done).note for done in (0, 1)] == ["", ""]
    assert profiler_of(config, 2).note.endswith("goes on after step 2, so the trace begins with step 3")
    assert profiler_of(config, 3).note.endswith("goes on after step 3, so nothing is profiled")
    run(preflight(unprofiled(tmp_path, steps=2)))
    run(preflight(made(tmp_path), str(checkpoint(tmp_path, 2))))
    assert profiler_of(config, 2).note in capsys.readouterr().out
    names = names_of(tmp_path / "out" / "profile" / "rank-0.json.gz")
    assert (names["step 2"], names["step 3"]) == (0, 1)
    assert ops_in(names) == ops_of(None, steps=1)


def test_a_run_that_fails_in_a_profiled_step_leaves_no_profiler_behind(tmp_path: Path) -> None:
    said = list[str]()
    for error in (ValueError, KeyError):  # torch has one profiler at a time
        profiler = profiler_of(made(tmp_path), say=said.append)
        with pytest.raises(error), profiler.running(), profiler.around(2):
            raise error
    assert said == []
    assert not (tmp_path / "out" / "profile").exists()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile").write_text("in the way")
    profiler = profiler_of(made(tmp_path))
    with profiler.running():
        with profiler.around(2):
            pass
        with pytest.warns(RuntimeWarning, match="the profile was not written"), profiler.around(3):
            pass
