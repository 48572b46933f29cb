"""The head of a Hugging Face model, which leaves its product to the loss where the logits are large.

`defer_head` changes the class of the one head, so that its hooks and names stay. The model's own forward then
goes on with `HeadLogits`; arithmetic that it does on them (a scale, a soft cap) is recorded there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.batch.head_logits import HeadLogits, are_large
from penstock.runtime.split_backward.recording import lowered


class DeferredHead(nn.Linear):
    """Returns HeadLogits where those in float32 would take more than HELD_BYTES."""

    def forward(self, input: Tensor) -> Tensor:
        large = are_large(input.shape[:-1].numel(), self.out_features)
        if not large or isinstance(self.weight, DTensor) or torch.compiler.is_compiling():
            return super().forward(input)
        kind, bias = input.device.type, self.bias
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        low = None if bias is None else lowered(bias, dtype)
        return HeadLogits(lowered(input, dtype), lowered(self.weight, dtype), low)


def defer_head(model: PreTrainedModel) -> None:
    """Let the model's head be a DeferredHead if it is a plain linear layer. Any other stays as it is."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and "forward" not in vars(head):
        head.__class__ = type("Linear", (DeferredHead,), {"__module__": nn.Linear.__module__})
