"""The world of a pipeline on GPUs: its backend, whether messages go in batches, the current device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.parallel import mesh, nccl, world
from penstock.parallel.world import WorldOptions, goes_in_batches, open_world
from penstock.runtime.transport.groups import Groups
from penstock.schedule import build, loop
from support.programs import written

LOOPED = build("1f1b", ranks=16, microbatches=32, stages_per_rank=2)


# _rendezvous: no other process comes
@pytest.mark.parametrize(
    ("device", "backend", "taken"),
    [("cuda:0", None, "chosen"), ("cuda:0", "nccl", "nccl"), ("cpu", None, "gloo")],
)
def test_a_job_on_gpus_takes_the_backend_that_these_allow(
    device: str, backend: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(mesh, "_rendezvous", lambda seconds: (HashStore(), 0, 1))
    monkeypatch.setattr(mesh, "backend_of_gpus", lambda *_: "chosen")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: asked.append(backend))
    watch = mesh.init_process_group(torch.device(device), 5.0, backend)
    assert watch is not None
    watch.close()
    assert asked == [taken]


# _all_ranks: a world of torch, which is made without a mesh
def test_a_job_without_a_backend_takes_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: torch calls it "undefined", which was taken for a backend without tags."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "undefined"
        made = Groups(init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), 1.0)
        assert (made.backend, made.control_device(torch.device("cpu"))) == ("gloo", torch.device("cpu"))
        assert world._all_ranks(1.0, torch.device("meta"), None).gather("x") == ["x"]
    finally:
        dist.destroy_process_group()


def test_messages_go_in_batches_on_nccl_where_the_schedule_can() -> None:
    options = WorldOptions()
    assert goes_in_batches(options, "nccl", LOOPED)
    assert not goes_in_batches(options, "gloo", LOOPED)
    assert not goes_in_batches(WorldOptions(exchange="channels"), "nccl", LOOPED)
    # each rank sends what another one takes only after a message that comes later
    circle = written(
        loop(3, 2), 2,
        "0F0 3F0 0F1 3F1", "1F0 4F0 1F1 4F1", "2F0 5F0 2F1 5F1",
    )  # fmt: skip
    assert nccl.fits_batches(circle) == goes_in_batches(options, "nccl", circle)


def test_a_gpu_is_made_the_current_one_before_anything_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: in one process it never was: events, synchronisation and random states were those of GPU 0."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    set_device: Callable[[torch.device], None] = current.append
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    woken: list[torch.device] = []
    monkeypatch.setattr(world, "wake_autograd", woken.append)
    schedule = build("1f1b", ranks=2, microbatches=2)
    made = open_world(schedule, WorldOptions(device="cuda:1", transport="local"))
    assert current == woken == [torch.device("cuda:1")] == [made.device]


@torch.no_grad()
def test_the_first_backward_on_a_gpu_multiplies_no_matrices() -> None:
    """0.5.0: torch warned that cuBLAS found no current CUDA context, in autograd's own thread."""

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Seen():  # type: ignore[no-untyped-call]
        world.wake_autograd(torch.device("cpu"))
    assert seen.count("aten.mul.Tensor") == 2  # forward and backward
    assert not any("mm" in name for name in seen)
