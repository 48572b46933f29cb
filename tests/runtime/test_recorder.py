"""Times of a GPU's kernels by the host's clock. The GPU is one on paper: both clocks are numbers."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch
from torch import nn

from penstock.pipeline import summary
from penstock.runtime.device import stream
from penstock.runtime.recorder import Recorder
from penstock.schedule import Op

FORWARD, BACKWARD = Op(0, "F", 0), Op(0, "B", 0)
LATE = 1000.0  # seconds by which the GPU's clock differs from the host's


class PaperGPU:
    """A stream whose kernels take seconds, and a host that queues them in none, or in some."""

    runs_behind = True

    def __init__(self) -> None:
        self.host, self._free = 0.0, 0.0

    def run(self, seconds: float, launch: float = 0.0) -> None:
        """Queue a kernel."""
        self.host += launch
        self._free = max(self._free, self.host) + seconds

    hold = run

    def begin_step(self) -> None:
        """There is one stream."""

    def now(self) -> PaperMoment:
        return PaperMoment(self, max(self._free, self.host))

    def anchor(self) -> tuple[float, PaperMoment]:
        moment = self.now()
        moment.synchronize()
        return self.host, moment


class PaperMoment:
    def __init__(self, gpu: PaperGPU, at: float) -> None:
        self._gpu, self._at, self._by_gpu, self.queued = gpu, at, at + LATE, gpu.host

    def query(self) -> bool:
        return self._gpu.host >= self._at

    def synchronize(self) -> None:
        self._gpu.host = max(self._gpu.host, self._at)

    def elapsed_time(self, end: Any) -> float:
        assert self.query()
        assert end.query()
        return float(torch.tensor((end._by_gpu - self._by_gpu) * 1e3, dtype=torch.float32))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PaperGPU:
    made = PaperGPU()
    monkeypatch.setattr(stream, "stream_of", lambda device: made)
    return made


def op(recorder: Recorder, gpu: PaperGPU, op: Op, seconds: float, launch: float = 0.0) -> None:
    if recorder.holds_back:
        recorder.hold_back(op)
    start = gpu.now()
    gpu.run(seconds, launch)
    recorder.add(op, None, start, gpu.now())


def test_times_are_those_of_the_kernels_whatever_the_stream_still_had_to_do(gpu: PaperGPU) -> None:
    """0.5.0: the host's time at the begin of a step was paired with a point behind the optimizer's kernels.
    All ops of the step seemed to have run earlier, by as long as these still took."""
    recorder = Recorder(torch.device("cuda"), clock_offset=0.25)
    recorder.begin_step()
    op(recorder, gpu, FORWARD, 1.0)
    assert recorder.times() == pytest.approx([0.25, 1.25, 0.25, 0.25])
    gpu.run(5.0)  # the optimizer's, from 1.0 on
    recorder.begin_step()
    op(recorder, gpu, FORWARD, 1.0)
    op(recorder, gpu, BACKWARD, 2.0)
    start = gpu.now()
    gpu.run(0.5)
    recorder.reduced(0, start, gpu.now())
    assert recorder.times()[:2] == pytest.approx([6.25, 7.25])
    assert recorder.times()[4:6] == pytest.approx([7.25, 9.25])
    assert recorder.reductions()[0] == pytest.approx((9.25, 9.75))


def test_times_are_exact_hours_after_the_first_step(gpu: PaperGPU) -> None:
    """CUDA gives the time between two points in float32: after a day it is known to 8 milliseconds only."""
    recorder = Recorder(torch.device("cuda"))
    gpu.host = 86_400.0
    recorder.begin_step()
    op(recorder, gpu, FORWARD, 0.0015)
    assert recorder.times()[:2] == pytest.approx([86_400.0, 86_400.0015], abs=1e-6)


def test_a_step_that_fails_is_placed_by_the_end_of_the_one_before(gpu: PaperGPU) -> None:
    """Its stream may never get to another point."""
    recorder = Recorder(torch.device("cuda"))
    recorder.begin_step()
    op(recorder, gpu, FORWARD, 1.0)
    recorder.times()
    gpu.run(5.0)
    recorder.begin_step()
    op(recorder, gpu, FORWARD, 1.0)
    op(recorder, gpu, BACKWARD, 1e9)
    gpu.host = 10.0
    ((ended, times),) = recorder.ended()
    assert ended == FORWARD
    assert times[:2] == pytest.approx((6.0, 7.0))


def test_a_first_step_that_fails_is_placed_too(gpu: PaperGPU) -> None:
    gpu.run(3.0)  # weights on their way to the GPU
    recorder = Recorder(torch.device("cuda"))
    recorder.begin_step()
    op(recorder, gpu, FORWARD, 1.0)
    gpu.host = 10.0
    ((_, times),) = recorder.ended()
    assert times[:2] == pytest.approx((3.0, 4.0))


def test_the_gaps_of_an_op_are_known_once_one_began_after_its_launch(gpu: PaperGPU) -> None:
    """A launch of 3 s and a kernel of 1 s: the GPU waits for 3 s within the op."""
    recorder = Recorder(torch.device("cuda"), clock_offset=100.0)
    for holds_back, length, device, gaps in ((False, 4.0, {}, nan), (True, 1.0, {(0, "F"): 1.0}, 0.0),
                                             (False, 4.0, {(0, "F"): 1.0}, 3.0)):  # fmt: skip
        recorder.holds_back = holds_back
        recorder.begin_step([FORWARD])
        recorder._launching.update(dict.fromkeys(recorder._launching, 0.7))  # below the longest hold
        op(recorder, gpu, FORWARD, 1.0, 0.7 if holds_back else 3.0)
        start, end, *_ = recorder.times()
        assert end - start == pytest.approx(length)
        assert recorder.device_times == pytest.approx(device)
        assert recorder.host_bound == pytest.approx(gaps, nan_ok=True)


def test_a_stream_stands_still_for_a_second_at_most(gpu: PaperGPU) -> None:
    """The op may have compiled its layers the last time that it ran."""
    recorder = Recorder(torch.device("cuda"))
    recorder.begin_step([FORWARD])
    op(recorder, gpu, FORWARD, 1.0, 60.0)
    recorder.times()
    recorder.begin_step([FORWARD])
    recorder.hold_back(FORWARD)
    before = gpu.host
    gpu.now().synchronize()
    assert gpu.host - before == pytest.approx(1.0)


def test_what_gpus_take_is_of_one_program(gpu: PaperGPU) -> None:
    """With other microbatches, or without a backward to come, an op takes another time."""
    recorder = Recorder(torch.device("cuda"))
    for program, seconds in (
        ([FORWARD, BACKWARD], 1.0),
        ([FORWARD], 2.0),
        ([FORWARD, FORWARD, BACKWARD], 3.0),
    ):
        recorder.begin_step(program)
        gpu.run(1.0)
        op(recorder, gpu, FORWARD, seconds)
        recorder.times()
    recorder.begin_step([FORWARD, BACKWARD])
    assert recorder.device_times == {(0, "F"): 1.0}


def test_a_layer_is_timed_by_its_own_stream(gpu: PaperGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: before and after a layer the host waited for all streams, and so for posted receives."""

    class Layer(nn.Module):
        def forward(self, seconds: float) -> None:
            gpu.run(seconds)

    def wait_for_messages(device: torch.device) -> None:
        gpu.host += 100.0

    monkeypatch.setattr(torch.cuda, "synchronize", wait_for_messages)
    layer = Layer()
    with summary.timed({0: [(3, layer)]}, torch.device("cuda")) as times:
        gpu.run(7.0)
        layer(0.5)
        layer(0.25)
        assert gpu.host == 0.0, "the host waited"
    gpu.now().synchronize()
    assert [stream.seconds(*call) for call in times[0, 3]] == pytest.approx([0.5, 0.25])


def test_the_anchor_of_a_gpu_is_a_point_that_it_has_just_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks on: after a sleep it would know too late."""
    clock = iter(range(1, 9))
    monkeypatch.setattr("penstock.runtime.device.stream.time.perf_counter", lambda: float(next(clock)))

    class Moment:
        def __init__(self, device: torch.device, current: None) -> None:
            self.looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks == 3

    monkeypatch.setattr(stream, "CudaMoment", Moment)
    at, moment = stream.CudaStream(torch.device("cuda")).anchor()
    assert isinstance(moment, Moment)
    assert (at, moment.looks) == (1.0, 3)
