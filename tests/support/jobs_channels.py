"""What the pool's workers run over channels of all kinds, and a connection whose sends take their time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from benchmarks.slow_network import Network, slowed_down
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import Pipeline
from penstock.batch.payload import Payload
from penstock.runtime.transport import channels
from penstock.runtime.transport.point_to_point import P2PGroup, Work
from penstock.schedule import Timeline
from penstock.schedule.choose import ScheduleLike
from penstock.schedule.order import Message

ROWS, WIDTH = 2, 8  # of a microbatch
Gradients = dict[int, list[Tensor]]  # by stage
Case = tuple[ScheduleLike, int, int]  # with the depth of its placement, and the microbatches


class Part(nn.Module):
    """last: what the stage ends with; "linear", whose output nobody keeps, or "tanh", which keeps its own"""

    def __init__(self, stage: int, dtype: torch.dtype, last: str, seconds: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 3)
        self.last, self.seconds = last, seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds and not x.is_meta:
            time.sleep(self.seconds)
        made: Tensor = self.linear(x.tanh())
        return made.tanh() if self.last == "tanh" else made


def mean_square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def batch(microbatches: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(99)
    return {"x": torch.randn(ROWS * microbatches, WIDTH, generator=generator, dtype=dtype)}


class Stepped(NamedTuple):
    loss: float
    gradients: Gradients
    buffers: tuple[int, ...]  # by rank, bytes when most was held
    timeline: Timeline


def pipeline(
    schedule: ScheduleLike = "1f1b",
    ranks: int = -1,
    microbatches: int = 4,
    *,
    dtype: torch.dtype = torch.float64,
    last: str = "tanh",
    seconds: float = 0.0,
    network: Network | None = None,
    timeout: float = 30,
    **options: Any,
) -> Pipeline:
    with slowed_down(network):
        return Pipeline.from_provider(
            lambda info: Part(info.stage, dtype, last, seconds),
            schedule=schedule,
            ranks=ranks,
            microbatches=microbatches,
            loss_fn=mean_square,
            timeout=timeout,
            **options,
        )


def step(
    schedule: ScheduleLike,
    ranks: int,
    microbatches: int,
    *,
    dtype: torch.dtype = torch.float64,
    last: str = "tanh",
    seconds: float = 0.0,
    steps: int = 1,
    **options: Any,
) -> Stepped:
    """What the last of `steps` gave on this rank, or on all where they are in one process."""
    pipe = pipeline(schedule, ranks, microbatches, dtype=dtype, last=last, seconds=seconds, **options)
    for _ in range(steps):
        for parameter in pipe.parameters():
            parameter.grad = None
        result = pipe.step(batch(microbatches, dtype))
    gradients = {stage: [p.grad for p in module.parameters() if p.grad is not None]
                 for stage, module in pipe.modules.items()}  # fmt: skip
    found = Stepped(result.loss, gradients, tuple(held.buffers for held in pipe.memory), pipe.timeline)
    pipe.close()
    return found


def assert_exact(found: Stepped, depth: int, microbatches: int, last: str = "tanh") -> None:
    """A step's loss and gradients are those of one process, in float64."""
    parts = [Part(stage, torch.float64, last, 0.0) for stage in range(depth)]
    loss = mean_square(nn.Sequential(*parts)(batch(microbatches, torch.float64)["x"]), None)
    loss.backward()  # type: ignore[no-untyped-call]
    assert found.loss == pytest.approx(float(loss.detach()), abs=1e-12)
    for stage, gradients in found.gradients.items():
        for gradient, parameter in zip(gradients, parts[stage % depth].parameters(), strict=True):
            assert parameter.grad is not None
            assert (gradient - parameter.grad).abs().max() < 1e-10 * parameter.grad.abs().max(), stage


def compare(ranks: int, cases: Sequence[Case], options: dict[str, Any]) -> None:
    """Two steps of each case are exact."""
    for schedule, depth, microbatches in cases:
        assert_exact(step(schedule, ranks, microbatches, steps=2, **options), depth, microbatches)


def step_with(options: dict[str, Any]) -> Stepped:
    """A step on two ranks."""
    return step(**{"schedule": "1f1b", "ranks": 2, "microbatches": 4, **options})


class SlowSend:
    """A send that reads its memory late and holds nothing of it: not the tensor, not the storage.

    died: whether the memory was gone before the send was over; gone: whether it is by now
    """

    def __init__(self, tensor: Tensor, until: Callable[[], object], give: Callable[[bytes], object]) -> None:
        self._address, self._nbytes = tensor.data_ptr(), tensor.nbytes
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._until, self._give = until, give
        self.over = Event()
        self.died = False

    def run(self) -> None:
        self._until()
        self.died = self.gone  # then nothing may be read there any more
        self._give(bytes(self._nbytes) if self.died else ctypes.string_at(self._address, self._nbytes))
        self.over.set()

    @property
    def gone(self) -> bool:
        return bool(self._storage.expired())  # type: ignore[no-untyped-call]

    def wait(self, timeout: timedelta = timedelta(days=1)) -> bool:
        if not self.over.wait(timeout.total_seconds()):
            raise RuntimeError("the send timed out")
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class SlowGroup:
    """A process group, as far as channels use it. Sends on it are over after `seconds`, one after another."""

    def __init__(self, group: dist.ProcessGroup, seconds: float, sends: list[SlowSend]) -> None:
        self._group, self._seconds, self._sends = group, seconds, sends
        self._thread = ThreadPoolExecutor(1)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        (tensor,) = tensors
        dtype, shape = tensor.dtype, tensor.shape

        def give(content: bytes) -> None:
            copy = torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
            self._group.send([copy], target, tag).wait()

        slow = SlowSend(tensor, lambda: time.sleep(self._seconds), give)
        self._sends.append(slow)
        self._thread.submit(slow.run)
        return slow

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return self._group.recv(tensors, source, tag)


class Slow(NamedTuple):
    """sends, died, early: how many there were, lost their memory too soon, were let go before their Free

    only_sent: of each forward's message, the bytes that it said were held for nothing else
    """

    sends: int
    died: int
    early: int
    only_sent: set[int]
    buffers: tuple[int, ...]


# _sending: whether a send is over is seen there alone
def slow_sends(last: str, microbatches: int, seconds: float) -> Slow:
    """Two exact steps of gpipe on two ranks, over connections whose sends are over after `seconds`."""
    sends: list[SlowSend] = []
    early: list[bool] = []
    only_sent: set[int] = set()
    open_p2p_groups, free, send = channels.open_p2p_groups, channels.Channels.free, channels.Channels.send

    def slow_groups(*args: Any) -> dict[Any, P2PGroup]:
        return {channel: p2p._replace(group=SlowGroup(p2p.group, seconds, sends))  # type: ignore[arg-type]
                for channel, p2p in open_p2p_groups(*args).items()}  # fmt: skip

    def noted_free(self: channels.Channels, message: Message) -> None:
        early.append(self._sending[message].over)
        free(self, message)

    def noted_send(self: channels.Channels, message: Message, payload: Payload, with_specs: bool) -> None:
        if message.op.kind == "F":
            only_sent.add(-1 if payload.only_sent is None else payload.only_sent)
        send(self, message, payload, with_specs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "open_p2p_groups", slow_groups)
        patch.setattr(channels.Channels, "free", noted_free)
        patch.setattr(channels.Channels, "send", noted_send)
        found = step("gpipe", 2, microbatches, last=last, steps=2, transport="gloo")
    assert_exact(found, 2, microbatches, last)
    died = sum(slow.died for slow in sends)
    return Slow(len(sends), died, sum(early), only_sent, found.buffers)
