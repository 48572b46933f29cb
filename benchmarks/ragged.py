"""Documents of many lengths: as they are, padded in three ways, and packed; tokens per second, and bytes.

Lengths are drawn from a lognormal distribution with a fixed seed and clipped, as those of text are. All
ways go through the same documents, in steps of 16 microbatches: of one document each, or of one row packed
with several, so that packed ones take fewer steps. P = 2 over gloo, 1f1b, a small Qwen3. The ways take turns,
so that what else the machine does hits all alike.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.memory import Watch, weights
from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Rounds, in_turn
from penstock import AutoPipeline
from penstock.batch.padding import Padding
from penstock.pipeline.options import Shapes
from penstock.train.data.packing import Numbers, best_fit, cut, one_each
from penstock.train.data.rows import DocumentLayout, SourceRows
from penstock.train.data.store import Store, StoreFacts

RANKS, MICROBATCHES = 2, 16
LONGEST, TYPICAL, SPREAD, SEED = 512, 128, 0.7, 0  # the median length, and the sigma of its logarithm
STEPS = 3  # of documents unpacked
CONFIG = Qwen3Config(
    vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=LONGEST, tie_word_embeddings=False,
)  # fmt: skip
WAYS: dict[str, Shapes] = {
    "ragged": "inferred",
    "packed": "inferred",
    "padded to the longest": Padding(),
    "padded to buckets": Padding(buckets=(128, 256, 384, 512)),
    "padded to 512": Padding(length=LONGEST),
}
BASE = "padded to the longest"


class Turn(NamedTuple):
    """Of one rank, over all documents: start and end, and Pipeline.memory at the most."""

    start: float
    end: float
    held: tuple[int, ...]


def lengths() -> Numbers:
    drawn = np.random.default_rng(SEED).lognormal(np.log(TYPICAL), SPREAD, STEPS * MICROBATCHES)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def steps(way: str) -> list[list[dict[str, Any]]]:
    """The microbatches of each step; every way has all documents."""
    documents = lengths()
    tokens = np.random.default_rng(SEED).integers(0, CONFIG.vocab_size, int(documents.sum()), dtype=np.uint16)
    pieces = cut(documents, LONGEST)
    packing = (best_fit if way == "packed" else one_each)(pieces.lengths, LONGEST)
    facts = StoreFacts(len(documents), len(tokens), len(tokens), 0, CONFIG.vocab_size - 1, "", "")
    rows = SourceRows(Store(tokens, None, documents, facts), pieces, packing)
    layout = DocumentLayout((MICROBATCHES,), packed=way == "packed")
    steps = np.array_split(np.arange(len(rows)), -(-len(rows) // MICROBATCHES))
    return [layout.content(rows, numbers.tolist()) for numbers in steps]


def prepare(rank: Rank, way: str) -> int:
    """The pipeline of one way, and its first turn; most bytes beside weights, gradients and the batch."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    batches = steps(way)
    # over gloo: `Watch` would count the whole segment of shared memory, used or not
    with Watch() as watch:
        # weights of 0: with 256 entries, embedding and head take less than a tenth of a layer's time
        pipe = AutoPipeline(
            ranks=RANKS, schedule="1f1b", microbatches=MICROBATCHES, embedding_weight=0, head_weight=0,
            device="cpu", timeout=60, shapes=WAYS[way], transport="gloo",
        ).build(model)  # fmt: skip
        for batch in batches:
            pipe.step(batch)
    rank.kept[way] = pipe, batches
    beside: int = watch.peak - weights(pipe.modules.values())
    return beside


def timed(rank: Rank, way: str) -> Turn:
    pipe, batches = rank.kept[way]
    held = [0] * RANKS
    dist.barrier()
    start = time.perf_counter()
    for batch in batches:
        pipe.step(batch)
        held = [max(most, now.total) for most, now in zip(held, pipe.memory, strict=True)]
    return Turn(start, time.perf_counter(), tuple(held))


def measure(repeats: int) -> Found:
    outside: dict[str, list[int]] = {}
    held: dict[str, tuple[int, ...]] = {}
    with Pool(RANKS) as pool:
        for way in WAYS:
            outside[way] = pool.run(prepare, way, timeout=180)

        def seconds(way: str) -> float:
            ranks: list[Turn] = pool.run(timed, way, timeout=180)
            held[way] = ranks[0].held
            return max(of.end for of in ranks) - min(of.start for of in ranks)

        rounds = in_turn({way: partial(seconds, way) for way in WAYS}, repeats, warm_up=0)
    tokens = int(lengths().sum())
    rows = [row for way in WAYS for row in _rows(way, tokens, rounds, held, outside)]
    drawn, counts = lengths(), {way: list(map(len, steps(way))) for way in ("ragged", "packed")}
    notes = [
        f"{len(drawn)} documents of {drawn.min()} to {drawn.max()} tokens, {tokens} in all: lognormal, "
        f"median {TYPICAL}, sigma {SPREAD}, seed {SEED}, clipped at {LONGEST}; Qwen3, "
        f"{CONFIG.num_hidden_layers} layers of {CONFIG.hidden_size}, fp32, no optimizer",
        "a turn: forward and backward of all documents, "
        + ", ".join(f"{way}: {len(each)} steps of {each[0]} microbatches" for way, each in counts.items()),
        f"over '{BASE}': within rounds; {rounds}",
        "bytes: Pipeline.memory of the rank that holds most, in its fullest step; counted from outside: "
        "every tensor made from building to the end of the first turn, less weights and gradients",
    ]
    raw = {"seconds a turn": rounds.found, "Pipeline.memory": held, "counted from outside": outside,
           "lengths": drawn.tolist()}  # fmt: skip
    return Found("ragged", f"Documents of many lengths, P={RANKS}, m={MICROBATCHES}", rows, notes, raw)


def places(way: str) -> int:
    """How many tokens are computed, padding among them."""
    shapes, total = WAYS[way], 0
    for batch in steps(way):
        sizes = [microbatch["input_ids"].shape for microbatch in batch]
        full = None if shapes == "inferred" or isinstance(shapes, str) else shapes.lengths(
            shapes.longest(batch)).full  # fmt: skip
        total += sum(rows * (full or length) for rows, length in sizes)
    return total


def _rows(
    way: str,
    tokens: int,
    rounds: Rounds,
    held: dict[str, tuple[int, ...]],
    outside: dict[str, list[int]],
) -> list[Row]:
    counted = max(outside[way]) / max(outside[BASE])
    less = max(held[way]) / max(held[BASE])
    judged, where = way == "ragged", f" / {BASE}" if way != BASE else ""
    rows = [
        measured(way, "real tokens per second", rounds.of(lambda seconds: tokens / seconds[way])),
        Row(way, "of the tokens computed, real", tokens / places(way) * 100, "%"),
        Row(way, "bytes at the peak, Pipeline.memory", max(held[way]) / 2**20, "MiB"),
        Row(way, "bytes at the peak, counted from outside", max(outside[way]) / 2**20, "MiB"),
    ]
    if way != BASE:
        rows += [
            measured(way, f"tokens per second{where}", rounds.ratio(BASE, way),
                     at_least=1.0 if judged else None, quiet=rounds.quiet),
            Row(way, f"Pipeline.memory{where}", less, "", None, "at most 1" if judged else "",
                less <= 1 if judged else None),
            Row(way, f"counted from outside{where}", counted),
        ]  # fmt: skip
    return rows
