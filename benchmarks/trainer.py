"""What `penstock train` takes for a step, beside the same step in a loop of one's own.

The model of `make train`, on two processes with a thread each. After each step of the trainer the same
processes run one of a plain loop: zero_grad, step, clip, the same AdamW. The trainer's counts from the end of
the loop's step before until its row is in the log, which it does not wait for otherwise.
"""

from __future__ import annotations

import io
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.in_memory import CONFIG, RANKS, built
from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, measured
from benchmarks.rounds import Numbers, rounds_of
from penstock.train import loop
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.part import Run, TrainStep
from penstock.train.preflight import preflight
from penstock.train.run import run

BAR = 1.02
STEPS, FIRST = 50, 10  # of a round, and those that do not count: shapes are new, threads start
SOURCE = Path(__file__).parents[1] / "src"  # what it learns to write


def config_in(folder: str) -> TrainConfig:
    return load_config(CONFIG, [
        f"data.path={SOURCE}", f"output.folder={folder}", f"train.steps={STEPS}",
        f"train.evaluate_every={STEPS}", "train.evaluate_batches=1", f"train.checkpoint_every={STEPS}",
        f"output.keep.every={STEPS}",
    ])  # fmt: skip


def plain_loop(config: TrainConfig) -> Any:
    """A step of a loop of one's own on a batch of the same size."""
    pipe, ids = built(config)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        pipe.step({"input_ids": ids, "labels": ids})
        pipe.clip_grad_norm_(config.train.clip_norm or 1.0)
        optimizer.step()

    return step


def steps(rank: Rank, folder: str) -> list[tuple[float, float]]:
    """Seconds of each of the trainer's steps, and of the loop's after it."""
    config = config_in(folder)
    mine, trainers = plain_loop(config), loop._step
    taken: list[tuple[float, float]] = []
    mark = 0.0

    def both(run: Run, step: int) -> TrainStep:
        nonlocal mark
        trained = trainers(run, step)
        run.log.flush()  # the log: a thread would write it during the loop's step
        by_trainer = time.perf_counter() - mark
        dist.barrier()
        start = time.perf_counter()
        mine()
        taken.append((by_trainer, time.perf_counter() - start))
        dist.barrier()
        mark = time.perf_counter()
        return trained

    with patch.object(loop, "_step", both), redirect_stdout(io.StringIO()):
        run(preflight(config))
    return taken[FIRST:]


def _round(_: int) -> Numbers:
    """Medians over the steps of a round, by the slower rank. A run of the trainer leaves no process group."""
    with tempfile.TemporaryDirectory() as folder, Pool(RANKS) as pool:
        ran = pool.run(steps, folder, timeout=180)
    slower = [[max(each) for each in zip(*of_ranks, strict=True)] for of_ranks in zip(*ran, strict=True)]
    trainer, plain = (median(column) for column in zip(*slower, strict=True))
    return {"trainer": trainer, "loop": plain}


def measure(repeats: int) -> Found:
    rounds = rounds_of(_round, repeats, warm_up=0)
    case = "make train's model, P=2"
    rows = [
        measured(case, "a step of penstock train", rounds["trainer"].scaled(1e3), "ms"),
        measured(case, "the same in a loop of one's own", rounds["loop"].scaled(1e3), "ms"),
        measured(case, "penstock train / the loop", rounds.ratio("trainer", "loop"), at_most=BAR,
                 quiet=rounds.quiet),
    ]  # fmt: skip
    notes = [
        f"{CONFIG.name} on penstock's own source; {STEPS - FIRST} pairs of steps a round, in turn, medians "
        f"by the clock of the slower rank; {rounds}",
        "the loop: zero_grad, pipe.step, clip_grad_norm_ and the step of the same fused AdamW, on one batch; "
        "the trainer also makes its batches, and waits until its row is written",
    ]
    return Found("trainer", "The trainer's step beside the library's", rows, notes, {case: rounds.found})
