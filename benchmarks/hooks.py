"""What placeholders and boundaries cost against a stage written by hand.

The same pipeline twice, in one process: once AutoPipeline's, once of modules that call the same layers in a
plain loop, with masks and rotary tables made by hand. Same weights, same executor, same loss; one step of
each in turn.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, measured
from benchmarks.rounds import Rounds, in_turn
from penstock import AutoPipeline, Pipeline
from penstock.models.stage import StageInfo

RANKS, MICROBATCHES, ROWS = 4, 4, 1
BAR = 1.01
AUTO, HAND = "AutoPipeline", "by hand"
# width, layers, sequence
CASES = ((512, 8, 256), (1024, 4, 512))
STEPS = 2  # of each, in turn, for one repeat


class ByHand(nn.Module):
    """The layers of one stage, in a loop. Without padding or packing SDPA's own causal mask will do."""

    def __init__(self, whole: LlamaForCausalLM, info: StageInfo) -> None:
        super().__init__()
        count = len(whole.model.layers) // info.stages
        self.layers = whole.model.layers[info.stage * count : (info.stage + 1) * count]
        self.rotary = LlamaRotaryEmbedding(whole.config)
        self.embed = whole.model.embed_tokens if info.is_first else None
        self.norm = whole.model.norm if info.is_last else None
        self.head = whole.lm_head if info.is_last else None
        self._table: Any = None

    def forward(self, hidden: Tensor | None = None, input_ids: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(input_ids)
        assert hidden is not None
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        if hidden.is_meta:  # while shapes are learnt
            table = self.rotary.to("meta")(hidden, places)
        elif self._table is None:
            table = self._table = self.rotary(hidden.detach(), places)
        else:
            table = self._table
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=places, position_embeddings=table)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        assert hidden is not None
        return hidden


def compare(_: Rank, width: int, layers: int, sequence: int, repeats: int) -> Rounds:
    """Processor seconds of one step, in turn: AutoPipeline's, and by hand."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=1024,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    options: dict[str, Any] = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    auto = AutoPipeline(**options, embedding_weight=0, head_weight=0).build(model)
    hand = Pipeline.from_provider(lambda info: ByHand(model, info), **options)
    ids = torch.randint(0, 1024, (MICROBATCHES * ROWS, sequence))
    batch = {"input_ids": ids, "labels": ids}
    losses = [pipe.step(batch).loss for pipe in (auto, hand)]
    assert losses[0] == losses[1], losses

    def seconds(pipe: Pipeline) -> float:
        pipe.zero_grad()
        start = time.thread_time()
        pipe.step(batch)
        return time.thread_time() - start

    # programs outside are not looked for: the processor's time leaves them out
    rounds = in_turn({AUTO: partial(seconds, auto), HAND: partial(seconds, hand)}, repeats, others=None)
    auto.close()
    hand.close()
    return rounds


def measure(repeats: int) -> Found:
    rows, raw = [], {}
    with Pool(1, join=False) as pool:
        for width, layers, sequence in CASES:
            rounds: Rounds = pool.run(compare, width, layers, sequence, STEPS * repeats, timeout=1800)[0]
            case = f"width {width}, sequence {sequence}"
            rows.append(measured(
                case, "step of AutoPipeline, and by hand", rounds.ratio(AUTO, HAND), "ms",
                ours=1e3 * rounds[AUTO].middle, torch=1e3 * rounds[HAND].middle, at_most=BAR,
            ))  # fmt: skip
            raw[case] = rounds.found
    notes = (
        f"Llama, P={RANKS} in process, one or two layers a stage, m={MICROBATCHES} of one row, float32, "
        f"one thread, processor time; {STEPS * repeats} pairs of steps, in turn",
        "other: the stage by hand, a loop over the same layers; same executor, weights and loss",
    )
    return Found("hooks", "Cost of placeholders and boundaries", rows, notes, raw)
