"""A run is killed at random places, and goes on over other numbers of ranks each time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.train.checkpoints import NEWEST
from support import tiny
from support.faults import Row, attempt, rows, tree
from support.strikes import Strike

pytestmark = [pytest.mark.sweep, pytest.mark.xdist_group("pool")]

WORLDS = (2, 4, 3, 1)
PLACES = ("a forward", "a backward", "the norm", "the optimizer", "a save", "the manifest of a commit")
CLOSE = 1e-5  # of the largest entry: other sums of a norm


def made(folder: Path, ranks: int) -> dict[str, Any]:
    config = tree(folder, ranks=ranks, timeout=60.0)
    config["model"] = {"config": {**tiny.QWEN3, "num_hidden_layers": 4}}
    return config


def strike(drawn: random.Random, ranks: int) -> Strike:
    """A kill in one of the first steps of an attempt."""
    point, rank = drawn.choice(PLACES), drawn.randrange(ranks)
    # two microbatches of each step; process 0 alone writes the manifest
    first = {"a forward": 5, "a backward": 5, "the norm": 3, "the optimizer": 3}.get(point, 1)
    return Strike(0 if point.startswith("the manifest") else rank, point, first)


def weights_and_moments(checkpoint: Path) -> dict[str, Tensor]:
    """By name alone: each rank writes files of its own, with its random state in one."""
    named = {key.partition(" ")[2]: value for key, value in tiny.tensors(checkpoint).items()}
    return {name: value for name, value in named.items() if name != "cpu"}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.fault("a run goes on over other ranks", "killed at random on 2, 4 and 3 ranks, ended on 1")
def test_a_run_goes_on_over_other_ranks_after_random_kills(tmp_path: Path, row: Row, seed: int) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "struck").mkdir()
    whole = attempt(made(tmp_path / "whole", 2))
    assert list(whole.codes.values()) == [0, 0], whole.errors
    drawn, folder, slowest = random.Random(seed), tmp_path / "struck", 0.0
    for ranks in WORLDS[:-1]:
        struck = strike(drawn, ranks)
        killed = attempt(made(folder, ranks), [struck], NEWEST)
        assert not killed.hung, struck
        assert killed.codes[struck.rank] == -9, (struck, killed.errors)
        slowest = max(slowest, killed.seconds)
    ended = attempt(made(folder, WORLDS[-1]), resume=NEWEST)
    assert list(ended.codes.values()) == [0], ended.errors
    expected, got = rows(tmp_path / "whole"), rows(folder)
    assert got.keys() == expected.keys()
    assert all(abs(got[step] - expected[step]) < CLOSE * abs(expected[step]) for step in got)
    one, other = (weights_and_moments(tiny.checkpoint(tmp_path / name, 6)) for name in ("whole", "struck"))
    assert len(one) > 3 * 40
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (other[name] - value).abs().max() <= CLOSE * value.abs().max(), name
    assert slowest < 20
    row.note(seconds=slowest)
