"""A real model on two ranks with one thread each, beside one process with one thread: tokens per second.

A Qwen3 model of 8 layers with random weights; forward and backward of the same batch in the same
microbatches, with the same loss. Both never run at once: the ranks wait in a blocking read meanwhile.
What two such single processes reach at the same time is measured too: more than that the machine cannot give.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from penstock import AutoPipeline
from penstock.batch.loss import NextToken
from penstock.batch.microbatches import split
from penstock.schedule import build, simulate

RANKS, MICROBATCHES, ROWS, SEQUENCE = 2, 16, 32, 128
BAR = 1.85
CONFIG = Qwen3Config(
    vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=SEQUENCE, tie_word_embeddings=False,
)  # fmt: skip


def prepare(rank: Rank) -> float:
    """Both ways of taking the step; returns how far apart their losses are."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    ids = torch.randint(CONFIG.vocab_size, (ROWS, SEQUENCE))
    batch = {"input_ids": ids, "labels": ids}
    # weights of 0: with 256 entries, embedding and head take less than a tenth of a layer's time
    pipe = AutoPipeline(
        ranks=RANKS, schedule="1f1b", microbatches=MICROBATCHES, embedding_weight=0, head_weight=0,
        device="cpu", timeout=60,
    ).build(model)  # fmt: skip
    loss = NextToken()
    weight = loss.weight(batch)

    def single() -> float:
        total = 0.0
        for microbatch in split(batch, MICROBATCHES, {}):
            logits = model(input_ids=microbatch["input_ids"], use_cache=False).logits
            share = loss.total(logits, microbatch) / weight
            share.backward()  # type: ignore[no-untyped-call]
            total += float(share.detach())
        return total

    rank.kept["pipeline"] = lambda: pipe.step(batch).loss
    rank.kept["single"] = single
    rank.kept["pipe"] = pipe
    return abs(single() - pipe.step(batch).loss)


def timed(rank: Rank, way: str, together: bool) -> tuple[float, float]:
    """Start and end of one step; together: the ranks start at the same time."""
    if together:
        dist.barrier()
    start = time.perf_counter()
    rank.kept[way]()
    return start, time.perf_counter()


def bubble(rank: Rank) -> float:
    return float(rank.kept["pipe"].timeline.bubble)


def measure(repeats: int) -> Found:
    times: dict[str, list[float]] = {"single": [], "pipeline": [], "two singles": []}
    with Pool(RANKS) as pool:
        apart = max(pool.run(prepare, timeout=120))
        if apart > 1e-4:
            raise RuntimeError(f"the losses differ by {apart}: not the same work")
        for _ in range(repeats):
            start, end = pool.run(timed, "single", False, on=[0])[0]
            times["single"].append(end - start)
            for name, way in (("pipeline", "pipeline"), ("two singles", "single")):
                ranks = pool.run(timed, way, True)
                times[name].append(max(end for _, end in ranks) - min(start for start, _ in ranks))
        measured_bubble = pool.run(bubble)[0]
    single, pipeline, both = (median(times[name]) for name in ("single", "pipeline", "two singles"))
    lost = simulate(build("1f1b", ranks=RANKS, microbatches=MICROBATCHES)).bubble
    speedup, ceiling, tokens = single / pipeline, 2 * single / both, ROWS * SEQUENCE
    wanted = BAR * (1 - lost)
    rows = [
        Row("one process", "tokens per second", tokens / single),
        Row(f"P={RANKS}, 1f1b", "tokens per second", tokens / pipeline),
        Row(f"P={RANKS}, 1f1b", "times one process", speedup, "", None,
            f"at least {BAR} less the bubble of {lost:.1%}: {wanted:.3f}", speedup >= wanted),
        Row(f"P={RANKS}, 1f1b", "the same without the bubble", speedup / (1 - lost)),
        Row(f"{RANKS} processes apart", "times one process", ceiling),
        Row(f"P={RANKS}, 1f1b", "of what they reach, without the bubble", speedup / (1 - lost) / ceiling),
        Row(f"P={RANKS}, 1f1b", "bubble measured in the last step", measured_bubble),
    ]  # fmt: skip
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(CONFIG).parameters())
    notes = [
        f"Qwen3, {CONFIG.num_hidden_layers} layers of {CONFIG.hidden_size}, {parameters / 1e6:.1f} million "
        f"parameters, fp32; {ROWS} rows of {SEQUENCE} tokens, m={MICROBATCHES}; 4 layers a rank "
        "(embedding_weight=0, head_weight=0)",
        f"forward and backward, no optimizer; median of {repeats}, in turn; losses differ by {apart:.0e}",
        "processes apart: two single processes at once, each with a batch of its own: the machine's ceiling",
    ]
    title = "Real compute: two ranks and one process, one thread each"
    return Found("throughput", title, rows, notes, times)
