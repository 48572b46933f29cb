"""Generation over ranks, beside transformers' `generate` of the whole model in one process.

A stage has part of the layers, so one sequence alone makes its ranks wait for each other. With a microbatch
for each rank there are as many sequences in flight, and every rank has work. Both ways have one thread a
process: two ranks have two cores, and transformers one. Greedy, no sequence ends early, and the tokens of
both are compared.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, measured
from benchmarks.rounds import Numbers, rounds_of
from penstock import AutoPipeline

RANKS, PROMPT, NEW = 2, 64, 48
ROWS = (8, 64)
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip
IN_FLIGHT = (1, RANKS)  # microbatches


def model_and_prompts() -> tuple[Any, Tensor]:
    """The same in every process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    model.generation_config.eos_token_id = None
    return model, torch.randint(SIZES["vocab_size"], (max(ROWS), PROMPT))


def build(rank: Rank) -> None:
    """Rank's stage; or the whole model, in a process of its own."""
    model, rank.kept["prompts"] = model_and_prompts()
    rank.kept["model"] = (
        AutoPipeline(ranks=RANKS, microbatches=RANKS, timeout=60).build(model) if rank.count > 1 else model
    )


def generate(rank: Rank, rows: int, in_flight: int | None = None) -> tuple[float, Tensor]:
    """Seconds, and the tokens of the first rows. in_flight: of a pipeline, its microbatches"""
    options: dict[str, Any] = {"do_sample": False} | ({"microbatches": in_flight} if in_flight else {})
    if rank.count > 1:
        dist.barrier()
    start = time.perf_counter()
    tokens = rank.kept["model"].generate(rank.kept["prompts"][:rows], max_new_tokens=NEW, **options)
    return time.perf_counter() - start, tokens


def measure(repeats: int) -> Found:
    with Pool(1, join=False) as one, Pool(RANKS) as pool:
        one.run(build)
        pool.run(build)

        def take(_: int) -> Numbers:
            return {way: seconds for rows in ROWS for way, seconds in _turn(one, pool, rows).items()}

        take(-1)  # what is imported late, and the first pages of caches
        rounds = rounds_of(take, repeats)
    table = [
        measured(
            f"{rows} rows in {count} microbatch{'es' if count > 1 else ''}", "time for all tokens",
            rounds.ratio(f"{rows} in {count}", f"{rows} in one process"), "s",
            ours=rounds[f"{rows} in {count}"].middle, torch=rounds[f"{rows} in one process"].middle,
        )
        for rows in ROWS for count in IN_FLIGHT
    ]  # fmt: skip
    notes = (
        f"Llama, {SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}, float32; prompts of {PROMPT} "
        f"tokens, {NEW} new tokens each, greedy; {rounds}",
        "other: transformers' generate of the whole model in one process with one thread, the same tokens",
    )
    return Found("generation", f"Generation, P={RANKS}", table, notes, {"rounds": rounds.found})


def _turn(one: Pool, pool: Pool, rows: int) -> dict[str, float]:
    """Seconds of each way; all give the same tokens."""
    seconds, expected = one.run(generate, rows)[0]
    found = {f"{rows} in one process": seconds}
    for count in IN_FLIGHT:
        results = pool.run(generate, rows, count)
        if not all(torch.equal(tokens, expected) for _, tokens in results):
            raise AssertionError(
                f"{rows} rows in {count} microbatches: tokens that transformers does not choose"
            )
        found[f"{rows} in {count}"] = max(took for took, _ in results)
    return found
