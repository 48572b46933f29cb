"""Messages within one process: values as if from another one, in the wire's dtype, and shared sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.batch.payload import EdgeSpecs, Form, Payload
from penstock.runtime.transport.interface import LocalMessages, LocalTransport, narrowed, on_wire
from penstock.schedule import Op
from penstock.schedule.order import Message

MESSAGE = Message(Op(0, "F", 0), 1)


def payload(*tensors: Tensor) -> Payload:
    return Payload(tensors, EdgeSpecs.of(tensors, Form()))


def test_a_message_is_received_once_and_counts_as_pending_until_then() -> None:
    messages = LocalMessages()
    assert messages.receive(MESSAGE) is None
    messages.send(MESSAGE, payload(torch.ones(2)), with_specs=False)
    assert (messages.arrived(MESSAGE), messages.pending) == (True, 1)
    received = messages.receive(MESSAGE)
    assert received is not None
    assert received.tensors[0].tolist() == [1, 1]
    assert (messages.arrived(MESSAGE), messages.pending) == (False, 0)


def test_a_failed_step_leaves_no_message() -> None:
    transport = LocalTransport()
    transport.messages.send(MESSAGE, payload(torch.ones(2)), with_specs=False)
    transport.reset()
    assert transport.messages.pending == 0


def test_what_arrives_is_no_part_of_the_senders_graph() -> None:
    trained, plain = torch.ones(2, requires_grad=True) * 1, torch.ones(2)
    messages = LocalMessages()
    messages.send(MESSAGE, payload(trained, plain), with_specs=False)
    received = messages.receive(MESSAGE)
    assert received is not None
    first, second = received.tensors
    assert first.grad_fn is None
    assert first.data_ptr() == trained.data_ptr()  # not copied
    second.zero_()  # a stage may write into what has no gradient
    assert plain.tolist() == [1, 1]


def test_floating_point_values_are_rounded_to_the_dtype_of_the_wire() -> None:
    values, whole = torch.tensor([1 / 3]), torch.tensor([2**30 + 1])
    messages = LocalMessages(torch.bfloat16)
    messages.send(MESSAGE, payload(values, whole), with_specs=False)
    received = messages.receive(MESSAGE)
    assert received is not None
    assert torch.equal(received.tensors[0], values.bfloat16().float())
    assert torch.equal(received.tensors[1], whole)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_specs_on_the_wire_are_those_of_what_is_sent(wire: torch.dtype | None) -> None:
    tensors = torch.ones(2), torch.ones(3, dtype=torch.int64)
    sent = narrowed(tensors, wire)
    assert [spec.dtype for spec in on_wire(EdgeSpecs.of(tensors, Form()), wire)] == [t.dtype for t in sent]
    assert [t.dtype for t in sent] == [wire or torch.float32, torch.int64]


def test_copies_of_a_shared_weight_all_get_their_sum() -> None:
    copies = [torch.full((2,), value) for value in (1.0, 2.0, 4.0)]
    LocalTransport().sum_shared((0, 1), [copies])
    assert [copy.tolist() for copy in copies] == [[7, 7]] * 3


def test_closing_runs_the_closers_from_the_last_to_the_first_once() -> None:
    transport, closed = LocalTransport(), list[int]()
    transport.closers += [lambda: closed.append(1), lambda: closed.append(2)]
    transport.close()
    transport.close()
    assert closed == [2, 1]
