"""What a step sends on each mesh, and how long it takes.

Collectives and their bytes are counted where torch dispatches them, on one rank, so that they hang on no
machine; beside torch.distributed.pipelining with fully_shard: the same modules, microbatches and mesh for
both, FSDP2 around each block, gathered weights kept until the step's end. Steps are timed with ops that sleep
over an emulated network, with and without dp_shard, and with real attention by Ulysses and by a ring.
"""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.networks import SLOW
from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rounds import interval
from benchmarks.sleeping import SECONDS
from benchmarks.slow_network import slowed_down
from penstock import AutoPipeline, Axes, Pipeline

KIB = 1024
RANKS, MICROBATCHES, WIDTH, BLOCKS = 2, 8, 64, 2
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
MESHES: list[tuple[str, Axes, dict[str, Any]]] = [
    ("llama", Axes(dp_shard=2), {}),
    ("llama", Axes(dp_replicate=2), {}),
    ("llama", Axes(cp=2), {"context": "ulysses"}),
    ("llama", Axes(cp=2), {"context": "ring"}),
    ("llama", Axes(tp=2), {}),
    ("mixtral", Axes(dp_shard=2, ep=2), {}),
]
LENGTHS = (256, 1024, 2048)


class Counting(TorchDispatchMode):
    """Calls and bytes of torch.distributed's operations, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not any(word in func._schema.name for word in ("wait", "wrap")):
            name = func._schema.name.split("::")[1].strip("_")
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max((tensor.nbytes for tensor in tensors), default=0)
        return func(*args, **(kwargs or {}))


class Blocks(nn.Module):
    """The blocks of one stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def count_ours(_: Rank) -> tuple[dict[str, int], dict[str, int]]:
    pipe = Pipeline.from_provider(
        lambda info: Blocks(), schedule="1f1b", ranks=RANKS, microbatches=MICROBATCHES, timeout=60,
        loss_fn=lambda output, part: F.mse_loss(output, part["target"]), axes=Axes(dp_shard=2),
    )  # fmt: skip
    batch = {"x": torch.randn(MICROBATCHES, WIDTH), "target": torch.randn(MICROBATCHES, WIDTH)}
    torch.manual_seed(pipe.batch_part[0])
    pipe.step(batch)
    with Counting() as counted:
        pipe.step(batch)
    pipe.close()
    return counted.calls, counted.bytes


def count_theirs(_: Rank) -> tuple[dict[str, int], dict[str, int]]:
    mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("pp", "dp"))
    rank, module = mesh.get_local_rank("pp"), Blocks()
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    row = torch.empty(1, WIDTH)
    stage = PipelineStage(
        module, rank, RANKS, torch.device("cpu"), group=mesh.get_group("pp"),
        input_args=row.clone().requires_grad_(rank > 0), output_args=row.clone().requires_grad_(),
    )  # fmt: skip
    runner = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)

    def step() -> None:
        inputs = (torch.randn(MICROBATCHES, WIDTH),) if rank == 0 else ()
        target = torch.randn(MICROBATCHES, WIDTH) if rank == RANKS - 1 else None
        runner.step(*inputs, target=target, return_outputs=False)

    step()
    with Counting() as counted:
        step()
    return counted.calls, counted.bytes


def pipeline(family: str, axes: Axes, sequence: int, options: dict[str, Any]) -> tuple[Pipeline, Any]:
    more = {"num_local_experts": 4} if family == "mixtral" else {}
    config = AutoConfig.for_model(family, **SIZES, **more, max_position_embeddings=2 * sequence)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    pipe = AutoPipeline(ranks=RANKS, microbatches=4, timeout=120, axes=axes, **options).build(model)
    ids = torch.randint(0, 256, (4, sequence))
    return pipe, {"input_ids": ids, "labels": ids}


def count_mesh(_: Rank, number: int) -> tuple[dict[str, int], dict[str, int]]:
    pipe, batch = pipeline(*MESHES[number][:2], 64, MESHES[number][2])
    pipe.step(batch)
    with Counting() as counted:
        pipe.step(batch)
    pipe.close()
    return counted.calls, counted.bytes


def time_context(_: Rank, sequence: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a step by each way, in turn."""
    pipes = {how: pipeline("llama", Axes(cp=2), sequence, {"context": how}) for how in ("ulysses", "ring")}
    times: dict[str, list[float]] = {how: [] for how in pipes}
    for number in range(repeats + 1):
        for how, (pipe, batch) in pipes.items():
            pipe.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            pipe.step(batch)
            if number:
                times[how].append(time.perf_counter() - start)
    for pipe, _ in pipes.values():
        pipe.close()
    return times


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        time.sleep(SECONDS)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * SECONDS)
        return gradients[0], gradients[0].sum(0)


class Sleeper(nn.Module):
    """FSDP2 takes no weight without a dimension, as steptime's has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Sleeping.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def time_emulated(_: Rank, axes: Axes | None, repeats: int) -> list[float]:
    """Seconds of a step of sleeping ops over a network as slow as half an op."""
    with slowed_down(SLOW):
        pipe = Pipeline.from_provider(
            lambda info: Sleeper(),
            schedule="1f1b",
            ranks=RANKS,
            microbatches=MICROBATCHES,
            timeout=60,
            loss_fn=lambda output, part: output.mean(),
            axes=axes,
        )
    batch = {"x": torch.ones(MICROBATCHES, WIDTH)}
    times = []
    for number in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        pipe.step(batch)
        if number:
            times.append(time.perf_counter() - start)
    pipe.close()
    return times


def measure(repeats: int) -> Found:
    rows, raw = [], {}
    with Pool(RANKS) as pool:
        alone = pool.run(time_emulated, None, repeats, timeout=300)[0]
    with Pool(2 * RANKS) as pool:
        our_calls, our_bytes = pool.run(count_ours)[0]
        their_calls, their_bytes = pool.run(count_theirs)[0]
        for name in sorted(our_calls.keys() | their_calls.keys()):
            case = "blocks, pp=2 x dp_shard=2"
            rows += [
                Row(case, f"{name}, calls", our_calls.get(name, 0), "", their_calls.get(name, 0)),
                Row(case, f"{name}, KiB", our_bytes.get(name, 0) / KIB, "", their_bytes.get(name, 0) / KIB),
            ]
        for number, (family, axes, options) in enumerate(MESHES):
            calls, nbytes = pool.run(count_mesh, number, timeout=300)[0]
            case = " ".join([family, "pp=2 x", str(axes), *options.values()])
            for name in sorted(calls):
                rows += [
                    Row(case, f"{name}, calls", calls[name]),
                    Row(case, f"{name}, KiB", nbytes[name] / KIB),
                ]
            raw[case] = [calls, nbytes]
        spread = pool.run(time_emulated, Axes(dp_shard=2), repeats, timeout=300)[0]
        case = f"sleeping ops of {1000 * SECONDS:.0f} ms, messages of {1000 * SLOW.latency:.0f} ms"
        rows += [
            measured(case, "step, pp=2", interval(alone).scaled(1e3), "ms"),
            measured(case, "step, pp=2 x dp_shard=2", interval(spread).scaled(1e3), "ms"),
            Row(case, "pp=2 x dp_shard=2 over pp=2", median(spread) / median(alone)),
        ]
        raw["emulated"] = [alone, spread]
        for sequence in LENGTHS:
            times = pool.run(time_context, sequence, repeats, timeout=600)[0]
            case = f"llama pp=2 x cp=2, {sequence} tokens"
            rows += [
                measured(case, f"step by {how}", interval(found).scaled(1e3), "ms")
                for how, found in times.items()
            ]
            raw[f"context {sequence}"] = times
    return Found(
        "meshes",
        "What a step sends on a mesh",
        rows,
        (
            f"rank 0; blocks: {BLOCKS} linear layers of {WIDTH} a stage, m={MICROBATCHES}, 1f1b; llama and "
            "mixtral: 4 layers of 64, m=4 of one row of 64 tokens",
            "KiB: the largest tensor of each call, added up; send and recv are the pipeline's messages and "
            "the ring's hops",
            "other: torch.distributed.pipelining with fully_shard around each block and the stage, "
            "reshard_after_forward=False",
            f"steps by ulysses and ring: four processes on {RANKS} cores, in turn, {repeats} of each",
        ),
        raw,
    )
