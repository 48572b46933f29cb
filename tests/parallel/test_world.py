"""What NCCL needs around it, without NCCL: the environment, shared GPUs, backends, options of groups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ConfigError
from penstock.parallel import mesh, nccl, world
from penstock.parallel.world import World, WorldOptions, goes_in_batches, open_world
from penstock.runtime.ranks import Ranks
from penstock.runtime.transport import groups
from penstock.runtime.transport.channels import open_p2p_groups
from penstock.runtime.transport.groups import Groups
from penstock.runtime.transport.interface import LocalTransport
from penstock.schedule import build, loop
from penstock.schedule.order import Channel
from support.programs import written

LOOPED = build("1f1b", ranks=16, microbatches=32, stages_per_rank=2)


def test_variables_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    nccl.set_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    nccl.set_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")


@pytest.mark.parametrize(("gpus", "shared"), [(["a", "b", "c"], False), (["a", "b", "a"], True)])
def test_all_ranks_find_out_where_two_share_a_gpu(gpus: list[str], shared: bool) -> None:
    store = HashStore()

    def ask(rank: int) -> bool:
        return nccl.shares_a_gpu(store, rank, len(gpus), gpus[rank])

    with ThreadPoolExecutor(len(gpus)) as ranks:
        assert list(ranks.map(ask, range(len(gpus)))) == [shared] * len(gpus)


def test_gloo_takes_the_place_of_nccl_on_a_shared_gpu_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "gpu_name", lambda device: "one")
    store, said = HashStore(), list[str]()

    def choose(rank: int) -> str:
        return nccl.backend_of_gpus(store, rank, 2, torch.device("cuda", 0), said.append)

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(choose, range(2))) == ["gloo", "gloo"]
    (line,) = said
    assert "share a GPU" in line
    assert "\n" not in line
    assert nccl.backend_of_gpus(HashStore(), 0, 1, torch.device("cuda", 0), said.append) == "nccl"
    assert len(said) == 1


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


class Group:
    """A group of the backends that are given by type of device."""

    def __init__(self, **backends: str) -> None:
        self._backends = backends
        self._device_types = [torch.device(kind) for kind in backends]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._backends[device.type])


@pytest.mark.parametrize(
    ("backends", "device", "expected", "kept"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", "nccl", False),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu", "gloo", False),
        ({"cuda": "nccl"}, "cuda", "nccl", True),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "gloo", True),
    ],
)
def test_the_backend_of_a_device(
    backends: dict[str, str], device: str, expected: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with two backends is not kept for messages: each collective would choose by its tensor."""
    group = Group(**backends)
    one = SimpleNamespace(get_group=lambda: group, get_local_rank=lambda: 0)
    of_one: Any = type("Mesh", (dict,), {"device_type": device})({"pp": one})
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0])
    monkeypatch.setattr(groups, "pipelines", lambda _: [[0]])
    asked: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **options: Any) -> Group:
        asked.append(options)
        return Group()

    monkeypatch.setattr(dist, "new_group", new_group)
    made: Any = Groups(of_one, 5.0)
    assert made.backend == expected
    assert (made.pipeline is group) == kept
    for_values = ["gloo"] * (expected == "nccl")  # a GPU is left alone
    assert [options["backend"] for options in asked] == ([] if kept else [expected]) + for_values


@pytest.mark.parametrize(
    ("backends", "at"), [({"cuda": "nccl"}, "cuda:1"), ({"cpu": "gloo", "cuda": "nccl"}, "cpu")]
)
def test_a_job_on_nccl_alone_exchanges_values_on_the_gpu(
    backends: dict[str, str], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: its tensors were in host memory, which NCCL refuses."""
    group: Any = Group(**backends)
    group.rank, group.size = (lambda: 0), (lambda: 1)
    monkeypatch.setattr(world, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=group)))
    assert world._all_ranks(1.0, torch.device("cuda:1"), None)._device == torch.device(at)


def test_a_group_for_messages_takes_few_processors_first_and_no_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's limit would end a rank whose host is far ahead; the host keeps the pipeline's.

    0.5.0: torch warned that `backend_options._timeout` was another one than the group's.
    """
    made: Any = Groups.__new__(Groups)
    made.backend, made.limit = "nccl", timedelta(seconds=5)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: asked.append(options))

    def options(is_high_priority_stream: bool) -> Any:
        return SimpleNamespace(high=is_high_priority_stream, config=SimpleNamespace())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    made._make([0, 1], "messages", messages=True, backend="nccl")
    made._make([0, 1], "others", messages=False, backend="nccl")
    made._make([0, 1], "others", messages=True, backend="gloo")
    first, second, third = asked
    assert first["pg_options"].high
    assert first["pg_options"].config.max_ctas <= 8
    assert first["timeout"] == second["timeout"] == first["pg_options"]._timeout == groups.FOREVER
    assert (second["pg_options"], third.get("pg_options"), third["timeout"]) == (None, None, made.limit)


@pytest.mark.parametrize(("batched", "made"), [(True, [(0, 1)]), (False, [(0, 1), (1, 0)])])
def test_messages_have_groups_of_their_own(batched: bool, made: list[tuple[int, ...]]) -> None:
    """With the options of messages; and where the job's group is not aborted, they can be."""
    asked: list[tuple[int, ...]] = []

    def new(ranks: Sequence[int], name: str, *, messages: bool = False) -> str:
        assert messages
        asked.append((*ranks,))
        return name

    of_two: Any = SimpleNamespace(backend="nccl", size=2, pipeline="the pipeline's", new=new)
    found = open_p2p_groups(of_two, [Channel(0, 1), Channel(1, 0)], (0, 1), batched)
    assert asked == made
    assert "the pipeline's" not in {str(each.group) for each in found.values()}


@pytest.mark.parametrize("debugging", [False, True])
def test_an_abort_ends_nccls_groups_together_and_once(debugging: bool) -> None:
    """A group of gloo, for another thread, knows no abort; neither does a process that is in none."""
    calls: list[str] = []

    class Made(dist.ProcessGroup):
        def __init__(self, name: str) -> None:
            super().__init__(0, 1)  # type: ignore[call-arg]
            self._name = name

        def abort(self) -> None:
            calls.append("abort")

        def _get_backend(self, device: torch.device) -> Any:
            marks = {} if debugging else {"_group_start": lambda: calls.append("start"),
                                          "_group_end": lambda: calls.append("end")}  # fmt: skip
            return SimpleNamespace(name=lambda: self._name, **marks)

    made: Any = Groups.__new__(Groups)
    made.backend, made.pipeline = "nccl", Made("nccl")
    made._made = [Made("nccl"), Made("gloo"), dist.GroupMember.NON_GROUP_MEMBER]
    made.abort()
    made.abort()
    assert calls == (["abort"] * 2 if debugging else ["start", "abort", "abort", "end"])


def test_communicators_of_a_rank() -> None:
    assert nccl.communicators(LOOPED, batched=True) == 1
    assert nccl.communicators(LOOPED, batched=False) == 8
    assert nccl.describe(LOOPED, "auto").startswith("1 communicator a rank")
    assert nccl.describe(LOOPED, "channels").startswith("up to 8 communicators a rank")


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


@pytest.mark.usefixtures("one_process")
def test_a_world_on_nccl_asks_for_enough_hardware_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is made, and for the schedule of another number of microbatches."""

    class OnNCCL(Groups):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.backend = "nccl"

    def refused(schedule: Any, batched: bool) -> None:
        raise ConfigError("too few", "hardware queues", "Set 32")

    monkeypatch.setattr(world, "Groups", OnNCCL)
    monkeypatch.setattr(world, "check_connections", refused)
    schedule = build("1f1b", ranks=1, microbatches=2)
    with pytest.raises(ConfigError, match="too few"):
        open_world(schedule, WorldOptions(device="cpu"))
    made = World((0,), torch.device("cpu"), LocalTransport(None), Ranks())
    made.check(schedule)
    with pytest.raises(ConfigError, match="too few"):
        replace(made, on_nccl=True).check(schedule)


ENDS = """
import datetime, threading
from types import SimpleNamespace
from penstock.runtime.transport import groups
groups._LINGERS = datetime.timedelta(seconds={seconds})
made = groups.Groups.__new__(groups.Groups)
group = SimpleNamespace(abort=threading.Event().wait if {hangs} else lambda: None,
                        _get_backend=lambda device: SimpleNamespace(name=lambda: "nccl"))
made.backend, made.pipeline, made._made = "nccl", group, []
made.abort()
print("raised")
"""


@pytest.mark.parametrize(("hangs", "seconds", "code"), [(True, 0.2, 1), (False, 60, 0)])
def test_a_process_ends_whatever_nccl_waits_for(hangs: bool, seconds: float, code: int) -> None:
    """0.5.0: a rank that had raised the error of a killed one never ended, in NCCL's abort."""
    ran = subprocess.run(
        [sys.executable, "-c", ENDS.format(hangs=hangs, seconds=seconds)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (code, "raised\n"), ran.stderr
    assert ("NCCL does not end" in ran.stderr) is hangs
