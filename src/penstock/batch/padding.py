"""Padding: all microbatches of a step get one length, where the pipeline needs fixed shapes.

Padding.longest (the maximum over all ranks is the caller's) -> Padding.lengths (rounded) -> Padding.pad

A user's loss may count every token that it gets. So it gets rows and outputs without padding: a padded
microbatch has an entry that removes the padding (`Unpadding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batch.loss import IGNORED, UNPAD
from penstock.batch.packing import PER_TOKEN, check_row_bounds, row_shape
from penstock.batch.placement import OnDevice, host_values
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.options import PaddingOptions
from penstock.private import tree_map


class PadEntry(NamedTuple):
    """How one entry of a microbatch is padded: the dimension of its sequence, and the value."""

    dim: int
    value: float


class Lengths(NamedTuple):
    """The length that rows are padded to: `full` in the batch, `local` on each context shard."""

    local: int
    full: int


ROUTED = "routed_experts"  # the experts to use for each token, -1 where the router chooses

# Entries that transformers' models take, and ROUTED. Dimensions count from the end, as position_ids may have
# one for text, height and width before the rows. The first of these entries in a microbatch gives its length.
KNOWN: dict[str, PadEntry | None] = {
    "input_ids": PadEntry(-1, 0),
    "inputs_embeds": PadEntry(1, 0),
    "labels": PadEntry(-1, IGNORED),
    "shift_labels": PadEntry(-1, IGNORED),
    "attention_mask": PadEntry(-1, 0),
    "position_ids": PadEntry(-1, 0),
    "token_type_ids": PadEntry(-1, 0),
    "mm_token_type_ids": PadEntry(-1, 0),
    "pixel_values": None,
    "pixel_values_videos": None,
    "pixel_attention_mask": None,
    "image_sizes": None,
    "image_grid_thw": None,
    "video_grid_thw": None,
    ROUTED: PadEntry(1, -1),
}
BOUNDARIES = {"cu_seq_lens_q": "max_length_q", "cu_seq_lens_k": "max_length_k"}  # and its maximum


@dataclass(frozen=True)
class Padding(PaddingOptions):
    """How long the rows of a step become: `PaddingOptions`, and how their entries are padded.

    Args:
        context_shards: the number of shards that each row is split into afterwards. `multiple` and `buckets`
            apply to one shard.
        entries: how to pad entries that transformers does not know, or pads differently; None leaves an
            entry as it is.

    The pipeline sets the rest:
        needs_mask: whether a padded row must have an attention_mask. True for models that attend to, or whose
            routers' loss counts, every token that no mask hides.
        unpads: whether the loss gets rows and outputs without padding.
        pools: whether an output without a sequence is known to be free of padding.
        hidden: what is wrong with outputs of tokens that see only masked tokens; empty where nothing is.
    """

    context_shards: int = 1
    entries: Mapping[str, PadEntry | None] = field(default_factory=dict)
    needs_mask: bool = False
    unpads: bool = False
    pools: bool = False
    hidden: str = ""

    def __post_init__(self) -> None:
        for name in ("length", "multiple", "context_shards"):
            if (value := getattr(self, name)) is not None and value < 1:
                rule = "it is a whole number from 1 on"
                raise ConfigError(f"padding {name}={value}", rule, "Give 1 or more")
        if any(bucket < 1 for bucket in self.buckets) or any(a >= b for a, b in pairwise(self.buckets)):
            rule = "each is longer than the one before"
            raise ConfigError(f"padding buckets={list(self.buckets)}", rule, "Sort them")
        if self.length is not None and self.buckets:
            both = f"padding length={self.length} with buckets={list(self.buckets)}"
            raise ConfigError(both, "a fixed length leaves nothing to choose from", "Give one of the two")

    def longest(self, microbatches: Sequence[Microbatch]) -> int:
        """Tokens in the longest row. Raises BatchError where a microbatch has no sequence."""
        return max(self._shape(microbatch)[1] for microbatch in microbatches)

    def lengths(self, longest: int) -> Lengths:
        """The lengths for rows of at most `longest` tokens. Raises BatchError where `length` is less."""
        if self.length is not None and longest > self.length:
            rule = f"padding has the fixed length {self.length}"
            remedy = f"Cut rows at {self.length} tokens, or give a length of {longest} or more"
            raise BatchError(f"a microbatch of {longest} tokens a row", rule, remedy)
        # rounded per shard: kernels that want a multiple see one shard
        local = -(-(self.length or longest) // self.context_shards)
        local = next((bucket for bucket in self.buckets if bucket >= local), local)
        local = -(-local // self.multiple) * self.multiple
        return Lengths(local, local * self.context_shards)

    def pad(self, microbatch: Microbatch, lengths: Lengths) -> dict[str, Any]:
        """`microbatch` with rows of `lengths.full` tokens; entries that need no padding are the same objects.

        Its rows are no longer than that. Raises BatchError where an entry may or may not be a sequence, and
        where it needs an attention_mask and has none.
        """
        rows, length = self._shape(microbatch)
        extra = lengths.full - length
        if extra and self.needs_mask and "attention_mask" not in microbatch:
            raise BatchError(
                f"a microbatch of {length} tokens a row to be padded, without attention_mask",
                "this model, or its routers' loss, counts all tokens that no mask hides, and so padding",
                "Give attention_mask, 1 for each token, or rows of one length, or take shapes='exchanged'",
            )
        if extra and self.hidden:
            self._refuse_hidden(microbatch)
        padded, dims = dict(microbatch), dict[str, int]()
        for name, value in microbatch.items():
            if not isinstance(value, Tensor) or name in BOUNDARIES:
                continue
            entry = self._entry(name, value, length)
            if entry is not None and extra:
                shape = list(value.shape)
                shape[entry.dim] = extra
                padded[name] = torch.cat([value, value.new_full(shape, entry.value)], dim=entry.dim)
                dims[name] = entry.dim
        if not extra:
            return padded
        if self.unpads:
            padded[UNPAD] = Unpadding(length, lengths.full, dims, self.pools)
        return padded | _grown(microbatch, rows, length, lengths.full)

    def _refuse_hidden(self, microbatch: Microbatch) -> None:
        """Raise BatchError for padding on the left whose outputs count: they change with the row's length."""
        mask, labels = microbatch.get("attention_mask"), microbatch.get("labels")
        if not isinstance(mask, Tensor) or mask.dim() != PER_TOKEN:
            return
        first = mask.ne(0).cumsum(-1) == 0
        counts = first
        if isinstance(labels, Tensor) and labels.shape == mask.shape and not self.unpads:
            labelled = labels != IGNORED  # of the token itself, or of the one after it
            counts = first & (labelled | labelled.roll(-1, -1))
        if bool(counts.any()):
            row, token = counts.nonzero()[-1].tolist()
            raise BatchError(
                f"an attention_mask that hides the tokens up to {token} of row {row}, in rows to be padded",
                f"{self.hidden} when rows with padding on the left are padded at their end as well",
                f"Give rows without it, label {IGNORED} to what follows it, or take shapes='inferred'",
            )

    def _shape(self, microbatch: Microbatch) -> tuple[int, int]:
        """Rows and length."""
        entries = {**KNOWN, **self.entries}
        dims = {name: entry.dim for name, entry in entries.items() if entry is not None}
        remedy = "Give input_ids or inputs_embeds, or name the sequence of another tensor in padding entries"
        return row_shape(microbatch, dims, remedy)

    def _entry(self, name: str, value: Tensor, length: int) -> PadEntry | None:
        """How to pad one tensor, None where it stays as it is. Raises BatchError."""
        if name in self.entries:
            entry = self.entries[name]
        elif name in KNOWN:
            # (rows,) labels are of whole rows; a mask of queries and keys has two dimensions to pad
            entry = KNOWN[name] if value.dim() >= PER_TOKEN else None
            if name == "attention_mask" and value.dim() > PER_TOKEN:
                raise _wrong(name, value, "padding knows masks of (rows, sequence)", "make it such a mask")
        elif value.dim() > 1 and value.shape[1] == length:
            rule = f"rows have {length} tokens too, so it may be a sequence or not"
            raise _wrong(name, value, rule, f"for a sequence, name it: PadEntry(dim=1, value=0) for {name!r}")
        else:
            entry = None
        dims = value.dim()
        if entry is not None and (not -dims <= entry.dim < dims or value.shape[entry.dim] != length):
            rule = f"it is padded along dimension {entry.dim}, which has the rows' {length} tokens"
            remedy = f"make it as long as the rows, or name another dimension for {name!r}"
            raise _wrong(name, value, rule, remedy)
        return entry


_CONSTANT = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class Unpadding:
    """Removes the padding of a microbatch whose rows of `length` tokens were padded to `full`.

    dims: for each padded entry, the padded dimension
    pools: whether outputs without a sequence are free of padding
    """

    length: int
    full: int
    dims: Mapping[str, int]
    pools: bool

    def entries(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch as it was before padding; on a device, with its copy on the host."""
        own = {name: self._entry(name, value) for name, value in microbatch.items() if name != UNPAD}
        for name, longest in BOUNDARIES.items():
            if longest in own and name in own:
                bounds = self._entry(name, host_values(microbatch)[name])
                own[longest] = int(bounds.diff().max())
        return OnDevice(own, self.entries(microbatch.host)) if isinstance(microbatch, OnDevice) else own

    def _entry(self, name: str, value: Any) -> Any:
        if name in BOUNDARIES:  # the inverse of `_grown`
            return value - (value // self.full * (self.full - self.length)).to(value.dtype)
        # positions may have been added since
        dim = self.dims.get(name, -1 if name == "position_ids" else None)
        return value if dim is None else value.narrow(dim, 0, self.length)

    def output(self, output: Any) -> Any:
        """The last stage's output without padding: tensors of (rows, sequence, ...) are cut.

        Raises ModelError for an output of another form, which may contain padding.
        """
        return tree_map(self._cut, output)

    def _cut(self, value: Any) -> Any:
        dims = value.dim() if isinstance(value, Tensor) else None
        if dims is not None and dims > PER_TOKEN and value.shape[1] == self.full:
            return value[:, : self.length]
        if dims == 0 or (self.pools and dims in (1, PER_TOKEN)) or isinstance(value, _CONSTANT):
            return value
        shown = type(value).__name__ if dims is None else f"tensor of shape {list(value.shape)}"
        raise ModelError(
            f"an output with a {shown} for padded rows of {self.full} tokens",
            "a loss_fn gets outputs without padding, and only those of (rows, sequence, ...) can be cut",
            "Return that form, of three dimensions or more; or take shapes='inferred', which pads nothing",
        )


def _wrong(name: str, value: Tensor, rule: str, remedy: str) -> BatchError:
    return BatchError(
        f"{name} of shape {list(value.shape)}",
        rule,
        f"In padding entries, {remedy}, or give None for it to leave it as it is",
    )


def _grown(microbatch: Microbatch, rows: int, length: int, full: int) -> dict[str, Any]:
    """The boundaries of packed documents in padded rows: the last document of each row takes the padding.

    A document of padding alone would be empty in a full row, which gives NaN in the backward of some
    attention kernels. The real tokens never attend to what follows them, and padding has no labels.
    """
    grown: dict[str, Any] = {}
    for name, longest in BOUNDARIES.items():
        bounds = microbatch.get(name)
        if bounds is None:
            continue
        check_row_bounds(name, bounds, rows, length)
        # the boundaries run over the rows laid end to end: each row moves all rows after it
        grown[name] = bounds + (bounds // length * (full - length)).to(bounds.dtype)
        if longest in microbatch:
            grown[longest] = int(grown[name].diff().max())
    return grown
