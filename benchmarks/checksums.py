"""What a step pays for checksums of its messages: ``python -m benchmarks.checksums [gloo]``.

The model of `make train`, on two processes with a thread each, twice: with and without checksums. Steps take
turns, and so does the first of a pair. It prints the median step without, and the median ratio of the pairs.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.in_memory import CONFIG, RANKS
from benchmarks.pool import Pool, Rank
from benchmarks.rounds import in_turn
from penstock import AutoPipeline
from penstock.train.config.load import load_config

PAIRS = 20  # a busy machine may take a second for each step


def prepare(rank: Rank, transport: str | None) -> None:
    config = load_config(CONFIG, ["data.path=."])
    section = config.pipeline
    torch.manual_seed(0)
    ids = torch.randint(256, (config.train.batch_size, config.data.sequence_length))
    for checksums in (False, True):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config.model.config or {})))
        rank.kept[checksums] = AutoPipeline(
            ranks=RANKS, schedule=section.schedule, microbatches=section.microbatches, device="cpu",
            transport=transport, checksums=checksums,
        ).build(model)  # fmt: skip
    rank.kept["batch"] = {"input_ids": ids, "labels": ids}


def _seconds(rank: Rank, checksums: bool) -> float:
    dist.barrier()
    start = time.perf_counter()
    rank.kept[checksums].step(rank.kept["batch"])
    return time.perf_counter() - start


def pairs(rank: Rank) -> list[tuple[float, float]]:
    """Seconds of a step with checksums and of one without."""
    ways = {str(checksums): partial(_seconds, rank, checksums) for checksums in (True, False)}
    taken = in_turn(ways, PAIRS, warm_up=4, others=None)  # the first ones make buffers
    return [(seconds["True"], seconds["False"]) for seconds in taken.found]


def main() -> None:
    transport = sys.argv[1] if len(sys.argv) > 1 else None
    with Pool(RANKS) as pool:
        pool.run(prepare, transport)
        slower = [[max(column) for column in zip(*ranks, strict=True)]
                  for ranks in zip(*pool.run(pairs), strict=True)]  # fmt: skip
    ratios = sorted(with_them / without for with_them, without in slower)
    without = median(pair[1] for pair in slower)
    quarters = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    print(f"{transport or 'shared memory'}: a step takes {without * 1e3:.1f} ms, and with checksums")
    print(f"{median(ratios):.3f} times as long, median of {len(ratios)} pairs, quartiles {quarters}")


if __name__ == "__main__":
    main()
