"""The axes of a mesh: sizes that multiply to the number of processes, and remedies for others."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from penstock import Axes
from penstock.errors import ConfigError, InputError, WorldSizeError
from support.mesh import Built, batch, build_pipe, later, model_of, own_part, same_on_all
from support.pool import Pool
from support.reference import plain_step
from support.refusals import refuses


def changed(axes: Axes, ranks: int, world: int, remedy: str) -> tuple[Axes, int, int]:
    """Axes, ranks and world after one of the remedies that an error names."""
    sizes = dict(axes.sizes)
    if remedy.endswith(" with ep=1"):
        sizes["ep"], remedy = 1, remedy.removesuffix(" with ep=1")
    number = int(re.findall(r"\d+", remedy)[-1])
    if remedy.startswith("start "):
        world = number
    elif remedy.startswith("set the pipeline's ranks to"):
        ranks = number
    else:
        (name,) = re.fullmatch(r"set (\w+) to \d+", remedy).groups()  # type: ignore[union-attr]
        sizes[name] = number
    return Axes(**sizes), ranks, world


def remedies(error: InputError) -> list[str]:
    if "ep to" in error.remedy and isinstance(error, ConfigError):
        return [f"set ep to {number}" for number in re.findall(r"\d+", error.remedy)]
    return re.split(r" or (?=set)", error.remedy[0].lower() + error.remedy[1:])


@pytest.mark.parametrize("world", [1, 4, 6, *later((2,), (3,), (8,), (12,), mark=pytest.mark.sweep)])
def test_every_remedy_for_sizes_works(world: int) -> None:
    open_ended = 0
    for ranks, *sizes in product((1, 2, 3), (-1, 1, 2), (-1, 1, 2, 3), (-1, 1, 2), (-1, 1, 2, 3), (-1, 1, 2)):
        if sizes.count(-1) > 1:
            continue
        axes = Axes(*sizes)
        try:
            full = axes.resolve(ranks, world)
        except (WorldSizeError, ConfigError) as error:
            offered = remedies(error)
            assert offered
            for remedy in offered:
                other, other_ranks, other_world = changed(axes, ranks, world, remedy)
                other.resolve(other_ranks, other_world)
            continue
        open_ended += -1 in sizes
        assert full.resolved
        assert ranks * full.ranks_per_stage == world
        assert full.dp_shard * full.cp % full.ep == 0
        assert all(size in (-1, full.sizes[name]) for name, size in axes.sizes.items())
    assert open_ended


@pytest.mark.parametrize(
    ("axes", "ranks", "world", "kind", "value", "remedy"),
    [
        (Axes(dp_shard=2), 2, 6,
         WorldSizeError, "6 processes for pp=2 x dp_shard=2",
         "Start 4 processes or set the pipeline's ranks to 3 or set dp_shard to 3"),
        (Axes(dp_shard=-1, ep=4), 2, 5,
         WorldSizeError, "5 processes for pp=2 x dp_shard=-1", "Start 8 processes"),
        (Axes(dp_shard=3, ep=2), 2, 4,
         WorldSizeError, "4 processes for pp=2 x dp_shard=3", "Set dp_shard to 2"),
        (Axes(dp_shard=2, cp=2, ep=3), 1, 4,
         ConfigError, "ep=3 with dp_shard=2 and cp=2", "Set ep to 1, 2 or 4"),
        (Axes(ep=2), 1, 1, ConfigError, "ep=2 with dp_shard=1 and cp=1", "Set ep to 1"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_multiply_are_refused_with_remedies(
    axes: Axes, ranks: int, world: int, kind: type[InputError], value: str, remedy: str
) -> None:
    with refuses(kind, value) as caught:
        axes.resolve(ranks, world)
    assert caught.value.remedy.endswith(remedy)


@pytest.mark.parametrize(
    ("sizes", "value", "rule"),
    [
        ({"dp_shard": -1, "tp": -1}, "dp_shard and tp of -1", "one axis at most"),
        ({"cp": 0}, "cp=0", "at least one rank"),
        ({"tp": 2.0}, "tp=2.0", "whole number of ranks"),
        ({"ep": True}, "ep=True", "whole number of ranks"),
        ({"dp_shard": "2"}, "dp_shard='2'", "whole number of ranks"),
    ],
)
def test_sizes_that_are_no_number_of_ranks_are_refused(sizes: dict[str, Any], value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        Axes(**sizes)


@pytest.mark.parametrize("axes", [Axes(), Axes(dp_shard=-1), Axes(ep=-1)])
def test_in_one_process_minus_one_is_one(axes: Axes) -> None:
    build_pipe("llama", 2, axes, {}).step(batch())


def built(cases: list[Built]) -> list[float]:
    """The loss of one step of each, for axes that come out as 1 or as all that are left."""
    losses = []
    for case in cases:
        pipe = build_pipe(*case)
        losses.append(pipe.step(own_part(batch(), *pipe.batch_part)).loss)
        pipe.close()
    return losses


@pytest.mark.sweep
def test_minus_one_may_resolve_to_one(pool: Pool) -> None:
    cases: list[Built] = [
        ("llama", 2, Axes(dp_shard=2, cp=-1), {}),
        ("llama", 2, Axes(ep=-1, tp=2), {}),
        ("mixtral", 2, Axes(dp_shard=2, ep=-1), {}),
    ]
    losses = same_on_all(pool.run(4, built, cases))
    expected = [plain_step(model_of(family), batch())[0] for family, *_ in cases]
    assert losses == pytest.approx(expected, rel=1e-10)
