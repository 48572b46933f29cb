"""Optimizers of sharded weights: several steps are those of one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock import Axes
from penstock.parallel.muon import Muon
from support.mesh import batch, build_pipe, full, model_of, train, train_alone
from support.pool import Pool


def optimizers(kind: str, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW as "foreach" or "fused" or neither, or "muon" of hidden matrices with AdamW for the rest."""
    if kind == "muon":
        hidden = [p for p in parameters if p.ndim > 1 and p.shape[0] != 64]  # 64: embedding and head
        rest = [p for p in parameters if not any(p is other for other in hidden)]
        own: list[torch.optim.Optimizer] = [Muon(hidden, lr=0.02)] if hidden else []
        return [*own, torch.optim.AdamW(rest, lr=1e-2)]
    how: dict[str, Any] = {kind: True} if kind in ("foreach", "fused") else {}
    return [torch.optim.AdamW(parameters, lr=1e-2, **how)]


STEPS = 3


Trained = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, and weights after them


def trained(family: str, ranks: int, axes: Axes, kinds: list[str]) -> dict[str, Trained]:
    """By kind of optimizer, some steps on a mesh."""
    found = {}
    for kind in kinds:
        pipe = build_pipe(family, ranks, axes, {})
        losses, norms = train(pipe, batch(), optimizers(kind, list(pipe.parameters())), STEPS, 0.5)
        found[kind] = losses, norms, {name: full(p.detach()).clone() for name, p in pipe.named_parameters()}
        pipe.close()
    return found


CASES: list[tuple[str, int, Axes, list[str]]] = [
    ("llama", 2, Axes(dp_shard=2), ["adamw", "foreach", "fused", "muon"]),
    ("llama", 2, Axes(tp=2), ["adamw", "muon"]),
    ("mixtral", 2, Axes(dp_shard=2, ep=2), ["adamw", "foreach", "muon"]),
    ("mixtral", 1, Axes(dp_shard=4, ep=2), ["muon"]),
    ("llama", 1, Axes(dp_shard=2, tp=2), ["muon"]),
]


def alone(family: str, kind: str) -> Trained:
    """The same steps in one plain process."""
    model = model_of(family)
    own = optimizers("muon" if kind == "muon" else "adamw", list(model.parameters()))
    losses, norms = train_alone(model, batch(), own, STEPS, 0.5)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parallel
@pytest.mark.parametrize(("family", "ranks", "axes", "kinds"), CASES)
def test_steps_are_those_of_one_process(
    pool: Pool, family: str, ranks: int, axes: Axes, kinds: list[str]
) -> None:
    everyone = pool.run(4, trained, family, ranks, axes, kinds)
    for kind in kinds:
        losses, norms, weights = alone(family, kind)
        names: set[str] = set()
        for found in everyone:
            assert found[kind][0] == pytest.approx(losses, rel=1e-9), kind
            assert found[kind][1] == pytest.approx(norms, rel=1e-9), kind
            for name, weight in found[kind][2].items():
                size = float(weights[name].abs().max())
                assert float((weight - weights[name]).abs().max()) <= 1e-9 * size, (kind, name)
                names.add(name)
        assert names == set(weights)


@pytest.mark.parametrize("options", [
    {}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
])  # fmt: skip
def test_muon_of_plain_matrices_is_torchs(options: dict[str, Any]) -> None:
    """And of a tensor of several experts, torch's of each one's matrix."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(size)) for size in ((6, 4), (4, 6), (3, 4, 6))]
    theirs = [nn.Parameter(each) for p in ours for each in p.detach().clone().view(-1, *p.shape[-2:])]
    mine, torchs = Muon(ours, lr=0.1, **options), torch.optim.Muon(theirs, lr=0.1, **options)
    for _ in range(3):
        for p in ours:
            p.grad = torch.randn_like(p)
        gradients = [each for p in ours for each in p.grad.view(-1, *p.shape[-2:])]  # type: ignore[union-attr]
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.clone()
        mine.step()
        torchs.step()  # type: ignore[no-untyped-call]
    for one, other in zip((each for p in ours for each in p.view(-1, *p.shape[-2:])), theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_muon_refuses_a_vector() -> None:
    with pytest.raises(ValueError, match=r"Muon is for matrices, not for one of shape \[3\]"):
        Muon([nn.Parameter(torch.zeros(3))])


def saved(folder: str, family: str, ranks: int, axes: Axes) -> None:
    pipe = build_pipe(family, ranks, axes, {})
    pipe.save_pretrained(folder)
    pipe.close()


@pytest.mark.parallel
@pytest.mark.parametrize(("family", "axes"), [("llama", Axes(tp=2)), ("mixtral", Axes(dp_shard=2, ep=2))])
def test_a_saved_model_opens_with_the_same_logits(
    pool: Pool, tmp_path: Path, family: str, axes: Axes
) -> None:
    pool.run(4, saved, str(tmp_path), family, 2, axes)
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, model_of(family).eval()(input_ids=ids).logits)
