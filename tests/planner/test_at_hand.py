"""The device at hand is a known one, and as many hosts as a run needs have it."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError
from penstock.planner.at_hand import check_at_hand, cluster_at_hand, device_at_hand
from penstock.planner.hardware import Device, read_cluster
from support.refusals import refuses


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
    with refuses(ConfigError, "the device NVIDIA RTX A6000", "known devices", "penstock plan --calibrate"):
        cluster_at_hand(False, 1)


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert device_at_hand(True) is None


@pytest.mark.parametrize("devices", [1, 2, 64])
def test_a_cpu_has_as_many_devices_as_a_run_asks_for(devices: int) -> None:
    check_at_hand(read_cluster({"host": "CPU host", "devices": devices}))
    calibrated = {"name": "2 threads of a CPU", "peaks": {"float32": 1e11}, "bandwidth": 1e10, "launch": 0}
    cpu = read_cluster({"host": "CPU host", "devices": devices})
    device = Device.model_validate({**calibrated, "memory": 1e9})
    check_at_hand(cpu.model_copy(update={"device": device, "host": "calibrated"}))


@pytest.mark.parametrize(
    ("cluster", "gpus", "fits"),
    [
        ("DGX H100", 8, True), ("DGX H100", 1, False), ("2 x DGX H100", 16, False), ("DGX A100", 8, False),
        ("2 x CPU host", 0, False), ("DGX H100", 0, False),
    ],
)  # fmt: skip
def test_runs_are_measured_on_the_cluster_itself(
    cluster: str, gpus: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    if fits:
        check_at_hand(read_cluster(cluster))
        return
    here = f"{gpus} x NVIDIA H100" if gpus else "no GPU"
    with refuses(ConfigError, rule=here, remedy="Leave --measure out"):
        check_at_hand(read_cluster(cluster))
