"""The device at hand is a known one, and as many hosts as a run needs have it."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError
from penstock.planner.at_hand import cluster_at_hand, device_at_hand


@pytest.mark.parametrize(("world", "hosts"), [(1, 1), (4, 1), (5, 2), (64, 16)])
def test_a_cpu_is_a_device_of_known_hosts(world: int, hosts: int) -> None:
    cluster = cluster_at_hand(True, world)
    assert (cluster.device.name, cluster.hosts) == ("CPU", hosts)
    assert cluster.world >= world


def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    cluster = cluster_at_hand(False, 16)
    assert (cluster.device.name, cluster.hosts, cluster.devices) == ("H100", 2, 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX A6000")
    with pytest.raises(ConfigError, match=r"the device NVIDIA RTX A6000: .* penstock plan --calibrate"):
        cluster_at_hand(False, 1)


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert device_at_hand(True) is None
