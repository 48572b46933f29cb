"""How long ops take on a device: the longer of computing and of moving bytes, and a launch.

    seconds
       |           ______/  flops / (peak x efficiency)
       |     _____/ ____    bytes / (bandwidth x efficiency)
       |____/__----
       |                    launch, and the ramp of a product: half / (peak x efficiency)
       +------------------ size of the op

A product of f FLOPs reaches the share e x f / (f + half) of the peak: it takes (f + half) / (peak x e): small
products pay for filling and draining the device. Ops on one device run one after the other.

A GPU loads the next operands while it computes. A core of a CPU does so in part: `exposed` is the share
of the shorter of the two that comes on top of the longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.planner.hardware import Device
from penstock.planner.work import OpWork


def seconds(works: Iterable[OpWork], device: Device) -> float:
    """Seconds that `works` take, one after the other. Raises ConfigError for a dtype without a peak."""
    return sum(work.calls * op_seconds(work, device) for work in works)


def op_seconds(work: OpWork, device: Device) -> float:
    """Seconds of one op of `work`."""
    shares = device.efficiencies
    shorter, longer = sorted((_computing(work, device), work.nbytes / (device.bandwidth * shares.memory)))
    return longer + shares.exposed * shorter + device.launch


def _computing(work: OpWork, device: Device) -> float:
    shares = device.efficiencies
    if work.flops == 0:  # of any dtype: integers are no product's
        return 0.0
    if work.kind == "other":
        return work.flops / device.peaks["float32"]
    share = shares.matmul if work.kind == "matmul" else shares.attention
    return (work.flops + shares.half) / (device.peak(work.dtype) * share)
