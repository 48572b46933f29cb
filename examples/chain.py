"""A chain of linear layers whose stages take a known time: the model of both examples.

Each stage is one linear layer that also sleeps, so that the pictures show the schedule and not the speed of
this machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline
from penstock.launch.start import relaunch
from penstock.models.stage import StageInfo
from penstock.schedule import Costs, render, simulate

WIDTH = 64
ROWS_PER_MICROBATCH = 4


class Options(NamedTuple):
    ranks: int
    microbatches: int
    seconds: float  # of one forward; a backward takes twice as long
    out: Path


class Sleep(torch.autograd.Function):
    """Returns its input after a sleep, as long as the stage's computation shall take."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)  # as much again for the input's gradient as for the weight's
        return gradients[0], None


class TimedStage(nn.Module):
    """One stage. The first reads the batch's `x`, each other one the output of the stage before."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if hidden.is_meta:  # penstock infers the shapes here, and need not wait
            return hidden
        slept: Tensor = Sleep.apply(hidden, self.seconds)  # type: ignore[no-untyped-call]
        return slept


def stage(seconds: float, info: StageInfo) -> TimedStage:
    torch.manual_seed(info.stage)  # the same values for any number of ranks
    return TimedStage(seconds)


def mean_squared_error(output: Tensor, microbatch: Any) -> Tensor:
    return F.mse_loss(output, microbatch["target"])


def run(schedule: str, options: Options) -> None:
    """Run a step to warm up and one to draw; rank 0 draws it beside the prediction."""
    relaunch(options.ranks)
    torch.set_num_threads(1)
    pipe = Pipeline.from_provider(
        functools.partial(stage, options.seconds),
        schedule=schedule, ranks=options.ranks, microbatches=options.microbatches,
        loss_fn=mean_squared_error, device="cpu",
    )  # fmt: skip
    torch.manual_seed(0)
    rows = options.microbatches * ROWS_PER_MICROBATCH
    batch = {"x": torch.randn(rows, WIDTH), "target": torch.randn(rows, WIDTH)}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(pipe.step(batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    if pipe.processes.index == 0:
        draw(pipe, options, losses)
    dist.destroy_process_group()


def draw(pipe: Pipeline, options: Options, losses: Sequence[float]) -> None:
    forward = options.seconds
    predicted = simulate(pipe.schedule, Costs(forward=forward, input_grad=forward, weight_grad=forward))
    measured = pipe.timeline
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / f"{pipe.schedule.name}.svg"
    render(measured, picture, predicted=predicted)
    print(render(measured, picture.with_suffix(".txt"), predicted=predicted))
    print(f"loss {losses[0]:.4f}, after one update {losses[1]:.4f}")
    print(f"predicted bubble {predicted.bubble:.1%}, step {predicted.makespan:.3f} s")
    print(f"measured bubble {measured.bubble:.1%}, step {measured.makespan:.3f} s")
    print(f"picture {picture}")


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def read_options(description: str) -> Options:
    """From the command line. `--ranks` is by default the number that torchrun started, or 4 without it."""
    parser = OneLineParser(description=description)
    parser.add_argument("--ranks", type=count, default=int(os.environ.get("WORLD_SIZE", "4")))
    parser.add_argument("--microbatches", type=count, default=8)
    parser.add_argument("--pseudo-computation-time", type=seconds, default=0.05, metavar="SECONDS",
                        help="of one forward; a backward takes twice as long")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("timelines"), help="folder for the pictures")
    parsed = parser.parse_args()
    return Options(parsed.ranks, parsed.microbatches, parsed.pseudo_computation_time, parsed.out)


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; give 1 or more")
    return int(text)


def seconds(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time to compute; give seconds above 0")
    return float(text)
