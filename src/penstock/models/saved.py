"""The whole model's files, written and read by its stages."""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.errors import CheckpointError, ConfigError
from penstock.models import weights
from penstock.models.weights import Ties
from penstock.runtime.processes import Processes
from penstock.runtime.stage import Stage

MAX_SHARD_SIZE = "50GB"  # transformers' own
GENERATION = "generation_config.json"

# what safetensors calls torch's dtypes
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class Shard(NamedTuple):
    """One file of the folder: the names that it holds, all of one stage's."""

    stage: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class SavedModel:
    """What of the whole model its stages need to write and read its files.

    beside: contents of files of the folder that the model came from which belong to it as well, such as its
        tokenizer's (Source.beside); written as they are, whatever has become of that folder
    """

    config: PretrainedConfig
    generation_config: GenerationConfig | None
    ties: Ties
    stages: int
    beside: Mapping[str, bytes] | None = None

    @property
    def copies(self) -> frozenset[str]:
        """Names under which a weight appears that is saved under another."""
        return frozenset(name for names in self.ties for name in names[1:])

    def write(
        self,
        folder: Path,
        stages: Mapping[int, Stage],
        processes: Processes,
        max_shard_size: int | str = MAX_SHARD_SIZE,
    ) -> None:
        """Write this process's stages into `folder`; process 0 adds index, configs and the files beside.

        A stage is in one file, or in several of `max_shard_size` at most (bytes, or text such as "5GB"; a
        single weight may be larger). Beside the stage itself never more than a layer is held.
        """
        limit = _bytes(max_shard_size)
        layouts = {index: Layout.of(stage.module, self.copies) for index, stage in stages.items()}
        mine = [(index, layout.sizes) for index, layout in layouts.items()]
        told = processes.gather(mine)  # before anything that can fail on one process alone
        sizes = {int(index): held for part in told for index, held in part}
        shards = make_shards(sizes, limit)
        for file, shard in shards.items():
            if shard.stage in stages:
                layouts[shard.stage].write(folder / file, shard.names)
        if processes.index == 0:
            self._write_rest(folder, shards, sizes)

    def _write_rest(
        self, folder: Path, shards: Mapping[str, Shard], sizes: Mapping[int, Mapping[str, int]]
    ) -> None:
        if len(shards) > 1:
            held = {
                file: {name: sizes[shard.stage][name] for name in shard.names}
                for file, shard in shards.items()
            }
            weights.write_index(folder, held)
        self.config.save_pretrained(folder)
        beside = self.beside or {}
        if self.generation_config is not None and GENERATION not in beside:
            self.generation_config.save_pretrained(folder)
        for name, content in beside.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    def load(self, folder: str | Path, stages: Mapping[int, Stage]) -> None:
        """Read the stages' weights back, in place. Raises CheckpointError."""
        folder = Path(folder)
        files = weights.weight_files(folder)
        if not files:
            raise CheckpointError(
                str(folder), "it holds no weights", "Give a folder that save_pretrained wrote"
            )
        for stage in stages.values():
            memo: dict[int, Any] = {
                id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in stage.module.parameters()
            }
            fresh = copy.deepcopy(stage.module, memo)
            weights.load(fresh, files, self.ties)
            read = fresh.state_dict()
            with torch.no_grad():
                for name, own in stage.module.state_dict().items():
                    own.copy_(read[name])


@dataclass(frozen=True)
class Layout:
    """What a stage's weights are in the model's files, told without their values.

    groups: its own names, in groups that are converted together; most often a layer's
    files: by group, what is made of it, on the meta device, by name
    """

    stage: PreTrainedModel
    groups: Sequence[Sequence[str]]
    files: Sequence[Mapping[str, Tensor]]

    @classmethod
    def of(cls, stage: PreTrainedModel, left_out: Collection[str]) -> Layout:
        left_out = {*left_out, *(stage._keys_to_ignore_on_save or ())}
        state = {name: value.to("meta") for name, value in stage.state_dict().items() if name not in left_out}
        whole = revert_weight_conversion(stage, state)
        by_layer: dict[str, list[str]] = {}
        for name in state:
            by_layer.setdefault(_layer(name), []).append(name)
        groups = list(by_layer.values())
        parts = [revert_weight_conversion(stage, {name: state[name] for name in group}) for group in groups]
        if _shapes(*parts) != _shapes(whole):  # a conversion that puts several layers' weights together
            return cls(stage, [list(state)], [whole])
        return cls(stage, groups, parts)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: value.nbytes for part in self.files for name, value in part.items()}

    def write(self, file: Path, names: Collection[str]) -> None:
        """A safetensors file of the weights `names`, converted and written group by group."""
        chosen = {name: value for part in self.files for name, value in part.items() if name in names}
        header, begins = _header(chosen)
        with file.open("wb") as opened:
            opened.write(header)
            for name, value in self._converted(chosen):
                opened.seek(begins[name])
                opened.write(_content(value))

    def _converted(self, chosen: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        own = self.stage.state_dict()
        for group, part in zip(self.groups, self.files, strict=True):
            if chosen.keys().isdisjoint(part):
                continue
            made = revert_weight_conversion(self.stage, {name: own[name] for name in group})
            yield from ((name, value) for name, value in made.items() if name in chosen)


def make_shards(sizes: Mapping[int, Mapping[str, int]], limit: int) -> dict[str, Shard]:
    """The files of a folder, by their names, from each stage's weights and their bytes.

    What several stages hold under one name, such as a buffer, is the first one's.
    """
    shards: list[Shard] = []
    met: set[str] = set()
    for stage, held in sorted(sizes.items()):
        names: list[str] = []
        filled = 0
        for name, size in held.items():
            if name in met:
                continue
            if names and filled + size > limit:
                shards.append(Shard(stage, tuple(names)))
                names, filled = [], 0
            met.add(name)
            names.append(name)
            filled += size
        if names:
            shards.append(Shard(stage, tuple(names)))
    if len(shards) == 1:
        return {weights.SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def _bytes(size: int | str) -> int:
    parts = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", str(size).upper())
    found = int(parts[1]) * 1000 ** " KMGT".index(parts[2] or " ") if parts else 0
    if found < 1:
        raise ConfigError(
            f"max_shard_size={size!r}", "it is a number of bytes", 'Give e.g. 5_000_000_000 or "5GB"'
        )
    return found


def _layer(name: str) -> str:
    """The name up to its first number: that of a layer, most often."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _shapes(*parts: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for part in parts for name, value in part.items()}


def _header(held: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """A safetensors file's header, and where in the file each tensor begins.

    Wider numbers first, so that each begins at a multiple of its width.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(held, key=lambda name: (-held[name].itemsize, name)):
        value = held[name]
        if value.dtype not in DTYPES:
            raise CheckpointError(
                f"{name} of {value.dtype}", "safetensors has no such dtype", "Convert it to another first"
            )
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape),
                        "data_offsets": [end, end + value.nbytes]}  # fmt: skip
        end += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {
        name: start + header[name]["data_offsets"][0] for name in held
    }


def _content(value: Tensor) -> memoryview:
    plain = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]
