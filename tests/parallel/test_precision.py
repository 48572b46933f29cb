"""`autocast=` on a mesh: gradients of one process under torch.autocast, shards in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from penstock import Axes
from penstock.parallel.fsdp import Sharded
from penstock.runtime.sharded_weights import param_groups, sharded_modules
from support.families import tiny_model
from support.mesh import batch, build_whole, full, later, own_part
from support.pool import Pool
from support.reference import Gradients, gradients_of

LOW = torch.bfloat16
MICROBATCHES = 2


def in_one_process(model: PreTrainedModel, parts: int, dtype: torch.dtype | None) -> tuple[float, Gradients]:
    """Of the microbatches that `parts` pipelines make, each in a region of autocast of its own."""
    model.zero_grad()
    whole, loss = batch(), 0.0
    weight = int((whole["labels"][:, 1:] != -100).sum())
    for part in range(parts):
        mine = own_part(whole, part, parts)
        pieces = (mine[name].chunk(MICROBATCHES) for name in ("input_ids", "labels"))
        for ids, labels in zip(*pieces, strict=True):
            with torch.autocast("cpu", dtype or LOW, enabled=dtype is not None):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (total / weight).backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach()) / weight
    return loss, gradients_of(model)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def stepped(
    family: str, axes: Axes, options: dict[str, Any]
) -> tuple[dict[str, tuple[float, float]], set[str]]:
    """By parameter: the distance from one process under autocast, and that process's from float32; and the
    dtypes that FSDP2 gathers, with the kind of module, where it gathers."""
    options = dict(options)
    model = tiny_model(family, layers=4, **options.pop("model", {}))
    exact = in_one_process(model, 1, None)[1]
    pipe = build_whole(model, 2, axes, autocast=LOW, microbatches=MICROBATCHES, **options)
    part, parts = pipe.batch_part
    loss, expected = in_one_process(model, parts, LOW)
    result = pipe.step(own_part(batch(), part, parts))
    assert result.loss == pytest.approx(loss, rel=1e-2 if axes.tp * axes.cp * axes.ep > 1 else 1e-6)
    assert pipe.evaluate(own_part(batch(), part, parts)).loss == pytest.approx(result.loss, rel=1e-3)
    found = {}
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        found[name] = distance(full(parameter.grad), expected[name]), distance(expected[name], exact[name])
    gathered = {
        f"{type(weight._module_info.module).__name__} {weight.param_dtype or weight.orig_dtype}"
        for module in pipe.modules.values()
        for each in sharded_modules(module)
        for group in param_groups(each)
        for weight in group.fsdp_params
    }
    pipe.close()
    return found, gathered


PRODUCTS = {"Linear torch.bfloat16", "Conv1D torch.bfloat16"}
SAME = [
    ("llama", Axes(dp_shard=2), {"schedule": "zb_v"}),
    *later(
        ("llama", Axes(dp_replicate=2), {"schedule": "1f1b"}),
        ("llama", Axes(dp_shard=2), {"schedule": "1f1b", "model": {"tied": True}}),
        ("gpt2", Axes(dp_shard=2), {"schedule": "zb_h1", "activation_checkpointing": True}),
        ("llama", Axes(dp_shard=2), {"schedule": "1f1b", "sharded": Sharded(reshard_after_forward=True)}),
        ("llama", Axes(dp_shard=2), {"schedule": "dualpipe_v"}),
    ),
]  # fmt: skip
CLOSE = [
    ("llama", Axes(tp=2), {"schedule": "zb_v"}),
    *later(
        ("llama", Axes(tp=2), {"schedule": "1f1b", "activation_checkpointing": True}),
        ("llama", Axes(tp=2), {"schedule": "1f1b", "sequence_parallel": True, "model": {"tied": True}}),
        ("llama", Axes(cp=2), {"schedule": "zb_h1"}),
        ("llama", Axes(cp=2), {"schedule": "1f1b", "context": "ring"}),
        ("mixtral", Axes(dp_shard=2, ep=2), {"schedule": "1f1b"}),
    ),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "axes", "options"), SAME)
def test_axes_that_shard_no_product_give_the_gradients_of_autocast(
    pool: Pool, family: str, axes: Axes, options: dict[str, Any]
) -> None:
    """Their sums over microbatches, in float32, are in another order; products are gathered in half."""
    for found, gathered in pool.run(4, stepped, family, axes, options):
        assert max(far for far, _ in found.values()) < 1e-5
        assert max(far for _, far in found.values()) > 1e-3, "nothing was in half precision"
        assert {each for each in gathered if each.endswith("bfloat16")} <= PRODUCTS
        assert not PRODUCTS & {each.replace("float32", "bfloat16") for each in gathered - PRODUCTS}


@pytest.mark.parametrize(("family", "axes", "options"), CLOSE)
def test_axes_that_shard_products_are_as_close_as_another_run_in_half_precision(
    pool: Pool, family: str, axes: Axes, options: dict[str, Any]
) -> None:
    """Partial sums are rounded: every gradient is as far from one process's as that is from float32."""
    for found, _ in pool.run(4, stepped, family, axes, options):
        far = {name: own / max(plain, 1e-3) for name, (own, plain) in found.items()}
        assert max(far.values()) < 2, max(far.items(), key=lambda item: item[1])
        assert max(plain for _, plain in found.values()) > 1e-3
