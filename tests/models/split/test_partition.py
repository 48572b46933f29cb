"""Which layers go to which stage, by every kind of description."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, PartitionError
from penstock.models.split.balanced_split import LayerCosts, Memory, balanced_split
from penstock.models.split.partition import even_split, partition, stages_of_size, to_layout
from penstock.options import SplitOptions
from penstock.schedule.layout import parse_layout


def split_as(
    layers: int, stages: int, balance: Any = None, prediction_layers: int = 0, **said: Any
) -> list[range]:
    return partition(
        layers, stages, SplitOptions(**said), balance=balance, prediction_layers=prediction_layers
    )


def counts(split: list[range]) -> list[int]:
    assert [layer for part in split for layer in part] == list(range(split[-1].stop))
    return [len(part) for part in split]


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
    ("layers", "stages", "said", "message"),
    [
        (4, 5, {}, "5 stages for 4 layers: .* Use at most 4 stages"),
        (4, 3, {"layout": "Ett|ttL"}, "it has 2 stages, and the schedule has 3. Write 2 [|], or change"),
        (4, 1, {"layout": "Ett|ttL"}, "it has 2 stages, and the schedule has 1"),
        (5, 2, {"layout": "Ett|ttL"}, "it has 4 layers, and the model has 5. Write 5 t"),
        (4, 2, {"layout": "Ett|ttmL"}, "built with none. Set mtp_loss_scaling_factor .* or take m away"),
        (5, 2, {"layout": "Ett|ttL", "prediction_layers": 1}, "built with 1. Write 1 m behind the last t"),
        (5, 2, {"layout": "Ett|tmL", "prediction_layers": 1}, "3 layers, and the model has 4. Write 4 t"),
        (4, 2, {"layout": "Ett|ttx"}, "layout, character 7: unknown symbol 'x'"),
        (10, 4, {"layers_per_stage": 4}, "10 layers make 3 stages of it, and the schedule has 4. Give 3, or"),
        (10, 7, {"layers_per_stage": 4}, "has 7. Give a number for each stage, or"),
        (10, 2, {"layers_per_stage": 4}, r"Give 5 or 6 or 7 or 8 or 9, or change ranks"),
        (4, 2, {"layers_per_stage": [1, 2, 1]}, "it has 3 stages, and the schedule has 2. Give 2 numbers"),
        (4, 2, {"layers_per_stage": [1, 2]}, "3 layers, and the model has 4. Give numbers that add up to 4"),
        (4, 2, {"first_stage_layers": 4}, "leaves 0 of 4 layers for 1 other stage. .* cannot be more than 3"),
        (4, 2, {"first_stage_layers": 5}, "leaves -1 of 4 layers"),
        (4, 2, {"first_stage_layers": 1, "last_stage_layers": 2}, "leaves 1 .* be other than 4 layers"),
        (4, 1, {"first_stage_layers": 2, "last_stage_layers": 2}, "the first stage is the last one here"),
        (4, 2, {"layout": "tt|tt", "layers_per_stage": 2}, "layout and layers_per_stage: each says by"),
        (4, 2, {"layout": "tt|tt", "last_stage_layers": 2}, "layout and last_stage_layers"),
        (4, 2, {"balance": [1] * 4, "first_stage_layers": 1, "last_stage_layers": 1}, "Give one of them"),
    ],
)  # fmt: skip
def test_descriptions_that_do_not_fit(layers: int, stages: int, said: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
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
    with pytest.raises(PartitionError, match=r"multiples of 4. Give 3 \(4 stages\)$"):
        stages_of_size(size, layers, ranks, group)


def test_a_size_that_nothing_fits() -> None:
    with pytest.raises(PartitionError, match=r"4 stages of it, .* multiples of 6. Use at most 4 stages"):
        stages_of_size(1, 4, 6)
    with pytest.raises(ConfigError, match="Give 1 or more"):
        stages_of_size(0, 4, 2)


def test_to_layout() -> None:
    split = split_as(61, 32, layout="Et*3|(tt|)*29|L")
    assert to_layout(split) == "Et*3|(tt|)*29|L"
    assert list(parse_layout(to_layout(split)).layers) == split
    split = split_as(62, 32, layout="Et*3|(tt|)*29m|L", prediction_layers=1)
    assert to_layout(split, 1) == "Et*3|(tt|)*29m|L"


# ---- the balanced split, compared with all splits


def every_split(layers: int, stages: int) -> list[list[range]]:
    cuts = itertools.combinations_with_replacement(range(layers + 1), stages - 1)
    return [[range(a, b) for a, b in itertools.pairwise((0, *inner, layers))] for inner in cuts]


def stage_sums(split: list[range], layers: list[float], first: float, last: float) -> list[Fraction]:
    sums = [sum((Fraction(layers[layer]) for layer in part), Fraction()) for part in split]
    sums[0] += Fraction(first)
    sums[-1] += Fraction(last)
    return sums


numbers = st.one_of(st.integers(0, 6).map(float), st.sampled_from([0.1, 0.2, 0.3, 0.7, 1e-9]))


@settings(deadline=None)  # all splits there are
@given(st.data(), st.lists(numbers, min_size=1, max_size=7), st.integers(1, 5), numbers, numbers)
def test_balanced_is_the_best_of_all(
    data: st.DataObject, costs: list[float], stages: int, first: float, last: float
) -> None:
    weights = data.draw(st.lists(st.integers(0, 4), min_size=len(costs), max_size=len(costs)))
    saved = data.draw(st.lists(st.integers(0, 4), min_size=len(costs), max_size=len(costs)))
    live = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    memory = data.draw(st.none() | st.integers(0, 40).map(
        lambda limit: Memory(limit, weights, saved, live, (3, 1), (2, 2))))  # fmt: skip

    def rank(split: list[range]) -> tuple[object, ...]:
        sums = stage_sums(split, costs, first, last)
        return max(sums), sum(one * one for one in sums), [len(part) for part in split]

    def held(split: list[range]) -> Fraction:
        fixed = stage_sums(split, [*map(float, weights)], 3, 2)
        each = stage_sums(split, [*map(float, saved)], 1, 2)
        return max(a + b * count for a, b, count in zip(fixed, each, live, strict=True))

    possible = every_split(len(costs), stages)
    fitting = [split for split in possible if memory is None or held(split) <= memory.limit]
    if fitting:
        found = balanced_split(LayerCosts(costs, first, last), stages, memory=memory)
        assert found == min(fitting, key=rank)
    else:
        least = min(map(held, possible))
        with pytest.raises(PartitionError, match=f"some stage holds {least} or more. Give {least} or more"):
            balanced_split(LayerCosts(costs, first, last), stages, memory=memory)


@pytest.mark.parametrize(
    ("costs", "stages", "ends", "layout"),
    [
        ([1] * 8, 4, (0, 0), "E(tt|)*3ttL"),
        ([1] * 10, 4, (0, 0), "Ett|tt|t*3|t*3L"),  # later stages hold fewer microbatches
        ([1] * 8, 4, (0, 3), "Ett|t*3|t*3|L"),  # the head counts as much as three layers
        ([0.1] * 9, 3, (0, 0), "Et*3|t*3|t*3L"),  # 0.1 + 0.1 + 0.1 is no 0.3 in floating point
        ([1, 1], 4, (0, 0), "E||t|tL"),
        ([], 2, (1, 1), "E|L"),
    ],
)
def test_known_balances(costs: list[float], stages: int, ends: tuple[float, float], layout: str) -> None:
    split = balanced_split(LayerCosts(costs, *ends), stages)
    assert to_layout(split) == layout


LOOP, V = (0, 1, 0, 1), (0, 1, 1, 0)
TWO = LayerCosts([1, 1])


@pytest.mark.parametrize("rank_of", [LOOP, V])
@pytest.mark.parametrize("head", [0, 10, 155])
@pytest.mark.parametrize("costs", [[24] * 12, [20] * 3 + [31] * 13, [28, 45] * 8])
def test_the_slowest_of_ranks_with_two_stages_is_within_2_percent_of_the_best(
    costs: list[int], head: int, rank_of: tuple[int, ...]
) -> None:
    """Version 0.5.0 gave the ranks of a V 2 and 4 of 6 layers: it looked at stages, not at ranks."""

    def slowest(split: list[range]) -> float:
        sums = stage_sums(split, [*map(float, costs)], 0, head)
        return float(max(sum(s for s, r in zip(sums, rank_of, strict=True) if r == rank) for rank in (0, 1)))

    found = balanced_split(LayerCosts(costs, head=head), 4, holders=[(rank,) for rank in rank_of])
    assert slowest(found) <= 1.02 * min(map(slowest, every_split(len(costs), 4)))


def test_both_copies_of_dualpipe_count() -> None:
    """A rank holds one stage of each copy: the first and the last, or two in the middle."""
    split = balanced_split(LayerCosts([1] * 12, head=4), 4, holders=[(0, 3), (1, 2), (2, 1), (3, 0)])
    costs = [len(layers) + 4 * (stage == 3) for stage, layers in enumerate(split)]
    assert costs[0] + costs[3] == costs[1] + costs[2]


@pytest.mark.parametrize(
    ("layers", "memory", "expected"),
    [
        (12, Memory(30, [1] * 12, [2] * 12, [4, 3, 2, 1]), [3, 3, 3, 3]),
        (12, Memory(18, [1] * 12, [2] * 12, [4, 3, 2, 1]), [2, 2, 3, 5]),
        (6, Memory(0.9, [0.1] * 6, [0.1] * 6, [2.5, 1.0]), [2, 4]),  # type: ignore[list-item]  # means
    ],
)
def test_early_stages_take_fewer_layers_where_they_hold_more_microbatches(
    layers: int, memory: Memory, expected: list[int]
) -> None:
    assert counts(balanced_split(LayerCosts([1] * layers), len(expected), memory=memory)) == expected


@pytest.mark.timeout(60)
@pytest.mark.parametrize("head", [5.0, 900.0])
def test_200_layers_on_64_stages_are_balanced_soon(head: float) -> None:
    """It takes 0.1 to 1 s; a search over all splits would take for ever."""
    costs = [1 + 0.37 * (layer * 7919 % 13) for layer in range(200)]
    memory = Memory(1e12, costs, costs, list(range(64, 0, -1)))
    assert sum(counts(balanced_split(LayerCosts(costs, head=head), 64, memory=memory))) == 200


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: even_split(4, 2, 1, -1), "head_weight=-1"),
        (lambda: split_as(4, 2, balance=[1, 2, 3]), "costs of 3 layers: the model has 4"),
        (lambda: split_as(4, 2, layers_per_stage=0), "Give 1 or more"),
        (lambda: split_as(4, 2, layers_per_stage=[-1, 5]), "Give 0 or more"),
        (lambda: split_as(4, 2, first_stage_layers=-1), "Give 0 or more"),
        (lambda: balanced_split(LayerCosts([1, -1]), 2), "costs with -1"),
        (lambda: balanced_split(LayerCosts([1, float("nan")]), 2), "costs with nan"),
        (lambda: balanced_split(LayerCosts([1]), 0), "stages=0"),
        (lambda: balanced_split(LayerCosts([1], head=float("inf")), 2), "embedding and costs.head with inf"),
        (lambda: balanced_split(TWO, 2, memory=Memory(9, [1])), "memory.weights of 1 numbers"),
        (lambda: balanced_split(TWO, 2, memory=Memory(9, [1, 1], [1])), "memory.activations of 1 numbers"),
        (lambda: balanced_split(TWO, 2, memory=Memory(9, [1, 1], live=[1])), "one for each stage, so 2"),
    ],
)
def test_numbers_that_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
