"""Messages through shared memory: each arrives whole, in any order of use, and memory is used again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.batch.payload import SINGLE, EdgeSpecs, Payload, flatten
from penstock.errors import PeerLostError, RunError
from penstock.runtime.shared_memory import messages as shared
from penstock.runtime.shared_memory.blocks import PAGE, Blocks
from penstock.runtime.shared_memory.messages import SharedMessages
from penstock.schedule import Op
from penstock.schedule.order import Channel, Message
from runtime.shared_memory.test_segment import segment
from runtime.transport.test_channels import Watch
from support.refusals import refuses

CHANNELS = (Channel(0, 1), Channel(1, 0))
BACK = Message(Op(1, "B", 0), 0)


class Ends:
    """Both ends of the two channels between two ranks."""

    def __init__(self, wire: torch.dtype | None = None) -> None:
        self.segments = [segment(), segment()]
        self.first, self.second = (
            SharedMessages(rank, self.segments, CHANNELS, (0, 1), wire, Watch(), timedelta(seconds=5), False)  # type: ignore[arg-type]
            for rank in (0, 1)
        )

    def end_step(self) -> None:
        self.first.end_step()
        self.second.end_step()

    def close(self) -> None:
        for each in self.segments:
            each.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def forth(number: int) -> Message:
    return Message(Op(0, "F", number), 1)


def payload(*tensors: Tensor) -> Payload:
    return Payload(tensors, EdgeSpecs.of(tensors, SINGLE))


def over(ends: Ends, number: int, sent: Payload, known: bool = True) -> tuple[Tensor, ...]:
    ends.second.post(forth(number), sent.specs if known else None)
    ends.first.send(forth(number), sent, with_specs=not known)
    return ends.second.receive(forth(number)).tensors


@pytest.mark.parametrize("known", [True, False])
def test_tensors_of_any_kind_arrive_as_they_were(ends: Ends, known: bool) -> None:
    value = {
        "hidden": torch.randn(2, 3, requires_grad=True).tanh(), "across": torch.arange(12.0).view(3, 4).t(),
        "ids": torch.tensor([[2**40, -1]]), "mask": torch.tensor([True, False, True]), "none": None,
        "empty": torch.empty(0, 7), "number": torch.tensor(3.5, dtype=torch.float64),
        "half": torch.ones(3).bfloat16(), "wave": torch.tensor([1 + 2j]), "length": 7,
    }  # fmt: skip
    tensors, form = flatten(value)
    sent = Payload(tensors, EdgeSpecs.of(tensors, form))
    ends.second.post(forth(0), sent.specs if known else None)
    ends.first.send(forth(0), sent, with_specs=not known)
    found = ends.second.receive(forth(0))
    assert found.specs == sent.specs
    for ours, theirs in zip(found.tensors, tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
        assert not ours.requires_grad
        assert torch.equal(ours, theirs)


def test_a_message_is_a_copy_that_belongs_to_its_receiver(ends: Ends) -> None:
    given_, other = torch.ones(4), torch.zeros(4)
    (found,) = over(ends, 0, payload(given_))
    given_.fill_(2)
    (next_,) = over(ends, 1, payload(other))
    assert found.tolist() == [1] * 4
    next_.add_(5)
    assert found.tolist() == [1] * 4
    assert other.tolist() == [0] * 4


def test_messages_are_used_in_another_order_than_sent(ends: Ends) -> None:
    for number in range(3):
        ends.second.post(forth(number), payload(torch.zeros(2)).specs)
        ends.first.send(forth(number), payload(torch.full((2,), float(number))), with_specs=False)
    for number in (2, 0, 1):
        assert ends.second.receive(forth(number)).tensors[0].tolist() == [number] * 2
    assert ends.second.pending == 0


@pytest.mark.parametrize(("wire", "width"), [(torch.bfloat16, 2), (None, 4), (torch.float64, 8)])
def test_floats_travel_in_the_wires_dtype_and_integers_in_their_own(
    wire: torch.dtype | None, width: int
) -> None:
    ends = Ends(wire)
    floats, integers = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-9, -3.14159] * 16), torch.tensor([2**40 + 1] * 8)
    ends.first.send(forth(0), payload(floats, integers), with_specs=False)
    assert ends.first.buffer_bytes == 64 * width + 64
    ends.second.post(forth(0), payload(floats, integers).specs)
    found = ends.second.receive(forth(0)).tensors
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], floats.to(wire or floats.dtype).float())
    assert torch.equal(found[1], integers)
    ends.close()


# _blocks: the memory of free blocks is in no public count
def test_memory_is_used_again_once_its_receiver_holds_it_no_more(ends: Ends) -> None:
    held = [over(ends, number, payload(torch.full((1024,), float(number)))) for number in range(3)]
    assert ends.first._blocks.nbytes == 3 * PAGE
    assert ends.first.buffer_bytes == 0  # the receiver counts what has arrived
    del held[1]
    ends.second.send(BACK, payload(torch.ones(1)), with_specs=False)  # what an op does when it has ended
    over(ends, 3, payload(torch.ones(1024)))
    assert ends.first._blocks.nbytes == 3 * PAGE
    assert [each[0][0].item() for each in held] == [0, 2]
    held.clear()
    ends.end_step()
    assert ends.first.buffer_bytes == ends.first._blocks.nbytes == 3 * PAGE  # for the next step
    over(ends, 0, payload(torch.ones(1024)))
    ends.end_step()
    ends.end_step()
    assert ends.first._blocks.nbytes == 0


def test_a_graph_holds_what_it_saved_of_a_message(ends: Ends) -> None:
    (found,) = over(ends, 0, payload(torch.full((1024,), 3.0)))
    weight = torch.ones(1024, requires_grad=True)
    product = (weight * found).sum()
    del found
    over(ends, 1, payload(torch.full((1024,), 9.0)))
    product.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 1024


# _blocks: the memory of free blocks is in no public count
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 4), st.booleans()), max_size=60))
def test_no_message_is_overwritten_and_no_memory_is_lost(messages: list[tuple[int, int, bool]]) -> None:
    """Random lengths, each held over a random number of later messages, with ends of steps in between."""
    ends = Ends()
    held: list[tuple[int, Tensor, Tensor]] = []
    for number, (length, lasts, ends_step) in enumerate(messages):
        sent = torch.randint(0, 256, (length,), dtype=torch.uint8)
        (found,) = over(ends, number, payload(sent))
        held = [(left - 1, ours, theirs) for left, ours, theirs in held if left]
        held.append((lasts, found, sent))
        del found
        assert all(torch.equal(ours, theirs) for _, ours, theirs in held)
        assert ends.first.buffer_bytes >= 0
        if ends_step:
            ends.end_step()
    held.clear()
    for _ in range(2):
        ends.end_step()
    assert ends.first._blocks.nbytes == 0
    ends.close()


# _blocks: the memory of free blocks is in no public count
def test_lengths_that_differ_gather_no_idle_memory(ends: Ends) -> None:
    longest = 64 * PAGE
    for number, pages in enumerate((64, 2, 50, 9, 33, 17, 61, 5, 40)):
        over(ends, number, payload(torch.zeros(pages * PAGE, dtype=torch.uint8)))
        assert ends.first._blocks.nbytes <= 2 * longest


def test_a_segment_that_is_full_says_so(ends: Ends) -> None:
    with pytest.raises(RuntimeError, match=r"no room for \d+ bytes in a shared segment"):
        Blocks(ends.segments[0]).take(1 << 50)


def test_more_microbatches_than_a_channel_has_entries(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ENTRIES", 2)
    for number in range(2):
        over(ends, number, payload(torch.ones(1)))
    with refuses(RunError, "3 microbatches", "up to 2"):
        over(ends, 2, payload(torch.ones(1)))


# _limit: a shorter one
def test_a_message_that_does_not_come_is_an_error(ends: Ends) -> None:
    ends.second._limit = timedelta(seconds=0.01)
    ends.second.post(forth(0), payload(torch.ones(1)).specs)
    with refuses(PeerLostError, rule="timed out"):
        ends.second.receive(forth(0))
    ends.second.close()
    ends.first.post(BACK, payload(torch.ones(1)).specs)
    with refuses(PeerLostError, rule="connection closed"):
        ends.first.receive(BACK)


def test_tensors_of_one_message_lie_in_storages_of_their_own(ends: Ends) -> None:
    large, small = over(ends, 0, payload(torch.ones(1024), torch.ones(2)))
    assert (large.untyped_storage().nbytes(), small.untyped_storage().nbytes()) == (4096, 8)
    del large
    over(ends, 1, payload(torch.zeros(1024), torch.zeros(2)))
    assert small.tolist() == [1, 1]  # it holds the whole block


def test_a_tensor_that_is_moved_to_other_shared_memory_takes_no_block_along(ends: Ends) -> None:
    """As torch.multiprocessing does with what is put into its queues."""
    (found,) = over(ends, 0, payload(torch.ones(4)))
    found.share_memory_()  # type: ignore[no-untyped-call]
    del found
    ends.second.send(BACK, payload(torch.ones(1)), with_specs=False)
    assert over(ends, 1, payload(torch.full((4,), 2.0)))[0].tolist() == [2] * 4
