"""Save and load the whole model's files, by all stages together."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.errors import CheckpointError, ConfigError
from penstock.models.tracing.meta import write_through
from penstock.models.weights import files as weights
from penstock.models.weights.files import INDEX, SINGLE, Ties
from penstock.models.weights.folder import Hashed, ManifestEntry
from penstock.models.weights.tensor_file import widest_first, write_tensors
from penstock.reading import parse_size
from penstock.runtime.ranks import Ranks
from penstock.runtime.sharded_weights import meta_like
from penstock.runtime.stage import Stage

MAX_SHARD_SIZE = "50GB"  # transformers' own
GENERATION = "generation_config.json"


class SavedShard(NamedTuple):
    """One file of the folder: the names of its tensors, which are all from one stage."""

    stage: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class SavedModel:
    """All that stages need to write and read the whole model's files, except the weights.

    kind: the model's class
    whole: the names of the whole model's tensors
    other_files: contents of further files of the model's original folder, such as its tokenizer's
        (Source.other_files); written unchanged, even if that folder is gone
    """

    config: PretrainedConfig
    generation_config: GenerationConfig | None
    ties: Ties
    other_files: Mapping[str, bytes] | None = None
    kind: type[PreTrainedModel] | None = None
    whole: Collection[str] | None = None

    def written(self, module: nn.Module) -> list[str]:
        """The names in the state of a stage's `module` that are saved."""
        return [name for name in module.state_dict() if name not in self.copies]

    def unread(self, stages: Mapping[int, Stage], *, pretrained: bool) -> str | None:
        """A parameter of the stages that a load would not read; None if all would be read.

        pretrained: a load by from_pretrained, which makes the model from the config; else by `load`
        """
        if self.kind is None or not pretrained:
            return None
        with torch.device("meta"):
            known = self.kind(self.config).state_dict().keys()
        names = {name for stage in stages.values() for name, _ in stage.module.named_parameters()}
        return min(names - known, default=None)

    @property
    def copies(self) -> frozenset[str]:
        """Names of weights that are saved under another name."""
        return frozenset(name for names in self.ties for name in names[1:])

    def lay_out(
        self, stages: Mapping[int, Stage], states: Mapping[int, Mapping[str, Tensor]] | None = None
    ) -> dict[int, FileLayout]:
        """The layouts of this process's stages, for `write`.

        states: by stage, the values to write, in place of those of its module
        """
        return {
            index: FileLayout.of(stage.module, self.copies, (states or {}).get(index))
            for index, stage in stages.items()
        }

    def write(
        self,
        folder: Path,
        layouts: Mapping[int, FileLayout],
        processes: Ranks,
        max_shard_size: int | str = MAX_SHARD_SIZE,
    ) -> Hashed:
        """Write this process's stages into `folder`; process 0 adds everything else. Collective.

        Returns the entries of this process's weights in the manifest.

        A stage is in one file, or in several of `max_shard_size` at most (bytes, or text such as "5GB"; a
        single weight may be larger). Peak memory is the stage plus the converted weights of a layer.
        """
        limit = parsed_size(max_shard_size)
        own = [(index, layout.sizes) for index, layout in layouts.items()]
        gathered = processes.gather(own)  # before any work that can fail on one process alone
        sizes = {int(index): names for stages in gathered for index, names in stages}
        shards = make_shards(sizes, limit)
        mine = {file: shard for file, shard in shards.items() if shard.stage in layouts}
        entries = {f: layouts[shard.stage].write(folder / f, shard.names) for f, shard in mine.items()}
        if processes.index == 0:
            self.write_rest(folder, shards, sizes)
        return entries

    def write_rest(
        self, folder: Path, shards: Mapping[str, SavedShard], sizes: Mapping[int, Mapping[str, int]]
    ) -> None:
        """Write the index, config and tokenizer. sizes: bytes, by stage and name"""
        if len(shards) > 1:
            weight_map = {name: file for file, shard in shards.items() for name in shard.names}
            total = sum(sizes[shard.stage][name] for shard in shards.values() for name in shard.names)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        self.config.save_pretrained(folder)
        others = self.other_files or {}
        if self.generation_config is not None and GENERATION not in others:
            self.generation_config.save_pretrained(folder)
        for name, content in others.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    def load(self, folder: str | Path, stages: Mapping[int, Stage]) -> None:
        """Load the stages' weights, in place, one tensor after the other.

        Raises CheckpointError, before any weight of this process changes.
        """
        self.check(folder, stages)
        for stage in stages.values():
            self._read(Path(folder), stage.module)

    def _read(self, folder: Path, module: PreTrainedModel) -> None:
        parameter = next(module.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        weights.load(write_through(module), _weight_files(folder), self.ties, device)

    def check(self, folder: str | Path, stages: Mapping[int, Stage]) -> None:
        """Raise the CheckpointError of `load` for this folder. No tensor is read."""
        files = _weight_files(Path(folder))
        for stage in stages.values():
            weights.check(write_through(stage.module), files, self.ties, whole=self.whole)


def _weight_files(folder: Path) -> list[Path]:
    files = weights.weight_files(folder) if folder.is_dir() else []
    if not files:
        rule = "it holds no weights" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(str(folder), rule, "Give a folder that save_pretrained wrote")
    return files


def make_shards(sizes: Mapping[int, Mapping[str, int]], limit: int) -> dict[str, SavedShard]:
    """The files of a folder, by their names, from the bytes of each stage's weights.

    If several stages have a tensor of one name, such as a buffer, the first stage writes it.
    """
    shards: list[SavedShard] = []
    met: set[str] = set()
    for stage, names in sorted(sizes.items()):
        new = {name: size for name, size in names.items() if name not in met}
        met.update(new)
        split = split_state_dict_into_shards_factory(
            new, get_storage_size=lambda size: size, filename_pattern="{suffix}", max_shard_size=limit
        )
        shards += [SavedShard(stage, tuple(names)) for names in split.filename_to_tensors.values()]
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def parsed_size(size: int | str) -> int:
    """Bytes of a number, or of text such as "5GB". Raises ConfigError."""
    byte_count = int(parse_size(str(size)) or 0)
    if byte_count < 1:
        raise ConfigError(
            f"max_shard_size={size!r}", "it is a number of bytes", 'Give e.g. 5_000_000_000 or "5GB"'
        )
    return byte_count


@dataclass(frozen=True)
class FileLayout:
    """The names and shapes with which a stage's weights are saved. Computed without values.

    state: the values under the stage's own names
    groups: these names in groups that are converted together, usually of a layer
    files: for each group its converted tensors, on the meta device, under the names in the files
    """

    stage: PreTrainedModel
    state: Mapping[str, Tensor]
    groups: Sequence[Sequence[str]]
    files: Sequence[Mapping[str, Tensor]]

    @classmethod
    def of(
        cls, stage: PreTrainedModel, left_out: Collection[str], state: Mapping[str, Tensor] | None = None
    ) -> FileLayout:
        """The layout of `stage`. state: the values to save; None takes the current ones"""
        values = stage.state_dict() if state is None else state
        left_out = {*left_out, *(stage._keys_to_ignore_on_save or ())}
        empty = {name: meta_like(value) for name, value in values.items() if name not in left_out}
        whole = revert_weight_conversion(stage, empty)
        by_layer: dict[str, list[str]] = {}
        for name in empty:
            by_layer.setdefault(_layer(name), []).append(name)
        groups = list(by_layer.values())
        files = [revert_weight_conversion(stage, {n: empty[n] for n in group}) for group in groups]
        if _shapes(*files) != _shapes(whole):  # a conversion joins weights of several layers
            return cls(stage, values, [list(empty)], [whole])
        return cls(stage, values, groups, files)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by the names in the files."""
        return {name: value.nbytes for file in self.files for name, value in file.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its name in the files; those of one group at a time."""
        return self._converted({name: value for file in self.files for name, value in file.items()})

    def write(self, file: Path, names: Collection[str]) -> ManifestEntry:
        """Write a safetensors file of the weights `names`, converting one group at a time."""
        chosen = {name: value for file in self.files for name, value in file.items() if name in names}
        layout = widest_first(chosen)
        buffers = {name for name, _ in self.stage.named_buffers()}
        return write_tensors(file, layout, self._converted(layout), buffers)

    def _converted(self, layout: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file in its order. A group of several widths is converted once for each."""
        for width in dict.fromkeys(value.itemsize for value in layout.values()):
            for group, file in zip(self.groups, self.files, strict=True):
                due = [name for name, value in file.items() if name in layout and value.itemsize == width]
                if due:
                    made = revert_weight_conversion(self.stage, {name: self.state[name] for name in group})
                    yield from ((name, made[name]) for name in due)


def _layer(name: str) -> str:
    """The name up to its first number, usually the index of a layer."""
    steps = name.split(".")
    index = next((index for index, step in enumerate(steps) if step.isdigit()), None)
    return "" if index is None else ".".join(steps[: index + 1])


def _shapes(*files: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for file in files for name, value in file.items()}
