"""Near ties are counted, and router flips explain what they can."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.pipeline.compare import Compared, Report, compared_gradient
from penstock.train.check.digests import norms
from penstock.train.check.rounding import Scores, explained_by_flips, near_ties


def report(losses: tuple[float, float] | None, experts: str, name: str, difference: float) -> Report:
    """Of a mixture's experts, which are equal, and of another gradient; both have a norm of 1."""
    equal = Compared("gradient", experts, 0, 0, 0.0, 1.0, 1e-5)
    return Report.of(losses, [equal, Compared("gradient", name, 0, 0, difference, 1.0, 1e-5)], 1e-5, "norm")


MOE = "model.layers.0.mlp."


@pytest.mark.parametrize(
    ("name", "difference", "near", "fine"),
    [
        ("model.norm.weight", 0.3, 1, True),
        ("model.norm.weight", 1.0, 1, False),
        ("model.norm.weight", 1.0, 64, True),
        ("model.norm.weight", 0.3, 0, False),
        ("model.norm.weight", math.nan, 64, False),
        ("model.layers.0.post_attention_layernorm.weight", 1.0, 1, False),
        (f"{MOE}gate.weight", 1.0, 1, True),
        (f"{MOE}experts.down_proj", 1.0, 1, True),
        (f"{MOE}experts.down_proj", math.nan, 1, False),
        ("model.layers.1.mlp.shared_expert.up_proj.weight", 1.0, 1, False),  # of a layer without experts
    ],
)
def test_what_a_router_flip_explains(name: str, difference: float, near: int, fine: bool) -> None:
    """Of 256 tokens."""

    def explained(losses: tuple[float, float] | None) -> bool:
        return explained_by_flips(report(losses, f"{MOE}experts.up_proj", name, difference), near, 256)

    assert explained((1.0, 1.01)) == fine
    assert not explained((1.0, 1.2))
    assert not explained((1.2, 1.0))
    assert not explained(None)


@pytest.mark.parametrize(("name", "fine"), [("model.norm.weight", False), (f"{MOE}experts.down_proj", True)])
def test_a_missing_gradient_is_explained_of_experts_only(name: str, fine: bool) -> None:
    """An expert has none where no token chooses it."""
    missing = compared_gradient((name, 1, 1), None, (1.0,), norms, 0.0, rounding=0.0)
    assert explained_by_flips(Report.of((1.0, 1.0), [missing], 1e-5, "norm"), 1, 256) == fine


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("self_attn.q_proj.weight", False),
        ("mlp.up_proj.weight", False),
        ("pre_feedforward_layernorm_2.weight", False),
        ("router.proj.weight", True),
        ("router.per_expert_scale", True),
        ("experts.down_proj", True),
        ("gate.weight", True),
        ("shared_expert.up_proj.weight", True),
    ],
)
def test_a_layer_that_holds_experts_directly_is_no_mixture_as_a_whole(name: str, fine: bool) -> None:
    """0.5.0: all of a gemma4 layer counted as one, its attention too, whose gradient might be any."""
    found = report((1.0, 1.0), f"{LAYER}experts.gate_up_proj", f"{LAYER}{name}", 1.0)
    assert explained_by_flips(found, 1, 512) == fine


def test_near_ties_are_those_within_what_the_scores_have_moved_by() -> None:
    before, after, shorter = Scores(), Scores(), Scores()
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.9], [2.0, 2.0, -torch.inf]])
    with before:
        scores.topk(2)
        torch.topk(scores[:, :2], 2)  # leaves no choice
    with after:
        torch.topk(scores + torch.tensor([[0.0, 0.0, 0.1]]), k=2, dim=-1)
    with shorter:
        scores[:1].topk(2)
    assert [(each.shape, chosen) for each, chosen in before.calls] == [((3, 3), 2)]
    assert near_ties(before, before) == 0
    assert near_ties(before, after) == 1
    assert near_ties(before, shorter) == 3
