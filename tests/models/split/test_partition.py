"""Which layers go to which stage, by every kind of description."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, PartitionError
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.split.partition import even_split, stages_of_size, to_layout
from penstock.schedule.layout import parse_layout
from support.layer_counts import counts, split_as
from support.refusals import refuses


@pytest.mark.parametrize(
    ("layers", "stages", "weights", "expected"),
    [
        (36, 2, (1, 1), [18, 18]),  # Qwen3-8B: 38 units, 19 a stage
        (32, 4, (1, 1), [8, 9, 8, 7]),  # 34 units: the first two stages take one more
        (32, 4, (0, 0), [8, 8, 8, 8]),
        (10, 4, (0, 0), [3, 3, 2, 2]),
        (4, 4, (1, 1), [1, 1, 1, 1]),  # the last stage's share would be the head alone
        (8, 2, (0, 4), [6, 2]),
        (3, 3, (5, 5), [1, 1, 1]),
        (1, 1, (1, 1), [1]),
    ],
)
def test_known_splits(layers: int, stages: int, weights: tuple[int, int], expected: list[int]) -> None:
    embedding, head = weights
    assert counts(split_as(layers, stages, embedding_weight=embedding, head_weight=head)) == expected


@given(st.integers(1, 60), st.integers(1, 16), st.integers(0, 9), st.integers(0, 9))
def test_every_layer_once_in_order_and_none_empty(layers: int, stages: int, first: int, last: int) -> None:
    if stages > layers:
        with pytest.raises(PartitionError):
            even_split(layers, stages, first, last)
        return
    parts = even_split(layers, stages, first, last)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(len(part) for part in parts)
    units = [len(part) for part in parts]
    units[0] += first
    units[-1] += last
    if all(len(part) > 1 for part in parts):  # nobody had to be helped out
        assert max(units) - min(units) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "said", "expected"),
    [
        (61, 32, {"layout": "Et*3|(tt|)*29|L"}, [3, *[2] * 29, 0, 0]),
        (4, 3, {"layout": "t|tt|t"}, [1, 2, 1]),
        (62, 32, {"layout": "Et*3|(tt|)*29m|L", "prediction_layers": 1}, [3, *[2] * 29, 1, 0]),
        (6, 2, {"layout": "Et*3|tmmL", "prediction_layers": 2}, [3, 3]),
        (4, 3, {"layout": [["embedding"], ["decoder"] * 3, ["decoder", "loss"]]}, [0, 3, 1]),
        (10, 3, {"layers_per_stage": 4}, [4, 3, 3]),
        (32, 4, {"layers_per_stage": 8}, [8, 8, 8, 8]),  # the most for each: embedding and head do not count
        (4, 3, {"layers_per_stage": [0, 4, 0]}, [0, 4, 0]),
        (4, 2, {"layers_per_stage": (1, 3)}, [1, 3]),
        (12, 4, {"first_stage_layers": 1}, [1, 4, 4, 3]),  # 11 layers and the head on three
        (12, 4, {"last_stage_layers": 2}, [3, 4, 3, 2]),
        (10, 4, {"first_stage_layers": 1, "last_stage_layers": 2}, [1, 4, 3, 2]),
        (4, 4, {"first_stage_layers": 0, "last_stage_layers": 0}, [0, 2, 2, 0]),
        (4, 2, {"first_stage_layers": 3, "last_stage_layers": 1}, [3, 1]),
        (4, 1, {"first_stage_layers": 4}, [4]),
        (4, 2, {"balance": [5, 1, 1, 1]}, [1, 3]),
        (4, 2, {"balance": LayerCosts([1, 1, 1, 1], 0, 3)}, [3, 1]),
        (4, 2, {"balance": LayerCosts([1, 1, 1, 1], 1, 3)}, [3, 1]),
    ],
)  # fmt: skip
def test_each_description(layers: int, stages: int, said: dict[str, Any], expected: list[int]) -> None:
    assert counts(split_as(layers, stages, **said)) == expected


@pytest.mark.parametrize(
    ("layers", "stages", "said", "value", "rule", "remedy"),
    [
        (4, 5, {}, "5 stages for 4 layers", "without layers", "at most 4 stages"),
        (4, 3, {"layout": "Ett|ttL"}, "layout 'Ett|ttL'", "the schedule has 3", "Write 2 |"),
        (4, 1, {"layout": "Ett|ttL"}, "layout 'Ett|ttL'", "the schedule has 1", ""),
        (5, 2, {"layout": "Ett|ttL"}, "layout 'Ett|ttL'", "the model has 5", "Write 5 t"),
        (4, 2, {"layout": "Ett|ttmL"}, "layout 'Ett|ttmL'", "built with none", "remove m"),
        (5, 2, {"layout": "Ett|ttL", "prediction_layers": 1},
         "layout 'Ett|ttL'", "built with 1", "Write 1 m"),
        (5, 2, {"layout": "Ett|tmL", "prediction_layers": 1},
         "layout 'Ett|tmL'", "the model has 4", "Write 4 t"),
        (4, 2, {"layout": "Ett|ttx"}, "layout, character 7", "unknown symbol 'x'", ""),
        (10, 4, {"layers_per_stage": 4}, "layers_per_stage=4", "the schedule has 4", "Give 3, or"),
        (10, 7, {"layers_per_stage": 4},
         "layers_per_stage=4", "the schedule has 7", "Give a number for each stage"),
        (10, 2, {"layers_per_stage": 4},
         "layers_per_stage=4", "the schedule has 2", "Give 5 or 6 or 7 or 8 or 9,"),
        (4, 2, {"layers_per_stage": [1, 2, 1]},
         "layers_per_stage=[1, 2, 1]", "the schedule has 2", "Give 2 numbers"),
        (4, 2, {"layers_per_stage": [1, 2]}, "layers_per_stage=[1, 2]", "the model has 4", "add up to 4"),
        (4, 2, {"first_stage_layers": 4}, "first_stage_layers=4", "leaves 0 of 4 layers", "more than 3"),
        (4, 2, {"first_stage_layers": 5}, "first_stage_layers=5", "leaves -1 of 4 layers", ""),
        (4, 2, {"first_stage_layers": 1, "last_stage_layers": 2},
         "first_stage_layers=1, last_stage_layers=2", "leaves 1 of 4 layers", "other than 4"),
        (4, 1, {"first_stage_layers": 2, "last_stage_layers": 2},
         "first_stage_layers=2, last_stage_layers=2", "the last one here", ""),
        (4, 2, {"layout": "tt|tt", "layers_per_stage": 2}, "layout and layers_per_stage", "each of them", ""),
        (4, 2, {"layout": "tt|tt", "last_stage_layers": 2},
         "layout and last_stage_layers", "each of them", ""),
        (4, 2, {"balance": [1] * 4, "first_stage_layers": 1, "last_stage_layers": 1},
         "first_stage_layers and last_stage_layers and balance", "each of them", ""),
    ],
)  # fmt: skip
def test_descriptions_that_do_not_fit(
    layers: int, stages: int, said: dict[str, Any], value: str, rule: str, remedy: str
) -> None:
    with refuses(PartitionError, value, rule, remedy):
        split_as(layers, stages, **said)


@pytest.mark.parametrize(
    ("size", "layers", "ranks", "group", "each"), [(4, 32, 4, 1, 2), (3, 10, 2, 1, 2), (5, 10, 2, 2, None),
                                                   (2, 8, 2, 2, 2), (9, 8, 1, 1, 1), (2, 10, 4, 1, None)]
)  # fmt: skip
def test_a_size_makes_stages_for_each_rank(
    size: int, layers: int, ranks: int, group: int, each: int | None
) -> None:
    if each is not None:
        assert stages_of_size(size, layers, ranks, group) == each
        assert max(counts(split_as(layers, each * ranks, layers_per_stage=size))) <= size
        return
    with refuses(PartitionError, rule="multiples of 4", remedy="Give 3 (4 stages)"):
        stages_of_size(size, layers, ranks, group)


def test_a_size_that_nothing_fits() -> None:
    with refuses(PartitionError, "layers_per_stage=1", "multiples of 6", "at most 4 stages"):
        stages_of_size(1, 4, 6)
    with refuses(ConfigError, "layers_per_stage=0", remedy="Give 1"):
        stages_of_size(0, 4, 2)


def test_to_layout() -> None:
    split = split_as(61, 32, layout="Et*3|(tt|)*29|L")
    assert to_layout(split) == "Et*3|(tt|)*29|L"
    assert list(parse_layout(to_layout(split)).layers) == split
    split = split_as(62, 32, layout="Et*3|(tt|)*29m|L", prediction_layers=1)
    assert to_layout(split, 1) == "Et*3|(tt|)*29m|L"
