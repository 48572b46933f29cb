"""The whole model's files, written and read by its stages."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.errors import CheckpointError, ConfigError
from penstock.models.tracing.meta import outlined
from penstock.models.weights import files as weights
from penstock.models.weights.files import DTYPES, Ties
from penstock.runtime.sharded_weights import outline
from penstock.runtime.stage import Stage
from penstock.runtime.transport.groups import Processes

MAX_SHARD_SIZE = "50GB"  # transformers' own
GENERATION = "generation_config.json"


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

    def lay_out(
        self, stages: Mapping[int, Stage], states: Mapping[int, Mapping[str, Tensor]] | None = None
    ) -> dict[int, Layout]:
        """What `write` takes, of this process's stages.

        states: by stage, what is written in place of the values that its module has then
        """
        return {
            index: Layout.of(stage.module, self.copies, (states or {}).get(index))
            for index, stage in stages.items()
        }

    def write(
        self,
        folder: Path,
        layouts: Mapping[int, Layout],
        processes: Processes,
        max_shard_size: int | str = MAX_SHARD_SIZE,
    ) -> None:
        """Write this process's stages into `folder`; process 0 adds index, configs and the files beside.

        A stage is in one file, or in several of `max_shard_size` at most (bytes, or text such as "5GB"; a
        single weight may be larger). Beside the stage itself never more than a layer is held.
        """
        limit = _bytes(max_shard_size)
        mine = [(index, layout.sizes) for index, layout in layouts.items()]
        told = processes.gather(mine)  # before anything that can fail on one process alone
        sizes = {int(index): held for part in told for index, held in part}
        shards = make_shards(sizes, limit)
        for file, shard in shards.items():
            if shard.stage in layouts:
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
        """Read the stages' weights back, in place, one tensor after the other.

        Raises CheckpointError, before any of this process is changed.
        """
        self.check(folder, stages)
        for stage in stages.values():
            weights.load(outlined(stage.module), _weight_files(Path(folder)), self.ties)

    def check(self, folder: str | Path, stages: Mapping[int, Stage]) -> None:
        """Raise CheckpointError where `load` would for what the folder holds. No tensor is read."""
        files = _weight_files(Path(folder))
        for stage in stages.values():
            weights.check(outlined(stage.module), files, self.ties)


def _weight_files(folder: Path) -> list[Path]:
    remedy = "Give a folder that save_pretrained wrote"
    if not folder.is_dir():
        raise CheckpointError(str(folder), "there is no such folder", remedy)
    files = weights.weight_files(folder)
    if not files:
        raise CheckpointError(str(folder), "it holds no weights", remedy)
    return files


@dataclass(frozen=True)
class Layout:
    """What a stage's weights are in the model's files, told without their values.

    state: the values by its own names
    groups: its own names, in groups that are converted together; most often a layer's
    files: by group, what is made of it, on the meta device, by name
    """

    stage: PreTrainedModel
    state: Mapping[str, Tensor]
    groups: Sequence[Sequence[str]]
    files: Sequence[Mapping[str, Tensor]]

    @classmethod
    def of(
        cls, stage: PreTrainedModel, left_out: Collection[str], state: Mapping[str, Tensor] | None = None
    ) -> Layout:
        """state: the values, where they are not those that the stage has now"""
        values = stage.state_dict() if state is None else state
        left_out = {*left_out, *(stage._keys_to_ignore_on_save or ())}
        outlines = {name: outline(value) for name, value in values.items() if name not in left_out}
        whole = revert_weight_conversion(stage, outlines)
        by_layer: dict[str, list[str]] = {}
        for name in outlines:
            by_layer.setdefault(_layer(name), []).append(name)
        groups = list(by_layer.values())
        parts = [revert_weight_conversion(stage, {n: outlines[n] for n in group}) for group in groups]
        if _shapes(*parts) != _shapes(whole):  # a conversion that puts several layers' weights together
            return cls(stage, values, [list(outlines)], [whole])
        return cls(stage, values, groups, parts)

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
        for group, part in zip(self.groups, self.files, strict=True):
            if chosen.keys().isdisjoint(part):
                continue
            made = revert_weight_conversion(self.stage, {name: self.state[name] for name in group})
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
