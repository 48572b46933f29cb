"""How long messages and collectives take: a latency a step, and bytes over the bandwidth of the slower link.

A group of N ranks on h hosts, g = N / h of them on each, n bytes:

    ring           N - 1 steps, h - 1 of them between hosts; a rank passes (N - 1) / N n on. g rings run at
                   once, each through another device's port: between hosts a port carries 1 / g of it.
                   All-gather and reduce-scatter go round once, all-reduce twice
    tree           up and down: 2 (g - 1) steps inside, 2 ceil(log2 h) between; n up and n down,
                   at 0.9 of a ring's bandwidth
    hierarchical   reduce-scatter inside, ring all-reduce of n / g between, all-gather inside
    all-to-all     a rank keeps 1 / N of its n bytes, sends (g - 1) / N inside and (N - g) / N between, side
                   by side; the fullest rank receives `imbalance` times the mean
    exchange       of tokens, which go once to a host and once to a rank, however many of their experts it has

Messages are pipelined: links inside and between hosts work at the same time, so that a ring takes as long as
the slower of both. Ranks of other groups use other devices, and so other ports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from penstock.errors import ConfigError
from penstock.parallel.axes import MESH, Axes
from penstock.planner.hardware import Cluster
from penstock.planner.practice import TokenCopies

Algorithm = Literal["ring", "tree", "hierarchical"]
_TREE_SHARE = 0.9  # of a ring's bandwidth: NCCL's tuning table (src/graph/tuning.cc)


class Group(NamedTuple):
    """The ranks of a collective: how many, and how many of them share a host."""

    size: int
    on_host: int

    @property
    def hosts(self) -> int:
        return -(-self.size // self.on_host)


def groups(ranks: int, axes: Axes, cluster: Cluster) -> Mapping[str, Group]:
    """The group of each axis of a pipeline of `ranks` ranks, in the mesh's order: pp outermost, tp innermost.

    Ranks fill hosts one after the other. Where groups of an axis lie differently, the group counts that spans
    the most hosts. ``shards`` is FSDP's axis, dp_shard x cp; ``loss`` dp_replicate x dp_shard x cp; ``ep``
    the inner ranks of ``shards``, and ``ep_shard`` its outer ones, which shard the same experts.

    Raises ConfigError where the mesh has more ranks than the cluster has devices.
    """
    sizes = {"pp": ranks, **{name: axes.sizes[name] for name in MESH if name != "pp"}}
    world = math.prod(sizes.values())
    if world > cluster.world:
        rule = (
            f"its mesh has {world} ranks, and {cluster.hosts} x {cluster.host} have {cluster.world} devices"
        )
        raise ConfigError(f"pp={ranks}, {axes}", rule, "Take more hosts, or smaller axes")
    strides, inner = {}, 1
    for name in reversed(MESH):
        strides[name], inner = inner, inner * sizes[name]
    spans = {name: (strides[name], sizes[name]) for name in MESH}
    spans["shards"] = (strides["cp"], axes.shards)
    spans["loss"] = (strides["cp"], axes.shards * axes.dp_replicate)
    spans["ep"] = (strides["cp"], axes.ep)
    spans["ep_shard"] = (strides["cp"] * axes.ep, axes.shards // axes.ep)
    return {name: _group(stride, size, world, cluster.devices) for name, (stride, size) in spans.items()}


def _group(stride: int, size: int, world: int, devices: int) -> Group:
    """The ranks b, b + stride, ... for the b whose ranks lie on the most hosts, with `devices` on a host."""
    if stride % devices == 0:
        return Group(size, 1)
    if devices % (stride * size) == 0:  # hosts hold whole groups
        return Group(size, size)
    block = stride * size
    repeats = math.lcm(block, devices) // block  # after so many blocks, groups lie as before
    firsts = (
        start + offset for start in range(0, min(world, repeats * block), block) for offset in range(stride)
    )
    hosts = max(len({(first + rank * stride) // devices for rank in range(size)}) for first in firsts)
    return Group(size, max(1, size // hosts))


def all_reduce(nbytes: float, group: Group, cluster: Cluster, algorithm: Algorithm | None = None) -> float:
    """Seconds until each rank has the sum of every rank's `nbytes`.

    algorithm: None takes the fastest, as NCCL does
    """
    if group.size == 1:
        return 0.0
    ways: dict[str, Callable[[], float]] = {
        "ring": lambda: 2 * _ring(nbytes, group, cluster),
        "tree": lambda: _tree(nbytes, group, cluster),
        "hierarchical": lambda: _hierarchical(nbytes, group, cluster),
    }
    return ways[algorithm]() if algorithm else min(way() for way in ways.values())


def all_gather(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds until each rank has the whole of `nbytes`, of which each has 1 / size at first."""
    return _ring(nbytes, group, cluster)


def reduce_scatter(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds until each rank has 1 / size of the sum of every rank's `nbytes`."""
    return _ring(nbytes, group, cluster)


def all_to_all(nbytes: float, group: Group, cluster: Cluster, imbalance: float = 1.0) -> float:
    """Seconds until each rank has sent its `nbytes` to all, itself included.

    imbalance: bytes that the fullest rank receives, over the mean. Raises ConfigError below 1
    """
    if imbalance < 1:
        rule = "the fullest rank receives the mean at least"
        raise ConfigError(f"imbalance={imbalance}", rule, "Give 1 or more")
    size, on_host = group
    shares = {False: (on_host - 1) / size, True: (size - on_host) / size}
    return max(
        (
            cluster.link(between).latency + imbalance * nbytes * share / cluster.link(between).rate
            for between, share in shares.items()
            if share
        ),
        default=0.0,
    )


def exchange(nbytes: float, copies: TokenCopies, group: Group, cluster: Cluster) -> float:
    """Seconds until each token is where its experts are: once on each of their hosts, then on each rank.

    nbytes: of the tokens of a rank, each once. Tokens are spread evenly over hosts and ranks
    """
    sent = {False: copies.ranks * (1 - 1 / group.on_host), True: copies.hosts * (1 - 1 / group.hosts)}
    return max(
        (send(nbytes * times, between, cluster) for between, times in sent.items() if times), default=0.0
    )


def send(nbytes: float, between_hosts: bool, cluster: Cluster) -> float:
    """Seconds of a message from one device to another."""
    link = cluster.link(between_hosts)
    return link.latency + nbytes / link.rate


def _ring(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Each rank's share passes every other rank."""
    passed = nbytes * (group.size - 1) / group.size
    inner, outer = (group.size - group.hosts, group.hosts - 1)
    return _piped(passed, (inner, outer), group, cluster)


def _tree(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Up to a root and down again: a chain on each host, a binary tree over the hosts."""
    steps = (2 * (group.on_host - 1), 2 * math.ceil(math.log2(group.hosts)))
    return _piped(2 * nbytes / _TREE_SHARE, steps, group, cluster)


def _hierarchical(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Inside, then between hosts, then inside again; no phase overlaps the next."""
    inside, between = Group(group.on_host, group.on_host), Group(group.hosts, 1)
    return 2 * _ring(nbytes, inside, cluster) + 2 * _ring(nbytes / group.on_host, between, cluster)


def _piped(passed: float, steps: tuple[int, int], group: Group, cluster: Cluster) -> float:
    """Seconds in which a rank passes bytes on, in so many steps inside and between hosts.

    The links inside are used where ranks share a host, those between where there are several hosts.
    """
    inner, outer = steps
    waiting = moving = 0.0
    if group.on_host > 1:
        inside = cluster.link(between_hosts=False)
        waiting, moving = inner * inside.latency, passed / inside.rate
    if group.hosts > 1:
        between = cluster.link(between_hosts=True)
        waiting += outer * between.latency
        moving = max(moving, passed / group.on_host / between.rate)
    return waiting + moving
