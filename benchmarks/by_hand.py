"""The first pipeline of a process, from building it to the end of its first step, where all is imported.

Beside torch.distributed.pipelining, whose user has written a module of the stage's own layers by hand. That
builds no other layer, and knows neither the names in the model's files nor what the other ranks run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers.models.llama import modeling_llama as llama

from benchmarks.pool import Pool, Rank
from benchmarks.rivals import DecoderStage
from benchmarks.rounds import Numbers
from benchmarks.startup import RANKS, batch, config, penstock

WHO = ("penstock", "torch")


class Part(DecoderStage):
    """One of `RANKS` stages of a Llama."""

    def __init__(self, layers: int, stage: int) -> None:
        super().__init__()
        settings, own, last = config(layers), layers // RANKS, stage == RANKS - 1
        settings._attn_implementation = "sdpa"
        width, words = settings.hidden_size, settings.vocab_size
        self.embedding = nn.Embedding(words, width) if stage == 0 else None
        self.layers = nn.ModuleList(llama.LlamaDecoderLayer(settings, stage * own + at) for at in range(own))
        self.rotary = llama.LlamaRotaryEmbedding(settings)
        self.norm = llama.LlamaRMSNorm(width) if last else None
        self.head = nn.Linear(width, words, bias=False) if last else None


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def by_hand(rank: Rank, layers: int) -> Callable[[], object]:
    """Build a stage; returns the pipeline's step, the first of which finds the shapes."""
    stage = PipelineStage(Part(layers, rank.index), rank.index, RANKS, torch.device("cpu"))
    runner, ids = Schedule1F1B(stage, RANKS, loss_fn=loss), batch()["input_ids"]
    inputs = (ids,) if rank.is_first else ()
    return lambda: runner.step(*inputs, target=ids if rank.is_last else None, return_outputs=False)


def imported(rank: Rank) -> None:
    """Import what both need, and connect the ranks."""
    from transformers import AutoModelForCausalLM

    from penstock import AutoPipeline

    assert callable(AutoModelForCausalLM.from_config)
    assert callable(AutoPipeline)
    dist.barrier()


def first_step(rank: Rank, who: str, layers: int) -> tuple[float, float]:
    """When building began, and when the first step ended."""
    dist.barrier()
    start = time.perf_counter()
    step = penstock(layers) if who == "penstock" else by_hand(rank, layers)
    step()
    rank.kept["step"] = step
    return start, time.perf_counter()


def round_of(layers: int, number: int) -> Numbers:
    """Seconds of the first pipeline in fresh processes, and of the second in them; by library."""
    found: dict[str, float] = {}
    for who in WHO[:: 1 if number % 2 else -1]:
        with Pool(RANKS) as pool:
            pool.run(imported, timeout=120)
            for which in ("first", "second"):
                ran: list[tuple[float, float]] = pool.run(first_step, who, layers, timeout=120)
                found[f"{who} {which}"] = max(end for _, end in ran) - min(start for start, _ in ran)
    return found
