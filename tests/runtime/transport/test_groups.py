"""Process groups of a pipeline on NCCL: their backends, limits and ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.parallel import world
from penstock.runtime.transport import groups
from penstock.runtime.transport.channels import open_p2p_groups
from penstock.runtime.transport.groups import Groups
from penstock.schedule.order import Channel


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


# _device: a collective there would need the GPU
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


# _made: groups of NCCL, which this machine cannot make
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


# one process imports torch, and forks one for each case, which ends as an interpreter does
ENDS = """
import datetime, os, sys, threading
from types import SimpleNamespace
from penstock.runtime.transport import groups
for hangs, seconds in ((True, 0.2), (False, 60)):
    if not (child := os.fork()):
        groups._LINGERS = datetime.timedelta(seconds=seconds)
        made = groups.Groups.__new__(groups.Groups)
        group = SimpleNamespace(abort=threading.Event().wait if hangs else lambda: None,
                                _get_backend=lambda device: SimpleNamespace(name=lambda: "nccl"))
        made.backend, made.pipeline, made._made = "nccl", group, []
        made.abort()
        print("raised")
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print("----", file=sys.stderr)
"""


def test_a_process_ends_whatever_nccl_waits_for() -> None:
    """0.5.0: a rank that had raised the error of a killed one never ended, in NCCL's abort."""
    ran = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.split() == ["raised", "1", "raised", "0"], ran.stderr
    hung, ended, _ = ran.stderr.split("----\n")
    assert "NCCL does not end" in hung
    assert "NCCL does not end" not in ended
