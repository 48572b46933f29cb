"""Weights from files: a stage reads its own tensors and none of another stage's.

Files are `safetensors` under the model's Hugging Face names; transformers' own renamings and conversions
apply on the way in and out.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers import logging as transformers_logging
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from penstock.errors import CheckpointError, InputError
from penstock.models.tracing.meta import destinations
from penstock.models.weights.folder import UNREADABLE
from penstock.models.weights.reading import HostReader, maps_for_results, reader_for
from penstock.models.weights.tensor_file import TensorFile, open_all
from penstock.reading import path_fault, read_json
from penstock.runtime.health.agreement import digest
from penstock.runtime.ranks import Ranks
from penstock.runtime.sharded_weights import own_part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAMED = 5  # tensors of each kind that an error names
_LAYER = re.compile(r"(.*?\.)??(?:layers|h|blocks|block|layer)\.(\d+)\.")

# parts of names that wrappers add to a model's tensors, and their wrappers
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "base_model.model.": "PEFT, by merge_and_unload()",
    "base_layer.": "PEFT, by merge_and_unload()",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "module.": "DistributedDataParallel",
}
_SCALE = re.compile(r"(_scale(_inv)?|\.(scales|qweight|qzeros|g_idx|absmax|quant_map|SCB))$|\.quant_state\.")
_ROWS = 4096  # rows of a tied weight that are compared at a time
_HOST = torch.device("cpu")
_log = logging.getLogger(__name__)

# for each tied weight its names, first the one under which it is saved
Ties = tuple[tuple[str, ...], ...]


def tied_names(model: nn.Module) -> Ties:
    """The groups of names of one weight."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    # transformers saves a weight under the name that it does not list as a copy
    copies = getattr(model, "all_tied_weights_keys", {})
    return tuple(
        tuple(sorted(group, key=lambda name: name in copies)) for group in names.values() if len(group) > 1
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads in a folder; empty if it has no weights.

    Raises CheckpointError if a file is missing, or a link leads nowhere. No file is opened.
    """
    single, index = folder / SINGLE, folder / INDEX
    if not single.is_file() and not index.is_file():
        if dead := next((file for file in (single, index) if file.is_symlink()), None):
            rule = f"it is a link to {dead.readlink()}, where no file is"
            raise CheckpointError(str(dead), rule, "Copy the folder again, with what its links lead to")
        others = [f for f in sorted(folder.iterdir()) if f.suffix in (".safetensors", ".bin", ".pt", ".pth")]
        if others:  # do not silently use random weights instead
            raise CheckpointError(
                str(others[0]),
                f"weights are read from {SINGLE}, or from shards that {INDEX} lists, and neither is here",
                "Complete the folder or save it as safetensors; give only its config for random weights",
            )
        return []
    if single.is_file() and index.is_file():
        say_once(folder, f"{SINGLE} is read, as transformers does, and {INDEX} is ignored")
    files = [folder / name for name in named_files(folder)]
    for file in files:
        if not file.is_file():
            remedy = f"Copy the folder again, or remove {INDEX} and save the weights anew"
            raise CheckpointError(str(file), "the index names it and it is missing", remedy)
    return files


@cache
def say_once(folder: Path, message: str) -> None:
    """Log a message for the user about a folder's weights, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s: %s", folder, message)


def named_files(folder: Path) -> list[str]:
    """The names of a folder's weight files, which may be missing: the single one, else those in its index.

    Raises CheckpointError for an index that cannot be read, or that names a file outside of the folder.
    """
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [SINGLE]
    try:
        index = read_json(folder / INDEX)
        names = sorted({_inside(name) for name in index["weight_map"].values()})
        if not names or not isinstance(index["metadata"], dict):
            raise ValueError("its weight_map names no file" if not names else "its metadata has no keys")
    except UNREADABLE as cause:
        why = getattr(cause, "strerror", None) or (cause if isinstance(cause, ValueError) else repr(cause))
        rule = f"it is no index of weight files ({why})"
        raise CheckpointError(str(folder / INDEX), rule, "Copy the folder again") from cause
    return names


def _inside(name: str) -> str:
    """Check that a name in an index is a file of the folder: an index may name any file of this machine."""
    parts = PurePosixPath(name).parts
    if path_fault(name) or ".." in parts or parts[0] == "/" or not name.endswith(".safetensors"):
        raise ValueError(f"{name[:80]!r} is no safetensors file of this folder")
    return name


def first_dtype(files: Sequence[Path]) -> torch.dtype | None:
    """The dtype that transformers takes for a model whose config has none: of the first file's first weight.

    None if that file has no floating-point weight.
    """
    with TensorFile(files[0]) as file:
        dtypes = (file.like(name).dtype for name in sorted(file.names()))
        return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), None)


class Reads(Protocol):
    """Shared reads: of the processes that need a tensor, one reads it and sends it to the others."""

    @property
    def processes(self) -> Ranks:
        """The processes that call `load` with the same stage."""

    def read(self, name: str, read: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Call `read` on one process; return its result on all. like: of its shape and dtype. Collective."""


def load(
    stage: PreTrainedModel,
    files: Sequence[Path],
    ties: Ties,
    device: torch.device = _HOST,
    reads: Reads | None = None,
    new: Collection[str] = (),
) -> None:
    """Fill the stage's parameters, which are on the meta device, from `files`.

    Tensor by tensor: peak memory is the stage plus one tensor in the files' dtype, or plus the tensors that
    transformers joins to one. If `stage` is a `write_through` twin of a sharded stage, a process reads only
    the rows of its shards, if shards are rows of a file; with `reads`, whole tensors.

    Args:
        device: of the parameters. For a GPU, tensors are read into its memory, with little host memory.
        reads: shared reads of tensors that other processes need too, over which the call is then collective;
            None: this process reads all.
        new: names that may be missing in the files, and then stay without values

    Raises CheckpointError if a parameter is in no file or has another shape; HandshakeError if the processes
    of `reads` have different files.
    """
    reader, unread = reader_for(device), dict[str, Unread]()
    with ExitStack() as opened:
        processes = Ranks() if reads is None else reads.processes
        file_of = processes.attempt(
            "open its files", lambda: opened.enter_context(open_all(files)), InputError
        )
        if reads is not None:
            processes.same("load()", _facts_of_files(file_of))
        for name, file in file_of.items():
            read, like = partial(file.read, name, reader), partial(file.like, name)
            unread[name] = Unread(partial(reads.read, name, read, like())) if reads else Unread(read, like)
        with maps_for_results(device):
            _fill(stage, files[0].parent, file_of, ties, unread, str(device), new=new)


def check(
    stage: PreTrainedModel,
    files: Sequence[Path],
    ties: Ties,
    *,
    whole: Collection[str] | None = None,
    new: Collection[str] = (),
) -> list[str]:
    """Raise the errors of `load` from the files' headers: no tensor is read, `stage` stays without values.

    Afterwards its parameters have the dtypes that `load` sets.

    Args:
        whole: the names of the whole model's tensors. Other tensors in the files are an error, except those
            that transformers ignores; None ignores all of them
        new: patterns of names that may be missing in the files

    Returns the names without values that `new` allows.
    """
    with open_all(files) as file_of:
        unread = {name: Unread(partial(file.like, name)) for name, file in file_of.items()}
        return _fill(stage, files[0].parent, file_of, ties, unread, "meta", whole=whole, new=new)


def copy_values(stage: PreTrainedModel, model: PreTrainedModel) -> None:
    """Fill the parameters of `stage` that are on the meta device with the values that `model` has.

    One parameter at a time. `stage` may be a `write_through` twin; it shares no parameter with `model`.
    """
    for prefix, owner in stage.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = model.get_parameter(f"{prefix}.{name}" if prefix else name)
                if not value.is_meta:
                    owner._parameters[name] = value


class Unread:
    """A tensor in its file. transformers reads it by `[...]` when it needs the tensor.

    read: reads the tensor; with `like`, it takes `rows` and `dtype` as TensorFile.read does
    like: returns a tensor of its shape without values
    """

    def __init__(self, read: Callable[..., Tensor], like: Callable[[], Tensor] | None = None) -> None:
        self._read, self._like = read, like

    def __getitem__(self, index: object) -> Tensor:
        return self._read()

    def for_shard(self, shard: DTensor) -> Unread:
        """Read only the shard's rows, in its dtype, if the tensor has the shard's full shape."""
        if self._like is None or self._like().shape != shard.shape or not (own := own_part(shard)):
            return self
        return Unread(partial(self._read, rows=own[0], dtype=shard.dtype))


def _facts_of_files(file_of: Mapping[str, TensorFile]) -> dict[str, str]:
    """Facts that must be equal on all processes of shared reads."""
    known: dict[str, list[Any]] = defaultdict(list)
    for name, file in file_of.items():
        like = file.like(name)
        known[f"tensors of {file.path.name}"].append([name, [*like.shape], str(like.dtype)])
    return {name: digest(json.dumps(facts)) for name, facts in known.items()}


def _fill(
    stage: PreTrainedModel,
    folder: Path,
    file_of: Mapping[str, TensorFile],
    ties: Ties,
    unread: dict[str, Unread],
    device: str,
    *,
    whole: Collection[str] | None = None,
    new: Collection[str] = (),
) -> list[str]:
    if next(stage.parameters(), None) is None:  # a stage without parameters, which passes on its input
        return []
    mapping = get_model_conversion_mapping(stage)
    for entry in mapping:  # a conversion to the CPU would move tensors without values
        if device == "meta" and isinstance(entry, WeightConverter):
            entry.force_cpu = False
    renamed = {} if whole is None else {key: name for key, name, _ in _renamed(unread, stage, mapping, whole)}
    _add_names_of_ties(unread, stage, ties, mapping)
    _read_own_rows(unread, stage, mapping)
    config = LoadStateDictConfig(
        weight_mapping=mapping,
        dtype=stage.dtype,
        device_map={"": device},
        dtype_plan=stage._get_dtype_plan(stage.dtype),  # weights that some families keep in float32
    )
    with _one_tensor_at_a_time():
        info, _ = convert_and_load_state_dict_in_model(stage, unread, config)
    tie_within(stage, ties)
    info.missing_keys -= {n for names in ties if not info.missing_keys.issuperset(names) for n in names}
    info.unexpected_keys = _without_prediction_layers(stage, set(renamed.values()).difference(whole or ()))
    stage._adjust_missing_and_unexpected_keys(info)  # ignore weights that its family omits on purpose
    fresh = {name for name in info.missing_keys if any(fnmatchcase(name, pattern) for pattern in new)}
    info.missing_keys -= fresh
    foreign = [key for key, name in renamed.items() if name in info.unexpected_keys]
    if problems := _problems(info, foreign):
        value = f"the weights in {folder}"
        raise CheckpointError(value, "; ".join(problems), _remedy(stage, info.missing_keys, file_of, foreign))
    _check_ties(file_of, ties, {name: key for key, name in renamed.items()}, stage.dtype)
    return sorted(fresh)


def _check_ties(
    file_of: Mapping[str, TensorFile], ties: Ties, stored: Mapping[str, str], dtype: torch.dtype
) -> None:
    """Raise CheckpointError if files have several values of one weight. stored: our names -> their keys"""
    for keys in (pair for names in ties for pair in pairwise(stored[n] for n in names if n in stored)):
        first, reader = file_of[keys[0]], HostReader()
        count = first.like(keys[0]).shape[0]
        for begin in range(0, count, _ROWS):
            rows = slice(begin, min(begin + _ROWS, count))
            parts = [file_of[key].read(key, reader, rows, dtype)[rows] for key in keys]
            if not torch.equal(*parts):
                raise CheckpointError(
                    f"{keys[0]} and {keys[1]} in {first.path.parent}",
                    "the config ties them to one weight, and their values differ",
                    "Set tie_word_embeddings to false in config.json, as transformers does for itself, "
                    "or remove one of them",
                )


def _without_prediction_layers(stage: PreTrainedModel, names: set[str]) -> set[str]:
    """`names` without those of prediction layers (MTP), which follow the model's own layers in files."""
    text = stage.config.get_text_config()
    count = getattr(text, "num_mtp_layers", None) or 0
    layers = {str(text.num_hidden_layers + index) for index in range(count)}
    return {name for name in names if not ((layer := _LAYER.match(name)) and layer[2] in layers)}


def _problems(info: Any, foreign: Collection[str]) -> list[str]:
    """The problems of the files, as text. foreign: names in the files that the model does not have"""
    wrong: dict[str, Collection[str]] = {
        "{} of another shape than the model's": [
            f"{name} is {list(stored)}, not {list(wanted)}" for name, stored, wanted in info.mismatched_keys
        ],
        "{} that transformers cannot convert": [
            f"{name} ({' '.join(text.split())})" for name, text in info.conversion_errors.items()
        ],
        "it lacks {} of the model's weights": info.missing_keys - info.conversion_errors.keys(),
        "{} that the model has no place for": foreign,
    }
    return [f"{text.format(len(names))}: {_first(names)}" for text, names in wrong.items() if names]


def _remedy(
    stage: PreTrainedModel, missing: Collection[str], stored: Collection[str], foreign: Collection[str]
) -> str:
    """The remedy if the files have the names `stored`, and `missing` are not among them."""
    for wrapper, writer in _WRAPPERS.items():
        plain = {key.replace(wrapper, ""): key for key in stored if wrapper in key}
        if near := sorted(plain.keys() & set(missing)):
            return f"The files have {plain[near[0]]} for {near[0]}: save the model without {writer}"
    if any(_SCALE.search(key) for key in foreign):
        return (
            "The weights are quantized, and its config.json does not say how (quantization_config): take the "
            "model in bfloat16, or dequantize it with transformers and save that"
        )
    layers = stage.config.get_text_config().num_hidden_layers
    numbers = [int(layer[2]) for key in stored if (layer := _LAYER.match(key))]
    depth = 1 + max(numbers, default=-1)
    if numbers and depth != layers and any(map(_LAYER.match, (*missing, *foreign))):
        return f"The config.json has {layers} layers and the files have {depth}: take both from one model"
    remedy = "Take the weights and the config.json of one model"
    if not missing:
        return f"{remedy}, or save the model anew with transformers" if foreign else remedy
    example = f'new_weights=("{min(missing)}",)'
    return f"{remedy}, or name what is to get new values: {example}, or model.new_weights in a config"


def _first(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Turn off transformers' prefetching threads, whose tensors take memory, and its progress bar."""
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
    unread: dict[str, Unread], stage: PreTrainedModel, ties: Ties, mapping: Sequence[WeightTransform]
) -> None:
    """Add a tied weight, which is stored under one of its names, under this stage's name for it too."""
    own = set(dict(stage.named_parameters(remove_duplicate=False)))
    tied = {name for names in ties for name in names}
    if own.isdisjoint(tied):
        return
    stored = {}
    for key, renamed, _ in _renamed(unread, stage, mapping, tied):
        stored[renamed] = stored[key] = key
    for names in ties:
        keys = [stored[name] for name in names if name in stored]
        for name in own.intersection(names):
            if keys and name not in stored:
                unread[name] = unread[keys[0]]


def _read_own_rows(
    unread: dict[str, Unread], stage: PreTrainedModel, mapping: Sequence[WeightTransform]
) -> None:
    """If a tensor becomes a sharded parameter without conversion, read only the rows of this rank's shard."""
    shards = {name: live for name, live in destinations(stage).items() if isinstance(live, DTensor)}
    if not shards:
        return
    for key, name, is_converted in _renamed(unread, stage, mapping):
        if name in shards and not is_converted:
            unread[key] = unread[key].for_shard(shards[name])


def _renamed(
    unread: Collection[str],
    stage: PreTrainedModel,
    mapping: Sequence[WeightTransform],
    others: Collection[str] = (),
) -> list[tuple[str, str, bool]]:
    """For each key, transformers' name for it, and whether transformers converts the tensor.

    The order is that of transformers, as some renamings depend on earlier keys.

    others: names that the stage may lack
    """
    mapping = copy.deepcopy(mapping)  # renamings keep state about earlier keys
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = dict.fromkeys((*stage.state_dict(), *others), True)
    new_names = []
    for key in sorted(unread, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, stage.base_model_prefix, known)
        if name not in known and key in known:  # as the loader does
            name, pattern = rename_source_key(key, [], [], stage.base_model_prefix, known)
        new_names.append((key, name, pattern is not None))
    return new_names


def tie_within(stage: nn.Module, ties: Ties) -> None:
    """Make names of one weight on the same stage one parameter again."""
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    for names in ties:
        first, *others = [name for name in names if name in parameters] or [""]
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(stage.get_submodule(owner), attribute, parameters[first])
