"""A plan's config is one that `penstock train` takes, and its dry run says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.batch import head_logits
from penstock.cli.dry_run import memory
from penstock.models.source import sdpa_for_flash
from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import estimate
from penstock.planner.run_config import run_config
from penstock.planner.workload import Workload
from penstock.runtime.device.offload import Offload
from penstock.train.config.load import load_config
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run as train
from support.mesh import later
from support.planning import LENGTH, LONG, assert_near, cluster, large_workload, small_config, workload
from support.tiny import metrics

RUN = Candidate(2, rows=2, length=LENGTH, microbatches=4)


@pytest.mark.parametrize(
    "run",
    [
        replace(RUN, axes=Axes(tp=2), sequence_parallel=True, recomputed="full"),
        replace(RUN, schedule="1f1b", options=(("stages_per_rank", 2),), recomputed="full", in_flight=(1, 1)),
        *later(
            (RUN,),
            (replace(RUN, axes=Axes(dp_shard=2), schedule="zb_v"),),
            (replace(RUN, ranks=1, axes=Axes(dp_shard=2, dp_replicate=2), recomputed="full", reshard=True),),
            mark=pytest.mark.sweep,
        ),
    ],
)
def test_a_dry_run_agrees_with_the_plan(run: Candidate, tmp_path: Path) -> None:
    agrees(workload(), run, tmp_path)


LARGE = Candidate(4, rows=2, length=LONG, microbatches=8)


@pytest.mark.parametrize(
    "run",
    [
        replace(LARGE, offload_ahead=1, recomputed="full", in_flight=(2, 1, 0, 0)),
        replace(LARGE, rows=4),  # of fewer rows, logits are small
        *later(
            (replace(LARGE, offload_ahead=1),),
            (replace(LARGE, rows=4, chunked_loss=False),),
            mark=pytest.mark.sweep,
        ),
    ],
)
def test_a_dry_run_agrees_with_what_is_offloaded_and_chunked(run: Candidate, tmp_path: Path) -> None:
    agrees(large_workload(vocab_size=5000), run, tmp_path)


def agrees(model: Workload, run: Candidate, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    predicted = estimate(model, run, cluster(memory="80 GB"))
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(run_config(predicted.candidate, {"path": str(tmp_path)})))
    config = load_config(path)
    assert config.train.batch_size == run.batch
    with sdpa_for_flash():
        planned = dry_run(config)
        needs = memory(planned)
    assert tuple(len(stage.layers) for stage in planned.plan.stages) == predicted.candidate.split
    assert planned.plan.schedule.programs == run.built().programs
    for mine, theirs in zip(predicted.memory, needs, strict=True):
        assert_near(mine, theirs, run.rows, run.length * model.config.hidden_size)


def test_plans_with_offloading_train_as_plans_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit."""
    leaving, left = Offload.leaving, list[int]()

    def counted(*arguments: Any) -> Any:
        storages = leaving(*arguments)
        left.append(len(storages))
        return storages

    monkeypatch.setattr(Offload, "leaving", counted)
    small_config(num_hidden_layers=4).save_pretrained(tmp_path / "model")
    kept = replace(LARGE, rows=1, length=LENGTH, precision="float32", split=(1, 1, 1, 1))
    runs = kept, replace(kept, offload_ahead=1)
    on_device, offloaded = (trained(run, tmp_path / "model", tmp_path / run.recomputation) for run in runs)
    assert len(on_device) == 2
    assert sum(left) > 0
    assert offloaded == on_device


def test_a_plan_with_chunks_trains_as_one_with_whole_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_logits, "HELD_BYTES", 2**20)
    small_config(num_hidden_layers=4).save_pretrained(tmp_path / "model")
    chunks = Candidate(2, rows=5, length=LENGTH, microbatches=1, precision="float32", split=(2, 2))
    runs = chunks, replace(chunks, chunked_loss=False)
    in_chunks, whole = (trained(run, tmp_path / "model", tmp_path / run.recomputation) for run in runs)
    assert len(whole) == 2
    assert in_chunks == pytest.approx(whole, rel=1e-6)


def trained(run: Candidate, model: Path, folder: Path) -> list[float]:
    """The losses of two steps of the plan."""
    folder.mkdir(exist_ok=True)
    tree = run_config(run, {"path": str(model), "weights": "random"})
    tree["output"] = {"folder": str(folder / "out")}
    tree["train"] |= {"steps": 2, "device": "cpu", "log_every": 1, "check": "off"}
    if run.offload_ahead:
        tree["train"]["activation_offloading"]["min_bytes"] = (
            2**14
        )  # hidden states of `small_config` take 2**15
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump(tree))
    train(preflight(load_config(file)))
    return [row["loss"] for row in metrics(folder) if "loss" in row]
