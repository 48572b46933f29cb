from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock import AutoPipeline
from penstock.errors import BatchError, ModelError
from support import zoo
from support.families import tiny_model
from support.refusals import refuses

IDS = torch.arange(32).view(4, 8)


def marked(value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[2, 3] = value
    return ids


REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a typing error": ({"attention_masks": torch.ones(4, 8)},
                       "'attention_masks' in a batch", "takes such an argument", "'attention_mask'"),
    "a divisor": ({"num_items_in_batch": 7},
                  "'num_items_in_batch' in a batch", "divides by the valid tokens", ""),
    "another label to ignore": ({"ignore_index": 0}, "'ignore_index' in a batch", "labels of -100", ""),
    "an inner name": ({"valid_items": torch.tensor(3)},
                      "'valid_items' in a batch", "takes such an argument", ""),
    "an entry of ours": ({"penstock:valid_items": 3},
                         "'penstock:valid_items' in a batch", "adds this entry itself", ""),
    "choices": ({"routed_experts": torch.zeros(4, 8)},
                "'routed_experts' in a batch", "choices of routers", "replay_routing=True"),
    "positions of one row": ({"position_ids": torch.arange(8)},
                             "position_ids of shape [8]", "positions have rows", "expand(rows, -1)"),
    "a list": ({"labels": IDS.tolist()}, "labels given as list", "only tensors", ""),
    "an array": ({"input_ids": np.zeros((4, 8))}, "input_ids given as ndarray", "only tensors", ""),
    "float ids": ({"input_ids": IDS.float()}, "input_ids of torch.float32", "token ids", ""),
    "an unknown id": ({"input_ids": marked(10**6)},
                      "input_ids with 1000000, at [2, 3]", "embedding has 64 tokens", ""),
    "a negative id": ({"input_ids": marked(-1)}, "input_ids with -1, at [2, 3]", "0 or more", ""),
    "float labels": ({"labels": IDS.float()}, "labels of torch.float32", "token ids", ""),
    "an unknown label": ({"labels": marked(10**6)},
                         "labels with 1000000, at [2, 3]", "head has 64 tokens", ""),
    "a negative label": ({"labels": marked(-1)}, "labels with -1, at [2, 3]", "from 0 on, or -100", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_entry_that_would_be_misread_is_refused(name: str) -> None:
    """0.5.0: torch's own errors in the middle of a step, or entries that were dropped or half used."""
    entries, *error = REFUSED[name]
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama", layers=2))
    with refuses(BatchError, *error):
        pipe.step({"input_ids": IDS, "labels": IDS, **entries})
    pipe.step({"input_ids": IDS, "labels": IDS})  # nothing is left of it


def test_shifted_labels_are_the_next_tokens_themselves() -> None:
    """0.5.0: they were compared unshifted, and counted by the labels."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama", layers=2))
    shifted = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    plain = pipe.step({"input_ids": IDS, "labels": IDS})
    assert pipe.step({"input_ids": IDS, "shift_labels": shifted})[:2] == plain[:2]
    assert pipe.step({"input_ids": IDS, "shift_labels": shifted, "labels": IDS * 0})[:2] == plain[:2]


@pytest.mark.parametrize("model_type", ["cpmant", "glm_moe_dsa"])
def test_padding_that_tokens_before_it_would_see_is_refused(model_type: str) -> None:
    """0.5.0: losses were off by 7 % for cpmant; an indexer may break ties by the length."""
    with refuses(ModelError, "shapes='padded' for"):
        AutoPipeline(ranks=2, microbatches=2, shapes="padded").build(zoo.tiny_model(model_type))


def test_a_loss_may_have_entries_of_its_own() -> None:
    """The model does not get them; a typing error of one of the model's own is found all the same."""

    def masked(logits: torch.Tensor, microbatch: Any) -> torch.Tensor:
        assert microbatch["num_items_in_batch"] == 3
        mask: torch.Tensor = microbatch["loss_mask"]
        return (logits.mean(-1) * mask).mean()

    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=masked).build(tiny_model("llama", layers=2))
    entries = {"input_ids": IDS, "loss_mask": torch.ones(4, 8), "num_items_in_batch": 3}
    pipe.step(entries)
    with refuses(BatchError, "'attention_masks' in a batch", remedy="you mean 'attention_mask'"):
        pipe.step({**entries, "attention_masks": torch.ones(4, 8)})
