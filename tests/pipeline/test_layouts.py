"""Uneven splits, stages of the embedding or the head alone and empty stages train like one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline
from penstock.errors import PartitionError
from penstock.schedule import Op, Schedule, loop
from support.covering import every
from support.families import FAMILIES, FLOAT32_INSIDE, ragged_batch, tiny_config, tiny_model
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step
from support.refusals import refuses

LAYOUTS = ["E|tt|tt|L", "Et||ttt|L", "Ett|tt L", "E||tttt|L", "Etttt||L", "Ett|||tt L", "|||", "E|ttttL"]
NAMES = [["model.embed_tokens", "model.rotary_emb"], ["model.layers.0"],
         ["model.layers.1", "model.layers.2", "model.layers.3", "model.norm", "lm_head"]]  # fmt: skip


def there_and_back(ranks: int, stages_per_rank: int, microbatches: int, kinds: str) -> Schedule:
    """All forwards, then all backwards, stage after stage: the plainest schedule with several on a rank.

    kinds: of a backward's ops, B or I and W
    """
    placement = loop(ranks, stages_per_rank)
    numbers = range(microbatches)
    programs = []
    for rank in range(ranks):
        own = placement.stages_of(rank)
        forwards = [Op(stage, "F", number) for stage in own for number in numbers]
        backwards = [
            Op.parse(f"{stage}{kind}{number}") for stage in own[::-1] for number in numbers for kind in kinds
        ]
        programs.append((*forwards, *backwards))
    return Schedule("there and back", placement, microbatches, tuple(programs))


def exact(
    family: str,
    ranks: int | None,
    dtype: torch.dtype = torch.float64,
    *,
    layers: int = 4,
    tied: bool = False,
    **options: Any,
) -> AutoPipeline:
    """Run one step of the family's tiny model so split, and compare loss and every gradient."""
    auto = AutoPipeline(ranks=ranks, microbatches=3 if ranks else None, **options)
    model = tiny_model(family, dtype, layers=layers, tied=tied)
    batch = ragged_batch()
    loss, gradients = plain_step(model, batch)
    pipe = auto.build(model)
    result = pipe.step(batch)
    assert result.loss == pytest.approx(loss, rel=TOLERANCE[dtype])
    found = gradients_of(pipe)
    assert set(found) == set(gradients)
    assert_gradients(found, gradients, TOLERANCE[dtype])
    return auto


@pytest.mark.parametrize(
    ("layout", "family", "tied"),
    every(2, [(form, *model) for form in LAYOUTS for model in (("llama", True), ("gpt2", False))]),
)
def test_layouts_are_exact(layout: str, family: str, tied: bool) -> None:
    layers = layout.count("t")
    if not layers:  # no model has none
        layout, layers = "E|tt||L", 2
    exact(family, layout.count("|") + 1, layers=layers, tied=tied, layout=layout)


@pytest.mark.parametrize("family", every(4, sorted(FAMILIES)))
def test_every_family_runs_from_a_stage_of_the_embedding_alone(family: str) -> None:
    dtype = torch.float32 if family in FLOAT32_INSIDE else torch.float64
    exact(family, 4, dtype, layout="E||tt|L", layers=2, activation_checkpointing=family < "h")


@pytest.mark.parametrize(
    ("ranks", "options", "counts"),
    [
        (3, {"first_stage_layers": 0, "last_stage_layers": 1}, [0, 3, 1]),
        (3, {"first_stage_layers": 1, "last_stage_layers": 0}, [1, 3, 0]),
        (3, {"last_stage_layers": 2}, [1, 1, 2]),
        (2, {"layers_per_stage": 2}, [2, 2]),
        (4, {"layers_per_stage": [1, 0, 3, 0]}, [1, 0, 3, 0]),
        (3, {"modules_per_stage": NAMES}, [0, 1, 3]),
        (3, {"layout": [["embedding"], [], ["decoder"] * 4 + ["loss"]]}, [0, 0, 4]),
    ],
)
def test_each_way_to_say_it_is_exact(ranks: int, options: dict[str, Any], counts: list[int]) -> None:
    auto = exact("llama", ranks, **options)
    stages = auto.build_plan(tiny_config("llama")).stages
    assert [len(stage.layers) for stage in stages] == counts


@pytest.mark.parametrize(
    ("schedule", "ranks", "size", "counts"),
    [
        ("1f1b", 2, 1, [1, 1, 1, 1]),
        ({"schedule": "1F1B", "zero_bubble": True}, 2, 1, [1, 1, 1, 1]),
        ("1f1b", 2, 2, [2, 2]),
        ("looped_bfs", 1, 2, [2, 2]),
        ("hanayo", 1, 1, [1, 1, 1, 1]),  # two waves
    ],
)
def test_a_number_of_layers_chooses_the_number_of_stages(
    schedule: Any, ranks: int, size: int, counts: list[int]
) -> None:
    auto = exact("llama", ranks, schedule=schedule, layers_per_stage=size)
    plan = auto.build_plan(tiny_config("llama"))
    assert [len(stage.layers) for stage in plan.stages] == counts
    more = auto.schedules(plan.schedule)(6)
    assert (more.microbatches, more.placement) == (6, plan.schedule.placement)


@pytest.mark.parametrize(
    ("schedule", "ranks", "size", "rule", "remedy"),
    [
        ("1f1b", 3, 1, "multiples of 3", "at most 4 stages"),
        ("hanayo", 2, 2, "multiples of 4", "Give 1 (4 stages)"),
        ("gpipe", 2, 1, "the schedule has 2", "Give 2 or 3"),  # one stage a rank
        ("zb_v", 2, 2, "the schedule has 4", "Give 1"),  # two
        ({"schedule": "1f1b", "num_stages_per_rank": 1}, 2, 1, "the schedule has 2", "Give 2 or 3"),  # given
    ],
)
def test_a_number_that_no_number_of_stages_fits(
    schedule: Any, ranks: int, size: int, rule: str, remedy: str
) -> None:
    auto = AutoPipeline(ranks=ranks, microbatches=2, schedule=schedule, layers_per_stage=size)
    with refuses(PartitionError, f"layers_per_stage={size}", rule, remedy):
        auto.build_plan(tiny_config("llama"))


@pytest.mark.parametrize(("layout", "ranks", "kinds"), every(2, [
    ("E|tt||ttL", 1, "B"), ("E|t||tttL", 2, "B"), ("|tttt||", 2, "IW"), ("Et|tt|t|L", 1, "IW"),
    ("Et|tt|t|L", 4, "IW"), ("E|tt||ttL", 2, "IW"),
]))  # fmt: skip
def test_several_stages_on_a_rank(layout: str, ranks: int, kinds: str) -> None:
    """Also where a stage gets what it passes on from its own rank, and a tied weight stands on one rank."""
    schedule = there_and_back(ranks, 4 // ranks, 3, kinds)
    exact("gpt2", None, schedule=schedule, layout=layout, tied=True)


def test_a_stage_without_weights_is_saved_and_read_back(tmp_path: Path) -> None:
    model = tiny_model("llama", tied=True)
    auto = AutoPipeline(ranks=5, microbatches=2, layout="E|tt||tt|L")
    pipe = auto.build(model)
    assert [len(dict(pipe.modules[stage].named_parameters())) for stage in range(5)] == [1, 18, 0, 18, 2]
    assert {name for name, _ in pipe.named_parameters(remove_duplicate=False)} == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    pipe.save_pretrained(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))
    again = auto.build(tmp_path / "model")
    pipe.load_weights(tmp_path / "model")
    other = AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "model")
    for other_pipe in (again, other):
        found = dict(other_pipe.named_parameters(remove_duplicate=False))
        assert all(
            torch.equal(parameter, found[name])
            for name, parameter in pipe.named_parameters(remove_duplicate=False)
        )
    batch = ragged_batch()
    assert pipe.step(batch).loss == pytest.approx(other.step(batch).loss, rel=1e-6)
    assert pipe.clip_grad_norm_(1.0) == pytest.approx(other.clip_grad_norm_(1.0), rel=1e-5)
    pipe.verify_against(model, batch)


def test_initial_values_hang_on_no_layout() -> None:
    one = AutoPipeline(ranks=1, microbatches=1).build(tiny_config("llama"))
    cut = AutoPipeline(ranks=4, microbatches=1, layout="E||tttt|L").build(tiny_config("llama"))
    found = dict(cut.named_parameters())
    assert all(torch.equal(parameter, found[name]) for name, parameter in one.named_parameters())


def test_layers_keep_their_class() -> None:
    """Those of the model, and those of the stages, of which the first and the last are boundaries."""
    model = tiny_model("llama")
    classes = [type(layer) for layer in model.model.layers]
    pipe = AutoPipeline(ranks=3, microbatches=1, layout="E|tttt|L").build(model)
    assert [type(layer) for layer in model.model.layers] == classes
    assert all(isinstance(pipe.modules[1].get_submodule(f"model.layers.{i}"), classes[0]) for i in range(4))


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"layout": "Ett|t|tL"}, "layout 'Ett|t|tL'", "3 stages, and the schedule has 2"),
        ({"layout": "Ett|tttL"}, "layout 'Ett|tttL'", "5 layers"),
        ({"layout": "Ett|tt)L"}, "layout, character 7", "no group is open"),
        (
            {"layout": "Ett|ttL", "modules_per_stage": [[], []]},
            "layout and modules_per_stage",
            "each of them",
        ),
        (
            {"modules_per_stage": [["model.embed_tokens"], ["lm_heat"]]},
            "modules_per_stage[1] with 'lm_heat'",
            "no such module",
        ),
        (
            {"modules_per_stage": [["model.layers"], []]},
            "modules_per_stage[0] with 'model.layers'",
            "several stages",
        ),
        ({"layers_per_stage": [1, 2]}, "layers_per_stage=[1, 2]", "3 layers"),
    ],
)
def test_refused_before_anything_is_loaded(options: dict[str, Any], value: str, rule: str) -> None:
    with refuses(PartitionError, value, rule):
        AutoPipeline(ranks=2, microbatches=2, **options).build_plan(tiny_config("llama"))
