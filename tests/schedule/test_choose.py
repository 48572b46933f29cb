from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock.errors import ConfigError
from penstock.schedule import (
    Costs,
    ScheduleConfig,
    build,
    compare,
    dump,
    search,
    verify,
)
from penstock.schedule.builders import BUILDERS
from penstock.schedule.choose import MAKERS, canonical, schedule_config
from support.refusals import refuses


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("1F1B", "1f1b"), ("GPipe", "gpipe"), ("afab", "gpipe"), ("zero_bubble_v", "zb_v"), ("ZBV", "zb_v"),
        ("dual_pipe_v", "dualpipe_v"), ("DualPipeV", "dualpipe_v"), ("looped_bfs", "looped_bfs"),
        ("Interleaved1F1B", "interleaved_1f1b"), ("InterleavedZeroBubble", "interleaved_zero_bubble"),
        ("ScheduleZBVZeroBubble", "zb_v"), ("Schedule1F1B", "1f1b"), ("zb-h1", "zb_h1"), ("V-Half", "v_half"),
    ],
)  # fmt: skip
def test_other_spellings(spelt: str, name: str) -> None:
    assert canonical(spelt) == name
    assert schedule_config(spelt).schedule == name


def test_every_builder_has_a_config_of_its_options() -> None:
    assert MAKERS.keys() == BUILDERS.keys() | {"searched", "file"}
    for name in BUILDERS:
        assert build(name, ranks=2, microbatches=4) == BUILDERS[name](ranks=2, microbatches=4)


@pytest.mark.parametrize(
    ("config", "name", "options"),
    [
        ({"schedule": "1f1b"}, "1f1b", {}),
        ({"schedule": "1f1b", "zero_bubble": True}, "1f1b", {"zero_bubble": True}),
        ({"schedule": "1f1b", "stages_per_rank": 2}, "interleaved_1f1b", {"stages_per_rank": 2}),
        ({"schedule": "1F1B", "num_stages_per_rank": 3, "zero_bubble": True},
         "interleaved_zero_bubble", {"stages_per_rank": 3}),
        ({"schedule": "1f1b", "stages_per_rank": 2, "microbatch_group_size_per_vp_stage": 6},
         "interleaved_1f1b", {"stages_per_rank": 2, "microbatch_group_size": 6}),
        ({"schedule": "zero_bubble_v", "stages_per_rank": 2}, "zb_v", {}),
        ({"schedule": "hanayo", "num_waves": 2}, "hanayo", {"waves": 2}),
        ({"schedule": "v_half", "costs": {"forward": 1, "input_grad": 2, "weight_grad": [1, 2, 1, 2, 1, 2]}},
         "v_half", {"costs": Costs(1, 2, [1, 2, 1, 2, 1, 2])}),
    ],
)  # fmt: skip
def test_what_a_config_builds(config: dict[str, Any], name: str, options: dict[str, Any]) -> None:
    built = schedule_config(config).build(ranks=3, microbatches=6)
    assert built == BUILDERS[name](ranks=3, microbatches=6, **options)
    verify(built)


@pytest.mark.parametrize(
    ("config", "value", "remedy"),
    [
        ({"schedule": "1f1"}, "schedule '1f1'", "Did you mean '1f1b'"),
        ({"schedule": "zzzz"}, "schedule 'zzzz'", "Take one of these"),
        ({"stages_per_rank": 2}, "a schedule of the keys stages_per_rank", "Take one of"),
        ({"schedule": 3}, "a schedule of the keys schedule", "Take one of"),
        ({"schedule": "gpipe", "stages_per_rank": 2}, "schedule option stages_per_rank=2", "Leave it out"),
        ({"schedule": "1f1b", "zero_bubbles": True}, "schedule option zero_bubbles=True",
         "Did you mean zero_bubble?"),
        ({"schedule": "1f1b", "stages_per_rank": 0}, "stages_per_rank=0", "Give 1 or more"),
        ({"schedule": "1f1b", "stages_per_rank": "2"}, "stages_per_rank='2'", "Give 1 or more"),
        ({"schedule": "1f1b", "num_stages_per_rank": 0}, "num_stages_per_rank=0", "Give 1 or more"),
        ({"schedule": "1f1b", "stages_per_rank": 2, "num_stages_per_rank": 3},
         "schedule option num_stages_per_rank=3", "Give it once"),
        ({"schedule": "hanayo", "num_waves": 2, "waves": 1}, "schedule option waves=1", "Give it once"),
        ({"schedule": "1f1b", "zero_bubble": 1}, "zero_bubble=1", "takes stages_per_rank"),
        ({"schedule": "zb_v", "stages_per_rank": 3}, "stages_per_rank=3", "Give 2"),
        ({"schedule": "1f1b", "microbatch_group_size": 4}, "microbatch_group_size=4", "stages_per_rank=2"),
        ({"schedule": "v_min", "costs": {"forwards": 1}}, "costs with 'forwards'", "Leave it out"),
        ({"schedule": "zb_v", "objective": "bubble"}, "objective='bubble'", "takes stages_per_rank"),
        ({"schedule": "zb_v", "objective": "extent"}, "objective='extent' without costs", "Give costs"),
        ({"schedule": "searched", "placement": "round"}, "placement='round'", "takes costs, memory_limit"),
        ({"schedule": "searched", "memory_limit": 0}, "memory_limit=0", "takes costs, memory_limit"),
        ({"schedule": "searched", "seed": -1}, "seed=-1", "takes costs, memory_limit"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(config: dict[str, Any], value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_config(config)
    assert caught.value.value == value
    assert remedy in caught.value.remedy


def test_a_config_can_be_the_key_of_a_mapping() -> None:
    configs = [schedule_config({"schedule": "1f1b", "stages_per_rank": stages}) for stages in (2, 2, 3)]
    assert len(set(configs)) == 2


def test_the_public_search_is_a_function() -> None:
    """Version 0.2.0 gave the package of that name, which cannot be called."""
    assert search(ranks=1, microbatches=1, seconds=0.1).makespan == 3


def test_what_is_neither_name_nor_mapping_is_refused() -> None:
    with refuses(ConfigError, "schedule None", "a schedule is a name, or a mapping"):
        schedule_config(None)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "value", "rule"),
    [
        (10**9, 8, "1000000000 ranks", "at most 4,096 stages"),
        (4, 10**9, "1000000000 microbatches", "fill the memory"),
    ],
)
def test_a_schedule_that_would_fill_the_memory_is_refused(
    ranks: int, microbatches: int, value: str, rule: str
) -> None:
    """Version 0.2.0 built it until it was killed."""
    with refuses(ConfigError, value, rule):
        build("gpipe", ranks=ranks, microbatches=microbatches)
    with refuses(ConfigError, value, rule):
        compare(ranks=ranks, microbatches=microbatches)
    with refuses(ConfigError, "4 ranks with 2000000000 stages each", "at most 4,096 stages"):
        build("hanayo", ranks=4, microbatches=8, waves=10**9)


def test_a_schedule_config_can_be_the_field_of_a_pydantic_model() -> None:
    class Mine(BaseModel):
        pipeline: ScheduleConfig

    read = Mine.model_validate({"pipeline": {"schedule": "1F1B", "stages_per_rank": 2, "zero_bubble": True}})
    assert read.pipeline == schedule_config({"schedule": "1f1b", "stages_per_rank": 2, "zero_bubble": True})
    assert Mine.model_validate({"pipeline": "gpipe"}).pipeline.schedule == "gpipe"
    assert Mine.model_validate(read.model_dump()) == read
    with pytest.raises(ValidationError, match="Did you mean 'gpipe'"):
        Mine.model_validate({"pipeline": "gpip"})


def test_a_file_brings_numbers_of_its_own(tmp_path: Path) -> None:
    dump(build("zb_v", ranks=2, microbatches=4), tmp_path / "own.csv")
    config = {"schedule": "file", "path": str(tmp_path / "own.csv")}
    assert schedule_config(config).build(2, 4).microbatches == 4
    with refuses(ConfigError, "microbatches=8", "given has 4"):
        schedule_config(config).build(2, 8)


@pytest.mark.parametrize(
    ("name", "options", "value", "rule", "remedy"),
    [
        ("GPipes", {}, "schedule 'GPipes'", "the known schedules are inference, gpipe, ", "'gpipe'"),
        ("zzz", {}, "schedule 'zzz'", "searched, file", ""),
        ("gpipe", {"stages_per_rank": 2}, "stages_per_rank=2", "takes ranks, microbatches", ""),
        ("file", {}, "schedule 'file' without path", "no default", "Give path"),
        ("dualpipe", {"ranks": 3}, "ranks=3", "ranks is even", "2 or 4"),
        # version 0.2.0 built GPipe here
        ("1f1b", {"schedule": "gpipe"}, "schedule='gpipe'", "the name is '1f1b'", ""),
    ],
)
def test_what_cannot_be_built_is_refused(
    name: str, options: dict[str, Any], value: str, rule: str, remedy: str
) -> None:
    with refuses(ConfigError, value, rule, remedy):
        build(name, **{"ranks": 2, "microbatches": 2, **options})


@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 0, "microbatches": 2},
        {"ranks": 2, "microbatches": -1},
        {"ranks": 2.0, "microbatches": 1},
        {"ranks": "2", "microbatches": 1},
        {"ranks": 2, "microbatches": 2, "stages_per_rank": 0},
    ],
)
def test_a_size_below_one_or_not_whole_is_refused(sizes: dict[str, int]) -> None:
    with refuses(ConfigError, rule="whole number"):
        build("inference", **sizes)
