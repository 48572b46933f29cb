"""Runs of four processes on a mesh: the loss curve of one process, and steps that all of them skip."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock import Pipeline
from penstock.errors import UnfitError
from penstock.train import loop
from penstock.train.checkpoints import NEWEST, check_fits
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.preflight import preflight
from penstock.train.run import run
from support import jobs_train
from support.pool import Pool
from support.refusals import refuses
from support.tiny import GPT2_WITH_DROPOUT, QWEN3, checkpoint, metrics, tree, write_documents

STEPS = 4
SMALL = {key: value for key, value in QWEN3.items() if key not in ("model_type", "head_dim")}
Curve = list[tuple[Any, ...]]


def sections(folder: Path, **parallel: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    made = tree(folder)
    # of two pipelines one has a row more than the other
    made["train"] |= {"steps": STEPS, "batch_size": 7, "evaluate_every": STEPS}
    made["parallel"] = parallel
    return made


def errors(pool: Pool, *arguments: Any) -> set[str]:
    """The errors of a run of four processes; "" for none."""
    return {each["error"] for each in pool.run(4, jobs_train.trained, *arguments)}


def curve(folder: Path) -> Curve:
    """Of each row: step, loss or held-out loss, the norm, the rate, tokens and padding."""
    return [
        (row["step"], row.get("loss", row.get("held_out_loss")), row.get("grad_norm", 0.0),
         row.get("learning_rate", 0.0), row["tokens"], row.get("padding", 0.0))
        for row in metrics(folder) if "checkpoint" not in row
    ]  # fmt: skip


def alone(folder: Path, made: dict[str, Any], ranks: int = 2, resume: str | None = None) -> Curve:
    """The curve of the same run in one process, without a mesh."""
    output = {"folder": str(folder / "alone" / "out")}
    made = {**made, "parallel": {}, "output": output, "pipeline": {**made["pipeline"], "ranks": ranks}}
    run(preflight(TrainConfig.model_validate(made), resume))
    return curve(folder / "alone")


def assert_close(found: Curve, expected: Curve) -> None:
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5), other[0]


MESHES = [
    pytest.param({"dp_shard": 2}, {"ranks": -1}, 7, id="pp2 x dp_shard2"),
    pytest.param(
        {"dp_replicate": 2}, {"ranks": 2, "balance": "measured", "head_weight": None}, 7, id="measured",
        marks=pytest.mark.sweep,
    ),
    pytest.param(
        {"dp_replicate": 2, "dp_shard": -1, "reshard_after_forward": True}, {"ranks": 1}, 8,
        id="dp_replicate2 x dp_shard2", marks=pytest.mark.sweep,
    ),
    pytest.param({"tp": 2}, {"ranks": 2}, 7, id="pp2 x tp2", marks=pytest.mark.sweep),
    pytest.param({"cp": 2}, {"ranks": 2}, 7, id="pp2 x cp2", marks=pytest.mark.sweep),
    pytest.param({"dp_shard": 2}, {"ranks": 2, "schedule": "zb_v"}, 7, id="zb_v", marks=pytest.mark.sweep),
]  # fmt: skip


@pytest.mark.parametrize(("parallel", "pipeline", "rows"), MESHES)
def test_a_mesh_has_the_curve_of_one_process(
    pool: Pool, tmp_path: Path, parallel: dict[str, Any], pipeline: dict[str, Any], rows: int
) -> None:
    made = sections(tmp_path, **parallel)
    layers = 4 if "schedule" in pipeline else 2  # zb_v has two stages on each rank
    keys = {"num_hidden_layers": layers, "num_key_value_heads": 2}
    made["model"]["config"] = {**made["model"]["config"], **keys}
    made["train"]["batch_size"] = rows
    made["pipeline"] |= pipeline
    made["train"]["check"] = "always"
    results = pool.run(4, jobs_train.trained, made)
    assert [each["error"] for each in results] == [""] * 4
    assert "checked in " in results[0]["said"]
    assert [bool(each["said"]) for each in results] == [True, False, False, False]
    assert_close(curve(tmp_path), alone(tmp_path, made))


@pytest.mark.sweep
def test_all_ranks_take_the_checkpoint_before_where_one_cannot_read(pool: Pool, tmp_path: Path) -> None:
    """0.5.0: the run ended, with OSError on the rank whose disk failed; no rank knew of another's error."""
    made = sections(tmp_path, dp_replicate=2)
    made["train"] |= {"steps": 2, "checkpoint_every": 1, "batch_size": 8}
    results = pool.run(4, jobs_train.resumed_with_a_failing_disk, made, 3)
    assert [error for _, error in results] == [""] * 4
    said = results[0][0]
    passed = f"passed over checkpoint {checkpoint(tmp_path, 2)}: its tensors, on process 3: it cannot be read"
    assert passed in said
    assert f"going on from {checkpoint(tmp_path, 1)}" in said


MUON = {
    "name": "muon", "learning_rate": 0.02, "weight_decay": 0.1, "warmup_steps": 1,
    "adamw": {"learning_rate": 0.01},
}  # fmt: skip


def with_muon(folder: Path, **parallel: Any) -> dict[str, Any]:
    """In double precision: Muon rounds to bfloat16 inside, and tells small differences of sums apart."""
    made = sections(folder, **parallel)
    made["model"] = {"config": made["model"]["config"], "dtype": "float64"}
    made["optimizer"] = MUON
    return made


def test_muon_trains_as_one_process_without_axes_too(tmp_path: Path) -> None:
    """Two ranks in this process, and one."""

    def trained(folder: str, ranks: int = 2, schedule: str = "1f1b", **optimizer: Any) -> Curve:
        made = with_muon(tmp_path / folder)
        made["optimizer"] = optimizer or MUON
        made["pipeline"]["schedule"] = schedule
        return alone(tmp_path / folder, made, ranks)

    expected = trained("one", 1)
    assert_close(trained("1f1b"), expected)
    assert_close(trained("dualpipe", schedule="dualpipe"), expected)
    adamw = [row[1] for row in trained("adamw", name="adamw")]
    assert [row[1] for row in expected][2:] != pytest.approx(adamw[2:], rel=1e-3)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_shard": 2}, id="dp_shard2", marks=pytest.mark.sweep),
        pytest.param({"tp": 2}, id="tp2", marks=pytest.mark.sweep),
        pytest.param({"cp": 2, "context": "ring"}, id="cp2", marks=pytest.mark.sweep),
    ],
)
def test_muon_goes_on_bit_for_bit_and_on_another_mesh(
    pool: Pool, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = with_muon(tmp_path, **parallel)
    made["model"]["config"] = {**made["model"]["config"], "num_key_value_heads": 2}
    made["train"]["checkpoint_every"] = 2
    assert errors(pool, made) == {""}
    found = curve(tmp_path)
    assert_close(found, alone(tmp_path, made))
    half = str(checkpoint(tmp_path, 2))

    again = {**made, "output": {"folder": str(tmp_path / "again" / "out")}}
    assert errors(pool, again, (), 0, half) == {""}
    rest = [row for row in found if row[0] > 2]
    assert curve(tmp_path / "again") == rest
    assert_close(alone(tmp_path / "other", made, resume=half), rest)


def test_state_of_another_optimizer_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    made = with_muon(tmp_path)
    run(preflight(TrainConfig.model_validate(made)))
    made["train"]["steps"] = 6
    made["optimizer"] = {}
    with refuses(UnfitError, "proj.weight was trained by Muon", "AdamW trains it"):
        preflight(TrainConfig.model_validate(made), NEWEST)


def test_state_that_0_3_0_wrote_is_adamw_s_and_refused_as_early(tmp_path: Path) -> None:
    """Its files do not tell the optimizer, so that it passed for Muon's."""
    made = with_muon(tmp_path)
    muon = preflight(TrainConfig.model_validate(made))
    prepared = preflight(TrainConfig.model_validate({**made, "optimizer": {}}))
    run(prepared)
    path = checkpoint(tmp_path, STEPS)
    for file in path.glob("optimizer-*.json"):
        file.unlink()
    check_fits(path, prepared.plan.source.model, (), prepared.kinds)
    with refuses(UnfitError, "proj.weight was trained by AdamW", "Muon trains it"):
        check_fits(path, prepared.plan.source.model, (), muon.kinds)


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (None, False),
        (GPT2_WITH_DROPOUT, True),
        ({"model_type": "mixtral", **SMALL, "num_local_experts": 2, "router_jitter_noise": 0.1}, False),
    ],
    ids=["qwen3", "gpt2 with dropout", "mixtral with noise"],
)
def test_ranks_share_a_seed_only_where_draws_depend_on_layer_and_microbatch(
    tmp_path: Path, model: dict[str, Any] | None, draws: bool
) -> None:
    """Up to 0.5.0 each rank had its own seed; with one for all, a router's noise would be the same on all."""
    prepared = preflight(TrainConfig.model_validate(tree(tmp_path, model)))
    pipe = prepared.auto.build(prepared.model)
    assert pipe.draws == draws
    ranks = [(process, part, step) for step in (1, 2) for process in range(2) for part in range(2)]
    found = []
    with torch.random.fork_rng(devices=[]):
        for process, part, step in ranks:
            rank = SimpleNamespace(
                draws=pipe.draws,
                device=pipe.device,
                processes=SimpleNamespace(index=process),
                batch_part=(part, 2),
            )
            loop.seed_step(cast(Pipeline, rank), 3, step)
            found.append(float(torch.rand(())))
            loop.seed_step(cast(Pipeline, rank), 3, step)
            assert float(torch.rand(())) == found[-1]
    assert len({*found}) == (2 if draws else len(ranks))


@pytest.mark.parametrize("count", [1, 3])
def test_few_held_out_rows_have_on_a_mesh_the_loss_of_one_process(
    pool: Pool, tmp_path: Path, count: int
) -> None:
    """A batch has 7 rows, and of two pipelines one may have no row of its own."""
    made = sections(tmp_path, dp_replicate=2)
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(json.dumps({"text": "abcdefgh"[: 3 + number]}) for number in range(count)))
    made["train"] |= {"steps": 1}
    documents = write_documents(tmp_path)
    made["data"] |= {"path": documents["data.path"], "kind": "jsonl", "packing": "none"}
    made["data"] |= {"validation": {"path": str(held)}}
    assert errors(pool, made) == {""}
    expected = alone(tmp_path, made)
    assert_close([row[:-1] for row in curve(tmp_path)], [row[:-1] for row in expected])  # padding is another
    tokens = {1: 2, 3: 3 + 4 + 4}[count]  # a separator follows each document but the last
    assert [row["tokens"] for row in metrics(tmp_path) if "held_out_loss" in row] == [tokens] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_ragged_rows_are_dealt_out_to_the_pipelines(pool: Pool, tmp_path: Path, packing: str) -> None:
    made = sections(tmp_path, dp_shard=2)
    path = write_documents(tmp_path, 120)["data.path"]
    made["data"] |= {"path": path, "kind": "jsonl", "packing": packing}
    assert errors(pool, made) == {""}
    expected = alone(tmp_path, made)
    assert_close([row[:-1] for row in curve(tmp_path)], [row[:-1] for row in expected])  # padding is another


@pytest.mark.sweep
def test_a_step_that_one_part_spoils_is_left_out_by_all(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sections(tmp_path, dp_shard=2)
    made["train"]["nonfinite"] = "skip"
    made["optimizer"] |= {"warmup_steps": 3}
    results = pool.run(4, jobs_train.trained, made, [2], 1)
    assert [each["error"] for each in results] == [""] * 4
    assert [each["updates"] for each in results] == [STEPS - 1] * 4
    assert "step 2/4  skipped: loss=nan, grad_norm=nan" in results[0]["said"]
    found = curve(tmp_path)[1:-1]  # without the evaluations at both ends
    assert found[1][1] is None

    original = Data.batch

    def never_two(data: Data, step: int) -> LoadedBatch:
        return original(data, step if step < 2 else step + 1)

    monkeypatch.setattr(Data, "batch", never_two)
    expected = alone(tmp_path, made)[1:-1]
    assert_close([row[1:] for row in (found[0], *found[2:])], [row[1:] for row in expected[: STEPS - 1]])


def test_a_step_that_one_part_spoils_stops_all(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(4, jobs_train.trained, sections(tmp_path, dp_replicate=2), [2], 0)
    ranks = " and ".join(
        rf"rank {rank} on {socket.gethostname()} \(model\.\S+ and \d+ more\)" for rank in range(2)
    )
    (error,) = {each["error"] for each in results}
    assert re.fullmatch(
        r"RunError: step 2: loss=nan, grad_norm=nan: these are finite numbers while a model trains, and so "
        rf"are gradients: not those of {ranks}\. Lower "
        r"optimizer\.learning_rate, lengthen optimizer\.warmup_steps, or use train\.precision=float32\. "
        r"Single steps may be skipped with train\.nonfinite=skip",
        error,
    )
    assert [each["updates"] for each in results] == [1] * 4


MIXTURE = {
    "model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        pytest.param({"tp": 2}, "self_attn.q_proj.weight", id="tp2", marks=pytest.mark.sweep),
        pytest.param({"cp": 2, "context": "ring"}, "mlp.up_proj.weight", id="cp2", marks=pytest.mark.sweep),
        pytest.param({"dp_shard": 2, "ep": 2}, "mlp.experts.down_proj", id="ep2"),
    ],
)
def test_the_check_finds_a_wrong_gradient_on_any_mesh(
    pool: Pool, tmp_path: Path, parallel: dict[str, Any], name: str
) -> None:
    """One rank's shard of it is a hundredth too large."""
    made = sections(tmp_path, **parallel)
    kind = MIXTURE if "ep" in parallel else {"num_key_value_heads": 2}
    plain = {key: value for key, value in made["model"]["config"].items() if key != "head_dim"}
    made["model"]["config"] = {**plain, **kind}
    made["train"]["check"] = "always"
    found = pool.run(4, jobs_train.checked_on_a_mesh, made, 2, name)
    assert [passed.startswith("checked in ") for passed, _ in found] == [True] * 4
    (wrong,) = {wrong for _, wrong in found}
    assert wrong.startswith("gradient model.layers.1."), wrong
    assert f"{name}: it differs by " in wrong
    assert "; gradient" not in wrong


def test_a_mesh_that_computes_something_else_is_found_by_all_before_the_first_step(
    pool: Pool, tmp_path: Path
) -> None:
    made = sections(tmp_path, dp_shard=2)
    made["train"]["check"] = "auto"
    results = pool.run(4, jobs_train.trained, made, [1], 1)  # the check's own step is the first
    assert all(each["error"].startswith("DifferenceError: loss: nan split, ") for each in results)
    assert [each["updates"] for each in results] == [0] * 4
