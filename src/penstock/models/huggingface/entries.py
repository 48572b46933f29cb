"""The entries that a batch may have for a Hugging Face model, and those that are added to its microbatches.

In transformers most forwards accept any keyword, and silently drop unknown ones. A pipeline refuses entries
that its model would not read or that the pipeline sets itself, and token ids outside of the vocabulary.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import TransformersKwargs

from penstock.batch.loss import OwnLoss, check_tokens
from penstock.batch.microbatches import PIXELS
from penstock.batch.packing import PER_TOKEN, is_packed, refuse_packed, with_positions
from penstock.batch.padding import ROUTED
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError
from penstock.models.huggingface.masks import shape_questions
from penstock.models.tracing.chain import Chain
from penstock.models.tracing.meta import is_empty, without_values
from penstock.models.tracing.towers import encodes

_OF_THE_LOSS = ("labels", "shift_labels", ROUTED)  # entries that a model's own forward does not get
_SET_BY_PIPELINE = ("use_cache", "past_key_values", "cache_position", "return_dict", "output_router_logits")
_KEPT = "logits_to_keep"
_REPLACED = {
    "num_items_in_batch": "the pipeline divides by the valid tokens of all microbatches",
    "ignore_index": "the pipeline leaves out labels of -100, as transformers does by default",
}


class BatchCheck:
    """Refuses a batch that a model would misread. Raises BatchError.

    Args:
        model: the whole model, with or without values
        loss: the pipeline's own loss, which reads the labels; None for a loss_fn
    """

    def __init__(self, model: PreTrainedModel, loss: OwnLoss | None) -> None:
        self._kind = type(model).__name__
        forward = inspect.signature(model.forward).parameters
        self._near = {*forward, *_OF_THE_LOSS[:2]}
        self._takes = {*taken(model), *_OF_THE_LOSS}
        self._tokens = _rows(model.get_input_embeddings)
        self._loss, self._head = loss, _rows(model.get_output_embeddings)

    def __call__(self, batch: Microbatch) -> None:
        for name in batch:
            self._check_name(name)
        if self._loss is not None and _KEPT in batch and {*_OF_THE_LOSS[:2]} & batch.keys():
            rule = "the loss compares the logits of all tokens with their labels"
            raise BatchError(f"{_KEPT!r} in a batch with labels", rule, "Take it out, or give a loss_fn")
        ids, positions = batch.get("input_ids"), batch.get("position_ids")
        if isinstance(ids, Tensor):
            self._check_ids(ids)
        if isinstance(positions, Tensor) and positions.dim() == 1:
            raise BatchError(
                f"position_ids of shape {list(positions.shape)}",
                "positions have rows, as they are split with them",
                "Give position_ids.expand(rows, -1)",
            )
        if self._loss is not None:
            self._loss.check(batch, self._head)

    def _check_name(self, name: str) -> None:
        if name in _SET_BY_PIPELINE:
            rule = "the pipeline sets it, to the same value on every stage"
            raise BatchError(f"{name!r} in a batch", rule, "Take it out; set it in the model's config")
        if name in _REPLACED and self._loss is not None:
            raise BatchError(f"{name!r} in a batch", _REPLACED[name], "Take it out, or give a loss_fn")
        if name in self._takes or name in _REPLACED:
            return
        cutoff = 0.85 if self._loss is None else 0.6  # a loss_fn may have entries of its own
        near = difflib.get_close_matches(name, sorted(self._near), n=1, cutoff=cutoff)
        if near or self._loss is not None:
            raise BatchError(
                f"{name!r} in a batch",
                f"no forward in {self._kind} takes such an argument",
                f"Did you mean {near[0]!r}?" if near else "Take it out, or give a loss_fn that reads it",
            )

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise BatchError(f"input_ids of {ids.dtype}", "they are token ids", "Give int64")
        if self._tokens is None or ids.dim() != PER_TOKEN or not ids.numel():
            return
        if bool((ids < 0).any()):
            raise BatchError(
                f"input_ids with {int(ids[ids < 0][0])}, at {(ids < 0).nonzero()[0].tolist()}",
                "a token id is 0 or more",
                "Put the padding token there, and -100 only in labels",
            )
        check_tokens("input_ids", ids, self._tokens, "the model's embedding has")


def taken(model: nn.Module) -> frozenset[str]:
    """The entries that a model gets: named parameters of its modules' forwards, and the keywords that
    transformers passes through them."""
    kinds = {type(module) for module in model.modules()}
    named = {name for kind in kinds for name in inspect.signature(kind.forward).parameters}
    named |= set(TransformersKwargs.__annotations__)
    return frozenset(named - {"self", "args", "kwargs", *_OF_THE_LOSS, *_REPLACED})


def _rows(get: Callable[[], nn.Module | None]) -> int | None:
    """The vocabulary size of an embedding or a head; None for a module of another form."""
    try:
        module = get()
    except (NotImplementedError, AttributeError):
        return None
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(module, nn.Embedding | nn.Linear) and weight is not None else None


class MicrobatchCompleter:
    """Adds positions to a microbatch, by which the model separates packed documents.

    Raises ModelError if documents would mix in this model, BatchError if they would in this microbatch, and
    for choices of experts that the pipeline does not replay.
    """

    def __init__(
        self, model: PreTrainedModel, chain: Chain, routed: Callable[[Microbatch], None] | None = None
    ) -> None:
        """routed: checks the choices of experts in a microbatch; None without routing replay"""
        # not the model itself, which may be the caller's, with all weights
        self._model = model if is_empty(model) else without_values(model)
        self._chain, self._routed, self._images = chain, routed, ImageCheck(model)
        self._keeps_apart = False  # until `refuse_packed` has accepted the model

    @functools.cached_property
    def shape_questions(self) -> int:
        """`masks.shape_questions`, counted on first use."""
        return shape_questions(self._model, self._chain)

    def __call__(self, microbatch: Microbatch) -> Microbatch:
        if ROUTED in microbatch and self._routed is None:
            rule = "this pipeline does not replay the choices of routers"
            raise BatchError(f"{ROUTED!r} in a batch", rule, "Build it with replay_routing=True")
        whole = with_positions(microbatch)
        if not self._keeps_apart and is_packed(whole):
            refuse_packed(self._model)
            self._keeps_apart = True
        if self._routed is not None:
            self._routed(microbatch)
        self._images(microbatch)
        return whole


class ImageCheck:
    """Refuses a microbatch whose images do not fit its image tokens. Raises BatchError.

    Without images a model would treat the tokens as words. Only for models with grids of patches is the
    number of tokens of an image known before the forward; for others see `HFCall`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        tokens = {
            kind: getattr(config, f"{kind}_token_id", None) for kind in PIXELS if kind in encodes(model)
        }
        self._tokens = {kind: token for kind, token in tokens.items() if isinstance(token, int)}
        self._takes_types = "mm_token_type_ids" in inspect.signature(model.forward).parameters
        self._merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)

    def __call__(self, microbatch: Microbatch) -> None:
        ids = microbatch.get("input_ids")
        if not self._tokens or not isinstance(ids, Tensor):
            return
        counts = {kind: int((ids == token).sum()) for kind, token in self._tokens.items()}
        given = [name for names in PIXELS.values() for name in names if microbatch.get(name) is not None]
        kind = next((kind for kind, count in counts.items() if count), "image")
        words = f"a microbatch with {counts.get(kind) or 'no'} tokens of {kind}s"
        words += f" ({kind}_token_id={self._tokens.get(kind)})"
        if any(counts.values()) and not given:
            rule = f"each is for a part of its {kind}, and it has no {' or '.join(PIXELS[kind])}"
            raise BatchError(words, rule, _REMEDY)
        if given and not any(counts.values()):
            rule = f"its {given[0]} replaces the embeddings of these tokens, and nothing else reads it"
            raise BatchError(words, rule, _REMEDY)
        grid = microbatch.get("image_grid_thw")
        if isinstance(grid, Tensor) and given == ["pixel_values"]:  # some count videos by the same tokens
            self._check_grid(grid, "mm_token_type_ids" in microbatch, counts.get("image", 0), words)

    def _check_grid(self, grid: Tensor, has_types: bool, token_count: int, words: str) -> None:
        if self._takes_types and not has_types:
            rule = "the model computes the positions of text and images from it"
            raise BatchError("image_grid_thw without mm_token_type_ids", rule, _REMEDY)
        if isinstance(self._merged, int) and grid.dim() == PER_TOKEN and grid.shape[1] == 3:
            wanted = int(grid.prod(dim=1).sum()) // self._merged**2
            if wanted != token_count:
                rule = f"the {len(grid)} images in image_grid_thw have {wanted} tokens"
                raise BatchError(words, rule, _REMEDY)


_REMEDY = "Give the images of its rows in order, with all entries that the model's processor makes"
