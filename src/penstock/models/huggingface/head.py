"""The head of a Hugging Face model, which defers its product to the loss where the logits are large.

`defer_head` wraps the head's forward, so that its hooks and names stay. The model's own forward then
continues with `HeadLogits`, which records arithmetic on them (a scale, a soft cap). Liger's kernel supports
no such arithmetic, and `check_for_liger` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.batch.head_logits import HeadLogits, are_large
from penstock.batch.liger import Chunked
from penstock.errors import ModelError
from penstock.models.tracing.chain import Chain
from penstock.models.tracing.probe import Identity, model_without_values
from penstock.runtime.around import around
from penstock.runtime.split_backward.recording import lowered


def deferred(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The head returns HeadLogits if float32 logits would take more than HELD_BYTES, or for Liger."""

    def forward(head: Any, input: Tensor) -> Tensor:
        by_liger, weight, bias = head._by_liger, head.weight, head.bias
        # with tp, the weight is here this rank's shard of the vocabulary; with FSDP it is a DTensor
        large = by_liger or are_large(input.shape[:-1].numel(), len(weight))
        if not large or isinstance(weight, DTensor) or torch.compiler.is_compiling():
            return plain(head, input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        low = None if bias is None else lowered(bias, dtype)
        return HeadLogits(lowered(input, dtype), lowered(weight, dtype), low, by_liger=by_liger)

    return forward


def defer_head(model: PreTrainedModel, chunked: Chunked) -> None:
    """Wrap the model's head by `deferred` if it is a plain linear layer. Any other head is not changed."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and "forward" not in vars(head):
        around(head, forward=deferred)
        vars(head)["_by_liger"] = chunked == "liger"


def check_for_liger(model: PreTrainedModel, chain: Chain) -> None:
    """Raise ModelError where Liger's kernel cannot compute the loss of the model's logits.

    The logits must be the unchanged product of a plain linear layer, in float32 or narrower.
    """
    key, remedy = f"chunked_loss='liger' for {type(model).__name__}", "Take chunked_loss=True"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or "forward" in vars(head):
        rule = f"Liger needs a plain linear head, and this one is {type(head).__name__}"
        raise ModelError(key, rule, remedy)
    if head.weight.dtype == torch.float64:
        raise ModelError(f"{key} in float64", "Liger computes in float32", remedy)
    layers = model.get_submodule(chain.layers).children()
    passed = {id(layer): Identity(layer, chain.output_form) for layer in layers}
    with model_without_values(model, False, passed) as whole:
        defer_head(whole, "liger")
        logits = whole(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    if not isinstance(logits, HeadLogits) or logits.steps:
        rule = "its forward changes the head's result (a scale, a soft cap, a cast), and Liger does not"
        raise ModelError(key, rule, remedy)
