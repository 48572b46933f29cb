"""Context parallelism splits a sequence over the ranks of the axis `cp`.

Under a causal mask a late token attends to more tokens than an early one. So the sequence is split into twice
as many pieces as there are ranks, and each rank gets an early piece and the late one that mirrors it:

    piece   0 1 2 3 4 5
    rank    0 1 2 2 1 0

Everything that depends on a token's neighbours is computed before the split: its position, its label (the
next token), and the facts that attention needs about tokens on other ranks (`FullSequence`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from penstock.batch.loss import IGNORED, VALID_ITEMS
from penstock.batch.microbatches import INNER
from penstock.batch.packing import with_positions
from penstock.batch.padding import KNOWN, Padding
from penstock.batch.placement import to_device
from penstock.batch.shapes import Microbatch, model_input
from penstock.errors import BatchError

FULL_SEQUENCE = f"{INNER}full_sequence"  # the entry of a split microbatch with its `FullSequence`
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, eq=False)
class FullSequence:
    """Facts about the full sequence; all but `index` are the same on all ranks.

    index, count: this rank's index on the axis, and the number of ranks
    length: tokens per row before the split
    padded: tokens per row with padding at the end, a multiple of 2 * count
    positions: int64 (rows, padded)
    mask: bool (rows, padded), False for padding; None where the caller gave none
    documents: int64 (rows, padded), equal for tokens of one document; None where each row is one document
    """

    index: int
    count: int
    length: int
    padded: int
    positions: Tensor
    mask: Tensor | None
    documents: Tensor | None

    @property
    def piece(self) -> int:
        """Tokens in a piece; each rank has two pieces."""
        return self.padded // (2 * self.count)

    def to_device(self, device: torch.device) -> FullSequence:
        """A copy with its tensors on `device`."""
        mask, documents = (None if t is None else to_device(t, device) for t in (self.mask, self.documents))
        return replace(self, positions=to_device(self.positions, device), mask=mask, documents=documents)

    def counted_tokens(self, masked: bool) -> Tensor:
        """Which of this rank's tokens a mean over tokens counts: bool (rows, 2 * piece).

        Padding of the split is never counted. The caller's own padding is counted unless `masked`.
        """
        if masked and self.mask is not None:
            real = self.mask
        else:
            along = torch.arange(self.padded, device=self.positions.device) < self.length
            real = along.expand(self.positions.shape)
        return local_part(real, 1, self.index, self.count)


def pieces(index: int, count: int) -> tuple[int, int]:
    """The indices of the two pieces of rank `index` of `count`, in order."""
    return index, 2 * count - 1 - index


def local_part(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Rank `index`'s part of a tensor whose dimension `dim` is the full, padded sequence."""
    split = tensor.tensor_split(2 * count, dim=dim)
    return torch.cat([split[piece] for piece in pieces(index, count)], dim=dim)


def concatenate(parts: list[Tensor], dim: int) -> Tensor:
    """The full sequence from the ranks' parts: the inverse of `local_part`."""
    halves = [tensor.tensor_split(2, dim=dim) for tensor in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim=dim)


def padded_length(microbatch: Microbatch, count: int) -> int:
    """Tokens per row after padding for `count` ranks: the next multiple of 2 * count.

    Raises BatchError where rows have fewer than 2 * count tokens, as a piece would be empty.
    """
    length = Padding().longest([microbatch])
    if length < 2 * count:
        raise BatchError(
            f"a microbatch of {length} tokens a row",
            f"over cp={count} ranks it is cut into {2 * count} pieces of at least one token",
            f"Give rows of {2 * count} tokens or more, or fewer ranks on the axis cp",
        )
    return -(-length // (2 * count)) * 2 * count


def split(microbatch: Microbatch, index: int, count: int) -> dict[str, Any]:
    """Rank `index`'s part of a microbatch with labels as transformers takes them, unshifted.

    With n = padded_length / count tokens per row, the part has:

    - input_ids (rows, n) or inputs_embeds (rows, n, hidden), and all other entries with a value per token
    - position_ids (rows, n): those of the microbatch, or 0, 1, ... in each row
    - shift_labels (rows, n) in place of labels: aligned with the logits, -100 ignored. The losses of the
      ranks' valid tokens sum up to the microbatch's
    - VALID_ITEMS, a scalar: number of tokens of the full microbatch that have a label
    - attention_mask (rows, padded_length) of the full sequence, which gives the model's mask functions the
      full length
    - FULL_SEQUENCE: a `FullSequence`, which a hook removes before the model's forward

    Packed documents that `with_positions` finds (positions that restart at 0, in rows without a mask) stay
    apart. Raises BatchError, the same on every rank, for entries that cannot be split.
    """
    padded = padded_length(microbatch, count)
    microbatch = with_positions(microbatch)
    leading = model_input(microbatch)
    rows, length = leading.shape[:2]
    _refuse(microbatch, length)
    entries = {name: value for name, value in microbatch.items() if name not in _BOUNDARIES}
    positions = entries.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=leading.device)
    entries["position_ids"] = positions = positions.expand(rows, length)
    mask = entries.pop("attention_mask", None)
    labels, shifted = entries.pop("labels", None), entries.pop("shift_labels", None)
    if labels is not None and shifted is None:  # a token's label is its successor; a row's last one has none
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if shifted is not None:
        entries[VALID_ITEMS] = (shifted != IGNORED).sum()

    extra = (0, padded - length)
    documents = None
    if mask is not None:  # with a mask, transformers ignores documents
        mask = F.pad(mask.bool(), extra, value=False)
    else:
        documents = find_packed_sequence_indices(positions)
        documents = None if documents is None else F.pad(documents, extra, value=-1)
    full = FullSequence(index, count, length, padded, F.pad(positions, extra), mask, documents)

    padding = Padding(length=padded)
    result: dict[str, Any] = {}
    for name, value in padding.pad(entries, padding.lengths(padded)).items():
        dim = _sequence_dim(name, value, padded)
        result[name] = value if dim is None else local_part(value, dim, index, count)
    if shifted is not None:
        result["shift_labels"] = local_part(F.pad(shifted, extra, value=IGNORED), 1, index, count)
    everything = positions.new_ones(rows, padded, dtype=torch.bool) if mask is None else mask
    return {**result, "attention_mask": everything.long(), FULL_SEQUENCE: full}


def _refuse(microbatch: Microbatch, length: int) -> None:
    """Raise BatchError for entries that cannot be split, or whose meaning would change."""
    for name in ("labels", "shift_labels", "attention_mask", "position_ids"):
        value = microbatch.get(name)
        if isinstance(value, Tensor) and (value.dim() != 2 or value.shape[1] != length):
            raise BatchError(
                f"{name} of shape {list(value.shape)} under context parallelism",
                f"it is split along the sequence, as (rows, {length})",
                "Give it in that form, or set cp to 1",
            )
    mask = microbatch.get("attention_mask")
    if mask is None or "position_ids" in microbatch:
        return
    valid = mask.bool()
    if bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        raise BatchError(
            "an attention_mask with padding before a valid token, and no position_ids",
            "models differ in their positions for such rows, and a part of a row cannot count them",
            "Give position_ids as the model takes them (most count the padding too), or pad at the end",
        )


def _sequence_dim(name: str, value: Any, padded: int) -> int | None:
    """The dimension to split; None for an entry that every rank gets. Raises BatchError if unknown."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return None
    if (known := KNOWN.get(name)) is not None:
        return known.dim
    if value.shape[1] == padded:
        raise BatchError(
            f"{name} of shape {list(value.shape)} under context parallelism",
            f"rows have {padded} tokens too, so it may be a sequence or not",
            "Take it out, or set cp to 1",
        )
    return None
