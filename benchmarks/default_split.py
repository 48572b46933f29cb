"""How good the split is that a user gets without asking, against the best of all splits.

Simulated: ten public configs by their multiply-adds, on four ranks under 1F1B. Every split into runs of
layers is tried but those whose slowest rank alone takes longer than the best step so far. And what
0.5.0 chose, which counted embedding and head as a layer each.

Run: two models that compute, on two ranks; every split is built and timed, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Rounds, in_turn, summary
from penstock import AutoPipeline
from penstock.models.split.balanced_split import LayerCosts, ranges
from penstock.models.split.multiply_adds import SEQUENCE, multiply_adds
from penstock.models.split.partition import even_split, to_layout
from penstock.models.tracing.chain import find_chain
from penstock.pipeline.building.build_plan import fastest_split
from penstock.schedule import Costs, Schedule, build, simulate

RANKS, MICROBATCHES = 4, 32
BAR = 1.02
# model type, width, layers, width within, heads, heads of keys, vocabulary, more
CONFIGS: dict[str, tuple[str, int, int, int, int, int, int, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3", 1024, 28, 3072, 16, 8, 151_936, {"head_dim": 128}),
    "Qwen3-1.7B": ("qwen3", 2048, 28, 6144, 16, 8, 151_936, {"head_dim": 128}),
    "Qwen3-4B": ("qwen3", 2560, 36, 9728, 32, 8, 151_936, {"head_dim": 128}),
    "Qwen3-8B": ("qwen3", 4096, 36, 12_288, 32, 8, 151_936, {"head_dim": 128}),
    "Llama-3.2-1B": ("llama", 2048, 16, 8192, 32, 8, 128_256, {}),
    "Llama-3.1-8B": ("llama", 4096, 32, 14_336, 32, 8, 128_256, {}),
    "Mistral-7B": ("mistral", 4096, 32, 14_336, 32, 8, 32_768, {}),
    "Gemma-2-2B": ("gemma2", 2304, 26, 9216, 8, 4, 256_000, {"head_dim": 256}),
    "Mixtral-8x7B": ("mixtral", 4096, 32, 14_336, 32, 8, 32_000, {}),
    "SmolLM2-1.7B": ("llama", 2048, 24, 8192, 32, 32, 49_152, {}),
}
RUN_RANKS, RUN_MICROBATCHES, ROWS, RUN_SEQUENCE = 2, 8, 8, 128
RUN = {
    "Qwen3, vocabulary of 8,192": ("qwen3", 256, 8, 768, 4, 2, 8192, {"head_dim": 64}),
    "Llama, vocabulary of 24,576": ("llama", 256, 8, 768, 4, 4, 24_576, {}),
}


def config_of(name: str) -> PretrainedConfig:
    kind, width, layers, inner, heads, key_heads, vocabulary, more = (CONFIGS | RUN)[name]
    return AutoConfig.for_model(
        kind, hidden_size=width, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, max_position_embeddings=SEQUENCE, **more,
    )  # fmt: skip


def costs_of(config: PretrainedConfig, sequence: int) -> LayerCosts:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return multiply_adds(model, find_chain(model), sequence)


# ---- simulated


def of_stages(costs: LayerCosts, split: Sequence[range]) -> list[float]:
    """Multiply-adds of each stage, in those of the first layer."""
    total = [sum(costs.layers[layer] for layer in layers) for layers in split]
    total[0] += costs.embedding
    total[-1] += costs.head
    return [each / costs.layers[0] for each in total]


def step_time(schedule: Schedule, costs: LayerCosts, split: Sequence[range]) -> float:
    """I and W take as long as F: each has the same matrix products."""
    each = of_stages(costs, split)
    return simulate(schedule, Costs(forward=each, input_grad=each, weight_grad=each)).makespan


def best_time(schedule: Schedule, costs: LayerCosts, known: float) -> float:
    """The shortest step of all splits. known: the step of one of them"""
    layers, best = len(costs.layers), known
    for cuts in combinations_with_replacement(range(layers + 1), schedule.ranks - 1):
        split = ranges([end - start for start, end in zip((0, *cuts), (*cuts, layers), strict=True)])
        if 3 * max(of_stages(costs, split)) * schedule.microbatches < best:
            best = min(best, step_time(schedule, costs, split))
    return best


def simulated(name: str) -> tuple[list[Row], dict[str, float]]:
    costs, schedule = (
        costs_of(config_of(name), SEQUENCE),
        build("1f1b", ranks=RANKS, microbatches=MICROBATCHES),
    )
    chosen = step_time(schedule, costs, fastest_split(costs, schedule))
    best = best_time(schedule, costs, chosen)
    even = step_time(schedule, costs, even_split(len(costs.layers), RANKS))
    rows = [
        Row(name, "default, over the best of all splits", chosen / best, "", None, f"at most {BAR}",
            chosen <= BAR * best),
        Row(name, "the split of 0.5.0, over the default", even / chosen),
    ]  # fmt: skip
    return rows, {"default": chosen, "best": best, "0.5.0": even}


# ---- run


def prepare(rank: Rank, name: str) -> list[str]:
    """A pipeline of each split; returns the layouts, the default first."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name))
    ids = torch.randint(model.config.vocab_size, (ROWS, RUN_SEQUENCE))
    auto = AutoPipeline(
        ranks=RUN_RANKS, microbatches=RUN_MICROBATCHES, device="cpu", timeout=60,
        sequence_length=RUN_SEQUENCE,
    )  # fmt: skip
    layers = model.config.num_hidden_layers
    default = to_layout([stage.layers for stage in auto.build_plan(model).stages])
    others = [to_layout(ranges([first, layers - first])) for first in range(layers + 1)]
    layouts = list(dict.fromkeys([default, *others]))
    for pipe in rank.kept.pop("pipes", {}).values():
        pipe.close()
    rank.kept["pipes"] = {
        layout: AutoPipeline(**{**vars(auto), "layout": layout}).build(model) for layout in layouts
    }
    rank.kept["batch"] = {"input_ids": ids, "labels": ids}
    return layouts


def timed(rank: Rank, layout: str) -> float:
    pipe = rank.kept["pipes"][layout]
    dist.barrier()
    start = time.perf_counter()
    pipe.step(rank.kept["batch"])
    pipe.zero_grad()
    return time.perf_counter() - start


def run(pool: Pool, name: str, repeats: int) -> tuple[list[Row], Rounds]:
    layouts: list[str] = pool.run(prepare, name, timeout=240)[0]

    def seconds(layout: str) -> float:
        slowest: float = max(pool.run(timed, layout))
        return slowest

    rounds = in_turn({layout: partial(seconds, layout) for layout in layouts}, repeats)
    default, best = layouts[0], min(layouts, key=lambda layout: rounds[layout].middle)
    rows = [
        measured(f"{name}, run", f"default {default}, over the best split, {best}",
                 rounds.ratio(default, best), at_most=BAR, quiet=rounds.quiet),
        measured(f"{name}, run", "default", rounds[default].scaled(1e3), "ms"),
    ]  # fmt: skip
    return rows, rounds


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    counted: list[Rounds] = []
    for name in CONFIGS:
        found, raw[name] = simulated(name)
        rows += found
    with Pool(RUN_RANKS) as pool:
        for name in RUN:
            found, rounds = run(pool, name, repeats)
            rows += found
            raw[name] = rounds.found
            counted.append(rounds)
    notes = [
        f"simulated: {RANKS} ranks, 1f1b, m={MICROBATCHES}, {SEQUENCE} tokens, by multiply-adds; no weights",
        f"run: {RUN_RANKS} ranks with a thread each, 1f1b, m={RUN_MICROBATCHES} of {RUN_SEQUENCE} tokens; "
        "forward and backward; the splits in turn; the best has the best median, and so has the noise of the "
        f"machine in its favour; {summary(counted)}",
    ]
    return Found("default_split", "The default split against the best of all splits", rows, notes, raw)
