"""Messages in batches: gradients as of plain ones, over gloo and in one process."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import ConfigError
from penstock.runtime.transport.emulated import Network
from penstock.runtime.transport.point_to_point import Batches, P2PBatch, P2PGroup, ring_arguments
from penstock.schedule.choose import chosen_schedule
from support import jobs_channels as jobs
from support.covering import every
from support.pool import Pool
from support.schedules import FORMS, takes


def cases(ranks: int, microbatches: int) -> list[jobs.Case]:
    """Every builder's schedule."""
    return [
        (form, chosen_schedule(form, ranks, microbatches).placement.depth, microbatches)
        for name, form in FORMS.items()
        if takes(name, ranks, microbatches) and "searched" not in name
    ]


@pytest.mark.parametrize(
    "options",
    every(3, [{"exchange": "batched"}, {"transport": "gloo"}, {}]),
    ids=["batched", "gloo", "shared memory"],
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_every_schedule_between_processes(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    pool.run(ranks, jobs.compare, ranks, cases(ranks, 6), options)


def test_schedules_in_one_process() -> None:
    jobs.compare(3, cases(3, 4)[::3], {"exchange": "batched"})


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb_v"},
        {"dtype": torch.float32, "wire_dtype": torch.bfloat16, "network": Network(latency=1e-3)},
    ],
)
def test_gradients_are_those_of_channels_bit_for_bit(pool: Pool, options: dict[str, Any]) -> None:
    for batched, plain in zip(
        pool.run(2, jobs.step_with, {**options, "exchange": "batched"}),
        pool.run(2, jobs.step_with, options),
        strict=True,
    ):
        assert batched.loss == plain.loss
        for stage, gradients in plain.gradients.items():
            assert all(map(torch.equal, batched.gradients[stage], gradients))


def test_what_cannot_go_in_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a message that carries its shapes has two parts.*'channels'"):
        jobs.step("1f1b", 2, 2, exchange="batched", shapes="exchanged")
    with pytest.raises(ConfigError, match="exchange='ring'"):
        jobs.step("1f1b", 2, 2, exchange="ring")


def test_a_ring_exchange_carries_what_fits_one(pool: Pool) -> None:
    several = [("1f1b", 4, 6), ("zb_h1", 4, 6), ({"schedule": "1f1b", "stages_per_rank": 2}, 8, 8)]
    assert all(count > 0 for count in pool.run(4, jobs.in_rings, 4, several))


class Op:
    """What ring_arguments reads of a torch.distributed.P2POp."""

    def __init__(self, sends: bool, peer: int, tensor: torch.Tensor) -> None:
        self.op = dist.isend if sends else dist.irecv
        self.group_peer, self.tensor = peer, tensor


def ring(*ops: tuple[bool, int, torch.Tensor], rank: int = 1, size: int = 4) -> Any:
    made: Any = [Op(*each) for each in ops]
    return ring_arguments(made, rank, size)


def test_a_ring_exchange_names_the_neighbours() -> None:
    to_next, from_next, from_previous = torch.zeros(3)
    found = ring((True, 2, to_next), (False, 2, from_next), (False, 0, from_previous))
    assert found == {
        "tensor_send_prev": None,
        "tensor_recv_prev": from_previous,
        "tensor_send_next": to_next,
        "tensor_recv_next": from_next,
    }
    of_two = ring((True, 0, to_next), (False, 0, from_next), size=2)  # the other rank counts as the previous
    assert (of_two["tensor_send_prev"], of_two["tensor_recv_prev"]) == (to_next, from_next)


@pytest.mark.parametrize(
    ("ops", "size"),
    [
        ([(True, 3)], 4),  # no neighbour of rank 1
        ([(True, 2), (True, 2)], 4),  # two to one
        ([(False, 0), (False, 0)], 2),  # in a ring of two the other is both neighbours, and is still one
    ],
)
def test_other_exchanges_do_not_fit_a_ring(ops: list[tuple[bool, int]], size: int) -> None:
    assert ring(*((*each, torch.zeros(1)) for each in ops), size=size) is None


class Noted:
    """A work that is over when it has been waited for, which is borne once."""

    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        assert self._name not in self._order
        self._order.append(self._name)
        return True

    def is_completed(self) -> bool:
        return self._name in self._order


def test_a_batch_is_over_after_those_before_it_and_is_waited_for_once() -> None:
    order: list[str] = []
    first = P2PBatch(None)
    second = P2PBatch(first)
    third = P2PBatch(second)
    first.begin([Noted("a", order), Noted("b", order)])
    second.begin([Noted("c", order)])
    third.begin([])
    assert not first.is_completed()
    third.wait()
    assert order == ["a", "b", "c"]
    second.wait()
    assert order == ["a", "b", "c"]
    assert first.is_completed()


def test_thousands_of_batches_that_nobody_waited_for() -> None:
    batch = None
    for _ in range(5000):
        batch = P2PBatch(batch)
        batch.begin([])
    assert batch is not None
    assert batch.wait()


def test_batches_hold_no_tensor_once_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = torch.zeros(1)
    held = weakref.ref(sent)
    group: Any = object()
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, **_: tensor)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [])
    batches = Batches(group)
    batches.send(P2PGroup(group, 1, 2, 5), [sent])
    assert held() is sent
    batches.start(in_line=False)
    del sent
    assert held() is None
