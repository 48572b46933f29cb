"""Options that all pipelines share, and the ways to say which layers go where."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock import AutoPipeline, Pipeline
from penstock.errors import ConfigError, PartitionError
from penstock.models.split.balanced_split import LayerCosts
from penstock.options import (
    AxisSizes,
    LayerOptions,
    MeshOptions,
    ModelOptions,
    RoutingOptions,
    RunOptions,
    ShardingOptions,
    SplitOptions,
    sentences,
)
from penstock.pipeline.options import Options, with_pipeline_axis
from penstock.train.config.model import ModelSection, ParallelSection, PipelineSection
from penstock.train.config.training import TrainSection
from support.families import ragged_batch, tiny_config, tiny_model
from support.own_chain import Piece, squares, x_batch
from support.refusals import refuses


def test_both_ways_to_a_pipeline_take_the_same_options() -> None:
    shared = {field.name for field in fields(Options)}
    assert shared <= {field.name for field in fields(AutoPipeline)}
    signature = inspect.signature(Pipeline.from_provider)
    assert list(signature.parameters) == ["provider", *(field.name for field in fields(Options))]
    assert "provider" in (Pipeline.from_provider.__doc__ or "")


def test_every_option_is_documented() -> None:
    """By the class that has it, and by the two that users write."""
    for kind in (AutoPipeline, Options):
        assert {field.name for field in fields(kind)} == sentences(kind).keys()
        assert all(meaning.strip() for meaning in sentences(kind).values())


def test_a_section_of_a_config_shares_the_options_of_its_groups() -> None:
    """By the same names, so that `make_auto` need not list them."""
    for section, groups in (
        (PipelineSection, (RunOptions, SplitOptions)),
        (ModelSection, (ModelOptions,)),
        (TrainSection, (RoutingOptions, LayerOptions)),
        (ParallelSection, (MeshOptions, AxisSizes, ShardingOptions)),
    ):
        for group in groups:
            assert {option.name for option in fields(group)} <= section.model_fields.keys()


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Pipeline\.from_provider\(\) has no option 'scedule'.*'schedule'"):
        Pipeline.from_provider(Piece, scedule="1f1b")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no option 'replay_routing'\. Its options are ranks, .*, common$"):
        Pipeline.from_provider(Piece, replay_routing=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Pipeline\.from_provider\(\) takes its options by keyword"):
        Pipeline.from_provider(Piece, 2)


def layers(**said: Any) -> list[list[int]]:
    auto = AutoPipeline(ranks=2, microbatches=2, **said)
    return [list(stage.layers) for stage in auto.build_plan(tiny_config("llama")).stages]


def test_modules_per_stage_by_either_name() -> None:
    first = ["model.embed_tokens", "model.layers.0"]
    rest = [f"model.layers.{i}" for i in (1, 2, 3)] + ["model.norm", "lm_head"]
    for name in ("modules_per_stage", "module_fqns_per_stage"):
        assert layers(**{name: [first, rest]}) == [[0], [1, 2, 3]]
    with refuses(PartitionError, "modules_per_stage and module_fqns_per_stage", "each of them"):
        layers(modules_per_stage=[first, rest], module_fqns_per_stage=[first, rest])


def test_a_measured_balance() -> None:
    assert layers(balance=[3.0, 1.0, 1.0, 1.0]) == [[0], [1, 2, 3]]
    assert layers(balance=LayerCosts([1, 1, 1, 1], embedding=0, head=2.5)) == [[0, 1, 2], [3]]
    with refuses(ConfigError, "costs of 3 layers", "the model has 4"):
        layers(balance=[1, 2, 3])
    with refuses(PartitionError, "layout and balance", "each of them"):
        layers(balance=[1] * 4, layout="Ett|ttL")


@pytest.mark.parametrize("names", [("stages",), ("dp", "stages"), ("stages", "pp")])
def test_the_axis_may_have_another_name(names: tuple[str, ...], one_process: None) -> None:
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    renamed = with_pipeline_axis(mesh, "stages")
    assert renamed["pp"].get_group() is mesh["stages"].get_group()
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = AutoPipeline(ranks=1, microbatches=2, mesh=mesh, pipeline_axis="stages").build(model)
    pipe.verify_against(model, batch)
    pipe.close()


def test_an_axis_that_the_mesh_does_not_have(one_process: None) -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (1,), mesh_dim_names=("stages",))
    with refuses(ConfigError, "pipeline_axis='stage' of a mesh with the axes ('stages',)", "that axis"):
        AutoPipeline(ranks=1, microbatches=2, mesh=mesh, pipeline_axis="stage").build(tiny_config("llama"))
    with refuses(ConfigError, rule="from the axis named 'pp'"):
        AutoPipeline(ranks=1, microbatches=2, mesh=mesh).build(tiny_config("llama"))


def test_options_of_a_provider_are_checked() -> None:
    for options, value, rule in (({"exchange": "batched", "shapes": "exchanged"},
                                  "shapes='exchanged'", "carries its shapes"),
                                 ({"shapes": "guessed"}, "shapes='guessed'", "cross an edge"),
                                 ({"timeout": 0}, "timeout=0", "seconds")):  # fmt: skip
        with refuses(ConfigError, value, rule):
            Pipeline.from_provider(Piece, ranks=2, microbatches=2, **options)
    pipe = Pipeline.from_provider(Piece, ranks=2, microbatches=2, loss_fn=squares)
    assert pipe.schedule.name == "1f1b"
    assert pipe.step(x_batch()).loss > 0
    assert all(isinstance(p.grad, torch.Tensor) for p in pipe.parameters())


def test_network_is_taken_with_a_warning() -> None:
    """0.5.0 emulated a slower network."""
    with pytest.warns(DeprecationWarning, match=r"network=.*simulate\(\)"):
        AutoPipeline(ranks=2, microbatches=4, network=1.0).chosen_schedule()


@pytest.mark.parametrize("action", ["build_plan", "build"])
def test_a_warning_names_the_line_that_calls_penstock(action: str) -> None:
    """0.5.0 named a line within penstock or contextlib, so that Python showed none of them."""
    auto = AutoPipeline(ranks=2, microbatches=2, overlap=True)
    with pytest.warns(DeprecationWarning, match="overlap=") as caught:
        getattr(auto, action)(tiny_config("llama"))
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match="overlap=") as caught:
        Pipeline.from_provider(Piece, ranks=2, microbatches=2, loss_fn=squares, overlap=True)
    assert [warning.filename for warning in caught] == [__file__]


def test_overlap_is_taken_with_a_warning() -> None:
    """0.5.0 ran pairs in two threads, on CPUs."""
    for given in (True, False, "auto"):
        with pytest.warns(DeprecationWarning, match="one after the other"):
            AutoPipeline(ranks=2, schedule="dualpipe_v", microbatches=4, overlap=given).chosen_schedule()
