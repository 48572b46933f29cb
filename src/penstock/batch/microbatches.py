"""Split a step's batch into microbatches; the input of a step; fingerprints of batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.batch.packing import split_lens
from penstock.batch.payload import TensorSpec
from penstock.batch.shapes import Microbatch, MicrobatchKey, microbatch_key
from penstock.errors import BatchError
from penstock.private import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

Batch = Mapping[str, Any]
# how one entry of a batch is split: along a dimension, not at all (None), or by a function of (entry,
# number of microbatches) that returns one part for each
Split = int | None | Callable[[Any, int], Sequence[Any]]
Sharding = Mapping[str, Split]  # by entry; other entries are split along their rows, dimension 0
# entries of images and videos, in transformers' names: a microbatch gets those that its rows refer to
PIXELS = {
    "image": ("pixel_values", "pixel_values_images", "image_patches"),
    "video": ("pixel_values_videos",),
}
INNER = "penstock:"  # the prefix of entries that the pipeline adds itself
# boundaries of packed documents, in transformers' names: they run over all rows, and are split with them
_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})


class PerRow(list[Tensor | None]):
    """An entry of a batch that lists a tensor for each row, or None: such as the pixels of a row's images.

    A microbatch gets the tensors of its rows, concatenated along dimension 0, or no such entry without any:

        {"input_ids": ids, "pixel_values": PerRow([two_images, None, one_image])}
    """


# so that code that visits all tensors of a batch reaches these
register_pytree_node(PerRow, lambda per_row: (list(per_row), None), lambda of_rows, _: PerRow(of_rows))

# (output of the last stage, number of the microbatch) -> what the caller wants to keep of it
Collect = Callable[[Any, int], Any]


@dataclass(frozen=True)
class StepInput:
    """The input of a step; every rank has all of it.

    weight: valid items over all microbatches, by which the loss is divided
    collect: gets the last stage's outputs, in an evaluation only
    scored: whether the last stage computes the loss; always true in training
    """

    microbatches: Sequence[Microbatch]
    weight: int
    collect: Collect | None = None
    scored: bool = True

    @cached_property
    def keys(self) -> tuple[MicrobatchKey, ...]:
        """A key of each microbatch, equal where all shapes and dtypes are."""
        return tuple([microbatch_key(microbatch) for microbatch in self.microbatches])

    @cached_property
    def shapes(self) -> tuple[int, ...]:
        """The keys as numbers, for this step only."""
        numbers: dict[object, int] = {}
        return tuple([numbers.setdefault(key, len(numbers)) for key in self.keys])


def split(batch: Batch, count: int, sharding: Sharding, group: int = 1) -> list[Microbatch]:
    """Split `batch` into `count` microbatches; the first ones have one group more where it does not divide.

    group: rows that stay together, from the first one on
    Raises BatchError where it has fewer groups than microbatches, or a part of one.
    """
    rows = check_rows(batch, count, sharding, group)
    cuts = _cuts(rows, count, group)
    parts = {name: _split(name, value, cuts, _dimension(name, value, sharding))
             for name, value in batch.items() if name not in _PACKED or name in sharding}  # fmt: skip
    parts |= _split_documents(batch, rows, cuts, sharding)
    return [joined({name: of_entry[index] for name, of_entry in parts.items()}) for index in range(count)]


def joined(microbatch: Microbatch) -> Microbatch:
    """`microbatch` with the tensors of each `PerRow` entry concatenated, without entries that list none."""
    per_row = {name: value for name, value in microbatch.items() if isinstance(value, PerRow)}
    if not per_row:
        return microbatch
    tensors = {name: _end_to_end(name, value) for name, value in per_row.items()}
    rest = {name: value for name, value in microbatch.items() if name not in per_row}
    return rest | {name: value for name, value in tensors.items() if value is not None}


def split_batch(
    batch: Batch,
    microbatches: int,
    *,
    sharding: Sharding | None = None,
    even: bool = False,
    rows_per_group: int = 1,
) -> list[Microbatch]:
    """Split a batch into microbatches as `Pipeline.step` does, before any padding.

    Targets split with the same `microbatches` line up with the step's: a loss_fn that takes the microbatch's
    number may index such a list with it.

    Args:
        sharding: by entry, how it is split: along a dimension (0 if not named), not at all (None), or by a
            function of (entry, number of microbatches)
        even: whether microbatches must be of one size. Else the first ones have one row more where the rows
            do not divide.
        rows_per_group: as the loss of the pipeline has it (penstock.batch.loss.Loss)

    Raises BatchError.
    """
    sharding = sharding or {}
    if microbatches < 1:
        raise BatchError(f"microbatches={microbatches}", "a batch becomes one microbatch or more", "Give 1")
    check_entries(batch, sharding)
    rows = check_rows(batch, microbatches, sharding, rows_per_group)
    if even and rows % microbatches:
        rule = "all microbatches have the same number of rows"
        remedy = f"Give a multiple of {microbatches} rows, or even=False"
        raise BatchError(f"a batch of {rows} rows in {microbatches} microbatches", rule, remedy)
    return split(batch, microbatches, sharding, rows_per_group)


def check_rows(batch: Batch, count: int, sharding: Sharding, group: int = 1) -> int:
    """The rows of a batch that is to become `count` microbatches.

    group: rows that stay together
    Raises BatchError for too few, and for a part of a group.
    """
    rows = batch_rows(batch, sharding)
    groups = check_groups("a batch", rows, group)
    if groups < count:
        least = "one row" if group == 1 else f"one group of {group} rows"
        rule = f"it is to be split into {count} microbatches of at least {least} each"
        remedy = f"Give {count * group} rows or more, or set microbatches to at most {groups}"
        raise BatchError(f"a batch of {rows} rows", rule, remedy)
    return rows


def check_groups(value: str, rows: int, group: int) -> int:
    """How many groups of `group` rows there are. Raises BatchError for a part of one. value: what has them"""
    if rows % group:
        raise BatchError(
            f"{value} of {rows} rows",
            f"the loss compares the rows of each group of {group}, so that no group is split",
            f"Give a multiple of {group} rows, those of a group next to each other",
        )
    return rows // group


def _cuts(rows: int, count: int, group: int) -> list[int]:
    """The first row of each microbatch but the first; for single rows, as torch.tensor_split has them."""
    size, more = divmod(rows // group, count)
    return [group * (at * size + min(at, more)) for at in range(1, count)]


def check_entries(batch: Batch, sharding: Sharding) -> None:
    """Raise BatchError for entries that are meant as tensors and are none: they would not be split."""
    for name, value in batch.items():
        if name.startswith(INNER):
            raise BatchError(f"{name!r} in a batch", "the pipeline adds this entry itself", "Take it out")
        if isinstance(value, PerRow):
            odd = next((row for row in value if not (row is None or isinstance(row, Tensor))), None)
            if odd is not None:
                rule = "PerRow lists a tensor or None for each row"
                raise BatchError(f"{name} with a {type(odd).__name__}", rule, "Give torch.as_tensor of it")
            continue
        if name in sharding:
            continue
        numbers = isinstance(value, list | tuple) and value and all(
            isinstance(leaf, bool | int | float) for leaf in tree_leaves(value)
        )  # fmt: skip
        if numbers or type(value).__module__ == "numpy":
            raise BatchError(
                f"{name} given as {type(value).__name__}",
                "only tensors are split into microbatches",
                f"Give torch.as_tensor({name}), or put {name!r}: None into sharding to give it whole to each",
            )


def batch_rows(batch: Batch, sharding: Sharding) -> int:
    """The length that every tensor of `batch` has along the dimension it is split on.

    Entries that are not tensors, and tensors without a dimension, are never split. Raises BatchError.
    """
    lengths: dict[str, int] = {}
    for name, value in batch.items():
        dim = _dimension(name, value, sharding)
        if not isinstance(dim, int) or (name in _PACKED and name not in sharding):
            continue
        if isinstance(value, PerRow):
            lengths[name] = len(value)
            continue
        for tensor in _tensors(value):
            if tensor.dim() == 0:
                continue
            if not -tensor.dim() <= dim < tensor.dim():
                raise BatchError(
                    f"{name} of shape {list(tensor.shape)}",
                    f"it is to be split along dimension {dim}, which it does not have",
                    "Name another dimension for it in sharding, or None to give it whole to every microbatch",
                )
            lengths[name] = tensor.shape[dim]
    if not lengths:
        raise BatchError(f"a batch of {sorted(batch)}", "none of it can be split", "Give at least one tensor")
    if len(set(lengths.values())) > 1:
        rule = "all tensors of a batch have the same length along the dimension they are split on"
        remedy = "Correct the batch, or name each tensor's dimension in sharding (None: not split)"
        raise BatchError(", ".join(f"{name}: {length}" for name, length in lengths.items()), rule, remedy)
    return next(iter(lengths.values()))


def _dimension(name: str, value: Any, sharding: Sharding) -> Split:
    """The rows; positions of (3, rows, sequence), for time, height and width, have them second."""
    three = name == "position_ids" and isinstance(value, Tensor) and value.dim() == 3
    return sharding.get(name, 1 if three else 0)


def _split(name: str, value: Any, cuts: Sequence[int], how: Split) -> Sequence[Any]:
    """One part for each microbatch. cuts: the first row of each but the first"""
    count = len(cuts) + 1
    if callable(how):
        parts = how(value, count)
        if len(parts) != count:
            raise BatchError(
                f"{len(parts)} parts of {name}",
                f"the function that sharding names for it makes one for each of {count} microbatches",
                f"Return {count} parts",
            )
        return parts
    if how is None or not isinstance(value, Tensor | Mapping | Sequence) or isinstance(value, str):
        return [value] * count
    if isinstance(value, Tensor):
        return value.tensor_split(tuple(cuts), dim=how) if value.dim() else [value] * count
    if isinstance(value, PerRow):
        return [PerRow(value[first:end]) for first, end in pairwise([0, *cuts, len(value)])]
    leaves, tree = tree_flatten(value)
    split = [_split(name, leaf, cuts, how) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten(list(part), tree) for part in zip(*split, strict=True)] or [value] * count


def _end_to_end(name: str, of_rows: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [tensor for tensor in of_rows if tensor is not None]
    try:
        return torch.cat(tensors) if tensors else None
    except (RuntimeError, TypeError) as error:
        shapes = " and ".join(sorted({str(list(tensor.shape)) for tensor in tensors}))
        rule = f"the tensors of its rows are concatenated ({str(error).splitlines()[0]})"
        remedy = "Pad them to one shape, as the model's processor does, or give a list of microbatches"
        raise BatchError(f"{name} of shapes {shapes} in one microbatch", rule, remedy) from None


def _split_documents(
    batch: Batch, rows: int, cuts: Sequence[int], sharding: Sharding
) -> dict[str, Sequence[Any]]:
    """The entries that say where documents begin, split where the rows are."""
    parts: dict[str, Sequence[Any]] = {}
    for end in ("q", "k"):
        lens, longest = f"cu_seq_lens_{end}", f"max_length_{end}"
        if lens in batch and lens not in sharding:
            parts[lens] = split_lens(lens, batch[lens], rows, cuts)
            parts[longest] = [int(part.diff().max()) for part in parts[lens]]
        elif longest in batch and longest not in sharding:
            parts[longest] = [batch[longest]] * (len(cuts) + 1)
    return parts


def with_entries(
    batch: Batch | Sequence[Microbatch], entries: Mapping[str, Any], sharding: Sharding
) -> Batch | Sequence[Microbatch]:
    """Add `entries` to a batch, or to a list of microbatches.

    Raises BatchError for a name that the batch already has, for an entry that cannot be split, and for a
    batch of the wrong type.
    """
    listed = isinstance(batch, Sequence) and all(isinstance(part, Mapping) for part in batch)
    if not isinstance(batch, Mapping) and not listed:
        rule = "it is a mapping from names to tensors, or a list of such mappings, one for each microbatch"
        remedy = "Give e.g. {'input_ids': ids, 'labels': ids}"
        raise BatchError(f"a batch given as {type(batch).__name__}", rule, remedy)
    if not entries:
        return batch
    microbatches: Sequence[Batch] = [batch] if isinstance(batch, Mapping) else batch
    if twice := sorted(entries.keys() & {name for microbatch in microbatches for name in microbatch}):
        raise BatchError(f"{', '.join(twice)} as an argument", "the batch has it as well", "Give it once")
    if isinstance(batch, Mapping):
        return {**batch, **entries}
    parts = {}
    for name, value in entries.items():
        how = sharding.get(name, 0)
        if isinstance(how, int) and any(leaf.dim() for leaf in _tensors(value)):
            raise BatchError(
                f"{name} next to a list of microbatches",
                "their numbers of rows may differ, so its rows cannot be assigned to them",
                "Put its parts into the microbatches, or name in sharding a function that splits it, or None",
            )
        parts[name] = _split(name, value, range(1, len(microbatches)), how)
    return [{**own, **{name: parts[name][at] for name in parts}} for at, own in enumerate(microbatches)]


def fingerprint(batches: Sequence[Batch], count: int, schedule: int) -> tuple[int, str]:
    """A number that is equal on ranks that work on the same step, and its description.

    Args:
        batches: the whole batch, or the microbatches where it came as such.
        count: the number of microbatches.
        schedule: a number that is equal where the schedule is.
    """
    named = [entry for batch in batches for entry in named_tensors(batch)]
    sums: dict[str, int] = {}
    crcs = checksums([tensor for _, tensor in named])
    for (name, _), crc in zip(named, crcs, strict=True):  # the order counts
        sums[name] = (31 * sums.get(name, 0) + crc) % (1 << 61)
    first = ", ".join(
        f"{name} {TensorSpec.of(value)}" if isinstance(value, Tensor) else name
        for name, value in batches[0].items()
    )
    constants = {name: value for batch in batches for name, value in batch.items()
                 if isinstance(value, bool | int | float | str)}  # fmt: skip
    values = f", {constants}" if constants else ""
    source = "the batch" if len(batches) < count else "the first"
    text = f"schedule {schedule:08x}, {count} microbatches, {source} {first}, checksums {sums}{values}"
    shapes = [microbatch_key(batch) for batch in batches], count
    return zlib.crc32(repr((schedule, shapes, sums)).encode()), text


def named_tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Its tensors, each with the name of its entry."""
    return ((name, tensor) for name, value in batch.items() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    leaves = (value,) if isinstance(value, Tensor) else tree_leaves(value)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


_SAMPLED = 1 << 16


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, a checksum of its bits and their positions, 0 to 2 ** 32 - 1: equal on any device.

    Of a large tensor, only every n-th entry is read, so that a step does not begin with a pass over its data.
    Waits for a GPU once.
    """
    sampled = [_sampled(tensor) for tensor in tensors]
    away = [tensor for tensor in sampled if not tensor.is_cpu]
    if away:
        fetched = iter(torch.split(torch.cat(away).cpu(), [len(tensor) for tensor in away]))
        sampled = [tensor if tensor.is_cpu else next(fetched) for tensor in sampled]
    return [zlib.crc32(tensor.numpy().data) for tensor in sampled]


def _sampled(tensor: Tensor) -> Tensor:
    """The bytes of up to `_SAMPLED` entries."""
    flat = tensor.detach().contiguous().view(-1)
    step = -(-flat.numel() // _SAMPLED)
    return (flat[::step].contiguous() if step > 1 else flat).view(torch.uint8)
