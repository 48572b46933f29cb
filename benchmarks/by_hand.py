"""The first pipeline of a process, from building it to the end of its first step, where all is imported.

Beside torch.distributed.pipelining, whose user has written a module of the stage's own layers by hand. That
builds no other layer, and knows neither the names in the model's files nor what the other ranks run.

And beside `pipeline`, torch's own function that cuts a whole model, as penstock does. It refuses a backward
of this one ("Backward of skip connections not supported yet"), so that its step is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama as llama

from benchmarks.pool import Pool, Rank
from benchmarks.rivals import DecoderStage
from benchmarks.rounds import Numbers
from benchmarks.startup import RANKS, batch, config, penstock

WHO = ("penstock", "torch")
CUT = 50  # layers; `pipeline` takes 16 s to cut them


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


class Whole(nn.Module):
    """A model as `pipeline` takes it: tensors in, a tensor out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config(layers))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def cut_by_torch(rank: Rank, layers: int) -> tuple[float, float]:
    """When torch began to build and cut the whole model, and when it had a stage of it."""
    dist.barrier()
    start = time.perf_counter()
    ids = batch()["input_ids"][: 8 // RANKS]
    places = {f"model.model.layers.{layers // RANKS * at}": SplitPoint.BEGINNING for at in range(1, RANKS)}
    pipe = pipeline(Whole(layers), mb_args=(ids,), split_spec=places)
    stage = pipe.build_stage(rank.index, torch.device("cpu"))
    assert sum(p.numel() for p in stage.submod.parameters()) > 0
    return start, time.perf_counter()


def imported(rank: Rank) -> None:
    """Import what both need, and connect the ranks."""
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
                found[f"{who} {which}"] = _seconds(pool.run(first_step, who, layers, timeout=120))
    return found


def round_of_cuts(number: int) -> Numbers:
    """Seconds to the end of penstock's first step, and of torch's cut of the same model."""
    found: dict[str, float] = {}
    for who in WHO[:: 1 if number % 2 else -1]:
        with Pool(RANKS) as pool:
            pool.run(imported, timeout=120)
            if who == "penstock":
                found[who] = _seconds(pool.run(first_step, who, CUT, timeout=120))
            else:
                found[who] = _seconds(pool.run(cut_by_torch, CUT, timeout=300))
    return found


def _seconds(ran: list[tuple[float, float]]) -> float:
    """From the first start to the last end."""
    return max(end for _, end in ran) - min(start for start, _ in ran)
