"""``penstock merge``: an adapter and its base model as one model's folder, a layer in memory at a time."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock.checkpoint.contents import STATE
from penstock.checkpoint.save_load import check_config
from penstock.errors import CheckpointError, ConfigError, RunError
from penstock.models import hub
from penstock.models.adapters import LoraConfig, merge, merged_ties, names_in_file, without_adapters
from penstock.models.huggingface.stages import cut
from penstock.models.model_folder import config_of, other_files
from penstock.models.mtp import FACTOR
from penstock.models.source import Source, open_source
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import Chain, find_chain
from penstock.models.weights.files import tied_names
from penstock.models.weights.folder import MANIFEST, Hashed, check_lengths, write_folder
from penstock.models.weights.hashes import hashed_meanwhile
from penstock.models.weights.saved import FileLayout, SavedModel, make_shards, parsed_size
from penstock.models.weights.saved_adapter import (
    ADAPTER_CONFIG,
    BASE,
    adapter_file,
    check_adapter,
    check_base,
    config_in,
    load_adapter,
)
from penstock.runtime.ranks import Ranks
from penstock.train.checkpoints import newest_checkpoint


def merge_folder(
    adapter: Path, out: Path, base: Path | None, max_shard_size: str, *, trusted: bool = False
) -> Path:
    """Write the merged model into `out`, complete or not at all.

    Args:
        adapter: an adapter's folder, as checkpoints/best of a run, or the output folder of a run
        base: the folder of the base model; None for the one that the adapter names
        trusted: whether Python code in that folder may run

    Returns the folder of the adapter.
    Raises ConfigError, CheckpointError, ModelError; RunError on a full disk.
    """
    limit, folder = parsed_size(max_shard_size), _adapter_folder(adapter)
    config = config_in(folder)
    named = _base_folder(config, folder, base, trusted)
    _check_out(out, folder, named)
    config.init_lora_weights = True  # the values come from the file
    factor = _prediction_factor(folder, config_of(named, trusted))
    source = open_source(named, None, None, config, mtp_factor=factor, trusted=trusted)
    if not source.files:
        raise ConfigError(f"base model {named}", "its folder holds no weights", "Give --base FOLDER")
    if (folder / BASE).is_file():
        check_config(folder, source.model.config)
    check_base(folder, source.base_fingerprint(0))
    merger = _Merger(source, folder)

    def write(target: Path) -> Hashed:
        with ExitStack() as hashing:  # files that penstock wrote are compared with their hashes
            for path in filter(None, (folder if (folder / MANIFEST).exists() else None, source.written)):
                check_lengths(path, added=True)
                hashing.enter_context(hashed_meanwhile(path, Ranks()))
            return merger.write(target, limit)

    try:
        with source.with_room():
            write_folder(out, write, Ranks())
    except OSError as error:
        rule = f"it cannot be written ({error.strerror or error})"
        raise RunError(f"--out {out}", rule, "Make room on that disk, or name another folder") from error
    return folder


def _base_folder(config: LoraConfig, folder: Path, base: Path | None, trusted: bool) -> Path:
    """The base model's folder: `base`, or the one that the adapter's config names. Raises ConfigError."""
    named = base or config.base_model_name_or_path
    if base is None and hub.is_name(named):
        named, _ = hub.folder_of(str(named), config.revision, trusted=trusted)
    if not named or not Path(named).is_dir():
        rule = f"{folder / ADAPTER_CONFIG} names it, and there is no such folder"
        raise ConfigError(f"base model {named}", rule, "Give the base model's folder: --base FOLDER")
    return Path(named)


def _check_out(out: Path, *merged: Path) -> None:
    """Raise ConfigError if the merged model would replace a checkpoint, or one of its own sources."""
    rule = "" if not (out / STATE).exists() else "it is a checkpoint that a run can go on from"
    for folder in map(os.path.realpath, merged):
        if Path(os.path.realpath(out)).is_relative_to(folder):
            rule = f"it is or lies in {folder}, which is merged"
    if rule:
        raise ConfigError(f"--out {out}", f"{rule}, and would be replaced or changed", "Name another folder")


def _adapter_folder(folder: Path) -> Path:
    """The folder of the adapter: this one, or a run's newest checkpoint. Raises CheckpointError."""
    if (folder / ADAPTER_CONFIG).is_file():
        return folder
    newest, passed, _ = newest_checkpoint(folder)
    for reason in passed:
        print(f"penstock: warning: passed over {reason}", file=sys.stderr)
    if newest is None or not (newest / ADAPTER_CONFIG).is_file():
        contents = f"no {ADAPTER_CONFIG}, and no checkpoint with one"
        raise CheckpointError(str(folder), f"it holds {contents}", "Give a run's folder, or an adapter's")
    return newest


def _prediction_factor(adapter: Path, config: PretrainedConfig) -> float | None:
    """The base config's mtp_loss_scaling_factor if the adapter has prediction layers; else None."""
    text = config.get_text_config()
    if not getattr(text, "num_mtp_layers", None):
        return None
    first = f".layers.{text.num_hidden_layers}."
    with adapter_file(adapter) as file:
        if not any(first in name for name in file.names()):
            return None
    factor = getattr(config, "mtp_loss_scaling_factor", None)
    return FACTOR if factor is None else float(factor)


class _Merger:
    """Merges one layer after the other; the embedding goes with the first layer, the head with the last."""

    def __init__(self, source: Source, folder: Path) -> None:
        assert source.adapter is not None
        self._source, self._folder, self._adapter = source, folder, source.adapter
        self._chain: Chain = find_chain(source.model)
        self._names, self._ties = names_in_file(source.model, source.adapter), tied_names(source.model)
        with without_adapters(source.model):
            plain = tied_names(source.model)
        with adapter_file(folder) as file:
            check_adapter(file, source.model, self._names, self._ties)
        self._merged_ties = merged_ties(source.model, plain)
        self._untied = len(self._merged_ties) < len(plain)

    def write(self, folder: Path, limit: int) -> Hashed:
        config = self._source.model.config
        if self._untied:  # the adapter changed only one of the tied weights
            config.tie_word_embeddings = False
        files = self._source.read_other_files()
        files |= {name: file.read_bytes() for name, file in other_files(self._folder).items()}
        saved = SavedModel(config, None, self._merged_ties, files, type(self._source.model))
        layers = range(self._chain.count)
        with without_adapters(self._source.model):
            sizes = {index: FileLayout.of(self._part(index), saved.copies).sizes for index in layers}
        shards, entries = make_shards(sizes, limit), Hashed()
        for index in layers:
            part = self._merged(index)
            layout = FileLayout.of(part, saved.copies)
            mine = {file: shard for file, shard in shards.items() if shard.stage == index}
            entries |= {file: layout.write(folder / file, shard.names) for file, shard in mine.items()}
        saved.write_rest(folder, shards, sizes)
        return entries

    def _part(self, index: int) -> PreTrainedModel:
        """The model of one layer, on the meta device."""
        info = StageInfo(index, self._chain.count)
        return cut(self._source.model, self._chain, range(index, index + 1), info, values=False)

    def _merged(self, index: int) -> PreTrainedModel:
        part = self._part(index)
        self._source.fill(part, 0, torch.device("cpu"))
        load_adapter(part, self._folder, self._names, self._ties)
        merge(part, self._adapter)
        return part
