"""The device at hand: which known device it is, and the cluster that a run on such devices has."""

from __future__ import annotations

import os

import torch

from penstock.errors import ConfigError
from penstock.planner.calibrate import CPU_THREADS, known_gpu
from penstock.planner.hardware import Cluster, Device, known, library, read_cluster

CPU = "CPU"


def cluster_at_hand(on_cpu: bool, world: int) -> Cluster:
    """The cluster of `world` devices like the one at hand: known hosts that have them.

    It depends on the device's name alone, so that all ranks of a run have the same one.

    Raises ConfigError for a GPU without known figures.
    """
    name = CPU if on_cpu else _known(torch.cuda.get_device_name())
    host, figures = next(pair for pair in library()["hosts"].items() if pair[1]["device"] == name)
    devices: int = figures["devices"]
    return read_cluster(f"{-(-world // devices)} x {host}")


def device_at_hand(on_cpu: bool) -> Device | None:
    """The GPU at hand, with its own memory; None for a CPU, whose memory its processes share."""
    if on_cpu or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties()
    peaks = {"float32": 1e12}  # nobody asks for its speed
    nbytes = float(properties.total_memory)
    return Device(name=properties.name, peaks=peaks, memory=nbytes, bandwidth=1e12, launch=0.0)


def is_cpu(device: Device) -> bool:
    """Whether a device is a process on a CPU."""
    return device.name == CPU or device.name.endswith(CPU_THREADS)


def check_at_hand(cluster: Cluster) -> None:
    """Raise ConfigError unless this machine has the devices of `cluster`, all of them.

    A CPU has as many devices as the cluster says: each is a process.
    """
    if cluster.hosts == 1 and is_cpu(cluster.device):
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    same = [name for name in names if cluster.device.name in (name, known_gpu(name))]
    if cluster.hosts == 1 and len(same) >= cluster.devices:
        return
    gpus = f"{len(names)} x {names[0]}" if names else "no GPU"
    rule = (
        f"it has {cluster.world} devices ({cluster.device.name}), and this machine has {os.cpu_count()} "
        f"processors and {gpus}: runs are measured on the cluster itself, if it is one host"
    )
    remedy = "Leave --measure out, or plan for this machine: penstock plan --calibrate"
    raise ConfigError(f"--measure on {cluster.hosts} x {cluster.host}", rule, remedy)


def _known(reported: str) -> str:
    if (name := known_gpu(reported)) is not None:
        return name
    rule = f"the known devices are {', '.join(known('devices'))}, and a plan needs the figures of this one"
    raise ConfigError(f"the device {reported}", rule, "Measure it: penstock plan --calibrate --out FILE, and "
                      "give --cluster FILE")  # fmt: skip
