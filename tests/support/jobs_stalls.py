"""Ranks of a small pipeline that comes to grief at one op.

python jobs_stalls.py CASE ...: all ranks of all cases at once, forked from one process that has imported
    torch, which is the slow part

A case is FOLDER,DEED,OP,RANKS,TIMEOUT. It leaves in its folder what each rank raised and when.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock import Pipeline
from penstock.checkpoint.save_load import CheckpointWriter
from penstock.errors import PeerError, account_of
from penstock.launch import stop as launch
from penstock.launch.failures import ERROR_FILE
from penstock.models.stage import StageInfo
from penstock.parallel import mesh, world
from penstock.runtime import ranks
from penstock.schedule import Op

MICROBATCHES = 6
# what rank 1 is about to call when it stops, by where it is
PLACES: dict[str, tuple[Any, str]] = {
    "away": (mesh, "Watch"),
    "joining": (mesh, "naming_peers"),
    "handshake": (ranks.Ranks, "same"),
    "groups": (world, "Groups"),
    "writer": (ranks, "naming_peers"),
}
REPORTED = 1.2  # seconds: longer than between two notes of the watch


class Case(NamedTuple):
    """deed: what happens to the rank in `op`: kill, stop, raise, or cut; loss for one in the loss function

    "node": rank 0 is killed on another machine than rank 2; its launcher ends rank 1, and the store with it.
    In other cases it happens to rank 1, where `op` says: it stops at one of `PLACES`, or exits between steps.
    """

    folder: str
    deed: str
    op: str
    ranks: int
    timeout: float

    @classmethod
    def parse(cls, text: str) -> Case:
        folder, deed, op, ranks, timeout = text.split(",")
        return cls(folder, deed, op, int(ranks), float(timeout))

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Grief(NamedTuple):
    case: Case

    def strike(self) -> None:
        if self.case.deed in ("raise", "loss"):
            raise ValueError("this op gave up")
        time.sleep(REPORTED if self.case.op not in PLACES else 0)
        (Path(self.case.folder) / "struck").write_text(str(time.time()))
        if self.case.deed == "cut":
            cut_off()
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self.case.deed == "stop" else signal.SIGKILL)


def cut_off() -> None:
    """Drop all that arrives at this process's connections, which stay open: a network partition."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter that returns 0 bytes
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                program = struct.pack("HP", 1, ctypes.addressof(drop))
                connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
            connection.close()


class Proxy:
    """Stands between a rank and the store, and passes nothing on once `cut` says so."""

    def __init__(self, cut: Callable[[], bool]) -> None:
        self._server, self._cut = socket.create_server(("127.0.0.1", 0)), cut
        self.port = self._server.getsockname()[1]

    def serve(self, port: int) -> None:
        """In a thread, between whoever connects and `port`."""
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def _accept(self, port: int) -> None:
        while True:
            near = self._server.accept()[0]
            far = socket.create_connection(("127.0.0.1", port))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._cut():
                    threading.Event().wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def stop_at(case: Case) -> None:
    """From now on this process stops where the case says."""
    module, name = PLACES[case.op]
    called = getattr(module, name)

    def stop(*args: Any, **kwargs: Any) -> Any:
        Grief(case).strike()
        return called(*args, **kwargs)

    setattr(module, name, stop)


class StruckBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, grief: Grief) -> Tensor:
        context.grief = grief
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.grief.strike()
        return gradient, None


class Part(nn.Module):
    def __init__(self, info: StageInfo, case: Case) -> None:
        super().__init__()
        self.linear, self.grief, self.forwards = nn.Linear(4, 4), Grief(case), 0
        self.struck = False
        if case.deed in ("kill", "stop", "raise", "cut", "node") and case.op not in PLACES:
            stage, self.kind, self.microbatch = Op.parse(case.op)
            self.struck = info.stage == stage

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        if not self.struck or x.device.type == "meta":
            return result
        self.forwards += 1
        if self.forwards != self.microbatch + 1:
            return result
        if self.kind == "F":
            self.grief.strike()
            return result
        struck: Tensor = StruckBackward.apply(result, self.grief)  # type: ignore[no-untyped-call]
        return struck


class Loss:
    """Of the microbatch that the case names, where it happens in the loss."""

    def __init__(self, case: Case) -> None:
        self.case, self.calls = case, 0

    def __call__(self, output: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
        if output.device.type != "meta":
            self.calls += 1
            if self.case.deed == "loss" and self.calls == Op.parse(self.case.op).microbatch + 1:
                Grief(self.case).strike()
        return output.square().mean()


# _START_SECONDS: a start as short as the timeout
def run(case: Case) -> NoReturn:
    """One rank; ends the process."""
    torch.set_num_threads(1)
    folder, rank = Path(case.folder), os.environ["RANK"]
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    if case.op == "away":
        mesh._START_SECONDS = case.timeout
    if case.op in PLACES and rank == "1":
        stop_at(case)
    if case.deed == "node":  # as under torchrun
        os.environ[ERROR_FILE] = str(folder / f"error-{rank}.json")
        launch.follow_parent()
    (folder / f"rank-{rank}.began").touch()
    try:
        pipe = Pipeline.from_provider(
            lambda info: Part(info, case), schedule="1f1b", ranks=case.ranks, microbatches=MICROBATCHES,
            loss_fn=Loss(case), timeout=case.timeout, trace_folder=folder / "stalled",
            transport="gloo" if case.deed in ("cut", "node") else None,
        )  # fmt: skip
        for _ in range(2):
            pipe.step({"x": torch.ones(2 * MICROBATCHES, 4)})
            if case.deed == "exit" and rank == "1":
                (folder / "struck").write_text(str(time.time()))
                sys.exit(0)
        if case.op == "writer":
            CheckpointWriter(pipe)
    except Exception as error:
        (folder / f"rank-{rank}.json").write_text(json.dumps(described(error)))
        if case.deed == "cut":  # Python has to end too
            sys.exit(3)
        launch.fail(error)
    launch.leave(0)


def described(error: Exception) -> dict[str, Any]:
    words = {"kind": type(error).__name__, "text": str(error), "time": time.time(),
             "account": str(account_of(error))}  # fmt: skip
    if isinstance(error, PeerError):
        ops = [] if error.timeline is None else [str(span.op) for span in error.timeline.spans]
        words |= {
            "rank": error.rank, "op": error.op, "peer": error.peer, "waited": error.waited, "ops": ops,
            "last_ops": [str(op) for op in error.last_ops], "peer_report": error.peer_report,
        }  # fmt: skip
    return words


def fork(case: Case, proxy: Proxy | None) -> tuple[list[int], int]:
    """The ids of the processes of all ranks, and the port of the store. proxy: between it and rank 1"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(case.ranks):
        pid = os.fork()
        if not pid:
            looks_at = str(port if proxy is None or rank != 1 else proxy.port)
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(case.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=looks_at,
                TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo",
            )  # fmt: skip
            os.environ[launch.LAUNCHER] = "0"  # nothing is printed by the rank itself
            run(case)
        pids.append(pid)
    return pids, port


def fork_all(cases: list[Case]) -> None:
    """Run all cases at once; as a launcher would, hold the store and end a stopped rank after the others."""
    proxies = {case: Proxy((Path(case.folder) / "struck").exists) for case in cases if case.deed == "cut"}
    forked = [fork(case, proxies.get(case)) for case in cases]
    stores = {
        case: TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(60))
        for case, (_, port) in zip(cases, forked, strict=True)
    }
    for case, (_, port) in zip(cases, forked, strict=True):
        if case in proxies:
            proxies[case].serve(port)
    running = {pid: case for case, (pids, _) in zip(cases, forked, strict=True) for pid in pids}
    while running:
        pid, status = os.wait()
        case = running.pop(pid)
        (Path(case.folder) / f"exit-{pid}").write_text(str(os.waitstatus_to_exitcode(status)))
        rest = [other for other, of in running.items() if of == case]
        if case.deed == "stop" and len(rest) == 1:
            os.kill(rest[0], signal.SIGKILL)
        if case.deed == "node" and len(rest) == 2:
            os.kill(rest[0], signal.SIGTERM)
        elif case.deed == "node" and rest:
            time.sleep(0.1)  # as torchrun looks ten times a second
            del stores[case]
    del stores


if __name__ == "__main__":
    gc.freeze()  # a collection in a rank would write to all pages that it shares
    fork_all([Case.parse(text) for text in sys.argv[1:]])
