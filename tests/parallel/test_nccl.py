"""NCCL without NCCL: its variables, communicators and hardware queues, and what takes its place."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.errors import ConfigError
from penstock.parallel import nccl, world
from penstock.parallel.world import World, WorldOptions, open_world
from penstock.runtime.ranks import Ranks
from penstock.runtime.transport.groups import Groups
from penstock.runtime.transport.interface import LocalTransport
from penstock.schedule import build
from support.refusals import refuses

LOOPED = build("1f1b", ranks=16, microbatches=32, stages_per_rank=2)


def test_variables_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    nccl.set_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    nccl.set_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")


def test_communicators_of_a_rank() -> None:
    assert nccl.communicators(LOOPED, batched=True) == 1
    assert nccl.communicators(LOOPED, batched=False) == 8
    assert nccl.describe(LOOPED, "auto").startswith("1 communicator a rank")
    assert nccl.describe(LOOPED, "channels").startswith("up to 8 communicators a rank")


@pytest.mark.usefixtures("one_process")
def test_a_world_on_nccl_asks_for_enough_hardware_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is made, and for the schedule of another number of microbatches."""

    class OnNCCL(Groups):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.backend = "nccl"

    def refused(schedule: Any, batched: bool) -> None:
        raise ConfigError("too few", "hardware queues", "Set 32")

    monkeypatch.setattr(world, "Groups", OnNCCL)
    monkeypatch.setattr(world, "check_connections", refused)
    schedule = build("1f1b", ranks=1, microbatches=2)
    with refuses(ConfigError, "too few"):
        open_world(schedule, WorldOptions(device="cpu"))
    made = World((0,), torch.device("cpu"), LocalTransport(None), Ranks())
    made.check(schedule)
    with refuses(ConfigError, "too few"):
        replace(made, on_nccl=True).check(schedule)


@pytest.mark.parametrize(("gpus", "shared"), [(["a", "b", "c"], False), (["a", "b", "a"], True)])
def test_all_ranks_find_out_where_two_share_a_gpu(gpus: list[str], shared: bool) -> None:
    store = HashStore()

    def ask(rank: int) -> bool:
        return nccl.shares_a_gpu(store, rank, len(gpus), gpus[rank])

    with ThreadPoolExecutor(len(gpus)) as ranks:
        assert list(ranks.map(ask, range(len(gpus)))) == [shared] * len(gpus)


def test_gloo_takes_the_place_of_nccl_on_a_shared_gpu_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "gpu_name", lambda device: "one")
    store, said = HashStore(), list[str]()

    def choose(rank: int) -> str:
        return nccl.backend_of_gpus(store, rank, 2, torch.device("cuda", 0), said.append)

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(choose, range(2))) == ["gloo", "gloo"]
    (line,) = said
    assert "share a GPU" in line
    assert "\n" not in line
    assert nccl.backend_of_gpus(HashStore(), 0, 1, torch.device("cuda", 0), said.append) == "nccl"
    assert len(said) == 1
