"""Weights in their files: what is there, and a stage's own read from it, without any of another stage's.

Files are `safetensors` under the model's Hugging Face names; transformers' own renamings and conversions
apply on the way in and out.
"""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import logging as transformers_logging
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from penstock.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# what safetensors calls torch's dtypes
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip

Ties = tuple[
    tuple[str, ...], ...
]  # each the names under which one weight appears, first the one it is saved by


def tied_names(model: nn.Module) -> Ties:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    # transformers saves a weight under the name that it does not list as a copy
    listed = getattr(model, "all_tied_weights_keys", {})
    return tuple(
        tuple(sorted(group, key=lambda name: name in listed)) for group in names.values() if len(group) > 1
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, each with a header that fits its length; may be none.

    Raises CheckpointError for a file that the index names and that is missing or cut short.
    """
    if (folder / INDEX).is_file():
        try:
            listed = json.loads((folder / INDEX).read_text())["weight_map"].values()
        except (ValueError, KeyError, AttributeError) as cause:
            raise CheckpointError(
                str(folder / INDEX), f"it is no index of weight files ({cause!r})", "Copy the folder again"
            ) from cause
        files = [folder / name for name in sorted(set(listed))]
    else:
        files = [folder / SINGLE] if (folder / SINGLE).is_file() else []
        others = [f for f in sorted(folder.iterdir()) if f.suffix in (".safetensors", ".bin", ".pt", ".pth")]
        if others and not files:  # random weights in their stead would be a silent loss
            raise CheckpointError(
                str(others[0]),
                f"weights are read from {SINGLE}, or from shards that {INDEX} lists, and neither is here",
                "Complete the folder or save it as safetensors; give its config alone for random weights",
            )
    for file in files:
        if not file.is_file():
            raise CheckpointError(str(file), "the index names it and it is missing", "Copy the folder again")
        _check_length(file)
    return files


def _check_length(file: Path) -> None:
    """Compare the file's length with what its header announces; no tensor is read."""
    try:
        with file.open("rb") as opened:
            (header,) = struct.unpack("<Q", opened.read(8))
            entries = json.loads(opened.read(header)) if header < 1 << 30 else {}
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        announced = 8 + header + max(ends, default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(str(file), "it has no safetensors header", "Copy or write it again") from cause
    if file.stat().st_size != announced:
        raise CheckpointError(
            f"{file} of {file.stat().st_size} bytes",
            f"its header announces {announced}, so it is cut short or altered",
            "Copy or write it again",
        )


def load(stage: PreTrainedModel, files: Sequence[Path], ties: Ties) -> None:
    """Fill the stage's parameters (on the meta device) from `files`, reading no tensor of another stage.

    One tensor after the other, into memory of its own: beside the stage there is at most the one at work, in
    the files' dtype, or the pieces of one that transformers puts together.
    Raises CheckpointError where a parameter is in no file or has another shape.
    """
    _fill(stage, files, ties, Unread, "cpu")


def check(stage: PreTrainedModel, files: Sequence[Path], ties: Ties) -> None:
    """Raise as `load` would, from the files' headers: no tensor is read, and `stage` stays without values.

    Its parameters have the dtypes then that `load` gives them.
    """
    _fill(stage, files, ties, Outlined, "meta")


def copy_values(stage: PreTrainedModel, model: PreTrainedModel) -> None:
    """Fill what of `stage`, made by `outlined`, is on the meta device with the values that `model` has.

    One parameter after the other; none of `model` is held.
    """
    for prefix, owner in stage.named_modules():
        for name, held in owner._parameters.items():
            if held is not None and held.is_meta:
                value = model.get_parameter(f"{prefix}.{name}" if prefix else name)
                if not value.is_meta:
                    owner._parameters[name] = value


def _fill(
    stage: PreTrainedModel, files: Sequence[Path], ties: Ties, reader: type[Unread], device: str
) -> None:
    if next(stage.parameters(), None) is None:  # a stage that only passes on what it gets
        return
    unread: dict[str, Any] = {}
    try:
        # not mapped into memory: training must not hang on what becomes of the files, and what is mapped and
        # read would count as the process's
        opened = [safe_open(file, framework="pt", backend="pread") for file in files]
    except SafetensorError as cause:
        raise CheckpointError(str(files), f"unreadable: {cause}", "Copy or write it again") from cause
    for file in opened:
        unread |= {key: reader(file, key) for key in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
    mapping = get_model_conversion_mapping(stage)
    _alias_ties(unread, stage, ties, mapping)
    config = LoadStateDictConfig(
        weight_mapping=mapping,
        dtype=stage.dtype,
        device_map={"": device},
        dtype_plan=stage._get_dtype_plan(stage.dtype),  # what some families keep in float32
    )
    with _quiet(), _one_by_one():
        info, _ = convert_and_load_state_dict_in_model(stage, unread, config)
    _tie_within(stage, ties)
    if info.mismatched_keys:
        name, found, wanted = sorted(info.mismatched_keys)[0]
        raise CheckpointError(
            f"{name} of shape {list(found)}",
            f"the model's config asks for {list(wanted)}",
            "Use the config that the checkpoint was written with",
        )
    lacking = info.missing_keys - {name for names in ties if not info.missing_keys.issuperset(names)
                                   for name in names}  # fmt: skip
    missing = sorted(
        name for name, p in stage.named_parameters() if (name in lacking if device == "meta" else p.is_meta)
    )
    if missing:
        raise CheckpointError(
            f"{files[0].parent}",
            f"it lacks {len(missing)} of the model's weights: {', '.join(missing[:5])}",
            "Take a checkpoint of this very model, or train from its config alone",
        )


class Unread:
    """A tensor in its file. transformers takes `[...]` of those that it wants, when it wants them."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __getitem__(self, index: object) -> Tensor:
        read: Tensor = self._file.get_tensor(self._name)
        return read


_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Outlined(Unread):
    """The same without its values."""

    def __getitem__(self, index: object) -> Tensor:
        found = self._file.get_slice(self._name)
        return torch.empty(found.get_shape(), dtype=_OF_NAME[found.get_dtype()], device="meta")


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Keep transformers from reading ahead in threads, whose tensors would wait in memory to be converted."""
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def _alias_ties(
    unread: dict[str, Any], stage: PreTrainedModel, ties: Ties, mapping: Sequence[WeightTransform]
) -> None:
    """A tied weight is stored under one of its names; let this stage find it under the name that it holds."""
    own = set(dict(stage.named_parameters(remove_duplicate=False)))
    if own.isdisjoint(name for names in ties for name in names):
        return
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = dict.fromkeys((*stage.state_dict(), *(name for names in ties for name in names)), True)
    stored = {}
    for key in unread:
        renamed, _ = rename_source_key(key, renamings, converters, stage.base_model_prefix, known)
        stored[renamed] = stored[key] = key
    for names in ties:
        found = [stored[name] for name in names if name in stored]
        for name in own.intersection(names):
            if found and name not in stored:
                unread[name] = unread[found[0]]


def _tie_within(stage: nn.Module, ties: Ties) -> None:
    """Names of one weight that live on the same stage are one parameter again."""
    for names in ties:
        held = [name for name in names if holds(stage, name)]
        for name in held[1:]:
            _replace(stage, name, stage.get_parameter(held[0]))


def holds(stage: nn.Module, name: str) -> bool:
    """Whether the stage has a parameter of this name."""
    try:
        stage.get_parameter(name)
    except AttributeError:
        return False
    return True


def _replace(stage: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(stage.get_submodule(owner), attribute, parameter)


def write_index(folder: Path, written: Mapping[str, Mapping[str, int]]) -> None:
    """The index of a folder in which each file (key) holds the weights named, of so many bytes."""
    total = sum(size for held in written.values() for size in held.values())
    weight_map = {name: file for file, held in written.items() for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class _quiet:  # noqa: N801  (used like a function)
    """transformers' progress bar off for a while."""

    def __enter__(self) -> None:
        self._shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            transformers_logging.enable_progress_bar()
