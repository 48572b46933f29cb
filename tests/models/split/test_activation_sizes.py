"""Estimated sizes of activations."""

from __future__ import annotations

import torch

from penstock.models.huggingface.stages import HFCall, HFEdges, cut
from penstock.models.split.activation_sizes import stage_sizes
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import find_chain
from support.families import tiny_model


def test_estimated_activation_bytes_are_what_autograd_holds() -> None:
    """Counted without values, and counted in a real forward of the same stage; token ids are the batch's."""
    model = tiny_model("llama", layers=2, hidden_size=64)
    chain, info, ids = find_chain(model), StageInfo(0, 2), torch.zeros(4, 32, dtype=torch.long)
    stage = cut(model, chain, range(1), info)
    found = stage_sizes(stage, info, HFEdges(model, chain), (4, 32))
    held: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    keep = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor)
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = HFCall(stage, info)((), {"input_ids": ids})
    assert found is not None
    predicted, in_backward = found
    assert output.shape == (4, 32, 64)
    assert predicted.activation == sum(held.values()) - ids.nbytes
    assert predicted.buffer == predicted.sent == output.nbytes
    assert in_backward > predicted.activation
