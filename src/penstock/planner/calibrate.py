"""Measure the machine at hand: its products, attention, memory, links and disk, as a `Cluster`.

    torchrun --nproc-per-node 4 ...     calibrate() in every process: links are measured by all-reduces
    python ...                          one process: a cluster of one device, without links

A process is a device: on a CPU each counts the threads that it has now. Of a GPU that devices.yaml knows,
peaks, memory and bandwidth are the data sheet's, and their shares are measured; of any other device the
measured rates are the peaks.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from penstock.errors import ConfigError
from penstock.planner.hardware import Cluster, known, read_cluster
from penstock.runtime.device.free_memory import free_on, room_in_memory

MIB = 1 << 20
CPU_THREADS = "threads of a CPU"  # a device, by their number
_CACHE = 32 * MIB  # that a core of a CPU may fill
_SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of square products
_SHARES = {"matmul": 0.4, "attention": 0.15, "memory": 0.15, "links": 0.2, "disk": 0.1}  # of the time


class Fit(NamedTuple):
    """Seconds of sizes, as a line: a size of 0 takes `start`, and `rate` sizes more take a second more."""

    start: float
    rate: float


def fit(sizes: Sequence[float], times: Sequence[float]) -> Fit:
    """The line through the times with the least relative errors, which never falls nor begins below 0.

    Of a single size all time is taken for the rate. Where other work delays the small sizes, the line may be
    all but flat: its rate is at most twice the best that any size reached.
    """
    weights = [1 / seconds**2 for seconds in times]
    total = sum(weights)
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * seconds for w, seconds in zip(weights, times, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
    rise = sum(
        w * (size - mean_size) * (seconds - mean_time)
        for w, size, seconds in zip(weights, sizes, times, strict=True)
    )
    slope = rise / spread if spread > 0 else 0.0
    steepest = min(seconds / size for size, seconds in zip(sizes, times, strict=True))
    start = mean_time - max(slope, steepest / 2) * mean_size
    if slope <= 0 or start < 0:  # through the origin
        squares = sum(w * size**2 for w, size in zip(weights, sizes, strict=True))
        slope = sum(w * size * t for w, size, t in zip(weights, sizes, times, strict=True)) / squares
        start = 0.0
    return Fit(start, 1 / max(slope, steepest / 2))


def calibrate(
    seconds: float = 45.0, device: torch.device | str | None = None, folder: str | Path | None = None
) -> Cluster:
    """Measure this machine. Collective where a process group exists; every rank returns the same cluster.

    Args:
        seconds: about how long it may take
        device: left out, the current GPU, or the CPU where there is none
        folder: on the disk to measure; left out, that of temporary files

    Raises ConfigError for fewer than 2 seconds, and where hosts have different numbers of processes.
    """
    if not seconds >= 2:
        raise ConfigError(f"seconds={seconds}", "measuring takes 2 seconds at least", "Give 30, or more")
    at = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    budget = {name: share * seconds for name, share in _SHARES.items()}
    names = _gathered(socket.gethostname())
    layout = {
        name: [rank for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)
    }
    per_host = {len(ranks) for ranks in layout.values()}
    if len(per_host) > 1:
        counts = ", ".join(f"{name}: {len(ranks)}" for name, ranks in layout.items())
        raise ConfigError(counts, "hosts of a cluster have equal devices", "Start as many processes on each")
    devices = per_host.pop()
    tree: dict[str, Any] = {
        "hosts": len(layout),
        "host": "calibrated",
        "devices": devices,
        "device": _device(at, budget, devices),
        **_links(at, list(layout.values()), budget["links"]),
        "host_memory": room_in_memory(),
        "host_link": _host_link(at),
        "disk": _disk_rate(Path(folder or tempfile.gettempdir()), budget["disk"]),
    }
    return read_cluster(_gathered(tree)[0])


# ---- timing


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock of ops: of one thread on a CPU the processor's time, so that other work does not count."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _time(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """The median of the seconds of `run`: as many as the budget allows, 3 to 50, after two that warm up."""
    taken: list[float] = []
    clock = clock_of(device)
    end = time.perf_counter() + budget
    for run_index in range(52):
        begin = clock()
        run()
        _wait(device)
        if run_index > 1:
            taken.append(clock() - begin)
        if len(taken) >= 3 and time.perf_counter() > end:
            break
    return median(taken)


def _empty_op(device: torch.device) -> float:
    """Seconds of an op on next to nothing. Of many, as ops follow each other without a wait between."""
    tensor, calls = torch.zeros(16, device=device), 200

    def run() -> None:
        for _ in range(calls):
            tensor.add_(1)

    return _time(run, device, 0.1) / calls


# ---- the device


def _device(at: torch.device, budget: Mapping[str, float], devices: int) -> dict[str, Any]:
    launch = _empty_op(at)
    fits = {_name(dtype): _products(at, dtype, budget["matmul"]) for dtype in _dtypes(at)}
    fastest = max(fits, key=lambda name: fits[name].rate)
    attended = torch.bfloat16 if at.type == "cuda" else torch.float32
    attention = _attention_rate(at, attended, budget["attention"])
    moved = _memory_rate(at, budget["memory"] / 2)
    figures = _sheet(at) or {
        "name": _own_name(at),
        "peaks": {name: line.rate for name, line in fits.items()},
        "memory": (free_on(at) or room_in_memory()) / (1 if at.type == "cuda" else devices),
        "bandwidth": moved,
    }
    peaks = figures["peaks"]
    shares = {
        "matmul": min(1.0, fits[fastest].rate / peaks[fastest]),
        "attention": min(1.0, attention / peaks[_name(attended)]),
        "memory": min(1.0, moved / figures["bandwidth"]),
        "half": max(0.0, fits[fastest].start - launch) * fits[fastest].rate,
        "exposed": _exposed(at, fits["float32"], moved, budget["memory"] / 2) if at.type == "cpu" else 0.0,
    }
    return {**figures, "launch": launch, "efficiencies": shares}


def _sheet(at: torch.device) -> dict[str, Any] | None:
    """The data sheet's figures of a GPU that is known."""
    if at.type != "cuda" or (name := known_gpu(torch.cuda.get_device_name(at))) is None:
        return None
    device = read_cluster({**_PLAIN, "device": name}).device
    return device.model_dump(include={"name", "peaks", "memory", "bandwidth"})


_PLAIN: dict[str, Any] = {
    "devices": 1, "host_memory": "1 GB", "host_link": {"latency": 0, "bandwidth": "1 GB/s"}, "disk": "1 GB/s",
}  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(at: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16, *((torch.float16,) if at.type == "cuda" else ()))


def _own_name(at: torch.device) -> str:
    if at.type == "cuda":
        return torch.cuda.get_device_name(at)
    return f"{torch.get_num_threads()} {CPU_THREADS}"


def known_gpu(reported: str) -> str | None:
    """The known device of a GPU's own name, which has all of its words: H100 of NVIDIA H100 80GB HBM3."""
    words = set(reported.replace("-", " ").upper().split())
    if words & {"PCIE", "NVL"}:  # slower ones, whose data sheets are not in devices.yaml
        return None
    return max(
        (name for name in known("devices") if set(name.upper().split()) <= words), key=len, default=None
    )


def _products(at: torch.device, dtype: torch.dtype, budget: float) -> Fit:
    """Square products, from small ones to the largest that a part of the budget allows."""
    sizes: list[float] = []
    times: list[float] = []
    part = budget / len(_dtypes(at)) / len(_SIDES)

    def affordable(side: int) -> bool:
        """Whether five runs fit: at twice the side a product takes eight times as long."""
        return not times or 5 * 8 * times[-1] < 4 * part

    for side in takewhile(affordable, _SIDES):
        a, b = (torch.randn(side, side, device=at).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        sizes.append(2.0 * side**3)
        times.append(_time(partial(torch.mm, a, b, out=out), at, part))
    return fit(sizes, times)


def _attention_rate(at: torch.device, dtype: torch.dtype, budget: float) -> float:
    """FLOP/s of attention: two products forward and five backward, as fused attention has."""
    rows, heads, length, width = (1, 4, 512, 64) if at.type == "cpu" else (4, 16, 4096, 128)
    query, key, value = (
        torch.randn(rows, heads, length, width, device=at, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(rows, heads, length, width, device=at, dtype=dtype)

    def run() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(query, key, value), (query, key, value), gradient)

    product = 2.0 * rows * heads * length**2 * width
    return (2 + 5) * product / _time(run, at, budget)


def _memory_rate(at: torch.device, budget: float) -> float:
    """Bytes/s of ops that only move: an addition and a norm, of activations that no cache holds on a GPU."""
    count = (16 if at.type == "cpu" else 256) * MIB // 4
    a, b = (torch.randn(count // 1024, 1024, device=at) for _ in range(2))
    out = torch.empty_like(a)
    added = _time(lambda: torch.add(a, b, out=out), at, budget / 2)
    normed = _time(lambda: F.layer_norm(a, (1024,)), at, budget / 2)
    return (3 + 2) * a.nbytes / (added + normed)


def _exposed(at: torch.device, line: Fit, moved: float, budget: float) -> float:
    """Of the bytes of products, the share of the time that computing does not hide.

    Of products as a layer has them: of few rows, each with a matrix that no cache holds any more.

    line: FLOP/s of products whose operands are in the caches
    moved: bytes/s of the memory
    """
    rows, side, count = 128, 1024, 4 * _CACHE // (4 * 1024**2)
    activations = torch.randn(rows, side, device=at)
    weights = [torch.randn(side, side, device=at) for _ in range(count)]
    out = torch.empty(rows, side, device=at)

    def run() -> None:
        for weight in weights:
            torch.mm(activations, weight, out=out)

    computing = line.start + 2.0 * rows * side**2 / line.rate
    moving = (activations.nbytes + weights[0].nbytes + out.nbytes) / moved
    shorter, longer = sorted((computing, moving))
    return min(1.0, max(0.0, (_time(run, at, budget) / count - longer) / shorter))


def _host_link(at: torch.device) -> dict[str, float]:
    sizes, times = (4096, 64 * MIB), []
    for nbytes in sizes:
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=at.type == "cuda")
        there = torch.zeros(nbytes, dtype=torch.uint8, device=at)
        times.append(_time(partial(there.copy_, host, non_blocking=True), at, 0.2))
    line = fit(sizes, times)
    return {"latency": min(line.start, 1.0), "bandwidth": line.rate}


# ---- links and disk


def _gathered(value: Any) -> list[Any]:
    """Every rank's value; this process's own without a group."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _links(at: torch.device, hosts: list[list[int]], budget: float) -> dict[str, Any]:
    """The links inside hosts and between them, each by all-reduces of all groups at once."""
    links: dict[str, Any] = {}
    if len(hosts[0]) > 1:
        links["inside"] = _ring_link(at, hosts, budget / 2)
    if len(hosts) > 1:
        links["between"] = _ring_link(at, [list(ranks) for ranks in zip(*hosts, strict=True)], budget / 2)
    return links


def _ring_link(at: torch.device, members: list[list[int]], budget: float) -> dict[str, float]:
    """Solve 2 (p - 1) latency + 2 (p - 1) / p n / bandwidth for measured all-reduces of n bytes."""
    group, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]
    ranks = len(members[0])
    sizes = (1024, MIB, 8 * MIB) if at.type == "cpu" else (MIB, 16 * MIB, 256 * MIB)
    times = [_reduced(torch.zeros(nbytes // 4, device=at), group, at, budget / 3) for nbytes in sizes]
    slowest = [max(ranked) for ranked in zip(*_gathered(times), strict=True)]
    steps = 2 * (ranks - 1)
    line = fit([steps / ranks * nbytes for nbytes in sizes], slowest)
    return {"latency": min(line.start / steps, 1.0), "bandwidth": line.rate}


def _reduced(tensor: torch.Tensor, group: Any, at: torch.device, budget: float) -> float:
    """The median of the seconds of an all-reduce; every rank makes the same number of them."""

    def once() -> float:
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _wait(at)
        return time.perf_counter() - begin

    once()  # connects
    longest = max(_gathered(once()))
    return median([once() for _ in range(int(max(3, min(50, budget / longest))))])


def _disk_rate(folder: Path, budget: float) -> float:
    """Bytes/s of a file that is written and reaches the disk."""
    block, written = os.urandom(8 * MIB), 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix="penstock-calibrate-") as file:
        begin = time.perf_counter()
        while written < 64 * len(block) and (time.perf_counter() - begin < budget or not written):
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += len(block)
        return written / (time.perf_counter() - begin)
