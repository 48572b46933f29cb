"""Copies of a batch that were sent ahead to the device of a step: the same values, or none."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from penstock.batch import placement
from penstock.batch.microbatches import split_batch
from penstock.batch.placement import OnDevice, host_values, placed, send_ahead, sent_ahead

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Copies:
    """What goes up is on the CPU as well, in other memory."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def up(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], None]:
        self.sent = [host.clone() for host in hosts]
        return self.sent, None


def batch() -> dict[str, Tensor]:
    ids = torch.arange(60).reshape(6, 10)
    return {"input_ids": ids, "labels": ids + 100, "position_ids": torch.arange(180).reshape(3, 6, 10),
            "pixel_values": torch.linspace(0, 1, 24).reshape(6, 4)}  # fmt: skip


def found(tensor: Tensor) -> Tensor:
    copy = sent_ahead(tensor, CPU)
    assert copy is not None
    assert copy.untyped_storage() is not tensor.untyped_storage()
    return copy


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_microbatches_get_views_of_what_was_sent(count: int) -> None:
    whole, copies = batch(), Copies()
    send_ahead([whole], copies.up)
    assert len(copies.sent) == len(whole)
    for microbatch in split_batch(whole, count):
        for tensor in microbatch.values():
            copy = found(tensor)
            assert torch.equal(copy, tensor)
            assert copy.stride() == tensor.stride()
            assert any(copy.untyped_storage() is each.untyped_storage() for each in copies.sent)


def test_a_view_of_any_form_is_found() -> None:
    ids = torch.arange(60).reshape(6, 10)
    send_ahead({"input_ids": ids}, Copies().up)
    for view in (ids.t(), ids[1:, ::3], ids[:, 4], ids.unsqueeze(1).expand(6, 2, 10), ids[2:2]):
        assert torch.equal(found(view), view)


def test_what_was_written_to_since_is_not_taken() -> None:
    ids = torch.arange(60).reshape(6, 10)
    send_ahead([ids], Copies().up)
    assert sent_ahead(ids[1:3], CPU) is not None
    ids[0, 0] = 7
    assert sent_ahead(ids, CPU) is None
    assert sent_ahead(ids[1:3], CPU) is None


def test_what_is_no_view_of_what_was_sent_is_not_taken() -> None:
    ids = torch.arange(60).reshape(6, 10)
    part, other = torch.arange(8)[2:], torch.ones(4, requires_grad=True)
    copies = Copies()
    send_ahead({"ids": ids, "part": part}, copies.up)
    assert len(copies.sent) == 1
    for tensor in (ids.clone(), part, other, ids.view(torch.int32)):
        assert sent_ahead(tensor, CPU) is None
    for device in (GPU, torch.device("cuda")):
        assert sent_ahead(ids, device) is None


# whether something was sent is in _sent alone
def test_where_nothing_was_sent_a_tensor_without_a_storage_is_no_error() -> None:
    gc.collect()
    assert not placement._sent
    assert sent_ahead(torch.eye(3).to_sparse(), CPU) is None


# how long a copy lives is in _sent alone
def test_copies_live_as_long_as_the_batch() -> None:
    ids, before = torch.arange(60).reshape(6, 10), len(placement._sent)
    send_ahead([ids], Copies().up)
    view = ids[1:]
    del ids
    gc.collect()
    assert len(placement._sent) == before + 1
    assert sent_ahead(view, CPU) is not None
    del view
    gc.collect()
    assert len(placement._sent) == before


def test_a_step_takes_what_was_sent_and_copies_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """`placed` on a GPU, which the meta device stands for."""
    meta, copied = torch.device("meta"), list[tuple[int, ...]]()
    whole = batch()

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        copied.append(tuple(tensor.shape))
        return tensor.to(device)

    def up(hosts: Sequence[Tensor]) -> tuple[list[Tensor], None]:
        return [host.to(meta) for host in hosts], None

    monkeypatch.setattr(placement, "to_device", to_device)
    send_ahead({name: value for name, value in whole.items() if name != "labels"}, up)
    microbatches = split_batch(whole, 2)
    on_device = placed(microbatches, meta)
    assert copied == [(60,)]  # the labels, at once
    for microbatch, copy in zip(microbatches, on_device, strict=True):
        assert isinstance(copy, OnDevice)
        assert host_values(copy) is microbatch
        assert {name: value.shape for name, value in copy.items()} == {
            name: value.shape for name, value in microbatch.items()
        }
        assert all(value.is_meta for value in copy.values())


def test_rows_of_a_batch_go_up_at_once_and_keep_their_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which shows what is copied, and what of a copy each microbatch gets."""
    meta, copied = torch.device("meta"), list[tuple[int, ...]]()

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        copied.append(tuple(tensor.shape))
        return tensor.to(device)

    monkeypatch.setattr(placement, "to_device", to_device)
    ids, wide = torch.arange(60).reshape(6, 10), torch.arange(90).reshape(6, 15)
    trained = torch.ones(6, 2, requires_grad=True)
    cases = {"ids": ids, "turned": ids.t().contiguous().t(), "part": wide[:, :10], "trained": trained}
    host = split_batch(cases, 3)
    up = placed(host, meta)
    # of `wide` two thirds are needed: a row at a time; what is trained keeps its graph
    assert sorted(copied) == sorted([(60,), (60,), *[(2, 10)] * 3, *[(2, 2)] * 3])
    for microbatch, copy in zip(host, up, strict=True):
        for name, tensor in microbatch.items():
            assert copy[name].shape == tensor.shape
            assert copy[name].stride() == tensor.stride() or name == "part"
        assert copy["ids"].storage_offset() == microbatch["ids"].storage_offset()
        assert copy["trained"].requires_grad


def test_a_copy_of_a_storage_holds_the_values_of_each_view() -> None:
    """On the CPU, through the class that `placed` uses: two dtypes in one storage, expanded rows."""
    words = torch.arange(12)
    host = [{"low": words[:6], "high": words[6:], "bits": words.view(torch.int32)[4:8],
             "same": words[3:4].expand(5), "rows": words.reshape(3, 4)[:, 1:3]}]  # fmt: skip
    copies = placement._Copies(host, CPU)  # `placed` gives the CPU the microbatches themselves
    for tensor in host[0].values():
        copy = copies.of(tensor)
        assert torch.equal(copy, tensor)
        assert copies.of(tensor) is copy
