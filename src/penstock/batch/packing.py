"""Packed documents: several in one row, none of which may attend to another.

How transformers keeps them apart (masking_utils.py, modeling_flash_attention_utils.py of 5.x):

- eager, sdpa and flex attention find documents in `position_ids`, wherever one is not its predecessor plus
  one, but only while `attention_mask` is None. With a 2-D mask, even one of ones alone, they do not look,
  and documents attend to each other without a warning. A 4-D mask is taken as it is: its maker is
  responsible.
- flash attention finds them in cu_seq_lens_q/k with max_length_q/k, for any number of rows, as it lays the
  rows end to end; or in `position_ids`, but only for a single row: with more rows, documents would attend
  to each other without a warning. A 2-D mask with a zero in it overrides both by one document a row.

So packed microbatches carry position_ids for the former, the boundaries for the latter, and no 2-D mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from penstock.batch.payload import TensorSpec
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ModelError

PER_TOKEN = 2  # dimensions of a tensor with one number per token: rows and sequence
# entries with a sequence, and its dimension
_SEQUENCES = {"input_ids": 1, "inputs_embeds": 1, "labels": 1, "shift_labels": 1, "position_ids": -1}
_MAKE = "Make it of the documents' lengths: penstock.batch.packing.metadata([5, 3])['cu_seq_lens_q'], say"
_REMEDY = "Give input_ids, inputs_embeds or labels"


def metadata(lengths: Sequence[int]) -> dict[str, Any]:
    """The arguments that transformers takes for one row of documents of these lengths.

    position_ids, int64 (1, total), from 0 on in each document; cu_seq_lens_q and _k, int32 (documents + 1,);
    max_length_q and _k, whole numbers. Raises BatchError for an empty document.
    """
    if not lengths or min(lengths) < 1:
        rule = "each document has a token or more"
        raise BatchError(f"documents of {list(lengths)} tokens", rule, "Drop empty ones")
    bounds = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
    return {"position_ids": positions(bounds)[None], **boundaries(bounds)}


def boundaries(bounds: Tensor) -> dict[str, Any]:
    """`bounds`, where each document ends, as the four arguments of flash attention."""
    longest = int(bounds.diff().max())
    bounds_of_both = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return {**bounds_of_both, "max_length_q": longest, "max_length_k": longest}


def positions(cu_seq_lens: Tensor) -> Tensor:
    """The position of each token in its own document, int64 (total,)."""
    bounds = cu_seq_lens.long()
    starts = torch.repeat_interleave(bounds[:-1], bounds.diff())
    return torch.arange(len(starts), device=bounds.device) - starts


def is_packed(microbatch: Microbatch) -> bool:
    """Whether a row holds more than one document.

    Read from the boundaries, or from positions that restart between two tokens that no mask hides: behind
    masked padding on the left, positions restart without a new document.
    """
    bounds = microbatch.get("cu_seq_lens_q")
    if bounds is not None:
        return len(bounds) - 1 > row_shape(microbatch, _SEQUENCES, _REMEDY)[0]
    ids, mask = microbatch.get("position_ids"), microbatch.get("attention_mask")
    if ids is None or ids.dim() != PER_TOKEN or ids.shape[1] < 2:
        return False
    begins = ids[:, 1:] == 0
    if mask is not None and mask.dim() == PER_TOKEN and mask.shape[1] == ids.shape[1]:
        begins = begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(begins.any())


def with_positions(microbatch: Microbatch) -> Microbatch:
    """`microbatch` with the position_ids that follow from its cu_seq_lens_q, if it has none.

    The boundaries run over the rows laid end to end. Raises BatchError where a document crosses the end of
    a row, where given position_ids run on from one document into the next, and where a mask would make
    transformers ignore the documents. Positions of more than two dimensions are not checked.
    """
    mask = microbatch.get("attention_mask")
    if mask is not None and mask.dim() == PER_TOKEN and is_packed(microbatch):
        rule = "with such a mask, transformers looks for no documents, and they attend to each other"
        remedy = "Leave attention_mask out: padding at the end of a row needs none, as no token looks ahead"
        raise BatchError(f"attention_mask of shape {list(mask.shape)} with packed documents", rule, remedy)
    bounds = microbatch.get("cu_seq_lens_q")
    if bounds is None:
        return microbatch
    rows, length = row_shape(microbatch, _SEQUENCES, _REMEDY)
    check_row_bounds("cu_seq_lens_q", bounds, rows, length)
    ids = microbatch.get("position_ids")
    if ids is None:
        return {**microbatch, "position_ids": positions(bounds).view(rows, length)}
    if ids.dim() != PER_TOKEN:
        return microbatch
    flat, starts = ids.expand(rows, length).flatten(), bounds[1:-1].long()
    starts = starts[starts % length != 0]
    wrong = starts[flat[starts] == flat[starts - 1] + 1]
    if len(wrong):
        raise BatchError(
            f"position_ids that go on at token {int(wrong[0])} where cu_seq_lens_q begins a document",
            "without flash attention a document is known by its positions alone",
            "Start the positions of each document at 0, or leave position_ids out",
        )
    return microbatch


def split_lens(name: str, cu_seq_lens: Any, rows: int, cuts: Sequence[int]) -> list[Tensor]:
    """The boundaries in each part of the rows; each begins at 0.

    Args:
        cu_seq_lens: of the whole batch, its rows laid end to end.
        cuts: the first row of each part but the first.

    Raises BatchError as `check_row_bounds`.
    """
    is_list = isinstance(cu_seq_lens, Tensor) and cu_seq_lens.dim() == 1 and len(cu_seq_lens) > 0
    length = max(int(cu_seq_lens[-1]) // rows, 1) if is_list else 1
    check_row_bounds(name, cu_seq_lens, rows, length)
    parts = []
    for first_row, end_row in pairwise([0, *cuts, rows]):
        first, end = first_row * length, end_row * length
        parts.append(cu_seq_lens[(cu_seq_lens >= first) & (cu_seq_lens <= end)] - first)
    return parts


def check_row_bounds(name: str, bounds: Any, rows: int, length: int) -> None:
    """Raise BatchError unless `bounds` divide `rows` rows of `length` tokens, end to end, into documents.

    No document is empty, and none continues in the next row, where attention could not follow it.
    """
    is_list = isinstance(bounds, Tensor) and bounds.dim() == 1 and len(bounds) > 0
    if not is_list or bounds.dtype not in (torch.int32, torch.int64):
        shown = TensorSpec.of(bounds) if isinstance(bounds, Tensor) else f"given as {type(bounds).__name__}"
        rule = "it lists, from 0 on, where each document ends: a tensor of int32 in one dimension"
        raise BatchError(f"{name} {shown}", rule, _MAKE)
    value, at = f"{name} of {len(bounds) - 1} documents for {rows} rows of {length} tokens", bounds.tolist()
    if len(at) < 2 or at[0] != 0 or any(a >= b for a, b in pairwise(at)):
        rule = "it lists, from 0 on, where each document ends, and no document is empty"
        raise BatchError(value, rule, f"Leave empty documents out. {_MAKE}")
    if not set(range(0, rows * length + 1, length)) <= set(at) or at[-1] != rows * length:
        rule = f"documents end where a row ends, at every multiple of {length} up to {rows * length}"
        raise BatchError(value, rule, "Cut documents at the rows' ends, or pack everything into one row")


def row_shape(microbatch: Microbatch, dims: Mapping[str, int], remedy: str) -> tuple[int, int]:
    """Rows and length, from the first entry of `dims` that has them; dims: the dimension of its sequence.

    Raises BatchError, with `remedy`, where no entry has them.
    """
    for name, dim in dims.items():
        value = microbatch.get(name)
        if not isinstance(value, Tensor) or value.dim() < PER_TOKEN:
            continue
        if name == "position_ids":  # its first dimension may be text, height and width
            return value.shape[-2], value.shape[-1]
        if dim < value.dim():
            return value.shape[0], value.shape[dim]
    rule = "no entry of it shows the length of its rows"
    raise BatchError(f"a microbatch of {sorted(microbatch)}", rule, remedy)


# ---- Models in which packed documents would mix


def refuse_packed(model: object) -> None:
    """Raise ModelError where packed documents would mix in `model`, a transformers model or its class.

    Nothing would show: the loss falls as usual. A class is judged by its name and signature only; a model
    is run as far as its masks, on a row of two tokens, wherever its parameters are.
    """
    kind = model if isinstance(model, type) else type(model)
    reason = _why_documents_mix(model, kind)
    if reason is not None:
        rule = f"{reason}, so one document would be mixed into the next"
        remedy = "Give each document a row of its own (data.packing=none)"
        raise ModelError(f"packed documents in {kind.__name__}", rule, remedy)


def _why_documents_mix(model: object, kind: type) -> str | None:
    if getattr(model, "_is_stateful", False):  # mamba, jamba, recurrent_gemma, ...
        return "its state runs over the whole row"
    if "position_ids" not in inspect.signature(getattr(kind, "forward", object)).parameters:
        return "it takes no position_ids, which separate documents"  # bloom, mpt, ...
    if not isinstance(model, nn.Module):
        return None
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "its convolutions run over the whole row"  # lfm2, which does not call itself stateful
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    # flash attention reads the boundaries, which the model's keywords pass on to it
    if "flash" not in attention and not _looks_for_documents(model):
        return f"with {attention} attention it ignores documents"  # opt, falcon, gpt_oss, ...
    return None


class _Looked(BaseException):
    """The model has looked for documents: the rest of its forward does not matter. Not an error."""


def _looks_for_documents(model: nn.Module) -> bool:
    """Whether positions reach transformers' masks: many models use them for their embeddings only."""
    from transformers import masking_utils

    row = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    looking = patch.object(masking_utils, "find_packed_sequence_indices", side_effect=_Looked)
    # any other failure, on two tokens without values, lies beyond the masks or comes from missing values
    with looking, torch.no_grad(), suppress(Exception):
        try:
            model(input_ids=row, position_ids=row, use_cache=False)
        except _Looked:
            return True
    return False
