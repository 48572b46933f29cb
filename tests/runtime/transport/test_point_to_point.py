"""Messages in the order of batches: gradients as of plain ones, between processes and in one."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.slow_network import Network

from penstock.errors import ConfigError
from penstock.runtime.transport.point_to_point import Batches, P2PBatch, P2PGroup
from penstock.schedule.choose import chosen_schedule
from support import jobs_channels as jobs
from support.covering import every
from support.pool import Pool
from support.refusals import refuses
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
    every(3, [{"transport": "gloo", "exchange": "batched"}, {"transport": "gloo"}, {}]),
    ids=["batched", "gloo", "shared memory"],
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("first", every(2, [0, 1]), ids=["half", "others"])
def test_every_schedule_between_processes(
    pool: Pool, first: int, ranks: int, options: dict[str, Any]
) -> None:
    pool.run(ranks, jobs.compare, ranks, cases(ranks, 6)[first::2], options)


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
    with refuses(
        ConfigError, "exchange='batched' with shapes='exchanged'", "carries its shapes", "'channels'"
    ):
        jobs.step("1f1b", 2, 2, exchange="batched", shapes="exchanged")
    with refuses(ConfigError, "exchange='ring'"):
        jobs.step("1f1b", 2, 2, exchange="ring")


def exchange_in_a_ring() -> list[float]:
    """What this rank receives from the rank before it and the one after it, in one batch with its sends."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    batches, received = Batches(group), [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    works = []
    for peer, buffer in zip((before, after), received, strict=True):
        works += batches.receive(P2PGroup(group, peer, rank, 0), [buffer])
        works += batches.send(P2PGroup(group, rank, peer, 0), [torch.tensor([rank], dtype=torch.float64)])
    assert len(set(works)) == 1
    assert not works[0].is_completed()
    batches.start()
    works[0].wait()
    return [float(buffer) for buffer in received]


def test_a_ring_exchange_is_one_batch(pool: Pool) -> None:
    assert pool.run(4, exchange_in_a_ring) == [[3.0, 1.0], [0.0, 2.0], [1.0, 3.0], [2.0, 0.0]]


def test_a_batch_is_over_when_all_of_it_is() -> None:
    first, second, batch = Noted(), Noted(), P2PBatch()
    assert not batch.is_completed()
    with pytest.raises(AssertionError, match="not begun"):
        batch.wait()
    batch.begin([first, second])
    first.wait()
    assert not batch.is_completed()
    batch.wait()
    assert second.is_completed()
    assert batch.is_completed()


class Noted:
    """A work that is over when it has been waited for."""

    def __init__(self) -> None:
        self._over = False

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._over = True
        return True

    def is_completed(self) -> bool:
        return self._over


def test_batches_hold_no_tensor_once_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = torch.zeros(1)
    held = weakref.ref(sent)
    group: Any = object()
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, **_: tensor)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [])
    batches = Batches(group)
    batches.send(P2PGroup(group, 1, 2, 5), [sent])
    assert held() is sent
    batches.start()
    del sent
    assert held() is None
