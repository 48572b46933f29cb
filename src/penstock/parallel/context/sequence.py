"""A sequence, cut over the ranks of the axis `cp`.

Under a causal mask a late token looks at more than an early one, so the sequence is cut into twice as many
pieces as there are ranks, and each rank gets an early one and the late one that mirrors it. For 3 ranks:

    piece   0 1 2 3 4 5
    rank    0 1 2 2 1 0

Whatever hangs on a token's neighbours is told before the cut: its position, its label (the next token), and
what attention has to know of the tokens on other ranks (`Whole`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from penstock.batch.loss import IGNORED, VALID_ITEMS
from penstock.batch.packing import with_positions
from penstock.batch.padding import KNOWN, Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError

WHOLE = "context"  # the entry of a cut microbatch that holds its `Whole`
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, eq=False)
class Whole:
    """What a rank knows of the whole sequence, the same on all of them but for `index`.

    index: the rank's number on the axis; count: how many there are
    length: tokens a row before the cut; padded: with what was put at the end, a multiple of 2 * count
    positions: int64 (rows, padded)
    mask: bool (rows, padded), False where a token is padding; None where the caller gave none
    documents: int64 (rows, padded), equal where tokens are of one document; None where rows hold one each
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
        """Tokens in a piece; a rank's part has twice as many."""
        return self.padded // (2 * self.count)

    def counted(self, masked: bool) -> Tensor:
        """Of this rank's part, which tokens the model counts in a mean over them: bool (rows, part).

        None that were put at the end; nor, where `masked`, those of the caller's own padding.
        """
        if masked and self.mask is not None:
            real = self.mask
        else:
            along = torch.arange(self.padded, device=self.positions.device) < self.length
            real = along.expand(self.positions.shape)
        return part(real, 1, self.index, self.count)


def pieces(index: int, count: int) -> tuple[int, int]:
    """The two pieces that rank `index` of `count` holds, in order."""
    return index, 2 * count - 1 - index


def part(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    """What rank `index` gets of a tensor whose dimension `dim` is the whole, padded sequence."""
    cut = tensor.tensor_split(2 * count, dim=dim)
    return torch.cat([cut[number] for number in pieces(index, count)], dim=dim)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The whole of what `part` gave to each rank, in the sequence's order."""
    halves = [tensor.tensor_split(2, dim=dim) for tensor in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim=dim)


def padded_length(microbatch: Microbatch, count: int) -> int:
    """Tokens a row once it can be cut over `count` ranks: the next multiple of 2 * count.

    Raises BatchError where a row has fewer than 2 * count tokens, so that a piece would hold none.
    """
    length = Padding().longest([microbatch])
    if length < 2 * count:
        raise BatchError(
            f"a microbatch of {length} tokens a row",
            f"over cp={count} ranks it is cut into {2 * count} pieces of at least one token",
            f"Give rows of {2 * count} tokens or more, or fewer ranks on the axis cp",
        )
    return -(-length // (2 * count)) * 2 * count


def cut(microbatch: Microbatch, index: int, count: int) -> dict[str, Any]:
    """Rank `index`'s part of a microbatch with labels as transformers takes them, unshifted.

    What comes out, with n = padded_length / count tokens a row:

    - input_ids (rows, n) or inputs_embeds (rows, n, hidden), and whatever else has an entry for each token
    - position_ids (rows, n): those given, or 0, 1, ... in each row
    - shift_labels (rows, n) in place of labels: aligned with the logits, -100 ignored. The sum of the loss
      over the ranks' own valid tokens is the microbatch's
    - valid_items, of no dimension: how many tokens of the whole microbatch have a label
    - attention_mask (rows, padded_length), of the whole sequence: that is how the model's mask functions
      learn that it goes on elsewhere
    - context, a `Whole`, which the model's hook takes out (penstock.parallel.context.attention.enter)

    What was found by `completed` (documents that begin at position 0, in a row without a mask) stays apart.
    Raises BatchError for what cannot be cut; every rank raises alike.
    """
    full = padded_length(microbatch, count)
    microbatch = with_positions(microbatch)
    rows, length = _size(microbatch)
    _refuse(microbatch, length)
    whole = _whole(microbatch, rows, length, full, index, count)
    given = {name: value for name, value in microbatch.items() if name not in _BOUNDARIES}
    given["position_ids"] = _positions(microbatch, rows, length)
    if "labels" in given:
        given["shift_labels"] = _shifted(given.pop("labels"))
        given[VALID_ITEMS] = (given["shift_labels"] != IGNORED).sum()
    result: dict[str, Any] = {}
    for name, value in _padded(given, full).items():
        along = _sequence_of(name, value, full)
        result[name] = value if along is None else part(value, along, index, count)
    mask = whole.mask if whole.mask is not None else whole.positions.new_ones(rows, full, dtype=torch.bool)
    result["attention_mask"] = mask.long()
    result[WHOLE] = whole
    return result


def _size(microbatch: Microbatch) -> tuple[int, int]:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(value := microbatch.get(name), Tensor):
            return int(value.shape[0]), int(value.shape[1])
    raise BatchError(
        f"a microbatch of {sorted(microbatch)}",
        "a model reads input_ids or inputs_embeds",
        "Give one of them",
    )


def _refuse(microbatch: Microbatch, length: int) -> None:
    """Raise BatchError for entries that cannot be cut, or whose meaning would change."""
    for name in ("labels", "shift_labels", "attention_mask", "position_ids"):
        value = microbatch.get(name)
        if isinstance(value, Tensor) and (value.dim() != 2 or value.shape[1] != length):
            raise BatchError(
                f"{name} of shape {list(value.shape)} under context parallelism",
                f"it is cut along the sequence, as (rows, {length})",
                "Give it in that form, or set cp to 1",
            )
    mask = microbatch.get("attention_mask")
    if mask is None or "position_ids" in microbatch:
        return
    valid = mask.bool()
    if bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        raise BatchError(
            "an attention_mask with padding before a valid token, and no position_ids",
            "models differ in the positions that they give to such rows, and a part cannot count them",
            "Give position_ids as the model takes them (most count the padding too), or pad at the end",
        )


def _positions(microbatch: Microbatch, rows: int, length: int) -> Tensor:
    own = microbatch.get("position_ids")
    if own is not None:
        return own.expand(rows, length)  # type: ignore[no-any-return]
    leading = microbatch.get("input_ids", microbatch.get("inputs_embeds"))
    assert leading is not None  # `_size` has found one
    return torch.arange(length, device=leading.device).expand(rows, length)


def _shifted(labels: Tensor) -> Tensor:
    """The label of each token's successor, none for a row's last token."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _whole(microbatch: Microbatch, rows: int, length: int, full: int, index: int, count: int) -> Whole:
    positions = _positions(microbatch, rows, length)
    mask, documents = microbatch.get("attention_mask"), None
    extra = (0, full - length)
    if mask is not None:
        mask = F.pad(mask.bool(), extra, value=False)
    else:  # a mask hides documents: that is transformers' rule
        documents = find_packed_sequence_indices(positions)
        documents = None if documents is None else F.pad(documents, extra, value=-1)
    return Whole(index, count, length, full, F.pad(positions, extra), mask, documents)


def _padded(given: Microbatch, full: int) -> dict[str, Any]:
    """`given` with what has an entry for each token padded at its end, where no real token looks."""
    shift = given.get("shift_labels")
    rest = {name: value for name, value in given.items() if name != "shift_labels"}
    padding = Padding(length=full)
    result = padding.pad(rest, padding.lengths(full))
    if shift is not None:
        result["shift_labels"] = F.pad(shift, (0, full - shift.shape[1]), value=IGNORED)
    return result


def _sequence_of(name: str, value: Any, full: int) -> int | None:
    """The dimension of an entry that is cut. Raises BatchError where that cannot be known."""
    if not isinstance(value, Tensor):
        return None
    if name == "shift_labels":
        return 1
    if name in KNOWN:
        return KNOWN[name].dim if value.dim() > 1 else None
    if value.dim() > 1 and value.shape[1] == full:
        raise BatchError(
            f"{name} of shape {list(value.shape)} under context parallelism",
            f"rows have {full} tokens too, so it may be a sequence or not",
            "Take it out, or set cp to 1",
        )
    return None
