"""How well a run uses its devices: model FLOPs a second, their share of the peak (MFU), and memory.

The FLOPs are those of the model's mathematics: a backward takes twice those of its forward, attention works
on pairs of tokens of one document, and neither padding nor recomputation counts. Towers work on the images
of the batch; frozen towers have no backward.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from penstock.models.split.multiply_adds import MultiplyAdds, works
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.runtime.device.memory import PeakMemory
from penstock.train.data.rows import Fill
from penstock.train.part import Run, RunPart, TrainStep
from penstock.train.records.metrics import MetricsRow
from penstock.train.settings import started

_FORWARD = 2  # of a multiply-add
_FLOPS = 3 * _FORWARD  # with a backward of two forwards

# Dense TFLOP/s by the GPU's name: in bfloat16 and float16, in TF32, and in float32. From NVIDIA's data sheets
# "A100 Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU" and "HGX B200", which give most peaks
# with sparsity: twice as much. A longer name comes before its own prefix.
_PEAKS = {
    "NVIDIA A100": (312.0, 156.0, 19.5),
    "NVIDIA H100 PCIe": (756.0, 378.0, 51.0),
    "NVIDIA H100 NVL": (835.5, 417.5, 60.0),
    "NVIDIA H100": (989.5, 494.5, 67.0),
    "NVIDIA H200 NVL": (835.5, 417.5, 60.0),
    "NVIDIA H200": (989.5, 494.5, 67.0),
    "NVIDIA B200": (2250.0, 1125.0, 75.0),
}


def peak_tflops(name: str, dtype: str) -> float | None:
    """The dense peak of one GPU; None if no data sheet is known.

    dtype: of the model's products; float32 counts as TF32 if torch may use that for products
    """
    known = next((peaks for prefix, peaks in _PEAKS.items() if name.startswith(prefix)), None)
    if known is None or dtype == "float64":
        return None
    half, tf32, full = known
    if dtype != "float32":
        return half
    return full if torch.get_float32_matmul_precision() == "highest" else tf32


class Throughput:
    """Counts how well the devices are used.

    Args:
        works: of all parts of the model
        devices: the number of GPUs, or of processes on CPUs
        peak: TFLOP/s of one device; None if it is unknown: then the rows have no `mfu`
        forward_only: works of another model that runs forward alone, as a teacher
    """

    def __init__(
        self,
        works: Sequence[MultiplyAdds],
        devices: int,
        peak: float | None,
        forward_only: Sequence[MultiplyAdds] = (),
    ) -> None:
        self.works, self._devices, self._peak, self._forward_only = works, devices, peak, forward_only

    @property
    def note(self) -> str:
        """The modules whose FLOPs are estimated, in words; empty if all are counted."""
        notes, count = [], sum(not work.counted for work in self.works)
        if count:
            how = "by its parameters and without attention, as it cannot run without values"
            notes.append(f"of {len(self.works)} modules (layers, embedding, head) {count} count {how}")
        if any(work.image for work in self.works):
            notes.append("towers count their parameters once for each patch of an image, without attention")
        return f"TFLOP/s: {'; '.join(notes)}" if notes else ""

    def entries(
        self, fill: Fill, seconds: float, memory: Sequence[PeakMemory], device: torch.device
    ) -> MetricsRow:
        """The entries of a step's row. fill: of the whole batch; memory: of each process"""
        flops = _FLOPS * sum(work.of(fill.tokens, fill.squares, fill.images) for work in self.works)
        flops += _FORWARD * sum(work.of(fill.tokens, fill.squares) for work in self._forward_only)
        tflops = flops / seconds / self._devices / 1e12
        row: MetricsRow = {"tflops_per_device": tflops}
        if self._peak is not None:
            row["mfu"] = tflops / self._peak
        if device.type == "cuda":
            row["peak_allocated"] = [process.allocated for process in memory]
            row["peak_reserved"] = [process.reserved for process in memory]
        return row | {"peak_resident": [process.resident for process in memory]}


class Usage(RunPart):
    """Adds the use of the devices to each row, and the run's share of padding to the summary."""

    def __init__(self, run: Run, plan: BuildPlan, teacher: BuildPlan | None = None) -> None:
        super().__init__(run)
        peak, device = run.config.train.peak_tflops, run.pipe.device
        if peak is None and device.type == "cuda":
            peak = peak_tflops(torch.cuda.get_device_name(device), run.config.computed)
        own, other = (() if of is None else works(of.source.model, of.chain) for of in (plan, teacher))
        self.throughput = Throughput(own, _devices(device), peak, other)
        self._fill = Fill()

    @property
    def note(self) -> str:
        return self.throughput.note

    def computed(self, step: int) -> None:
        """Reset the peak, which the step has reported: a row has the peak since the row before."""
        if self.run.pipe.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.pipe.device)

    def row(self, step: TrainStep) -> MetricsRow:
        pipe, fill = self.run.pipe, step.batch.fill
        self._fill += fill
        return self.throughput.entries(fill, step.seconds, pipe.peak_memory, pipe.device)

    def summary(self) -> Iterator[str]:
        if self._fill.padding:
            yield f"padding     {self._fill.padding:.1%} of the tokens, over all steps"


def _devices(device: torch.device) -> int:
    processes = started() or 1
    if device.type != "cuda":
        return processes
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return processes * min(on_host, torch.cuda.device_count()) // on_host  # ranks may share a GPU
