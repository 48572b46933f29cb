"""How many processes a run takes, every mesh that does not fit, and how keys reach the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh

from penstock import AutoPipeline, Axes, Sharded
from penstock.batch.padding import Padding
from penstock.errors import ConfigError, PenstockError, WorldSizeError
from penstock.models.activation_checkpointing import Checkpointing, checkpointing
from penstock.models.activation_offloading import Offloading
from penstock.pipeline import Compile
from penstock.train.config.sections import TrainConfig, check_rows
from penstock.train.preflight import preflight
from penstock.train.run import run
from penstock.train.settings import axes_of, make_auto, ranks_of
from support import tiny
from support.predicting import tiny_config
from support.refusals import refuses

_OF_DEEPSEEK = (
    "model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "n_group",
    "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "first_k_dense_replace", "num_nextn_predict_layers",
)  # fmt: skip


def config(folder: Path, rows: int = 8, ranks: int = 2, **parallel: Any) -> TrainConfig:
    return tiny.config(folder, keys={"parallel": parallel, "pipeline.ranks": ranks}, batch_size=rows)


def under_torchrun(monkeypatch: pytest.MonkeyPatch, world: int, rank: int = 0) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", str(rank))


def refused(made: TrainConfig) -> str:
    with pytest.raises(PenstockError) as caught:
        preflight(made)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_axes_of_a_run_that_starts_its_ranks(tmp_path: Path) -> None:
    assert axes_of(config(tmp_path)) == Axes()
    assert axes_of(config(tmp_path, dp_shard=2, cp=2, ep=-1, tp=3)).ranks_per_stage == 12
    assert axes_of(config(tmp_path, dp_shard=2, cp=2, ep=-1)) == Axes(dp_shard=2, cp=2, ep=4)


def test_an_axis_takes_all_that_are_left_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, 8, rank=5)
    made = config(tmp_path, dp_shard=-1)
    assert axes_of(made) == Axes(dp_shard=4)
    assert make_auto(made).trace_folder == tmp_path / "out" / "stalled" / "pipeline-1"
    prepared = preflight(made)
    assert prepared.axes == Axes(dp_shard=4)
    assert prepared.data.parts == 4


def test_the_pipeline_takes_all_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(tmp_path, ranks=-1, dp_shard=2, ep=1)
    assert refused(made).startswith("pipeline.ranks=-1: it takes the processes that are left")
    under_torchrun(monkeypatch, 4)
    assert ranks_of(made) == 2
    assert preflight(made).plan.schedule.ranks == 2
    said = refused(config(tmp_path, ranks=-1, dp_shard=-1))
    assert "the pipeline's ranks and dp_shard of -1: one axis at most takes all remaining" in said
    under_torchrun(monkeypatch, 5)
    assert "5 processes for pp=-1 x dp_shard=2: each of the pipeline's ranks takes 2 of them" in refused(made)


def test_the_library_takes_all_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = AutoPipeline(ranks=-1, microbatches=8, axes=Axes(tp=2))
    with refuses(ConfigError, "ranks=-1 in one process", "remaining"):
        made.chosen_schedule()
    under_torchrun(monkeypatch, 8)
    assert made.chosen_schedule().ranks == 4
    assert replace(made, axes=None).chosen_schedule().ranks == 8
    with refuses(ConfigError, "ranks=8", "given has 4"):
        replace(made, axes=None, microbatches=None, schedule=made.chosen_schedule()).chosen_schedule()


def test_the_library_takes_the_axis_of_a_mesh(one_process: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "stages"))
    made = AutoPipeline(ranks=-1, microbatches=2, mesh=mesh, pipeline_axis="stages")
    assert made.chosen_schedule().ranks == 1


def test_what_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(config(tmp_path, dp_shard=-1))
    assert said.startswith("parallel.dp_shard=-1: it takes the processes that are left")
    assert "Give a number, or start the processes yourself: torchrun" in said
    assert "Set ep to 1 or 2" in refused(config(tmp_path, dp_shard=2, ep=3))
    under_torchrun(monkeypatch, 6)
    said = refused(config(tmp_path, dp_shard=2))
    assert "6 processes for pp=2 x dp_shard=2" in said
    assert "Start 4 processes" in said
    assert refused(config(tmp_path, rows=4, dp_shard=-1)) == (
        "train.batch_size=4: its rows cannot be split into pipeline.microbatches=2 for each of 3 parts "
        "(parallel.dp_replicate x parallel.dp_shard). Give 6 rows or more, or "
        "pipeline.microbatches=1 or fewer"
    )


def test_each_pipeline_needs_a_row_for_each_microbatch() -> None:
    check_rows(8, 4, 2)
    with refuses(ConfigError, "train.batch_size=3", remedy="Give each microbatch"):
        check_rows(3, 4, 1)
    with refuses(ConfigError, "train.batch_size=1", "2 parts", "Give 8 rows"):
        check_rows(1, 4, 2)


def test_a_mesh_in_one_process_is_refused(tmp_path: Path) -> None:
    with refuses(WorldSizeError, "the axes dp_shard=2 in one process", "only the pipeline"):
        run(preflight(config(tmp_path, dp_shard=2)))


def test_parallel_keys_reach_the_library(tmp_path: Path) -> None:
    auto = make_auto(config(
        tmp_path, dp_shard=2, cp=2, tp=2, param_dtype="bfloat16", reduce_dtype="float32",
        reshard_after_forward=True, cpu_offload=True, context="ring", sequence_parallel=True,
    ))  # fmt: skip
    assert auto.axes == Axes(dp_shard=2, cp=2, tp=2)
    assert auto.sharded == Sharded(torch.bfloat16, torch.float32, True, True)
    assert (auto.context, auto.sequence_parallel) == ("ring", True)
    assert auto.trace_folder == tmp_path / "out" / "stalled" / "pipeline-0"
    plain = make_auto(config(tmp_path))
    assert (plain.axes, plain.sharded) == (None, Sharded())
    assert plain.trace_folder == tmp_path / "out" / "stalled"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"layout": "Et|tL"}, {"layout": "Et|tL"}),
        ({"layers_per_stage": 4}, {"layers_per_stage": 4}),
        ({"layers_per_stage": [4, 3]}, {"layers_per_stage": (4, 3)}),
        (
            {"first_stage_layers": 0, "last_stage_layers": 3},
            {"first_stage_layers": 0, "last_stage_layers": 3},
        ),
        ({"layout": [["embedding"], ["loss"]]}, {"layout": (("embedding",), ("loss",))}),
        ({"modules_per_stage": [["a", "b"], ["c"]]}, {"modules_per_stage": (("a", "b"), ("c",))}),
    ],
)
def test_keys_of_the_layers_reach_the_library(
    tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = tiny.config(tmp_path, keys={f"pipeline.{name}": value for name, value in keys.items()})
    assert {name: getattr(make_auto(made), name) for name in expected} == expected
    assert TrainConfig.model_validate(yaml.safe_load(made.to_yaml())) == made


def test_pipeline_keys_reach_the_library(tmp_path: Path) -> None:
    pipeline = {
        "ranks": 2, "microbatches": 2, "shapes": "padded", "padding": {"multiple": 24}, "exchange": "batched",
        "transport": "gloo", "wire_dtype": "bfloat16",
    }  # fmt: skip
    auto = make_auto(tiny.config(tmp_path, keys={"pipeline": pipeline}))
    assert auto.shapes == Padding(multiple=24)
    assert (auto.transport, auto.exchange, auto.wire_dtype) == ("gloo", "batched", torch.bfloat16)
    with refuses(ConfigError, "pipeline.transport=local", "holds all ranks"):
        make_auto(tiny.config(tmp_path, keys={"pipeline.transport": "local"}))
    plain = make_auto(tiny.config(tmp_path))
    found = (plain.shapes, plain.transport, plain.exchange, plain.wire_dtype)
    assert found == ("inferred", None, "auto", None)


def test_who_reads_and_which_commit_reach_the_library(tmp_path: Path) -> None:
    keys = {"model.config": None, "model.path": "makers/model", "model.commit": "c0ffee"}
    auto = make_auto(tiny.config(tmp_path, keys={**keys, "model.load": "broadcast"}))
    assert (auto.load, auto.revision) == ("broadcast", "c0ffee")
    # of random weights the config is read by its own
    random = make_auto(tiny.config(tmp_path, keys={**keys, "model.weights": "random"}))
    assert (random.load, random.revision) == ("each", None)


def test_prediction_layers_reach_the_plan(tmp_path: Path) -> None:
    model = {key: value for key, value in tiny_config().to_dict().items() if value is not None}
    keys = {
        "model": {"config": {name: model[name] for name in _OF_DEEPSEEK}, "mtp_loss_scaling_factor": 0.2},
        "pipeline": {"ranks": 3, "microbatches": 2, "layout": "Etttt|m|L"},
    }
    planned = preflight(tiny.config(tmp_path, keys=keys)).plan
    assert planned.source.model.mtp_loss_scaling_factor == 0.2
    assert [len(stage.layers) for stage in planned.stages] == [4, 1, 0]


def test_activation_offloading_reaches_the_library(tmp_path: Path) -> None:
    def reaches(how: Any) -> object:
        return make_auto(tiny.config(tmp_path, activation_offloading=how)).activation_offloading

    assert reaches(True) == Offloading()
    assert reaches(False) is None
    chosen = {"modules": ["mlp"], "layers": 2, "ahead": 3, "min_bytes": 0}
    assert reaches(chosen) == Offloading(("mlp",), 2, 3, 0)
    assert reaches({}) == Offloading()


def test_activation_checkpointing_reaches_the_library(tmp_path: Path) -> None:
    def reaches(how: Any, **keys: Any) -> object:
        made = tiny.config(tmp_path, keys=keys, batch_size=5, activation_checkpointing=how)
        return make_auto(made).activation_checkpointing

    limit = {"every": 2, "save": ["matmul"], "memory_limit": 2.0**30}
    padded = {"pipeline.shapes": "padded", "pipeline.padding": {"multiple": 24}}
    # the larger of two microbatches has three rows of 16, which the pipeline pads
    expected = Checkpointing(every=2, save=("matmul",), memory_limit=2.0**30, shape=(3, 24))
    assert reaches(limit, **padded) == expected
    assert reaches("selective") == checkpointing("selective")
    assert reaches({"in_flight": [1, 0]}) == Checkpointing(in_flight=(1, 0))


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [
        ({"pipeline.padding": {"buckets": [64, 32]}}, "buckets=[64, 32]", "longer than the one before"),
        (
            {"pipeline.padding": {"buckets": [64], "length": 64}},
            "length=64 with buckets=[64]",
            "a fixed length",
        ),
        (
            {"train.activation_checkpointing": {"memory_limit": "1 GB", "in_flight": 2}},
            "in_flight=2",
            "memory_limit chooses",
        ),
    ],
)
def test_keys_that_do_not_fit_together_are_refused_by_the_library(
    tmp_path: Path, keys: dict[str, Any], value: str, rule: str
) -> None:
    made = tiny.config(tmp_path, keys={"pipeline.shapes": "padded", **keys})
    with refuses(ConfigError, value, rule):
        make_auto(made)


def test_compile_reaches_the_library(tmp_path: Path) -> None:
    def reaches(how: object) -> object:
        return make_auto(tiny.config(tmp_path, compile=how)).compile

    assert reaches(True) == Compile()
    assert reaches("none") is False
    assert reaches("layers") == Compile(loss=False)
    assert reaches("loss") == Compile(layers="none")
    assert reaches({"backend": "aot_eager", "dynamic": True}) == Compile(backend="aot_eager", dynamic=True)


def test_a_compiler_that_is_not_there_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    assert "compile.backend='fast': torch knows" in refused(
        tiny.config(tmp_path, compile={"backend": "fast"})
    )


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(tmp_path: Path, schedule: str) -> None:
    """Its split is checked against plain code, which is what it is compared with."""
    losses = []
    for how in (False, {"backend": "aot_eager"}):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run(
            preflight(
                tiny.config(tmp_path, keys={"pipeline.schedule": schedule}, compile=how, check="always")
            )
        )
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == bool(how)
        losses.append([row["loss"] for row in tiny.metrics(tmp_path) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch._dynamo.reset()
