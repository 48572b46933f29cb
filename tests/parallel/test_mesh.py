"""Meshes: their axes, how processes join, and what keeps them from it."""

from __future__ import annotations

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from penstock import Axes
from penstock.errors import ConfigError, StalledPeerError, WorldSizeError
from penstock.parallel import mesh
from penstock.parallel.axes import MESH
from penstock.parallel.mesh import init_process_group
from support.mesh import build_pipe, error_of, same_on_all
from support.pool import Pool
from support.refusals import refuses


def test_the_mesh_has_every_axis_but_ep_which_is_folded() -> None:
    assert sorted([*MESH, "ep"]) == sorted(["pp", *Axes().sizes])


@pytest.mark.parametrize("options", [{}, {"transport": "local"}])
def test_axes_above_one_need_other_processes(options: dict[str, Any]) -> None:
    for axes in (Axes(dp_shard=2), Axes(cp=2, tp=-1)):
        with refuses(WorldSizeError, "in one process", remedy="Start 4 processes"):
            build_pipe("llama", 2, axes, options)
    with refuses(ConfigError, "ep=2 with dp_shard=1 and cp=1", remedy="ep to 1"):
        build_pipe("mixtral", 2, Axes(ep=2), options)


def refused_meshes(cases: list[tuple[tuple[int, ...], tuple[str, ...], int, Axes]]) -> list[str]:
    """Meshes of the caller's own, by sizes and names, with ranks and axes that do not fit them."""
    found = []
    for sizes, names, ranks, axes in cases:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        found.append(error_of(lambda: build_pipe("llama", ranks, axes, {"mesh": mesh})))  # noqa: B023
    return found


MESHES: list[tuple[tuple[int, ...], tuple[str, ...], int, Axes, str]] = [
    ((2, 2), ("pp", "dp_shard"), 2, Axes(dp_shard=2), "ConfigError: axes and a mesh with the axes pp, dp"),
    ((2, 1, 1, 2, 1), MESH, 2, Axes(dp_shard=2),
     "WorldSizeError: dp_shard=2, cp=1 and a mesh .* Set dp_shard to 1 and cp to 2, or leave mesh out"),
    ((2, 1, 2, 1, 1), MESH, 1, Axes(),
     "WorldSizeError: pp=1, dp_shard=1 and a mesh .* Set ranks to 2 and dp_shard to 2"),
    ((1, 1, 2, 2, 1), ("dp_replicate", "tp", "pp", "dp_shard", "cp"), 2, Axes(dp_shard=2),
     "ConfigError: axes and a mesh .* in this order"),
]  # fmt: skip


def test_a_mesh_unlike_the_axes_is_refused(pool: Pool) -> None:
    found = same_on_all(pool.run(4, refused_meshes, [case[:4] for case in MESHES]))
    for words, (*_, message) in zip(found, MESHES, strict=True):
        assert re.match(message, words), words


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: torch's traceback, "The server socket has failed to listen on any local network address"."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        with refuses(ConfigError, f"MASTER_PORT={port}", "another process", "--master-port"):
            init_process_group(torch.device("cpu"), 1.0)


def test_a_network_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: "Unable to find interface for", in a traceback of torch."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense")
    with refuses(
        ConfigError, "GLOO_SOCKET_IFNAME=nonsense", f"{socket.gethostname()} has no network interface"
    ):
        init_process_group(torch.device("cpu"), 1.0)


# _START_SECONDS, _SPARE: shorter waits
def test_a_store_that_does_not_answer_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: the process hung for ever, where that of rank 0 was stopped: torch waits for its answer."""
    monkeypatch.setattr(mesh, "_START_SECONDS", 0.3)
    monkeypatch.setattr(mesh, "_SPARE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system takes connections for it
        port = str(silent.getsockname()[1])
        world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        with refuses(ConfigError, f"MASTER_PORT={port}", "rank 0 does not answer"):
            init_process_group(torch.device("cpu"), 0.3)


# _attempt, in threads of one process instead of under agents
def test_all_processes_of_an_attempt_have_one_name_for_it_whatever_their_agents_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.5.0: agents of torchrun count restarts each by itself, and ranks with other counts never met.

    The store is that of all attempts, and has what ranks of the earlier ones asked and heard.
    """
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    store, names = HashStore(), set[str]()
    with ThreadPoolExecutor(3) as threads:
        for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
            asked = []
            for rank in order:
                asked.append(threads.submit(mesh._attempt, store, rank, 3, 20.0))
                time.sleep(0.05)
            (name,) = {each.result(20) for each in asked}
            assert name not in names
            names.add(name)


# _attempt, in one process instead of under an agent
def test_the_ranks_of_one_agent_take_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert mesh._attempt(HashStore(), 1, 2, 20.0) == "3"


# _attempt, in one process instead of under an agent
def test_a_rank_0_that_does_not_name_the_attempt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with refuses(StalledPeerError, "rank 1 waiting for rank 0", "come within 0"):
        mesh._attempt(store, 1, 2, 0.2)
