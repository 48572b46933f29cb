"""Ranks of a small pipeline that comes to grief at one op.

python jobs_stalls.py CASE ...: all ranks of all cases at once, forked from one process that has imported
    torch, which is the slow part

A case is FOLDER,DEED,OP,RANKS,TIMEOUT. It leaves in its folder what each rank raised and when.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock import Pipeline
from penstock.errors import PeerError, account_of
from penstock.launch import start as launch
from penstock.models.stage import StageInfo
from penstock.schedule import Op

MICROBATCHES = 6
REPORTED = 1.2  # seconds: longer than between two notes of the watch


class Case(NamedTuple):
    """deed: what happens to the rank in `op`: kill, stop, or raise; loss for one in the loss function"""

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
        time.sleep(REPORTED)
        (Path(self.case.folder) / "struck").write_text(str(time.time()))
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.case.deed])


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
        stage, self.kind, self.microbatch = Op.parse(case.op)
        self.struck = info.stage == stage and case.deed != "loss"

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


def run(case: Case) -> NoReturn:
    """One rank; ends the process."""
    torch.set_num_threads(1)
    folder, rank = Path(case.folder), os.environ["RANK"]
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    try:
        pipe = Pipeline.from_provider(
            lambda info: Part(info, case), schedule="1f1b", ranks=case.ranks, microbatches=MICROBATCHES,
            loss_fn=Loss(case), timeout=case.timeout, trace_folder=folder / "stalled",
        )  # fmt: skip
        for _ in range(2):
            pipe.step({"x": torch.ones(2 * MICROBATCHES, 4)})
    except Exception as error:
        (folder / f"rank-{rank}.json").write_text(json.dumps(described(error)))
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


def fork(case: Case) -> tuple[list[int], int]:
    """The ids of the processes of all ranks, and the port at which they look for the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(case.ranks):
        pid = os.fork()
        if not pid:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(case.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo",
            )  # fmt: skip
            os.environ[launch.LAUNCHER] = "0"  # nothing is printed by the rank itself
            run(case)
        pids.append(pid)
    return pids, port


def fork_all(cases: list[Case]) -> None:
    """Run all cases at once; as a launcher would, hold the store and end a stopped rank after the others."""
    forked = [fork(case) for case in cases]
    stores = [
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(60))
        for _, port in forked
    ]
    running = {pid: case for case, (pids, _) in zip(cases, forked, strict=True) for pid in pids}
    while running:
        pid, _ = os.wait()
        case = running.pop(pid)
        rest = [other for other, of in running.items() if of == case]
        if case.deed == "stop" and len(rest) == 1:
            os.kill(rest[0], signal.SIGKILL)
    del stores


if __name__ == "__main__":
    fork_all([Case.parse(text) for text in sys.argv[1:]])
