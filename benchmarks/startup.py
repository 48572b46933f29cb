"""How long it takes until the first step of a very deep model is done.

200 layers of next to no width, so that what is counted is the library's own: the search for the chain, the
cut with its 200 places in each stage, and initial values. All four ranks run in one process, one after the
other; beside it the whole model by transformers. On a machine with a process for each rank the four cuts and
fillings happen at once.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from penstock import AutoPipeline

LAYERS, RANKS = 200, 4
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 128}  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(8 * 16).reshape(8, 16) % 128
    return {"input_ids": ids, "labels": ids}


def piped(_: Rank, layers: int) -> tuple[float, float, float, float]:
    """Seconds: what is found without a weight; all of build, that included; first step; another step."""
    config = LlamaConfig(**SIZES, num_hidden_layers=layers)
    auto = AutoPipeline(ranks=RANKS, microbatches=RANKS)
    times = [time.perf_counter()]
    auto.build_plan(config)
    times.append(time.perf_counter())
    pipe = auto.build(config)
    for _again in range(2):
        times.append(time.perf_counter())
        pipe.step(batch())
    times.append(time.perf_counter())
    pipe.close()
    outline, build, first, second = (b - a for a, b in pairwise(times))
    return outline, build, first, second


def plain(_: Rank, layers: int) -> tuple[float, float, float]:
    config = LlamaConfig(**SIZES, num_hidden_layers=layers)
    times = [time.perf_counter()]
    model = AutoModelForCausalLM.from_config(config)
    for _again in range(2):
        times.append(time.perf_counter())
        for part in range(RANKS):  # the same microbatches
            rows = {name: value[2 * part : 2 * part + 2] for name, value in batch().items()}
            model(**rows, use_cache=False).loss.backward()
    times.append(time.perf_counter())
    build, first, second = (b - a for a, b in pairwise(times))
    return build, first, second


def measure(repeats: int) -> Found:
    ours, theirs = [], []
    with Pool(1, join=False) as pool:
        pool.run(piped, 4)  # imports
        pool.run(plain, 4)
        for _ in range(repeats):
            ours += pool.run(piped, LAYERS, timeout=300)
            theirs += pool.run(plain, LAYERS, timeout=300)
    outline, build, first, second = (median(column) for column in zip(*ours, strict=True))
    made, their_first, their_second = (median(column) for column in zip(*theirs, strict=True))
    case = f"{LAYERS} layers, P={RANKS} in process"
    rows = [
        Row(case, "outline: what is known without a weight", outline, "s"),
        Row(case, "build, outline included", build, "s", made),
        Row(case, "first step", first, "s", their_first),
        Row(case, "start-up to the end of the first step", build + first, "s", made + their_first),
        Row(case, "another step", second, "s", their_second),
    ]
    notes = (
        f"Llama of width 32, 8 rows of 16 tokens in {RANKS} microbatches; one thread; median of {repeats}",
        "under torch: from_config, forward and backward of the same microbatches on the whole model",
    )
    raw = {"penstock": ours, "whole": theirs}
    return Found("startup", "Start-up of a deep model", rows, notes, raw)
