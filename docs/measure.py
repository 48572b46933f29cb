"""Take a real step on four processes and draw it below its prediction, as the page that `draw.py` shows.

    PYTHONPATH=examples python docs/measure.py runs/measured.html

The stages are those of the examples: each takes a known time.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.distributed as dist

from chain import ROWS_PER_MICROBATCH, WIDTH, mean_squared_error, stage
from penstock import Pipeline
from penstock.launch.start import relaunch
from penstock.schedule import Costs, render, simulate

RANKS, MICROBATCHES = 4, 8
SECONDS = 0.02  # of one forward


def main(path: str) -> None:
    relaunch(RANKS)
    torch.set_num_threads(1)
    pipe = Pipeline.from_provider(
        functools.partial(stage, SECONDS),
        schedule="1f1b", ranks=RANKS, microbatches=MICROBATCHES, loss_fn=mean_squared_error, device="cpu",
    )  # fmt: skip
    torch.manual_seed(0)
    rows = MICROBATCHES * ROWS_PER_MICROBATCH
    for _ in range(2):  # the first one warms up
        pipe.step({"x": torch.randn(rows, WIDTH), "target": torch.randn(rows, WIDTH)})
    if pipe.processes.index == 0:
        predicted = simulate(pipe.schedule, Costs(SECONDS, SECONDS, SECONDS))
        render(pipe.timeline, path, predicted=predicted)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
