"""Channels: what is sent is held until it is sent and no longer, narrowed where asked, and counted right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Queue
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.batch.payload import SINGLE, EdgeSpecs, Payload
from penstock.errors import PeerLostError
from penstock.runtime.transport.buffers import Staging
from penstock.runtime.transport.channels import Channels
from penstock.schedule import Op
from penstock.schedule.order import Channel, Message
from runtime.transport.test_staging import Stream
from support import jobs_channels as jobs
from support.pool import Pool
from support.refusals import refuses

FORTH, BACK = Message(Op(0, "F", 0), 1), Message(Op(1, "B", 0), 0)


class Mail:
    """The group of two ranks in one process, as channels use it. Sends are over once `gate` is open."""

    def __init__(self) -> None:
        self.gate = Event()
        self.sends: list[jobs.SlowSend] = []
        self._letters: dict[int, Queue[bytes]] = {tag: Queue() for tag in (1, 2)}

    def send(self, tensors: list[Tensor], target: int, tag: int) -> jobs.SlowSend:
        slow = jobs.SlowSend(tensors[0], lambda: self.gate.wait(30), self._letters[tag].put)
        self.sends.append(slow)
        Thread(target=slow.run, daemon=True).start()
        return slow

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Arrival:
        return Arrival(tensors[0], self._letters[tag])


class Arrival:
    def __init__(self, buffer: Tensor, letters: Queue[bytes]) -> None:
        self._buffer, self._letters = buffer, letters

    def wait(self, timeout: timedelta = timedelta(seconds=30)) -> bool:
        content = bytearray(self._letters.get(timeout=30))
        self._buffer.copy_(torch.frombuffer(content, dtype=self._buffer.dtype).view_as(self._buffer))
        return True

    def is_completed(self) -> bool:
        return not self._letters.empty()


class Groups:
    def __init__(self, mail: Mail, rank: int) -> None:
        self.pipeline, self.rank, self.size = mail, rank, 2
        self.backend, self.limit = "gloo", timedelta(seconds=5)

    def new(self, ranks: object, name: str) -> Mail:
        return self.pipeline

    def control_device(self, device: torch.device) -> torch.device:
        return device


class Watch:
    @contextmanager
    def waiting(self, what: object, peer: object) -> Iterator[None]:
        try:
            yield
        except RuntimeError as cause:
            raise PeerLostError("rank 0", str(cause), "Look") from cause


class Ends:
    """Both ends of the two channels between two stages."""

    def __init__(self, **options: Any) -> None:
        self.mail = Mail()
        channels = (Channel(0, 1), Channel(1, 0))
        self.first, self.second = (
            Channels(Groups(self.mail, rank), channels, (0, 1), torch.device("cpu"),  # type: ignore[arg-type]
                     options.get("wire"), Watch())  # type: ignore[arg-type]
            for rank in (0, 1)
        )  # fmt: skip

    def close(self) -> None:
        self.mail.gate.set()
        self.first.close()
        self.second.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def payload(*tensors: Tensor, only_sent: int | None = None) -> Payload:
    return Payload(tensors, EdgeSpecs.of(tensors, SINGLE), only_sent)


def eventually(holds: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(holds())


def test_messages_of_a_gpu_go_over_gloo_by_way_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    empty: Any = torch.empty

    def noted(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        made: Tensor = empty(*sizes, **options)
        return made

    class OfGloo(Groups):
        def control_device(self, device: torch.device) -> torch.device:
            return torch.device("cpu")

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr("penstock.runtime.transport.channels.CudaCopies", lambda device: Stream())
    gpu, both = torch.device("cuda:1"), (Channel(0, 1), Channel(1, 0))
    made: Any = Channels(OfGloo(Mail(), 0), both, (0, 1), gpu, None, Watch())  # type: ignore[arg-type]
    made.post(BACK, EdgeSpecs.of((torch.ones(2),), SINGLE))
    made.close()
    assert pinned[0]


def test_what_is_sent_is_held_until_it_is_sent_and_let_go_before_its_free(ends: Ends) -> None:
    ends.first.send(FORTH, payload(torch.arange(4.0)), with_specs=False)
    (slow,) = ends.mail.sends
    assert not slow.gone
    assert ends.first.buffer_bytes == 16
    ends.mail.gate.set()
    assert eventually(lambda: slow.gone)
    assert not slow.died
    assert ends.first.buffer_bytes == 0
    assert ends.first.pending == 1  # until the plan's Free
    ends.first.free(FORTH)
    assert ends.first.pending == 0


# _p2p_groups: one channel gets a group that stands still
def test_a_channel_does_not_hold_up_what_goes_over_another(ends: Ends) -> None:
    ends.second.send(BACK, payload(torch.ones(4)), with_specs=False)
    other = Mail()
    other.gate.set()
    p2p = ends.first._p2p_groups[FORTH.channel]
    ends.first._p2p_groups[FORTH.channel] = p2p._replace(group=other)  # type: ignore[arg-type]
    ends.first.send(FORTH, payload(torch.ones(4)), with_specs=False)
    assert eventually(lambda: other.sends[0].gone)
    assert not ends.mail.sends[0].gone


def test_what_its_graph_keeps_is_not_counted_as_freed(ends: Ends) -> None:
    kept = torch.ones(4, requires_grad=True).tanh()
    ends.first.send(FORTH, payload(kept.detach(), only_sent=0), with_specs=False)
    assert ends.first.buffer_bytes == 0
    ends.mail.gate.set()
    assert eventually(lambda: ends.mail.sends[0].over.is_set())
    assert not ends.mail.sends[0].gone


def test_a_copy_made_to_be_sent_is_counted_whatever_its_original(ends: Ends) -> None:
    across = torch.ones(4, 2).t()
    ends.first.send(FORTH, payload(across, only_sent=0), with_specs=False)
    assert ends.first.buffer_bytes == 32


# _limit: a shorter one
def test_a_send_that_does_not_end_is_an_error_of_the_free(ends: Ends) -> None:
    ends.first._limit = timedelta(seconds=0.05)
    ends.first.send(FORTH, payload(torch.ones(4)), with_specs=False)
    with refuses(PeerLostError, rule="timed out"):
        ends.first.free(FORTH)


# _staging, _pool: a stream on paper in place of a GPU's
def test_a_staged_send_begins_when_the_device_has_come_to_it(ends: Ends) -> None:
    copies = Stream()
    ends.first._staging = Staging(ends.first._pool, copies)
    ends.first.send(FORTH, payload(torch.ones(4)), with_specs=False)  # returns at once
    assert ends.mail.sends == []
    copies.run()
    assert eventually(lambda: ends.mail.sends)
    assert ends.first._pool.idle_bytes == 0  # gloo reads the host memory
    ends.mail.gate.set()
    ends.first.free(FORTH)
    assert eventually(lambda: ends.first._pool.idle_bytes == ends.first._pool.nbytes)
    assert not ends.mail.sends[0].died


# _staging, _pool, _p2p_groups: a stream on paper, and a group that fails
def test_a_staged_send_that_cannot_begin_is_an_error_of_its_free(ends: Ends) -> None:
    """In 0.3.0 the error ended the thread that sends; the Free waited for the whole timeout and reported one.

    A broken connection is made an error that names a rank, which the thread did not expect.
    """
    ends.first._staging = Staging(ends.first._pool, Stream(ahead=True))
    p2p = ends.first._p2p_groups[FORTH.channel]
    ends.first._p2p_groups[FORTH.channel] = p2p._replace(group=Broken())  # type: ignore[arg-type]
    ends.first.send(FORTH, payload(torch.ones(4)), with_specs=False)
    with refuses(PeerLostError, rule="Connection reset"):
        ends.first.free(FORTH)
    ends.first._p2p_groups[FORTH.channel] = p2p
    ends.mail.gate.set()
    ends.first.send(FORTH, payload(torch.ones(4)), with_specs=False)  # the thread lives on
    ends.first.free(FORTH)


class Broken:
    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(("wire", "width"), [(torch.bfloat16, 2), (None, 4), (torch.float64, 8)])
def test_floats_travel_in_the_wires_dtype_and_integers_in_their_own(
    wire: torch.dtype | None, width: int
) -> None:
    ends = Ends(wire=wire)
    floats, integers = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-9, -3.14159]), torch.tensor([2**40 + 1, -7])
    sent = payload(floats, integers)
    ends.second.post(FORTH, sent.specs)
    assert ends.second.buffer_bytes == 4 * width + 2 * 8
    ends.mail.gate.set()
    ends.first.send(FORTH, sent, with_specs=False)
    found = ends.second.receive(FORTH).tensors
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], floats.to(wire or floats.dtype).float())
    assert torch.equal(found[1], integers)
    ends.close()


def test_a_narrow_copy_is_counted_as_narrow_while_it_is_sent() -> None:
    ends = Ends(wire=torch.bfloat16)
    ends.first.send(FORTH, payload(torch.ones(8)), with_specs=False)
    assert ends.first.buffer_bytes == 16
    ends.close()


def flat(found: jobs.Stepped) -> dict[int, Tensor]:
    return {stage: torch.cat([g.flatten() for g in row]) for stage, row in found.gradients.items()}


WIRE = {"dtype": torch.float32, "wire_dtype": torch.bfloat16}


def test_a_narrow_wire_changes_gradients_by_its_rounding_and_a_wide_one_not_at_all(pool: Pool) -> None:
    plain, alone = flat(jobs.step_with({"dtype": torch.float32})), flat(jobs.step_with(WIRE))
    for stage, gradient in plain.items():
        error = float((alone[stage] - gradient).abs().max() / gradient.abs().max())
        assert 0 < error < 4 * torch.finfo(torch.bfloat16).eps  # two tensors are rounded, on the way and back
    for dtype, expected in ((torch.bfloat16, alone), (torch.float64, plain)):
        for found in pool.run(2, jobs.step_with, {**WIRE, "wire_dtype": dtype}):
            assert all(torch.equal(gradient, expected[stage]) for stage, gradient in flat(found).items())


def test_slow_sends_lose_nothing_and_an_output_that_its_graph_keeps_is_no_buffer(pool: Pool) -> None:
    """Six activations are on their way at once: bytes of buffers where nothing else holds them."""
    message = jobs.ROWS * jobs.WIDTH * 8
    free, kept = (pool.run(2, jobs.slow_sends, last, 6, 0.1)[0] for last in ("linear", "tanh"))
    for rank in (free, kept):
        assert (rank.sends, rank.died) == (2 * 6, 0)
        assert rank.early > 0
    assert (free.only_sent, kept.only_sent) == ({message}, {0})
    assert free.buffers[0] >= 4 * message
    assert kept.buffers[0] <= 3 * message  # receives that are posted
