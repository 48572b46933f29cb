"""Save and load an adapter: PEFT's folder, which `PeftModel.from_pretrained(base_model, folder)` opens.

    adapter_model.safetensors   the trained tensors, under PEFT's names
    adapter_config.json         peft's LoraConfig, with the folder of the base model
    base_model.json             the base model's config and fingerprint, for a resume

The base model's weights stay in its own folder. PEFT reads one file, so each stage writes a part of it, and
process 0 joins the parts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import CheckpointError, UnfitError
from penstock.models.adapters import Adapter, LoraConfig, import_peft
from penstock.models.tracing.meta import write_through
from penstock.models.weights.files import Ties
from penstock.models.weights.folder import Hashed
from penstock.models.weights.reading import HostReader
from penstock.models.weights.saved import GENERATION, MAX_SHARD_SIZE, SavedModel
from penstock.models.weights.tensor_file import TensorFile, open_all, widest_first, write_tensors
from penstock.reading import read_json
from penstock.runtime.ranks import Ranks
from penstock.runtime.stage import Stage

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASE = "base_model.json"
_PART = "part-{:05d}.safetensors"

# options of an adapter that change the result of the same weights
_MEANING = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "lora_bias",
            "fan_in_fan_out", "trainable_token_indices")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SavedAdapter(SavedModel):
    """SavedModel for a model with an adapter: only the adapter is saved.

    names: for each parameter of the whole model that is saved, its name in the file
    base: returns the fingerprint of the base model
    """

    adapter: Adapter
    names: Mapping[str, str]
    base: Callable[[], str]

    def written(self, module: nn.Module) -> list[str]:
        return [name for name in module.state_dict() if name in self.names]

    def unread(self, stages: Mapping[int, Stage], *, pretrained: bool) -> str | None:
        """A trained parameter that PEFT's file would not contain."""
        trained = {n for s in stages.values() for n, p in s.module.named_parameters() if p.requires_grad}
        return min(trained - self.names.keys() - self.copies, default=None)

    def lay_out(
        self, stages: Mapping[int, Stage], states: Mapping[int, Mapping[str, Tensor]] | None = None
    ) -> dict[int, Any]:
        """By stage, the tensors by their names in the file."""
        full = {i: (states or {}).get(i) or stage.module.state_dict() for i, stage in stages.items()}
        return {
            index: {key: state[name] for name, key in self.names.items() if name in state}
            for index, state in full.items()
        }

    def write(
        self,
        folder: Path,
        layouts: Mapping[int, Any],
        processes: Ranks,
        max_shard_size: int | str = MAX_SHARD_SIZE,
    ) -> Hashed:
        """Write this process's stages; process 0 joins them to one file. Collective. There are no shards."""

        def write_parts() -> list[str]:
            files = {_PART.format(index): widest_first(tensors) for index, tensors in layouts.items()}
            for file, tensors in files.items():
                write_tensors(folder / file, tensors)
            return list(files)

        parts = processes.attempt("write its part of the adapter", write_parts)
        every = sorted(file for files in processes.gather(parts) for file in files)
        if processes.index:
            return {}
        entry = _join(folder, every)
        self._write_rest_of_adapter(folder)
        return {ADAPTER: entry}

    def _write_rest_of_adapter(self, folder: Path) -> None:
        config, kind = copy.deepcopy(self.adapter.config), self.kind
        config.inference_mode = True  # as PEFT writes it
        mapping = None
        if config.task_type is None and kind is not None:
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=mapping)
        base = {"config": json.loads(self.config.to_json_string(use_diff=False)), "fingerprint": self.base()}
        (folder / BASE).write_text(json.dumps(base, indent=1) + "\n", encoding="utf-8")
        for name, content in (self.other_files or {}).items():
            if name != GENERATION:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)

    def _read(self, folder: Path, module: PreTrainedModel) -> None:
        load_adapter(module, folder, self.names, self.ties)

    def check(self, folder: str | Path, stages: Mapping[int, Stage]) -> None:
        folder = Path(folder)
        self._check_config(folder)
        check_base(folder, self.base)
        with adapter_file(folder) as file:
            for stage in stages.values():
                check_adapter(file, stage.module, self.names, self.ties)

    def _check_config(self, folder: Path) -> None:
        content = read_object(folder / ADAPTER_CONFIG)
        ours = self.adapter.facts
        for key in _MEANING:
            if content.get(key, ours.get(key)) != ours.get(key):
                raise _unfit(folder, f"adapter with {key}={content[key]}", f"the model has {ours.get(key)}")


def config_in(folder: Path) -> LoraConfig:
    """The config of an adapter's folder, read by PEFT. Raises CheckpointError; ConfigError without PEFT."""
    read_object(folder / ADAPTER_CONFIG)
    try:
        return import_peft().PeftConfig.from_pretrained(str(folder))
    except Exception as cause:  # PEFT checks some keys, and raises any error for others
        rule, remedy = f"PEFT cannot read it: {cause}", "Give a folder that PEFT or penstock wrote"
        raise CheckpointError(str(folder / ADAPTER_CONFIG), rule, remedy) from cause


def read_object(file: Path) -> dict[str, Any]:
    """The keys of a JSON file of an adapter. Raises CheckpointError."""
    try:
        content = read_json(file)
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
        return content
    except (OSError, ValueError) as cause:
        rule = f"it cannot be read: {getattr(cause, 'strerror', None) or cause}"
        raise CheckpointError(str(file), rule, "Give a folder that holds an adapter") from cause


def adapter_file(folder: Path) -> TensorFile:
    """The file of the adapter in a folder. Raises CheckpointError."""
    if not (folder / ADAPTER).is_file():
        rule = "it cannot be read: there is no such file"
        raise CheckpointError(str(folder / ADAPTER), rule, "Give a folder that holds an adapter")
    return TensorFile(folder / ADAPTER)


def check_adapter(file: TensorFile, module: nn.Module, names: Mapping[str, str], ties: Ties) -> None:
    """Raise CheckpointError unless the adapter's file fits `module`, the whole model or a stage of it.

    names: those in the file, of the whole model's parameters
    """
    there, folder = set(file.names()), file.path.parent
    state = module.state_dict()
    for name, key in _keys(module, names, ties, there).items():
        if key not in there:
            raise _unfit(folder, f"{ADAPTER}: it lacks {key}")
        stored, wanted = list(file.like(key).shape), list(state[name].shape)
        if stored != wanted:
            raise _unfit(folder, f"{key} is {stored}, not {wanted}")
    if foreign := sorted(there.difference(names.values())):
        raise _unfit(folder, f"{ADAPTER}: it holds {foreign[0]}", "the model's adapter has no such tensor")


def load_adapter(module: PreTrainedModel, folder: Path, names: Mapping[str, str], ties: Ties) -> None:
    """Give `module`, the whole model or a stage of it, the values of the adapter in `folder`.

    names: those in the file, of the whole model's parameters
    """
    twin = write_through(module)
    with adapter_file(folder) as file:
        keys, reader = _keys(twin, names, ties, set(file.names())), HostReader()
        for prefix, owner in twin.named_modules():
            for table in (owner._parameters, owner._buffers):
                for name in table:
                    if key := keys.get(f"{prefix}.{name}".lstrip(".")):
                        table[name] = file.read(key, reader)


def check_base(folder: Path, base: Callable[[], str]) -> None:
    """Raise CheckpointError where the adapter in `folder` was trained on another base model.

    base: returns the fingerprint of the present one. An adapter written by PEFT has no fingerprint.
    """
    file = folder / BASE
    if not file.is_file():
        return
    trained_on = read_object(file).get("fingerprint")
    if trained_on != (fingerprint := base()):
        raise UnfitError(
            f"adapter {folder}",
            f"it was trained on another base model ({str(trained_on)[:12]}, and here is {fingerprint[:12]})",
            "Give the base model that it was trained on: adapter_config.json names its folder",
        )


def _keys(module: nn.Module, names: Mapping[str, str], ties: Ties, there: set[str]) -> dict[str, str]:
    """The names in the file of `module`'s parameters; for tied ones, the name that the file has."""
    aliases = {name: group for group in ties for name in group}
    keys = {}
    for name in module.state_dict():
        candidates = [names[other] for other in (name, *aliases.get(name, ())) if other in names]
        if candidates:
            keys[name] = next((key for key in candidates if key in there), candidates[0])
    return keys


def _join(folder: Path, parts: list[str]) -> Any:
    """Write one file with the tensors of all parts, one tensor after the other, and remove the parts."""
    with open_all(folder / part for part in parts) as file_of:
        layout, reader = widest_first({key: file.like(key) for key, file in file_of.items()}), HostReader()
        values = ((key, file_of[key].read(key, reader)) for key in layout)
        entry = write_tensors(folder / ADAPTER, layout, values)
    for part in parts:
        (folder / part).unlink()
    return entry


def _unfit(folder: Path, fault: str, rule: str = "the model's adapter has other tensors") -> UnfitError:
    return UnfitError(f"adapter {folder}: {fault}", rule, "Make the model's adapter as it was trained")
