"""Clusters from names, files and mappings: known figures fill in, whatever is wrong is one error at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.planner.hardware import Device, known, library, read_cluster, to_yaml
from penstock.yaml_reader import parse_yaml
from support.clusters import ROUND, round_cluster
from support.refusals import refuses

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", known("hosts"))
def test_every_known_host_is_a_cluster(name: str) -> None:
    cluster = read_cluster(f"3 x {name}")
    assert (cluster.hosts, cluster.host, cluster.world) == (3, name, 3 * cluster.devices)
    assert cluster.link(between_hosts=True).rate <= cluster.link(between_hosts=False).rate
    assert read_cluster(name.lower().replace(" ", "-")) == read_cluster(name)


@pytest.mark.parametrize("name", known("devices"))
def test_every_known_device_may_stand_in_a_cluster(name: str) -> None:
    device = read_cluster(ROUND | {"device": name}).device
    assert device.name == name
    assert device.memory < 300 * 2**30
    assert device.bandwidth < max(device.peaks.values())


@pytest.mark.parametrize("kind", ["devices", "hosts"])
def test_every_figure_of_the_library_has_its_source(kind: str) -> None:
    for name, entry in library()[kind].items():
        figures = entry.keys() - {"sources"} - ({"device"} if kind == "hosts" else set())
        assert entry["sources"].keys() == figures, name
        assert all(entry["sources"].values()), name


def test_peaks_are_of_dense_products() -> None:
    """Data sheets print those with sparsity, which are twice as high."""
    h100, a100 = read_cluster("DGX H100").device, read_cluster("DGX A100").device
    assert (h100.peak("bfloat16"), a100.peak("bfloat16")) == (989.4e12, 312e12)
    assert h100.peak("float8_e4m3fn") == 1979e12
    assert read_cluster("HGX H800").device.peaks == h100.peaks
    with refuses(ConfigError, "device A100", "no peak for float8_e5m2"):
        a100.peak("float8_e5m2")


def test_links_count_one_direction() -> None:
    cluster = read_cluster("2 x DGX H100")
    assert cluster.inside is not None
    assert cluster.between is not None
    assert (cluster.inside.bandwidth, cluster.between.bandwidth) == (450e9, 50e9)


def test_a_file_says_what_differs_from_a_known_host(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "hosts: 8\nhost: dgx h100\noversubscription: 2\nbetween: {bandwidth: 200 Gbit/s}\n"
        "device: {memory: 64 GB, efficiencies: {matmul: 0.7}}\n"
    )
    cluster, host = read_cluster(path), read_cluster("8 x DGX H100")
    assert cluster.device.memory == 64e9
    assert cluster.device.efficiencies.matmul == 0.7
    assert cluster.device.efficiencies.attention == host.device.efficiencies.attention
    assert cluster.device.peaks == host.device.peaks
    assert cluster.link(between_hosts=True).rate == 25e9 * 0.9 / 2
    assert cluster.link(between_hosts=False) == host.link(between_hosts=False)
    assert read_cluster(str(path)) == cluster
    assert read_cluster({"hosts": 8, "host": "DGX H100", "device": "H200"}).device == Device.model_validate(
        read_cluster("DGX H200").device.model_dump()
    )


def test_hosts_of_a_users_own_need_no_known_name() -> None:
    cluster = round_cluster(host="attic")
    assert cluster.host == "attic"
    assert read_cluster(cluster.model_dump()) == cluster


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"hosts": 0}, "hosts=0", "equal to 1", ""),
    ({"hosts": 10**7}, "hosts", "10000000 is more", ""),
    ({"hosts": True}, "hosts=True", "integer", ""),
    ({"inside": {"latency": 0, "bandwidth": 0}}, "inside.bandwidth", "0 is outside of what hardware has", ""),
    ({"inside": {"latency": "2", "bandwidth": 1e9}}, "inside.latency", "'2' is no amount", "Write 2 us"),
    ({"between": {"latency": 4, "bandwidth": 1e9}}, "between.latency", "4 is outside", ""),
    ({"disk": "400 gb/s"}, "disk", "'400 gb/s' is no amount", "Gbit/s"),
    ({"host_memory": -1}, "host_memory", "-1 is outside", ""),
    ({"host_memory": float("nan")}, "host_memory", "nan is outside", ""),
    ({"host_memory": float("inf")}, "host_memory", "inf is outside", ""),
    ({"oversubscription": 0.5}, "oversubscription=0.5", "equal to 1", ""),
    ({"device": "H101"}, "device 'H101'", "no such device", "Take H100"),
    ({"device": {"name": "H100", "memory": 80}}, "device.memory", "80 is outside", ""),
    ({"device": {"name": "H100", "bandwith": 1}}, "device.bandwith=1", "no such key", "you mean bandwidth"),
    (
        {"device": {"name": "H100", "peaks": {"bf16": 1e12}}},
        "device.peaks", "'bf16' is no dtype", "you mean bfloat16",
    ),
    ({"device": {"name": "H100", "peaks": {"float32": 989}}}, "device.peaks.float32", "989 is outside", ""),
    ({"device": {"name": "H100", "efficiencies": {"half": -1}}},
     "device.efficiencies.half=-1", "equal to 0", ""),
    ({"device": 3}, "device=3", "holds keys", ""),
    ({"device": {"name": "mine", "memory": 1e9}}, "cluster", "device.peaks is missing", ""),
    ({"inside": None}, "cluster", "need inside", ""),
    ({"between": None}, "cluster", "need between", ""),
    ({"gpus": 8}, "gpus=8", "no such key", ""),
    ({"host": "DGX H10", "device": None}, "device=None", "holds keys", ""),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "value", "rule", "remedy"), REFUSED)
def test_what_no_hardware_has_is_refused(changes: dict[str, Any], value: str, rule: str, remedy: str) -> None:
    with refuses(ConfigError, value, rule, remedy):
        round_cluster(**changes)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        round_cluster(hosts=0, disk=-1, gpus=8)
    assert [key in str(caught.value) for key in ("3 things", "hosts=0", "disk", "gpus")] == [True] * 4


@pytest.mark.parametrize(
    ("source", "value", "rule"),
    [
        ("8 x DGX H10", "host 'DGX H10'", "no such host"),
        ("dgx h900", "host 'dgx h900'", "neither a known host nor a file"),
        ("nothing.yaml", "cluster nothing.yaml", "cannot be read (No such file or directory)"),
        ("", "cluster ''", "empty path"),
        ("0 x DGX H100", "hosts=0", "equal to 1"),
        ({"host": "mine"}, "host 'mine'", "no such host"),
        ({}, "cluster", "devices is missing"),
    ],
)
def test_what_names_no_cluster_is_refused(source: Any, value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        read_cluster(source)


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("- 8\n")
    with refuses(ConfigError, rule="it holds no keys, but"):
        read_cluster(tmp_path / "cluster.yaml")


def test_a_link_that_the_cluster_lacks_is_an_error() -> None:
    alone = round_cluster(hosts=1, devices=1, inside=None, between=None)
    for between, key in ((False, "inside"), (True, "between")):
        with refuses(ConfigError, "cluster of 1 x host", "no link", f"Give {key}"):
            alone.link(between)


@SETTINGS
@given(
    hosts=st.integers(1, 10**6), devices=st.integers(1, 10**4), memory=st.floats(1e6, 1e16),
    bandwidth=st.floats(1e4, 1e15), latency=st.floats(0, 1), share=st.floats(0.01, 1),
)  # fmt: skip
def test_a_cluster_is_what_its_own_yaml_says(
    hosts: int, devices: int, memory: float, bandwidth: float, latency: float, share: float
) -> None:
    link = {"latency": latency, "bandwidth": bandwidth, "efficiency": share}
    cluster = round_cluster(hosts=hosts, devices=devices, host_memory=memory, inside=link, between=link)
    assert read_cluster(parse_yaml(yaml.safe_dump(cluster.model_dump()))) == cluster
    text = to_yaml(cluster)
    again = read_cluster(parse_yaml(text))
    assert (again.hosts, again.devices, again.device.name) == (hosts, devices, "round")
    assert again.host_memory == pytest.approx(memory, rel=1e-3)
    # two figures of four digits
    assert again.link(hosts > 1).rate == pytest.approx(bandwidth * share, rel=2e-3)
    assert again.link(hosts > 1).latency == pytest.approx(latency, rel=1e-3, abs=1e-12)


def test_a_written_cluster_has_units() -> None:
    text = to_yaml(read_cluster("8 x DGX H100"))
    assert [
        line in text for line in ("bfloat16: 989.4 TFLOP/s", "bandwidth: 3.35 TB/s", "latency: 4 us")
    ] == [True] * 3
    assert read_cluster(parse_yaml(text)).link(between_hosts=True).rate == 45e9
