"""Messages with checksums: the same gradients, and a bit that flips on the way is an error."""

from __future__ import annotations

import random
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import AutoPipeline
from penstock.batch.payload import SINGLE, EdgeSpecs, Payload
from penstock.errors import ConfigError, PeerLostError, RunError
from penstock.runtime.shared_memory.messages import SharedMessages
from penstock.runtime.transport.channels import Channels
from penstock.runtime.transport.checksums import CheckedMessages, checksum
from penstock.runtime.transport.interface import LocalMessages, Messages
from penstock.schedule import Op
from penstock.schedule.order import Channel, Message
from runtime.shared_memory.test_segment import segment
from runtime.transport.test_channels import Watch
from runtime.transport.test_point_to_point import cases
from support import jobs_channels as jobs
from support.families import tiny_model
from support.pool import Pool
from support.refusals import refuses

FORTH = Message(Op(0, "F", 3), 1)
HOST = socket.gethostname()


def test_bytes_that_change_places_are_noticed() -> None:
    """Unreleased: it was a sum of words. Swapped halves passed, and 143 of 20,000 pairs of flipped bits."""
    data = torch.arange(512).to(torch.uint8)
    data[256:] += 1
    known = checksum(data)
    assert checksum(data.roll(256)) != known
    draw = random.Random(0)
    for _ in range(2000):
        changed = data.clone()
        bit = 1 << draw.randrange(8)
        for at in draw.sample(range(512), 2):
            changed[at] ^= bit
        assert checksum(changed) != known


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(()), torch.ones(0, 3), torch.ones(2, 3).T, torch.ones(3).bfloat16(), torch.tensor([True])],
    ids=["a number", "no number", "not contiguous", "bfloat16", "booleans"],
)
def test_a_checksum_is_that_of_the_numbers_in_their_order(tensor: Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone(memory_format=torch.contiguous_format))


# ---- one message, over each transport


def name_of(rank: int) -> str:
    return f"rank {rank}"


def checked(inner: Messages, wire: torch.dtype | None = None) -> CheckedMessages:
    return CheckedMessages(inner, (0, 1), wire, name_of)


def payload(*tensors: Tensor) -> Payload:
    return Payload(tensors, EdgeSpecs.of(tensors, SINGLE))


def values() -> tuple[Tensor, Tensor]:
    """A float for each bit to flip, and a mask."""
    return torch.linspace(-1, 1, 32), torch.tensor([True, False])


def flip(tensor: Tensor, bit: int) -> None:
    tensor.view(torch.int32)[bit] ^= torch.tensor(1 << bit).to(torch.int32)


def names_both_ends(tensor: int, spec: str) -> Any:
    about = f"tensor {tensor} ({spec}) of the result of 0F3, from rank 0 to rank 1"
    return refuses(RunError, about, "bits changed on the way", "last checkpoint")


@pytest.mark.parametrize("bit", range(32))
def test_each_bit_that_flips_in_shared_memory_is_noticed(bit: int) -> None:
    """In the sender's memory, which the receiver computes on."""
    segments, edges, limit = [segment(), segment()], (Channel(0, 1),), timedelta(seconds=5)
    first, second = (
        checked(SharedMessages(rank, segments, edges, (0, 1), None, Watch(), limit, False))  # type: ignore[arg-type]
        for rank in (0, 1)
    )
    tensors = values()
    second.post(FORTH, payload(*tensors).specs)
    first.send(FORTH, payload(*tensors), with_specs=False)
    memory = segments[0].tensor(position_in_memory_of(first), (32,), torch.float32)
    flip(memory, bit)
    with names_both_ends(0, "float32[32]"):
        second.receive(FORTH)
    for one in segments:
        one.close()


def position_in_memory_of(messages: CheckedMessages) -> int:
    """Where its one message begins in the sender's memory."""
    # nothing public gives the memory that a message waits in
    (end,) = messages._inner._outgoing.values()  # type: ignore[attr-defined]
    # as above: the second word of the channel's first entry
    return int(end.words[end._ring + 1])


def test_the_error_names_the_tensor_that_changed() -> None:
    inner = LocalMessages()
    messages = checked(inner)
    messages.send(FORTH, payload(*values()), with_specs=False)
    inner._mail[FORTH].tensors[1].logical_not_()  # on its way, where nothing public reaches it
    with names_both_ends(1, "bool[2]"):
        messages.receive(FORTH)


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float64])
def test_what_arrives_is_what_the_inner_transport_brings(wire: torch.dtype | None) -> None:
    tensors = values()
    plain, messages = LocalMessages(wire), checked(LocalMessages(wire), wire)
    for one in (plain, messages):
        one.send(FORTH, payload(*tensors), with_specs=False)
    assert (messages.arrived(FORTH), messages.pending) == (True, 1)
    expected, received = plain.receive(FORTH), messages.receive(FORTH)
    assert expected is not None
    assert received is not None
    assert received.specs == expected.specs
    assert all(map(torch.equal, received.tensors, expected.tensors))
    assert messages.receive(FORTH) is None


def test_a_message_without_tensors_has_no_checksum() -> None:
    messages = checked(LocalMessages())
    messages.send(FORTH, payload(), with_specs=False)
    assert messages.receive(FORTH) == payload()


# ---- whole steps


@pytest.mark.parametrize(
    "options", [{}, {"transport": "gloo"}, {"transport": "gloo", "exchange": "batched"}],
    ids=["shared memory", "gloo", "batched"],
)  # fmt: skip
def test_every_schedule_is_exact(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(2, jobs.compare, 2, cases(2, 6)[::3], {**options, "checksums": True})


def test_schedules_in_one_process_are_exact() -> None:
    jobs.compare(3, cases(3, 4)[::3], {"checksums": True})


@pytest.mark.parametrize("options", [{"wire_dtype": torch.bfloat16}, {"shapes": "exchanged"}])
def test_gradients_are_those_without_checksums_bit_for_bit(pool: Pool, options: dict[str, Any]) -> None:
    options = {"dtype": torch.float32, **options}
    for with_them, plain in zip(
        pool.run(2, jobs.step_with, {**options, "checksums": True}),
        pool.run(2, jobs.step_with, options),
        strict=True,
    ):
        assert with_them.loss == plain.loss
        for stage, gradients in plain.gradients.items():
            assert all(map(torch.equal, with_them.gradients[stage], gradients))


def flipped(transport: str | None) -> str:
    """The error of this rank where a gradient, of microbatch 2, changes once it has its checksum."""
    kind: Any = SharedMessages if transport is None else Channels
    send = kind.send

    def spoil(self: Messages, message: Message, payload: Payload, with_specs: bool) -> None:
        if str(message.op) == "1B2":
            gradient = payload.tensors[0].clone()
            gradient.view(torch.int64).view(-1)[0] ^= 1
            payload = payload._replace(tensors=(gradient, *payload.tensors[1:]))
        send(self, message, payload, with_specs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "send", spoil)
        with pytest.raises((RunError, PeerLostError)) as error:
            # the pool's process outlives its failed rank, so that the other one waits out its timeout
            jobs.step_with({"transport": transport, "checksums": True, "timeout": 3})
    return str(error.value)


@pytest.mark.parametrize("transport", [None, "gloo"], ids=["shared memory", "gloo"])
def test_all_ranks_hear_of_a_bit_that_flipped(pool: Pool, transport: str | None) -> None:
    for said in pool.run(2, flipped, transport):
        assert f"of the result of 1B2, from rank 1 on {HOST} to rank 0 on {HOST}" in said
        assert "bits changed on the way" in said


def test_a_gpu_s_messages_are_refused() -> None:
    auto = AutoPipeline(ranks=2, microbatches=2, checksums=True, device="meta")
    with refuses(ConfigError, "checksums=True", "computed on the host", "device='cpu'"):
        auto.build(tiny_model("llama"))
