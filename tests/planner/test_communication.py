"""Seconds of collectives: textbook formulas, and what no change of size or cluster may do."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.parallel.axes import MESH, Axes
from penstock.planner.communication import (
    Algorithm,
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    exchange,
    groups,
    reduce_scatter,
    send,
)
from penstock.planner.practice import TokenCopies
from support.clusters import round_cluster
from support.refusals import refuses

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True)

CLUSTER = round_cluster(hosts=1024)  # 100 GB/s and 1 us inside, 10 GB/s and 10 us between
ALONE = round_cluster(hosts=1, between=None)
BYTES = st.floats(0, 1e13)
GROUPS = st.builds(
    lambda hosts, on_host: Group(hosts * on_host, on_host), st.integers(1, 64), st.integers(1, 8)
)
COLLECTIVES = (all_reduce, all_gather, reduce_scatter, all_to_all)


@SETTINGS
@given(nbytes=BYTES, size=st.integers(2, 8))
def test_a_ring_on_one_host_is_the_textbooks(nbytes: float, size: int) -> None:
    """Thakur et al., 2005: 2 (p - 1) alpha + 2 (p - 1) / p n beta."""
    group, alpha, beta = Group(size, size), 1e-6, 1 / 100e9
    expected = 2 * (size - 1) * alpha + 2 * (size - 1) / size * nbytes * beta
    assert all_reduce(nbytes, group, ALONE, "ring") == pytest.approx(expected)
    for half in (all_gather, reduce_scatter):
        assert half(nbytes, group, ALONE) == pytest.approx(expected / 2)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # 2 x 15 steps, 2 of them between hosts; 2 x 15/16 x 8 GB, an eighth of it through a port
        ("ring", 28 * 1e-6 + 2 * 10e-6 + 2 * 15 / 16 * 8e9 / 8 / 10e9),
        # 2 x 7 steps inside, 2 x 1 between; 16 GB, an eighth of it through a port, at 0.9
        ("tree", 14 * 1e-6 + 2 * 10e-6 + 16e9 / 0.9 / 8 / 10e9),
        # 2 x 7/8 x 8 GB inside, then 2 x 1/2 x 1 GB between
        ("hierarchical", 14 * 1e-6 + 2 * 7 / 8 * 8e9 / 100e9 + 2 * 10e-6 + 1e9 / 10e9),
    ],
)
def test_all_reduce_over_two_hosts(algorithm: Algorithm, expected: float) -> None:
    assert all_reduce(8e9, Group(16, 8), CLUSTER, algorithm) == pytest.approx(expected)


def test_the_fastest_algorithm_is_taken() -> None:
    """Trees have fewer steps, rings move less."""
    small, large, group = 1e3, 1e10, Group(64, 8)
    ways: tuple[Algorithm, ...] = ("ring", "tree", "hierarchical")
    for nbytes, best in ((small, "tree"), (large, "ring")):
        times = {way: all_reduce(nbytes, group, CLUSTER, way) for way in ways}
        assert min(times, key=lambda way: times[way]) == best
        assert all_reduce(nbytes, group, CLUSTER) == times[best]


def test_all_to_all_sends_inside_and_between_side_by_side() -> None:
    # of 16 GB a rank keeps 1, sends 7 inside at 100 GB/s, and 8 between at 10 GB/s
    assert all_to_all(16e9, Group(16, 8), CLUSTER) == pytest.approx(10e-6 + 0.8)
    assert all_to_all(16e9, Group(16, 8), CLUSTER, imbalance=1.5) == pytest.approx(10e-6 + 1.2)
    assert all_to_all(8e9, Group(8, 8), CLUSTER) == pytest.approx(1e-6 + 0.07)
    with refuses(ConfigError, "imbalance=0.5", "fullest rank receives"):
        all_to_all(1, Group(8, 8), CLUSTER, imbalance=0.5)


def test_a_token_goes_once_to_a_host_and_once_to_a_rank() -> None:
    """Two hosts of eight: half of 1.5 copies crosses; of three copies seven eighths move inside."""
    group = Group(16, 8)
    assert exchange(16e9, TokenCopies(3, 1.5), group, CLUSTER) == pytest.approx(10e-6 + 16e9 * 1.5 / 2 / 10e9)
    assert exchange(16e9, TokenCopies(30, 1), group, CLUSTER) == pytest.approx(
        1e-6 + 16e9 * 30 * 7 / 8 / 100e9
    )
    assert exchange(16e9, TokenCopies(1, 1), Group(1, 1), ALONE) == 0


def test_a_message_takes_its_link() -> None:
    assert send(1e9, between_hosts=False, cluster=CLUSTER) == pytest.approx(0.010001)
    assert send(1e9, between_hosts=True, cluster=CLUSTER) == pytest.approx(0.10001)


@pytest.mark.parametrize("collective", COLLECTIVES)
@SETTINGS
@given(nbytes=BYTES, more=BYTES, group=GROUPS)
def test_more_bytes_are_never_faster(collective: Any, nbytes: float, more: float, group: Group) -> None:
    assert 0 <= collective(nbytes, group, CLUSTER) <= collective(nbytes + more, group, CLUSTER)


@pytest.mark.parametrize("collective", COLLECTIVES)
@SETTINGS
@given(nbytes=BYTES, size=st.integers(1, 8))
def test_a_group_on_one_host_never_touches_the_network(collective: Any, nbytes: float, size: int) -> None:
    """`ALONE` has no link between hosts: using it is an error."""
    assert collective(nbytes, Group(size, size), ALONE) == collective(nbytes, Group(size, size), CLUSTER)
    assert (collective(nbytes, Group(size, size), ALONE) == 0) == (size == 1)


@pytest.mark.parametrize("collective", COLLECTIVES)
@SETTINGS
@given(nbytes=BYTES, size=st.integers(1, 64))
def test_a_group_with_one_rank_a_host_never_touches_the_links_inside(
    collective: Any, nbytes: float, size: int
) -> None:
    apart = round_cluster(hosts=1024, devices=1, inside=None)
    assert collective(nbytes, Group(size, 1), apart) == collective(nbytes, Group(size, 1), CLUSTER)


@pytest.mark.parametrize("collective", COLLECTIVES)
@SETTINGS
@given(nbytes=BYTES, group=GROUPS, factor=st.floats(1, 100))
def test_oversubscription_never_helps(collective: Any, nbytes: float, group: Group, factor: float) -> None:
    narrow = round_cluster(hosts=1024, oversubscription=factor)
    assert collective(nbytes, group, narrow) >= collective(nbytes, group, CLUSTER)
    if group.hosts == 1:
        assert collective(nbytes, group, narrow) == collective(nbytes, group, CLUSTER)


def test_groups_of_a_mesh_that_fills_hosts() -> None:
    #  pp 4 | dp_replicate 2 | dp_shard 2 | cp 2 | tp 4: tp and cp share a host of 8
    mesh = groups(4, Axes(dp_replicate=2, dp_shard=2, cp=2, tp=4, ep=2), CLUSTER)
    assert mesh == {
        "pp": Group(4, 1), "dp_replicate": Group(2, 1), "dp_shard": Group(2, 1), "cp": Group(2, 2),
        "tp": Group(4, 4), "shards": Group(4, 2), "loss": Group(8, 2), "ep": Group(2, 2),
        "ep_shard": Group(2, 1),
    }  # fmt: skip


def lying(axis: str, sizes: dict[str, int], devices: int) -> Group:
    """The group of an axis by listing all ranks of the mesh: that on the most hosts."""
    ranks = list(product(*(range(sizes[name]) for name in MESH)))
    position = MESH.index(axis)
    hosts: dict[tuple[int, ...], set[int]] = {}
    for rank, coordinates in enumerate(ranks):
        others = coordinates[:position] + coordinates[position + 1 :]
        hosts.setdefault(others, set()).add(rank // devices)
    size = sizes[axis]
    return Group(size, max(1, size // max(map(len, hosts.values()))))


@SETTINGS
@given(
    sizes=st.fixed_dictionaries({name: st.integers(1, 4) for name in MESH}), devices=st.integers(1, 9)
)  # fmt: skip
def test_groups_are_those_of_the_mesh_rank_by_rank(sizes: dict[str, int], devices: int) -> None:
    cluster = round_cluster(hosts=1024, devices=devices)
    others = {name: size for name, size in sizes.items() if name != "pp"}
    mesh = groups(sizes["pp"], Axes(**others), cluster)
    assert {name: mesh[name] for name in MESH} == {name: lying(name, sizes, devices) for name in MESH}


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with refuses(ConfigError, rule="its mesh has 16 ranks, and 1 x host have 8 devices"):
        groups(2, Axes(tp=8), ALONE)


def test_many_ranks_take_no_time() -> None:
    """16,384 ranks on hosts that the axes do not divide."""
    cluster = round_cluster(hosts=4096, devices=6)
    mesh = groups(16, Axes(dp_shard=128, tp=8), cluster)
    assert math.prod(mesh[name].size for name in MESH) == 16384
