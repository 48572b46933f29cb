"""Real compute: a whole training step of a Qwen3 by each way that two cores offer.

Every way trains the same decoder on the same batch: forward, backward, AdamW. Ways that run in two processes
have a thread each. All ways take turns, a round holds one step of each, and ratios are those within a round.

- one process: with one thread or both, its batch in microbatches or as a whole
- two processes apart: each does the work of one rank of the pipeline at the same time as the other, and
  waits for nothing. Less the schedule's bubble it is the limit of a pipeline on this machine
- DDP and FSDP2: each process has half of the microbatches
- torch.distributed.pipelining and penstock: the same modules as stages

A round counts where programs outside of the benchmark took less than `OTHERS` of the cores' time in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import TORCH, Mean, placement
from penstock import Pipeline
from penstock.schedule import build, simulate

RANKS, CORES, SEQUENCE, VOCABULARY = 2, 2, 128, 256
OTHERS = 0.05  # share of the cores' time
LIMIT = 0.97


class Case(NamedTuple):
    """hidden: size of the model; layers: that it has; rows: of a microbatch"""

    hidden: int
    layers: int
    rows: int
    microbatches: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, {self.rows} x {SEQUENCE} tokens, m={self.microbatches}"
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.microbatches * SEQUENCE


CASES = (Case(256, 8, 1, 8), Case(256, 8, 1, 16))
TWO_THREADS = "one process, two threads, whole batch"
ALONE = "one process, one thread, microbatches"
APART = "two processes apart"
THEIRS = {f"torch, {name}": name for name in ("1f1b", "interleaved_1f1b")}
OURS = {f"penstock, {name}": name for name in ("1f1b", "interleaved_1f1b", "zb_h1")}
GLOO = "penstock, 1f1b over gloo"


class Part(nn.Module):
    """Stage `stage` of `stages` of the decoder."""

    def __init__(self, case: Case, stage: int, stages: int) -> None:
        super().__init__()
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=case.hidden, intermediate_size=3 * case.hidden,
            num_hidden_layers=case.layers, num_attention_heads=case.hidden // 64,
            num_key_value_heads=case.hidden // 128, head_dim=64, max_position_embeddings=SEQUENCE,
            attn_implementation="sdpa",
        )  # fmt: skip
        own = case.layers // stages
        torch.manual_seed(stage)
        self.embedding = nn.Embedding(VOCABULARY, case.hidden) if stage == 0 else None
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, stage * own + at) for at in range(own))
        self.rotary = Qwen3RotaryEmbedding(config)
        last = stage == stages - 1
        self.norm = Qwen3RMSNorm(case.hidden) if last else None
        self.head = nn.Linear(case.hidden, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(SEQUENCE, device=x.device)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


Step = Callable[[], None]


def optimized(modules: Sequence[nn.Module], gradients: Callable[[], object]) -> Step:
    """A step of training: `gradients` runs forward and backward."""
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-4)

    def step() -> None:
        gradients()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ids_of(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (case.rows * case.microbatches, SEQUENCE), generator=generator)


def alone(case: Case, ids: Tensor, microbatches: int, threads: int = 1) -> Step:
    model = Part(case, 0, 1)

    def gradients() -> None:
        torch.set_num_threads(threads)
        for part in ids.chunk(microbatches):
            (loss(model(part), part) / microbatches).backward()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)

    return optimized([model], gradients)


def apart(case: Case, rank: Rank) -> Step:
    """The work of one rank of the pipeline, with inputs and gradients of its own."""
    module, first, last = Part(case, rank.index, rank.count), rank.is_first, rank.is_last
    gradient = torch.full((case.rows, SEQUENCE, case.hidden), 1e-3)

    def gradients() -> None:
        for part in ids_of(case).chunk(case.microbatches):
            output = module(part if first else gradient.clone().requires_grad_())
            if last:
                (loss(output, part) / case.microbatches).backward()  # type: ignore[no-untyped-call]
            else:
                output.backward(gradient)

    return optimized([module], gradients)


def data_parallel(case: Case, rank: Rank, sharded: bool) -> Step:
    model: Any = Part(case, 0, 1)
    if sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    own = ids_of(case).chunk(rank.count)[rank.index].chunk(case.microbatches // rank.count)

    def gradients() -> None:
        for number, part in enumerate(own):
            last = number == len(own) - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            with nullcontext() if sharded or last else model.no_sync():
                (loss(model(part), part) / len(own)).backward()  # type: ignore[no-untyped-call]

    return optimized([model], gradients)


def torch_pipeline(case: Case, rank: Rank, schedule: str) -> Step:
    placed, ids = placement(schedule, rank.count), ids_of(case)
    row = ids[: case.rows]
    hidden = torch.empty(case.rows, SEQUENCE, case.hidden, requires_grad=True)
    logits = torch.empty(case.rows, SEQUENCE, VOCABULARY, requires_grad=True)
    stages = [
        PipelineStage(
            Part(case, stage, placed.stages), stage, placed.stages, torch.device("cpu"),
            input_args=hidden if stage else row,
            output_args=logits if stage == placed.stages - 1 else hidden,
        )
        for stage in placed.stages_of(rank.index)
    ]  # fmt: skip
    of_rank: Any = stages if len(stages) > 1 else stages[0]
    runner = TORCH[schedule](of_rank, case.microbatches, loss_fn=loss)
    inputs = (ids,) if placed.rank_of[0] == rank.index else ()
    target = ids if placed.rank_of[-1] == rank.index else None
    return optimized(
        [stage.submod for stage in stages], lambda: runner.step(*inputs, target=target, return_outputs=False)
    )


def penstock_pipeline(case: Case, rank: Rank, schedule: str, transport: str | None = None) -> Step:
    ids = ids_of(case)
    pipe = Pipeline.from_provider(
        lambda info: Part(case, info.stage, info.stages), schedule=schedule, ranks=rank.count,
        microbatches=case.microbatches, loss_fn=Mean(loss), device="cpu", timeout=60, transport=transport,
    )  # fmt: skip
    batch = {"x": ids, "target": ids}
    return optimized(list(pipe.modules.values()), lambda: pipe.step(batch))


def prepare(rank: Rank, case: Case) -> None:
    """All ways of taking the step, warmed up."""
    ids, count = ids_of(case), case.microbatches
    ways = {
        ALONE: alone(case, ids, count),
        "one process, one thread, whole batch": alone(case, ids, 1),
        TWO_THREADS: alone(case, ids, 1, threads=CORES),
        APART: apart(case, rank),
        "DDP": data_parallel(case, rank, sharded=False),
        "FSDP2": data_parallel(case, rank, sharded=True),
        **{way: torch_pipeline(case, rank, schedule) for way, schedule in THEIRS.items()},
        **{way: penstock_pipeline(case, rank, schedule) for way, schedule in OURS.items()},
        GLOO: penstock_pipeline(case, rank, "1f1b", "gloo"),
    }
    rank.kept.update({(case, way): step for way, step in ways.items()})


def timed(rank: Rank, case: Case, way: str, together: bool) -> tuple[float, float, float]:
    """Start and end of one step, and the processor's time that it took."""
    if together:
        dist.barrier()
    used, start = time.process_time(), time.perf_counter()
    rank.kept[case, way]()
    return start, time.perf_counter(), time.process_time() - used


def ways(pool: Pool, case: Case) -> dict[str, float]:
    """Seconds of one step of each way; empty where other programs took too much of the machine."""
    found, mine = {}, 0.0
    busy, began = _busy(), time.perf_counter()
    for way in (ALONE, "one process, one thread, whole batch", TWO_THREADS, APART, "DDP", "FSDP2",
                *THEIRS, *OURS, GLOO):  # fmt: skip
        lone = way.startswith("one process")
        ran = pool.run(timed, case, way, not lone, on=[0] if lone else None)
        found[way] = max(end for _, end, _ in ran) - min(start for start, _, _ in ran)
        mine += sum(used for *_, used in ran)
    others = _busy() - busy - mine
    return found if others < OTHERS * CORES * (time.perf_counter() - began) else {}


def _busy() -> float:
    """Seconds of processor time that all programs have taken, with what the host took from this machine."""
    user, nice, system, _, _, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + sum(interrupts)) / 100


def measure(repeats: int) -> Found:
    rounds: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
    tried = 0
    with Pool(RANKS) as pool:
        for case in CASES:
            pool.run(prepare, case, timeout=120)
            for _ in range(2):
                ways(pool, case)
        while min(map(len, rounds.values())) < repeats and tried < 3 * repeats:
            tried += 1
            for case in CASES:
                if found := ways(pool, case):
                    rounds[case].append(found)
    rows = [row for case in CASES if rounds[case] for row in _rows(case, rounds[case])]
    notes = [
        "fp32, AdamW; one thread a process, or two where the row says so",
        f"{tried} rounds; of them count " + ", ".join(str(len(found)) for found in rounds.values())
        + f": in the others programs outside took {OTHERS:.0%} of the cores' time or more",
        "medians; in brackets the quartiles; a bar that they include is not resolved",
        f"limit: {APART}, each with the work of one rank, less 1f1b's bubble with ops of equal length",
    ]  # fmt: skip
    return Found("throughput", "Real compute: a training step on two cores", rows, notes,
                 {str(case): found for case, found in rounds.items()})  # fmt: skip


def _rows(case: Case, rounds: Sequence[dict[str, float]]) -> list[Row]:
    rows = [
        Row(f"{case}: {way}", "tokens per second", case.tokens / median(found[way] for found in rounds))
        for way in rounds[0]
    ]
    bubble = simulate(build("1f1b", ranks=RANKS, microbatches=case.microbatches)).bubble
    ours, torchs = "penstock, 1f1b", "torch, 1f1b"
    rows.append(_ratio(case, rounds, f"{ours} / {torchs}", lambda r: r[torchs] / r[ours], 1.0))
    best = min(OURS, key=lambda way: median(found[way] for found in rounds))
    rows.append(_ratio(case, rounds, f"{best} / {ALONE}", lambda r: r[ALONE] / r[best], None))
    rows.append(_ratio(case, rounds, f"{ours} / {GLOO}", lambda r: r[GLOO] / r[ours], None))
    limit = f"{ours} / limit"
    rows.append(_ratio(case, rounds, limit, lambda r: r[APART] / (1 - bubble) / r[ours], LIMIT))
    return rows


def _ratio(
    case: Case, rounds: Sequence[dict[str, float]], name: str, of: Callable[[dict[str, float]], float],
    bar: float | None,
) -> Row:  # fmt: skip
    """A ratio of speeds, paired within rounds."""
    ratios = [of(found) for found in rounds]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    what = f"times as fast [{low:.3f}, {high:.3f}]"
    if bar is None:
        return Row(f"{case}: {name}", what, median(ratios))
    resolved = not low < bar < high
    words = f"at least {bar}" + ("" if resolved else ", not resolved")
    return Row(
        f"{case}: {name}", what, median(ratios), "", None, words, median(ratios) >= bar if resolved else None
    )
