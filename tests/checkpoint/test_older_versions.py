"""Checkpoints that older versions of penstock wrote still load.

`written_by_0.5.0` was written by penstock 0.5.0: two ranks of one process, after two steps of AdamW.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock import AutoPipeline, load_checkpoint

OLD = Path(__file__).parent / "written_by_0.5.0"
CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
)  # fmt: skip
LOSSES = [2.6385257244110107, 2.5844117403030396, 2.5260496139526367]  # of 0.5.0, of the next three steps
DRAWN = [0.49625658988952637, 0.7682217955589294]  # what it drew after the save
BATCH = {name: torch.arange(24).reshape(4, 6) % 16 for name in ("input_ids", "labels")}


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (1, "gpipe"), (2, "dualpipe_v")])
def test_a_run_of_0_5_0_goes_on_as_it_would_have(ranks: int, schedule: str) -> None:
    layers = {"layers_per_stage": [1, 0, 0, 1]} if schedule == "dualpipe_v" else {}
    auto = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=4 if layers else 2, **layers)  # type: ignore[arg-type]
    pipe = auto.build(CONFIG)
    optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=0.5)
    assert load_checkpoint(OLD, pipe, optimizer) == {"step": 2}
    assert torch.rand(2).tolist() == DRAWN
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for expected in LOSSES:
        assert pipe.step(BATCH).loss == pytest.approx(expected, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


def test_transformers_opens_a_checkpoint_of_0_5_0() -> None:
    model = AutoModelForCausalLM.from_pretrained(OLD)
    assert model(**BATCH).loss.item() == pytest.approx(LOSSES[0], rel=1e-5)
