"""Weights from files: a stage reads its own tensors and none of another stage's.

Files are `safetensors` under the model's Hugging Face names; transformers' own renamings and conversions
apply on the way in and out.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

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
from penstock.models.weights.folder import UNREADABLE
from penstock.models.weights.reading import PieceReader, TensorsOnDevice
from penstock.reading import LARGEST_JSON, open_regular, read_json, size
from penstock.runtime.device.copies import CudaCopies
from penstock.runtime.health.agreement import digest, shake_hands, shared_errors
from penstock.runtime.transport.groups import Processes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAMED = 5  # tensors of each kind that an error names
_HOST = torch.device("cpu")

# torch's dtypes by their names in safetensors
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip

# the names under which each tied weight appears, the one that it is saved by first
Ties = tuple[tuple[str, ...], ...]


def tied_names(model: nn.Module) -> Ties:
    """The groups of names that stand for one weight."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    # transformers saves a weight under the name that it does not list as a copy
    copies = getattr(model, "all_tied_weights_keys", {})
    return tuple(
        tuple(sorted(group, key=lambda name: name in copies)) for group in names.values() if len(group) > 1
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder; none where it holds no weights.

    Raises CheckpointError where a file that the index names is missing, cut short or altered in length. Only
    headers are read.
    """
    files = [folder / name for name in named_files(folder)]
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        files = []
        others = [f for f in sorted(folder.iterdir()) if f.suffix in (".safetensors", ".bin", ".pt", ".pth")]
        if others:  # random weights in their stead would be a silent loss
            raise CheckpointError(
                str(others[0]),
                f"weights are read from {SINGLE}, or from shards that {INDEX} lists, and neither is here",
                "Complete the folder or save it as safetensors; give its config alone for random weights",
            )
    for file in files:
        if not file.is_file():
            raise CheckpointError(str(file), "the index names it and it is missing", "Copy the folder again")
        _open(file)
    return files


def named_files(folder: Path) -> list[str]:
    """The names of a folder's weight files, which need not be there: those in its index, or the only one.

    Raises CheckpointError for an index that cannot be read, or that names a file outside of the folder.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    try:
        return sorted({_inside(name) for name in read_json(folder / INDEX)["weight_map"].values()})
    except UNREADABLE as cause:
        raise CheckpointError(
            str(folder / INDEX),
            f"it is no index of weight files ({_why(cause)})",
            "Copy the folder again",
        ) from cause


def _inside(name: str) -> str:
    """The name of a file of the folder; an index from elsewhere may name any file of this machine."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or parts[0] == "/":
        raise ValueError(f"{name!r} is no file of this folder")
    return name


def _why(cause: Exception) -> str:
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return str(cause) if isinstance(cause, ValueError) else repr(cause)


def _open(file: Path) -> Any:
    """Open a safetensors file, whose header has to fit its length. Raises CheckpointError."""
    check_header(file)
    try:
        # not mapped into memory: training must not depend on what becomes of the file, and pages of a map
        # that were read would count as the process's memory
        return safe_open(file, framework="pt", backend="pread")
    except SafetensorError as cause:
        rule = f"it is no complete safetensors file ({cause})"
        raise CheckpointError(
            f"{file} of {file.stat().st_size} bytes", rule, "Copy or write it again"
        ) from cause
    except OSError as cause:
        raise CheckpointError(str(file), f"it cannot be read ({cause})", "Copy it again") from cause


def check_header(file: Path) -> None:
    """Raise CheckpointError for a header of which nobody knows what it takes once it is parsed."""
    try:
        with open_regular(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
    except OSError as cause:
        rule = f"it cannot be read ({cause.strerror or cause})"
        raise CheckpointError(str(file), rule, "Copy or write it again") from cause
    if LARGEST_JSON < length < file.stat().st_size:  # of another one the error says more
        rule = f"its header has {length:,} bytes, and {size(LARGEST_JSON)} are read at most"
        raise CheckpointError(str(file), rule, "Write its tensors into several files")


class Reads(Protocol):
    """How the processes that need the same tensors get them: one reads each, and passes it on."""

    @property
    def processes(self) -> Processes:
        """Those that call `load` with the same stage."""

    def read(self, name: str, read: Callable[[], Tensor], like: Tensor) -> Tensor:
        """What `read` returns on one of them, on all. like: of its shape and dtype. Collective."""


def load(
    stage: PreTrainedModel,
    files: Sequence[Path],
    ties: Ties,
    device: torch.device = _HOST,
    reads: Reads | None = None,
) -> None:
    """Fill the stage's parameters, which are on the meta device, from `files`.

    Tensor by tensor: peak memory is the stage plus one tensor in the files' dtype, or plus the tensors that
    transformers puts together to one.

    Args:
        device: where they come to be. On a GPU that memory is the GPU's, and little is in host memory.
        reads: how this process gets tensors that others need too; None reads each. The call is then
            collective over those processes.

    Raises CheckpointError where a parameter is in no file or has another shape; HandshakeError where the
    processes of `reads` have other files.
    """
    if device.type == "cpu":
        _fill(stage, files, ties, _passed_on(_each(Unread), reads), "cpu")
    else:
        load_to_device(stage, files, ties, device, reads)


def load_to_device(
    stage: PreTrainedModel,
    files: Sequence[Path],
    ties: Ties,
    device: torch.device,
    reads: Reads | None = None,
) -> None:
    """As `load`, by way of two pieces of host memory."""
    reader = PieceReader(CudaCopies(device))
    with ExitStack() as opened:

        def unread(path: Path) -> dict[str, Unread]:
            tensors = TensorsOnDevice(path, reader, device)
            opened.callback(tensors.close)
            return {name: UnreadOnDevice(tensors, name) for name in _open(path).keys()}  # noqa: SIM118

        _fill(stage, files, ties, _passed_on(unread, reads), str(device))


def check(stage: PreTrainedModel, files: Sequence[Path], ties: Ties, *, whole: bool = False) -> None:
    """Raise the errors of `load` from the files' headers: no tensor is read, `stage` stays without values.

    Its parameters then have the dtypes that `load` gives them.

    Args:
        whole: `stage` is the whole model: a tensor that it has no place for is an error, too
    """
    _fill(stage, files, ties, _each(UnreadShape), "meta", whole=whole)


def copy_values(stage: PreTrainedModel, model: PreTrainedModel) -> None:
    """Fill the parameters of `stage` that are on the meta device with the values that `model` has.

    One parameter at a time. `stage` may be a `write_through` twin; it shares no parameter with `model`.
    """
    for prefix, owner in stage.named_modules():
        for name, held in owner._parameters.items():
            if held is not None and held.is_meta:
                value = model.get_parameter(f"{prefix}.{name}" if prefix else name)
                if not value.is_meta:
                    owner._parameters[name] = value


class Unread:
    """A tensor in its file. transformers reads it with `[...]` when it needs it."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __getitem__(self, index: object) -> Tensor:
        read: Tensor = self._file.get_tensor(self._name)
        return read


class UnreadShape(Unread):
    """The same without its values."""

    def __getitem__(self, index: object) -> Tensor:
        found = self._file.get_slice(self._name)
        return torch.empty(found.get_shape(), dtype=DTYPES[found.get_dtype()], device="meta")


class UnreadOnDevice(Unread):
    """The same, read into the memory of a GPU."""

    def __getitem__(self, index: object) -> Tensor:
        tensors: TensorsOnDevice = self._file
        return tensors.read(self._name, DTYPES.__getitem__)


class UnreadByOne(Unread):
    """The same, read by one process of several."""

    def __init__(self, own: Unread, like: Tensor, name: str, reads: Reads) -> None:
        self._own, self._like, self._name, self._reads = own, like, name, reads

    def __getitem__(self, index: object) -> Tensor:
        return self._reads.read(self._name, lambda: self._own[...], self._like)


Opened = Callable[[Path], Mapping[str, Unread]]  # the tensors of a file, by name


def _passed_on(opened: Opened, reads: Reads | None) -> Opened:
    """The same tensors, each read by one process of `reads`. All of them open all files, for the headers."""
    if reads is None:
        return opened
    processes = reads.processes

    def unread(path: Path) -> dict[str, Unread]:
        with shared_errors(processes):
            own, headers = opened(path), _each(UnreadShape)(path)
        like = {name: header[...] for name, header in headers.items()}
        known = json.dumps([(name, [*each.shape], str(each.dtype)) for name, each in like.items()])
        shake_hands(processes, {f"tensors of {path.name}": digest(known)})
        return {name: UnreadByOne(own[name], like[name], name, reads) for name in own}

    return unread


def _each(kind: type[Unread]) -> Opened:

    def unread(path: Path) -> dict[str, Unread]:
        file = _open(path)
        return {name: kind(file, name) for name in file.keys()}  # noqa: SIM118

    return unread


def _fill(
    stage: PreTrainedModel,
    files: Sequence[Path],
    ties: Ties,
    tensors: Opened,
    device: str,
    *,
    whole: bool = False,
) -> None:
    if next(stage.parameters(), None) is None:  # a stage that only passes on its input
        return
    unread: dict[str, Any] = {}
    for file in files:
        unread |= tensors(file)
    mapping = get_model_conversion_mapping(stage)
    for entry in mapping:  # where one asks for the CPU, it would move what has no values
        if device == "meta" and isinstance(entry, WeightConverter):
            entry.force_cpu = False
    _add_names_of_ties(unread, stage, ties, mapping)
    config = LoadStateDictConfig(
        weight_mapping=mapping,
        dtype=stage.dtype,
        device_map={"": device},
        dtype_plan=stage._get_dtype_plan(stage.dtype),  # what some families keep in float32
    )
    with _one_tensor_at_a_time():
        info, _ = convert_and_load_state_dict_in_model(stage, unread, config)
    tie_within(stage, ties)
    read_by_another_name = {n for names in ties if not info.missing_keys.issuperset(names) for n in names}
    lacking = info.missing_keys - read_by_another_name
    mismatched = {
        name: f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in info.mismatched_keys
    }
    missing = [
        name
        for name, parameter in stage.named_parameters()
        if name not in mismatched and (name in lacking if device == "meta" else parameter.is_meta)
    ]
    stage._adjust_missing_and_unexpected_keys(info)  # without what its family leaves out on purpose
    unexpected = info.unexpected_keys if whole else ()
    wrong = {
        "{} of another shape than the model's": mismatched.values(),
        "it lacks {} of the model's weights": missing,
        "{} that the model has no place for": unexpected,
    }
    if found := [f"{text.format(len(names))}: {_first(names)}" for text, names in wrong.items() if names]:
        raise CheckpointError(
            f"the weights in {files[0].parent}",
            "; ".join(found),
            "Take the weights and the config.json of one model, or train from its config alone",
        )


def _first(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Without transformers' reading ahead in threads, whose tensors wait in memory, and its progress bar."""
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    before, shows_bar = os.environ.get(switch), transformers_logging.is_progress_bar_enabled()
    os.environ[switch] = "1"
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bar:
            transformers_logging.enable_progress_bar()
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def _add_names_of_ties(
    unread: dict[str, Any], stage: PreTrainedModel, ties: Ties, mapping: Sequence[WeightTransform]
) -> None:
    """A tied weight is stored under one of its names; offer it under the name that this stage holds, too."""
    held = set(dict(stage.named_parameters(remove_duplicate=False)))
    tied = {name for names in ties for name in names}
    if held.isdisjoint(tied):
        return
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = dict.fromkeys((*stage.state_dict(), *tied), True)
    stored = {}
    for key in unread:
        renamed, _ = rename_source_key(key, renamings, converters, stage.base_model_prefix, known)
        stored[renamed] = stored[key] = key
    for names in ties:
        found = [stored[name] for name in names if name in stored]
        for name in held.intersection(names):
            if found and name not in stored:
                unread[name] = unread[found[0]]


def tie_within(stage: nn.Module, ties: Ties) -> None:
    """Make names of one weight on the same stage one parameter again."""
    held = dict(stage.named_parameters(remove_duplicate=False))
    for names in ties:
        first, *others = [name for name in names if name in held] or [""]
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(stage.get_submodule(owner), attribute, held[first])
