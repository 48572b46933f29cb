"""What a step pays for a checkpoint in memory after each step.

The model of `make train`, on two processes with a thread each. Steps take turns: before one the state after
the last is saved, and copied while it computes; before the other it is not. Both end with AdamW's step, which
waits for the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, measured
from benchmarks.rounds import Numbers, in_turn, rounds_of
from penstock import AutoPipeline, Pipeline
from penstock.checkpoint.in_memory import MemoryCheckpoints
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.state import FRESH

CONFIG = Path(__file__).parents[1] / "configs" / "stdlib.yaml"
RANKS = 2
BAR = 3.5  # percent
PAIRS = 10  # of a step with and one without, in one round
MIB = 2**20


def built(config: TrainConfig) -> tuple[Pipeline, Tensor]:
    """The pipeline of `make train`, and token ids for one step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config.model.config or {})))
    section = config.pipeline
    pipe = AutoPipeline(
        ranks=RANKS, schedule=section.schedule, microbatches=section.microbatches, device="cpu", timeout=60
    ).build(model)
    return pipe, torch.randint(256, (config.train.batch_size, config.data.sequence_length))


def prepare(rank: Rank) -> int:
    """Returns the bytes that this rank keeps of one step."""
    config = load_config(CONFIG, ["data.path=."])
    pipe, ids = built(config)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    output = Path("benchmarks-in-memory")  # a name alone: nothing is written there
    kept = MemoryCheckpoints(pipe, [optimizer], "benchmarks" if rank.is_first else None, output, 60)
    rank.kept.update(
        step=partial(pipe.step, {"input_ids": ids, "labels": ids}), optimizer=optimizer, memory=kept,
        config=config, done=0,
    )  # fmt: skip
    for with_copy in (True, False, True, False):
        _step(rank, with_copy)
    return sum(file.stat().st_size for file in kept.folder.glob(f"rank-{rank.index:05d}.0"))


def _step(rank: Rank, with_copy: bool) -> float:
    """Seconds of a step, and of the save before it."""
    kept = rank.kept
    memory: MemoryCheckpoints = kept["memory"]
    config: TrainConfig = kept["config"]
    step: Callable[[], Any] = kept["step"]
    kept["done"] += 1
    dist.barrier()
    start = time.perf_counter()
    if with_copy:
        memory.save(kept["done"], lambda: FRESH.after(kept["done"], "benchmarks", config, {}))
    step()
    memory.settle(exchanged=True)
    kept["optimizer"].step()
    kept["optimizer"].zero_grad()
    return time.perf_counter() - start


def steps(rank: Rank) -> list[tuple[float, float]]:
    """Seconds of a step with and of one without."""
    ways = {str(with_copy): partial(_step, rank, with_copy) for with_copy in (True, False)}
    taken = in_turn(ways, PAIRS, warm_up=0, others=None)
    return [(seconds["True"], seconds["False"]) for seconds in taken.found]


def clear(rank: Rank) -> None:
    rank.kept["memory"].close()
    dist.barrier()
    rank.kept["memory"].remove()


def _pairs(pool: Pool, _: int) -> Numbers:
    """Medians over the pairs of a round, by the slower rank."""
    pairs = [[max(each) for each in zip(*of_ranks, strict=True)]
             for of_ranks in zip(*pool.run(steps), strict=True)]  # fmt: skip
    kept, plain = (median(column) for column in zip(*pairs, strict=True))
    return {"kept": kept, "plain": plain, "more": median(full - bare for full, bare in pairs)}


def measure(repeats: int) -> Found:
    with Pool(RANKS) as pool:
        sizes = pool.run(prepare)
        try:
            rounds = rounds_of(partial(_pairs, pool), repeats, warm_up=0)
        finally:
            pool.run(clear)
    case = "make train's model, P=2"
    rows = [
        measured(case, "step without", rounds["plain"].scaled(1e3), "ms"),
        measured(case, "a checkpoint after each step, of the step", rounds.ratio("more", "plain").scaled(100),
                 "%", at_most=BAR, quiet=rounds.quiet),
    ]  # fmt: skip
    notes = [
        f"{CONFIG.name}: {max(sizes) / MIB:.1f} MiB a rank and step, weights and AdamW's moments; one host, "
        f"so that no copy goes to another; {repeats * PAIRS} pairs of a step with and one without; {rounds}",
        "of the step: what it took longer, median over the pairs of a round, by the clock of the slower rank",
    ]
    raw = {case: rounds.found, "bytes": sizes}
    return Found("in_memory", "Cost of checkpoints in memory", rows, notes, raw)
