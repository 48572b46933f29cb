"""What calibration measures is a cluster that can be written and read; its line is the least squares'.

No figure is asserted: how fast a test machine is differs from moment to moment. `benchmarks/calibration.py`
compares predicted and measured products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.planner import calibrate as calibration
from penstock.planner.calibrate import calibrate, fit, known_gpu
from penstock.planner.communication import Group, all_reduce
from penstock.planner.hardware import read_cluster, to_yaml
from penstock.planner.roofline import op_seconds
from penstock.planner.work import OpWork
from penstock.yaml_reader import parse_yaml
from support.pool import Pool
from support.refusals import refuses

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True)


# _SHARES: of the two seconds that a calibration takes at least
@contextmanager
def hastily() -> Iterator[None]:
    """All that is measured is measured as few times as it may be."""
    with pytest.MonkeyPatch.context() as patch:
        shares = {name: 0.1 * share for name, share in calibration._SHARES.items()}
        patch.setattr(calibration, "_SHARES", shares)
        yield


@SETTINGS
@given(start=st.floats(0, 1), rate=st.floats(1, 1e12))
def test_a_line_is_found_again(start: float, rate: float) -> None:
    sizes = [rate * seconds for seconds in (0.01, 0.1, 1.0, 10.0)]
    line = fit(sizes, [start + size / rate for size in sizes])
    assert line.start == pytest.approx(start, rel=1e-6, abs=1e-9)
    assert line.rate == pytest.approx(rate, rel=1e-6)


@SETTINGS
@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e3)), min_size=1, max_size=8))
def test_a_line_never_falls_nor_begins_below_nothing(points: list[tuple[float, float]]) -> None:
    sizes, times = zip(*points, strict=True)
    line = fit(sizes, times)
    assert 0 < line.rate <= 2.001 * max(size / seconds for size, seconds in points)
    assert line.start >= 0


def test_a_delay_of_the_small_sizes_does_not_make_the_rate_absurd() -> None:
    """A machine with other work: the small product took as long as one 64 times as large."""
    line = fit([5e5, 32e6], [1e-3, 1.0000001e-3])
    assert line.rate == pytest.approx(2 * 32e6 / 1e-3, rel=1e-3)


def test_one_process_is_a_device_without_links(tmp_path: Path) -> None:
    with hastily():
        cluster = calibrate(2, "cpu", tmp_path)
    assert (cluster.hosts, cluster.devices, cluster.inside, cluster.between) == (1, 1, None, None)
    assert set(cluster.device.peaks) == {"float32", "bfloat16"}
    assert 0 <= cluster.device.efficiencies.exposed <= 1
    assert op_seconds(OpWork("matmul", "float32", 2e9, 12e6), cluster.device) > cluster.device.launch
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "cluster.yaml"
    path.write_text(to_yaml(cluster))
    again = read_cluster(path)
    assert again.device.peak("float32") == pytest.approx(cluster.device.peak("float32"), rel=1e-3)
    assert again.disk == pytest.approx(cluster.disk, rel=1e-3)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("AMD Instinct MI300X", "MI300X"), ("NVIDIA H100 PCIe", None), ("NVIDIA RTX A6000", None),
        ("NVIDIA A100-PCIE-40GB", None), ("NVIDIA H100 NVL", None),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_the_name_that_its_driver_reports(reported: str, name: str | None) -> None:
    assert known_gpu(reported) == name


def test_too_little_time_is_refused() -> None:
    for seconds in (0, -1, float("nan")):
        with refuses(ConfigError, rule="measuring takes 2 seconds"):
            calibrate(seconds)


def measured() -> str:
    with hastily():
        return to_yaml(calibrate(2, "cpu"))


def test_ranks_of_a_job_measure_their_links_and_agree(pool: Pool) -> None:
    """Two processes of one host: a link inside, none between, and half of the memory for each."""
    first, second = pool.run(2, measured)
    assert first == second
    cluster = read_cluster(parse_yaml(first))
    assert (cluster.hosts, cluster.devices, cluster.between) == (1, 2, None)
    assert all_reduce(8 * 2**20, Group(2, 2), cluster) > 0
    assert cluster.device.memory < cluster.host_memory * 0.75


def on_two_hosts(per_host: int) -> str:
    """As if each `per_host` ranks had a host of their own."""
    name = f"host-{dist.get_rank() // per_host}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: name)
        return measured()


def test_links_between_hosts_are_measured_across_them(pool: Pool) -> None:
    results = pool.run(4, on_two_hosts, 2)
    assert len(set(results)) == 1
    cluster = read_cluster(parse_yaml(results[0]))
    assert (cluster.hosts, cluster.devices) == (2, 2)
    assert cluster.link(between_hosts=True).rate > 0
    assert cluster.link(between_hosts=False).rate > 0


def uneven() -> str:
    with pytest.raises(ConfigError) as caught:
        on_two_hosts(2)
    return str(caught.value)


def test_hosts_with_different_numbers_of_processes_are_refused(pool: Pool) -> None:
    for message in pool.run(3, uneven):
        assert message.startswith("host-0: 2, host-1: 1: hosts of a cluster have equal devices")
