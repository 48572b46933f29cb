"""Adapters on a mesh: the gradients of PEFT in one process, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Axes
from penstock.checkpoint.save_load import load_checkpoint, save_checkpoint
from penstock.errors import ConfigError
from support import zoo
from support.adapted import adapted, lora, opened, tensors_of
from support.families import tiny_model
from support.mesh import batch, build_whole, full, later, own_part
from support.pool import Pool
from support.reference import assert_gradients, plain_step
from support.refusals import refuses

PREFIX = "base_model.model."
FORMS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules and rows": {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"], "bias": "all"},
    "attention of mixtral": {"target_modules": ["q_proj", "o_proj"]},
}


def peft_of(form: str) -> Any:
    family = "mixtral" if "mixtral" in form else "llama"
    return adapted(tiny_model(family, torch.float64, layers=2), lora(**FORMS[form]))


def exact(form: str, axes: Axes, options: dict[str, Any], folder: Path) -> bool:
    """Loss, every gradient, the norm and, after a step, a checkpoint are those of the whole model."""
    peft = peft_of(form)
    loss, gradients = plain_step(peft, batch())
    expected = {name.removeprefix(PREFIX): gradient for name, gradient in gradients.items()}
    pipe = build_whole(peft, 2, axes, **options)
    result = pipe.step(own_part(batch(), *pipe.batch_part))
    assert result.loss == pytest.approx(loss, rel=1e-10)
    found = {n: full(p.grad) for n, p in pipe.named_parameters() if p.grad is not None}
    assert found.keys() == {n for n, p in pipe.named_parameters() if p.requires_grad}
    assert_gradients(found, expected, 1e-10)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert pipe.clip_grad_norm_(1e9) == pytest.approx(float(norm), rel=1e-9)
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2)
    optimizer.step()
    save_checkpoint(folder / "checkpoint", pipe, optimizer)
    values = {n: full(p.detach()).clone() for n, p in pipe.named_parameters()}
    pipe.close()
    again = build_whole(peft_of(form), 2, axes, **options)
    second = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    load_checkpoint(folder / "checkpoint", again, second)
    assert all(torch.equal(full(p.detach()), values[n]) for n, p in again.named_parameters())
    again.close()
    return True


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("form", "axes", "options"),
    [
        ("modules and rows", Axes(dp_shard=2), {"schedule": "zb_h1"}),
        *later(
            ("lora", Axes(dp_shard=2), {}),
            ("dora", Axes(dp_shard=2), {}),
            ("embedding", Axes(dp_shard=2), {"schedule": "zb_h1"}),
            ("lora", Axes(dp_replicate=2), {}),
            ("attention of mixtral", Axes(dp_shard=2, ep=2), {"schedule": "zb_h1"}),
            ("dora", Axes(cp=2), {}),
            ("modules and rows", Axes(cp=2), {"schedule": "zb_h1", "context": "ring"}),
        ),
    ],
)
def test_exact(pool: Pool, tmp_path: Path, form: str, axes: Axes, options: dict[str, Any]) -> None:
    assert all(pool.run(4, exact, form, axes, options, tmp_path))
    base = tiny_model("mixtral" if "mixtral" in form else "llama", torch.float64, layers=2)
    found = dict(opened(base, tmp_path / "checkpoint").named_parameters())
    saved = tensors_of(tmp_path / "checkpoint")
    assert saved
    assert all(any(torch.equal(value, other) for other in found.values()) for value in saved.values())


def new_adapter(axes: Axes | None, ranks: int, folder: str | None, form: str) -> dict[str, Any]:
    """This process's parameters of a new adapter, sharded from the start."""
    source: Any = zoo.tiny_config("llama") if folder is None else folder
    pipe = build_whole(source, ranks, axes, adapter=lora(**FORMS[form]), seed=3)
    values = {n: full(p.detach()).clone() for n, p in pipe.named_parameters()}
    pipe.close()
    return values


@pytest.mark.parametrize(
    ("form", "from_folder"),
    later(("dora", True), ("modules and rows", True), ("dora", False), ("embedding", False)),
)
def test_initial_values_do_not_depend_on_the_mesh(
    pool: Pool, tmp_path: Path, form: str, from_folder: bool
) -> None:
    folder = None
    if from_folder:
        zoo.tiny_model("llama").save_pretrained(tmp_path)
        folder = str(tmp_path)
    expected = new_adapter(None, 1, folder, form)
    everyone = pool.run(4, new_adapter, Axes(dp_shard=2), 2, folder, form)
    found = {name: value for each in everyone for name, value in each.items()}
    assert found.keys() == expected.keys()
    assert [n for n, value in found.items() if not torch.equal(value, expected[n])] == []


@pytest.mark.parametrize(
    ("family", "options", "axes", "value", "rule", "remedy"),
    [
        (
            "llama",
            {},
            Axes(tp=2),
            "tp=2 for a model with an adapter (on model.layers.0",
            "whole matrices",
            "Use dp_shard",
        ),
        (
            "qwen3_moe",
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
            Axes(dp_shard=2, ep=2),
            "ep=2 for an adapter on model.layers.",
            "some of the experts",
            "such as q_proj",
        ),
        ("llama", {"lora_dropout": 0.1}, Axes(cp=2), "lora_dropout", "random numbers", ""),
    ],
)
def test_what_would_not_be_exact_is_refused(
    family: str, options: Any, axes: Axes, value: str, rule: str, remedy: str
) -> None:
    from penstock import AutoPipeline

    peft = adapted(zoo.tiny_model(family), lora(**options))
    with refuses(ConfigError, value, rule, remedy):
        AutoPipeline(ranks=2, microbatches=2, axes=axes).build_plan(peft)
