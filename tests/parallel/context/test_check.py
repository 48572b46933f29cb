"""Models that context parallelism takes or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from penstock.errors import ConfigError, InputError, ModelError, PenstockError
from penstock.parallel.context.attention import Method
from penstock.parallel.context.check import check
from support import zoo
from support.covering import every
from support.families import FAMILIES, tiny_model
from support.pool import Pool
from support.refusals import refuses
from support.split_sequences import HOW, differing


def every_type(types: Sequence[str], method: Method) -> dict[str, str]:
    """For each type of causal model: "exact", what it was refused with, or what was wrong."""
    found = {}
    for name in types:
        try:
            model = zoo.tiny_model(name)
            check(model, dist.get_world_size(), method)
        except PenstockError as error:
            found[name] = f"refused by check: {error.value}"
            continue
        try:
            batch = {**zoo.tiny_batch(name)}
            wrong = differing(name, model, batch, method, 1e-5)
            if wrong:  # gradients that nearly cancel are no better than their rounding; parts stay in float32
                wrong = differing(name, zoo.tiny_model(name, torch.float64), batch, method, 1e-5)
            found[name] = "".join(wrong) or "exact"
        except PenstockError as error:
            found[name] = f"refused in the first forward: {error.value}"
        except Exception as error:
            found[name] = f"failed: {type(error).__name__}: {error}"
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("method", HOW)
@pytest.mark.parametrize("first", range(0, len(zoo.TYPES), 10))
def test_every_type_is_exact_or_refused(pool: Pool, first: int, method: Method) -> None:
    types = [name for name in zoo.TYPES[first : first + 10] if name not in zoo.SKIPPED]
    for found in pool.run(2, every_type, types, method):
        assert not {name: how for name, how in found.items() if not how.startswith(("exact", "refused"))}


def _tiny(family: str = "llama", **changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: tiny_model(family, layers=1, **changes)


def _zoo(name: str) -> Callable[[], PreTrainedModel]:
    return lambda: zoo.tiny_model(name)


def _by_flex() -> PreTrainedModel:
    model = tiny_model("llama", layers=1)
    model.config._attn_implementation_internal = "flex_attention"
    return model


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


WIDE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], type[InputError], str, str]] = {
    "a state": (_zoo("mamba"), ModelError, "its state runs over the sequence", "registered causal attention"),
    "convolutions": (_zoo("lfm2"), ModelError, "'conv'", "registered causal attention"),
    "an indexer": (_zoo("deepseek_v32"), ModelError, "'indexed_attention'", "registered causal attention"),
    "alibi": (_zoo("bloom"), ModelError, "no position_ids", "registered causal attention"),
    "attention of its own": (_zoo("gptj"), ModelError,
                             "no attention of transformers' registry", "registered causal attention"),
    "positions of its own": (_zoo("roberta"), ModelError, "counts positions", "registered causal attention"),
    "rules of its own": (_zoo("gemma4_unified"), ModelError, "rules of the model's own", "masks are causal"),
    "positions in attention": (_zoo("llama4_text"), ModelError, "arange", "registered causal attention"),
    "turns by the longest": (_tiny(rope_parameters=ROPE), ModelError,
                             "longest position", "registered causal attention"),
    "routers' loss": (_tiny(output_router_logits=True), ConfigError,
                      "output_router_logits=True", "routers' losses"),
    "heads": (_tiny(hidden_size=48, num_attention_heads=6), ConfigError,
              "cp=4 by ulysses", "6 attention heads"),
    "key heads": (_tiny(**WIDE), ConfigError, "cp=4 by ulysses", "3 key and value heads"),
    "flex": (_by_flex, ConfigError, "flex_attention", "all 'sdpa' or all 'eager'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_not_be_exact_are_refused(name: str) -> None:
    make, kind, value, rule = REFUSED[name]
    with refuses(kind, value, rule):
        check(make(), 4, "ulysses")


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_every_family_passes_without_values(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family, layers=2)
    before = model.config._attn_implementation
    for method in HOW:
        check(model, 4, method)
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks
