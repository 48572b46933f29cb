"""Sizes of activations, estimated from the model without a run; measured sizes are better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.batch.liger import Chunked
from penstock.batch.loss import NextToken
from penstock.batch.payload import Payload
from penstock.batch.shapes import Microbatch
from penstock.models.huggingface.stages import HFCall, HFEdges
from penstock.models.stage import StageInfo
from penstock.models.tracing.autocast import AutocastWithoutValues
from penstock.models.tracing.meta import shadow
from penstock.private import FLASH_ATTENTION_FOR_CPU
from penstock.runtime.device.footprints import footprint
from penstock.runtime.device.memory import Measured, MicrobatchBytes
from penstock.runtime.device.offload import Offload
from penstock.runtime.split_backward.deferred import without_autocast
from penstock.runtime.stage import Stage, StageCall
from penstock.runtime.stage_part import Forward


class _Fused(TorchFunctionMode):
    """Attention by fused kernels: without values, torch would choose the kernel that keeps all scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _fused(*args, **(kwargs or {}))


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)  # as torch does
    result: Tensor = FLASH_ATTENTION_FOR_CPU(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


_ONE_DOCUMENT = "penstock_one_document"  # sdpa of rows with one document each


def _mask_of_one_document(*args: Any, **options: Any) -> Any:
    """Without values transformers cannot see that positions do not restart, and would make a mask."""
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **{**options, "allow_is_causal_skip": True})


@contextmanager
def _one_document(model: nn.Module) -> Iterator[None]:
    """Inside, transformers makes the masks of `model` for rows with one document each."""
    ALL_ATTENTION_FUNCTIONS[_ONE_DOCUMENT] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_MASK_ATTENTION_FUNCTIONS[_ONE_DOCUMENT] = _mask_of_one_document
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PretrainedConfig) and config._attn_implementation == "sdpa":
            config._attn_implementation_internal = _ONE_DOCUMENT
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_ONE_DOCUMENT], ALL_MASK_ATTENTION_FUNCTIONS[_ONE_DOCUMENT]


class _Under(NamedTuple):
    """A call of a stage under autocast, innermost, so that other modes see the casts."""

    autocast: AutocastWithoutValues
    call: StageCall

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        with self.autocast:
            return self.call(received, microbatch)


def stage_sizes(
    part: PreTrainedModel,
    info: StageInfo,
    edges: HFEdges,
    shape: tuple[int, int],
    split: bool = False,
    entries: frozenset[str] | None = None,
    shared: Sequence[object] = (),
    defers_head: Chunked = True,
    autocast: torch.dtype | None = None,
    offload: Offload | None = None,
) -> tuple[MicrobatchBytes, int] | None:
    """The bytes of one microbatch on a stage made by `cut`, and the most during its I or B.

    They come from a forward and the first half of a backward without values, with the next-token loss. An
    autocast region of the caller has no effect. Each row counts as one document.

    Args:
        shape: rows and sequence of the microbatch.
        split: whether backwards are split, so that some bytes are kept for W.
        entries: the microbatch's entries for the model, if axes have changed its forward.
        shared: objects that a copy of the stage shares, such as a mesh.
        autocast: the dtype of autocast; None for none. Its casts of weights do not count.
        offload: offloads activations of `part`; None without offloading.

    Returns None if the model's forward reads values, so that only a real run can show the sizes.
    """
    if not edges.known:
        return None
    taken = (*shared, offload)
    with shadow(part, {id(original): original for original in taken}) as model, _one_document(model):
        tokens = torch.zeros(shape, dtype=torch.long)
        microbatch = {"input_ids": tokens, "labels": tokens}
        edge, before = edges(info.stage, microbatch), edges(max(info.stage - 1, 0), microbatch)
        incoming = Payload(tuple(torch.empty(s.shape, dtype=s.dtype) for s in before.tensors), before)
        received = None if info.is_first else incoming
        lowered = None if autocast is None else AutocastWithoutValues(autocast)
        call = HFCall(model, info, entries, defers_head=defers_head)
        lowering = call if lowered is None else _Under(lowered, call)
        stage = Stage(info.stage, model.train(), lowering, () if offload is None else (offload,))
        casts = tuple if lowered is None else lambda: lowered.casts.storages
        try:
            how = Forward(split, offload=offload is not None)
            with without_autocast(), _Fused(), Measured(casts) as measured:
                if info.is_last:
                    stage.forward(0, received, microbatch, how=how, loss=NextToken())
                    sent: tuple[torch.Tensor, ...] = ()
                else:
                    sent = stage.forward(0, received, microbatch, edge, how).tensors
        except RuntimeError:  # torch's, in a forward that reads values
            return None
        kept = footprint(measured.own_bytes, stage.live[0].inputs, sent)
        offloaded = 0
        if offload is not None:
            staying = stage.staying(0, microbatch)
            offloaded = sum(storage.nbytes for storage in offload.leaving(0, staying))
        gradients = [torch.ones(())] if info.is_last else [torch.empty_like(tensor) for tensor in sent]
        del sent
        with nullcontext() if lowered is None else lowered:  # layers that run again
            grown = _growth_in_backward(stage, gradients, measured)
        for_weight = stage.deferred[0].nbytes
        sizes = MicrobatchBytes(kept.activation, kept.output, incoming.nbytes, for_weight, offloaded)
        return sizes, kept.activation + grown


def _growth_in_backward(stage: Stage, gradients: list[Tensor], measured: Measured) -> int:
    """The most bytes that the I or B of microbatch 0 allocates beyond those before it.

    Gradients of weights exist from the start, as after a first microbatch.
    """
    for parameter in stage.module.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    measured.peak = before = measured.nbytes
    with measured:
        stage.input_backward(0, gradients)
    return measured.peak - before
