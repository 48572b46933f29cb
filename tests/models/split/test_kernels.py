"""Forwards without values take the kernels that a run takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.models.split.kernels import kernels_of_runs, one_document
from penstock.models.tracing.meta import shadow
from penstock.private import FakeTensorMode, grouped_mm
from support import zoo


def test_attention_returns_the_width_of_the_values() -> None:
    """1.0: that of the queries, so that multi-head latent attention failed, and its memory was unknown."""
    with FakeTensorMode(), kernels_of_runs():
        query, value = (torch.empty(2, 4, 8, width, requires_grad=True) for width in (6, 4))
        result = F.scaled_dot_product_attention(query, query, value, is_causal=True)
        assert result.shape == (2, 4, 8, 4)
        assert result.transpose(1, 2).is_contiguous()
        result.sum().backward()  # type: ignore[no-untyped-call]
        assert query.grad is not None
        assert query.grad.shape == query.shape
        assert value.grad is not None
        assert value.grad.shape == value.shape


def test_a_mask_that_trains_has_a_gradient() -> None:
    """A learned bias on the scores: no fused kernel has a gradient for it."""
    with FakeTensorMode(), kernels_of_runs():
        query, mask = torch.empty(2, 4, 8, 6), torch.empty(8, 8, requires_grad=True)
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward()  # type: ignore[no-untyped-call]
        assert mask.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_takes_every_dtype(dtype: torch.dtype) -> None:
    """1.0: experts in float32 failed without values, and their memory was unknown."""
    with FakeTensorMode(), kernels_of_runs():
        tokens = torch.empty(64, 16, dtype=dtype, requires_grad=True)
        experts = torch.empty(4, 16, 32, dtype=dtype, requires_grad=True)
        result = grouped_mm(tokens, experts, torch.empty(4, dtype=torch.int32))
        assert result.shape == (64, 32)
        result.backward(torch.empty_like(result))  # type: ignore[no-untyped-call]
        assert tokens.grad is not None
        assert tokens.grad.shape == tokens.shape
        assert experts.grad is not None
        assert experts.grad.shape == experts.shape


@pytest.mark.parametrize("family", ["falcon", "deepseek_v32"])
def test_a_family_that_needs_its_mask_gets_it(family: str) -> None:
    """1.0 took every mask away: these two read it, and failed with a TypeError."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.tiny_config(family))
    with shadow(model) as whole, one_document(), kernels_of_runs():
        logits = whole(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False).logits
    assert logits.shape == (1, 8, zoo.VOCABULARY)


def test_no_mask_is_made_where_each_row_is_a_document() -> None:
    seen = []

    attention: Any = F.scaled_dot_product_attention

    def attends(*args: Any, **options: Any) -> Any:
        seen.append(options.get("attn_mask"))
        return attention(*args, **options)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    with shadow(model) as whole, one_document(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attends)
        whole(input_ids=torch.zeros(2, 8, dtype=torch.long), use_cache=False)
    assert seen == [None] * SMALL["num_hidden_layers"]


SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 64,
}  # fmt: skip
