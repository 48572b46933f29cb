"""Clusters with round figures, to reckon with by hand."""

from __future__ import annotations

from typing import Any

from penstock.planner.hardware import Cluster, read_cluster

ROUND: dict[str, Any] = {
    "hosts": 4,
    "devices": 8,
    "device": {
        "name": "round",
        "peaks": {"bfloat16": 100e12, "float32": 10e12},
        "memory": "80 GB",
        "bandwidth": "1 TB/s",
        "launch": "10 us",
        "efficiencies": {"matmul": 0.5, "attention": 0.25, "memory": 0.8, "half": 1e9},
    },
    "inside": {"latency": "1 us", "bandwidth": "200 GB/s", "efficiency": 0.5},
    "between": {"latency": "10 us", "bandwidth": "20 GB/s", "efficiency": 0.5},
    "host_memory": "1 TB",
    "host_link": {"latency": "10 us", "bandwidth": "10 GB/s"},
    "disk": "1 GB/s",
}


def round_cluster(**changes: Any) -> Cluster:
    """100 GB/s inside hosts and 10 GB/s between them; a device of 100 TFLOP/s and 1 TB/s."""
    return read_cluster(ROUND | changes)
