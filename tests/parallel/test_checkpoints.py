"""Checkpoints and folders of sharded weights, written on one mesh and read on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import Axes, CheckpointWriter, load_checkpoint
from support.families import tiny_model
from support.mesh import batch, build_whole, later, train, train_alone
from support.pool import Pool


def saved_and_read(
    folder: str, family: str, first: tuple[int, Axes, str], second: tuple[int, Axes, str], background: bool
) -> tuple[list[float], list[float]]:
    """Losses of three steps on one mesh, a checkpoint, and three more on another."""
    losses = []
    for number, (ranks, axes, schedule) in enumerate((first, second)):
        model = tiny_model(family, torch.float64, layers=4, seed=number)
        pipe = build_whole(model, ranks, axes, schedule=schedule)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if number:
            assert load_checkpoint(f"{folder}/checkpoint", pipe, optimizer) == {"step": 3}
        losses.append(train(pipe, batch(), [optimizer], 3, 1.0)[0])
        if not number:
            with CheckpointWriter(pipe, background=background) as writer:
                writer.save(f"{folder}/checkpoint", optimizer, {"step": 3})
        else:
            pipe.save_pretrained(f"{folder}/pretrained")
        pipe.close()
    return losses[0], losses[1]


CASES = [
    ("llama", (2, Axes(dp_shard=2), "1f1b"), (1, Axes(dp_shard=2, dp_replicate=2), "1f1b"), True),
]
MORE = [
    ("mixtral", (1, Axes(dp_shard=2, ep=2, tp=2), "1f1b"), (2, Axes(dp_replicate=2), "1f1b"), True),
    ("llama", (2, Axes(dp_replicate=2), "zb_v"), (2, Axes(dp_shard=2), "1f1b"), False),
    ("llama", (4, Axes(), "1f1b"), (2, Axes(tp=2), "zb_v"), True),
    ("llama", (1, Axes(dp_shard=2, tp=2), "1f1b"), (2, Axes(cp=2), "1f1b"), False),
    ("mixtral", (1, Axes(dp_shard=4, ep=2), "1f1b"), (2, Axes(dp_shard=2, ep=2), "zb_v"), True),
]


@pytest.mark.parametrize(
    ("family", "first", "second", "background"),
    [*CASES, *later(*MORE)],
)
def test_training_continues_on_another_mesh(
    pool: Pool,
    tmp_path: Path,
    family: str,
    first: tuple[int, Axes, str],
    second: tuple[int, Axes, str],
    background: bool,
) -> None:
    expected, model = alone(family)
    for before, after in pool.run(4, saved_and_read, str(tmp_path), family, first, second, background):
        assert before + after == pytest.approx(expected, rel=1e-9)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained", dtype=torch.float64)
    for name, weight in model.named_parameters():
        assert torch.allclose(opened.get_parameter(name), weight, rtol=1e-7, atol=1e-9), name


def alone(family: str) -> tuple[list[float], torch.nn.Module]:
    """Losses of six steps of one plain process, and the model after them."""
    model = tiny_model(family, torch.float64, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train_alone(model, batch(), [optimizer], 6, 1.0)[0], model
