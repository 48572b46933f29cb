"""B: several processes on one GPU.

- gloo by way of pinned memory, with 2 and 4 processes: every gradient has the bits of the same pipeline in
  one process. penstock takes gloo by itself where processes share a GPU.
- NCCL with a world of one process: build, step, save and close.
- NCCL with several processes on one GPU, which it takes from 2.30 on; "not run" with an older one.
- A step of `1f1b` next to that of torch.distributed.pipelining, over NCCL: of the same two stages, in turns
  in the same two processes.
- One of two processes is killed, or stopped, in its third forward: the other raises the right error soon
  after its timeout.

Attention and precision are those whose kernels give the same bits each time: torch's own in float32.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from benchmarks.gpu.exactness import full_float32
from benchmarks.gpu.models import Batch, Size, attention, batch_of, qwen3, seconds, wait_for
from benchmarks.gpu.part import Part, nccl_version
from benchmarks.pool import Pool, Rank
from benchmarks.rivals import Block, Work, ours, theirs
from benchmarks.rounds import interval
from penstock import AutoPipeline, Pipeline
from penstock.errors import PeerError, PeerLostError, StalledPeerError
from penstock.models.stage import StageInfo

WORLDS = (2, 4)
WORLD_OF_ONE = 5.0  # seconds to build, step, save and close
AFTER = 5.0  # seconds after the timeout in which an error has to come
SHARES_A_GPU = (2, 30)  # NCCL that takes several ranks on one GPU, where NCCL_MULTI_RANK_GPU_ENABLE says so
NEXT_TO_TORCH = 1.0  # a step over torch's
NEXT = "1f1b next to torch.distributed.pipelining, 2 processes"
STRUCK = 3  # the forward in which a process is killed or stopped
ERRORS: Mapping[str, type[PeerError]] = {"kill": PeerLostError, "stop": StalledPeerError}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_START = 120.0  # seconds for a case of several processes, whose first use of CUDA is slow


class Stack(NamedTuple):
    """A stack of blocks over two stages, in bfloat16. tokens: of a microbatch; rounds: that count"""

    blocks: int
    width: int
    tokens: int
    microbatches: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.width}, m={self.microbatches} of {self.tokens} tokens"


class Sizes(NamedTuple):
    """Sizes of this part.

    beside: for the step next to torch's
    timeout: of the pipelines whose process is killed or stopped; method: see benchmarks.pool.Pool
    """

    model: Size
    beside: Stack
    schedules: tuple[str, ...]
    timeout: float
    method: str


FULL = Sizes(
    Size(8, 256, 768, 4, 2, 64, 512, 2, 128, 8, 0), Stack(8, 2048, 4096, 16, 10),
    ("1f1b", "zb_v", "dualpipe"), 5.0, "spawn",
)  # fmt: skip
TINY = Sizes(Size(8, 16, 24, 2, 1, 8, 64, 1, 8, 8, 0), Stack(4, 16, 8, 4, 2), ("zb_v",), 1.5, "forkserver")


class Job(NamedTuple):
    """What the processes of one case run.

    on: their numbers in the pool, in the order of the ranks; transport: None for penstock's choice
    """

    on: tuple[int, ...]
    port: int
    device: str
    size: Size
    schedule: str = "1f1b"
    transport: str | None = None
    timeout: float = 60.0
    deed: str = ""
    folder: str = ""


def run(part: Part, sizes: Sizes) -> None:
    part.notes += [
        str(sizes.model._replace(ranks=max(WORLDS))),
        f"kill, stop: rank 1 of 2 in its forward {STRUCK}, timeout {sizes.timeout:g} s",
        "a world of one: of a process that has imported torch and used CUDA before",
    ]
    with Pool(max(WORLDS), join=False, method=sizes.method) as pool:
        _several(part, sizes, pool, "gloo", None if part.on_gpu else "gloo")
        if not part.on_gpu:
            _next_to_torch(part, sizes, pool, "gloo")
        _world_of_one(part, sizes, pool)
        _faults(part, sizes, pool, "gloo", None if part.on_gpu else "gloo")
    obstacle = no_shared_gpu(part)
    if obstacle is not None:
        for name in (
            "several processes on one GPU",
            NEXT,
            *(f"{deed} one of two processes" for deed in ERRORS),
        ):
            part.not_run(f"NCCL: {name}", "as over gloo", obstacle, "as over gloo")
        return
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # the processes inherit it
    with Pool(max(WORLDS), join=False, method=sizes.method) as pool:
        _next_to_torch(part, sizes, pool, "nccl")
        _several(part, sizes, pool, "nccl", "nccl")
        _faults(part, sizes, pool, "nccl", "nccl")


def no_shared_gpu(part: Part) -> str | None:
    """Why NCCL cannot run several ranks on one GPU here; None where it can."""
    version = nccl_version()
    if not part.on_gpu or not version:
        return "NCCL needs a GPU"
    if version[:2] >= SHARES_A_GPU:
        return None
    found, needed = (".".join(map(str, each)) for each in (version, SHARES_A_GPU))
    return f"NCCL {found}; several ranks on one GPU need {needed}"


def job_of(part: Part, sizes: Sizes, on: Sequence[int], **more: Any) -> Job:
    return Job(tuple(on), free_port(), str(part.device), sizes.model._replace(ranks=len(on)), **more)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# ---- the same bits as in one process


def _several(part: Part, sizes: Sizes, pool: Pool, backend: str, transport: str | None) -> None:
    for world in WORLDS:
        for schedule in sizes.schedules:
            case = f"{backend}, {world} processes: {schedule}"
            job = job_of(part, sizes, range(world), schedule=schedule, transport=transport)
            part.measure(case, _START, partial(_same_bits, part, pool, case, backend, job))


def _same_bits(part: Part, pool: Pool, case: str, backend: str, job: Job) -> None:
    expected = digests_of(job._replace(transport="local"))
    answers = pool.run(gradients_of_rank, job, on=job.on, timeout=_START)
    taken = {taken for taken, _ in answers}
    if taken != {backend}:
        raise RuntimeError(f"the ranks took {sorted(taken)}")
    found = {name: digest for _, digests in answers for name, digest in digests.items()}
    names = expected.keys() | found.keys()
    differing = [name for name in sorted(names) if expected.get(name) != found.get(name)]
    why = f"such as {differing[0]}" if differing else ""
    part.add(case, "gradients that differ in any bit", len(differing), at_most=0, why=why)


def digests_of(job: Job) -> dict[str, str]:
    """The hash of each gradient after a step, by name and stage, and the loss."""
    with full_float32(), attention(SDPBackend.MATH):
        pipe = built(job)
        loss = pipe.step(batch(job)).loss
        found = {"the loss": repr(loss)}
        for stage, module in pipe.modules.items():
            for name, parameter in module.named_parameters():
                found[f"{name} of stage {stage}"] = digest(parameter.grad)
        pipe.close()
    return found


def digest(value: Tensor | None) -> str:
    """Raises RuntimeError for a gradient that is not there."""
    if value is None:
        raise RuntimeError("a parameter has no gradient")
    flat = value.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def built(job: Job) -> Pipeline:
    return AutoPipeline(
        ranks=job.size.ranks, schedule=job.schedule, microbatches=job.size.microbatches, device=job.device,
        transport=job.transport, timeout=job.timeout,
    ).build(qwen3(job.size))  # fmt: skip


def batch(job: Job) -> Batch:
    return batch_of(job.size, torch.device(job.device), ignored=True)


def gradients_of_rank(rank: Rank, job: Job) -> tuple[str, dict[str, str]]:
    """In a process of the pool: the backend that the ranks took, and the digests of this one's stages."""
    with joined(rank, job):
        found = digests_of(job)
        return dist.get_backend(), found


def join(rank: Rank, job: Job) -> None:
    """Set the environment that torchrun gives to a rank; penstock joins the others by it."""
    names = {
        "RANK": job.on.index(rank.index), "WORLD_SIZE": len(job.on), "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job.port, "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in names.items()})


@contextmanager
def joined(rank: Rank, job: Job) -> Iterator[None]:
    """One of the ranks of a case. Afterwards the process may join another one."""
    join(rank, job)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)


# ---- next to torch


class HalfOfBlocks(nn.Module):
    """One of two stages. Made on the current device: penstock builds it without values, too."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(stack.width) for _ in range(stack.blocks // 2)])
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).float().square().mean()


def work_of(stack: Stack, device: torch.device) -> Work:
    torch.manual_seed(0)
    shape = stack.microbatches, stack.tokens, stack.width
    batch, target = torch.randn((2, *shape), dtype=torch.bfloat16).to(device).unbind()
    return Work(partial(HalfOfBlocks, stack), squared, batch, target, stack.microbatches)


def _next_to_torch(part: Part, sizes: Sizes, pool: Pool, backend: str) -> None:
    case = f"{backend}: {NEXT}"
    part.notes.append(f"{NEXT}: {sizes.beside}")
    job = job_of(part, sizes, (0, 1), transport=backend)
    part.measure(case, _START, partial(_compare_steps, part, pool, case, job, sizes.beside))


def _compare_steps(part: Part, pool: Pool, case: str, job: Job, stack: Stack) -> None:
    by_rank = pool.run(steps_in_turn, job, stack, on=job.on, timeout=_START)
    # a step is over when its last rank is done
    rounds = [
        {name: max(each[name] for each in ranks) for name in ranks[0]} for ranks in zip(*by_rank, strict=True)
    ]
    part.raw[case] = rounds
    ratio = interval([each["penstock"] / each["torch"] for each in rounds])
    part.add(case, "step / torch's", ratio.middle, at_most=NEXT_TO_TORCH, timing=True, quartiles=ratio)
    mine, theirs = (median(each[name] for each in rounds) for name in ("penstock", "torch"))
    part.add(case, "step", mine, "s", other=theirs)


def steps_in_turn(rank: Rank, job: Job, stack: Stack) -> list[dict[str, float]]:
    """In a process of the pool: the seconds of a step of each, by round."""
    number = job.on.index(rank.index)
    device = torch.device(job.device)
    if device.type == "cuda" and torch.cuda.device_count() >= len(job.on):
        device = torch.device("cuda", number)
    with joined(rank, job):
        pipe, mine = ours(work_of(stack, device), "1f1b", len(job.on), transport=job.transport)
        steps = {"penstock": mine, "torch": theirs(work_of(stack, device), "1f1b", number, len(job.on)).step}

        def one(step: Callable[[], object]) -> float:
            pipe.processes.gather(None)  # the ranks begin together
            return seconds(device, step)

        rounds = [{name: one(step) for name, step in steps.items()} for _ in range(2 + stack.rounds)]
        pipe.close()
    return rounds[2:]


# ---- a world of one


def _world_of_one(part: Part, sizes: Sizes, pool: Pool) -> None:
    case = f"{'NCCL' if part.on_gpu else 'gloo'}, a world of one"
    part.measure(case, 60, partial(_lives, part, sizes, pool, case))


def _lives(part: Part, sizes: Sizes, pool: Pool, case: str) -> None:
    with tempfile.TemporaryDirectory(dir=part.scratch) as folder:
        job = job_of(part, sizes, [0], folder=str(Path(folder, "saved")))
        ((backend, times),) = pool.run(whole_life, job, on=job.on, timeout=60)
        if backend != ("nccl" if part.on_gpu else "gloo"):
            raise RuntimeError(f"it took {backend}")
        part.raw[case] = times
        total = sum(times.values())
        part.add(case, "build, step, save and close", total, "s", at_most=WORLD_OF_ONE, timing=True)


def whole_life(rank: Rank, job: Job) -> tuple[str, dict[str, float]]:
    """In a process of the pool: the backend, and the seconds of each part of a pipeline's life."""
    device = torch.device(job.device)
    stamps = [time.perf_counter()]

    def stamp() -> None:
        wait_for(device)
        stamps.append(time.perf_counter())

    with joined(rank, job):
        pipe = built(job)
        backend = dist.get_backend()
        stamp()
        pipe.step(batch(job))
        stamp()
        pipe.save_pretrained(job.folder)
        stamp()
        pipe.close()
    stamp()
    names = ("build", "step", "save", "close")
    return backend, {name: end - start for name, start, end in zip(names, stamps, stamps[1:], strict=False)}


# ---- a process that is killed, or stopped


def _faults(part: Part, sizes: Sizes, pool: Pool, backend: str, transport: str | None) -> None:
    """kill: the second process of the pool; stop: the fourth. Neither can be used again, nor its partner."""
    for deed, on in zip(ERRORS, ((0, 1), (2, 3)), strict=True):
        case = f"{backend}: {deed} one of two processes"
        job = job_of(part, sizes, on, transport=transport, timeout=sizes.timeout, deed=deed)
        part.measure(case, _START, partial(_strike, part, pool, case, job))


def _strike(part: Part, pool: Pool, case: str, job: Job) -> None:
    (survivor, victim), expected = job.on, ERRORS[job.deed].__name__
    with tempfile.TemporaryDirectory(dir=part.scratch) as folder:
        limit = job.timeout + AFTER + _START / 2
        job = job._replace(folder=folder)
        ((kind, text, at),) = pool.run(bereaved, job, on=[survivor], silent=[victim], timeout=limit)
        struck = float(Path(folder, "struck").read_text())
    part.raw[case] = text
    why = f"{kind}: {text}"[:200]
    part.add(case, f"errors other than {expected}", kind != expected, at_most=0, why=why)
    # a process of the same machine is looked for, and one that stands still may go on until the timeout
    at_most = AFTER if job.deed == "kill" else job.timeout + AFTER
    part.add(case, "to the error", at - struck, "s", at_most=at_most)


class Struck(nn.Module):
    """A linear layer in whose forward its process is killed or stopped."""

    def __init__(self, info: StageInfo, job: Job) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self._job, self._left = job, STRUCK if info.stage == 1 else 0

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and self._left:
            self._left -= 1
            if not self._left:
                self._strike()
        result: Tensor = self.linear(x)
        return result

    def _strike(self) -> None:
        Path(self._job.folder, "struck").write_text(str(time.time()))
        os.kill(os.getpid(), SIGNALS[self._job.deed])


def mean_square(output: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
    return output.square().mean()


def bereaved(rank: Rank, job: Job) -> tuple[str, str, float]:
    """In a process of the pool: what is raised, its text, and when. Raises RuntimeError if nothing is.

    The process never leaves: to destroy a group might wait for the one that is gone.
    """
    join(rank, job)
    pipe = Pipeline.from_provider(
        lambda info: Struck(info, job), schedule="1f1b", ranks=2, microbatches=8, device=job.device,
        loss_fn=mean_square, transport=job.transport, timeout=job.timeout,
    )  # fmt: skip
    try:
        for _ in range(3):
            pipe.step({"x": torch.ones(8, 64)})
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    raise RuntimeError("three steps without an error")
