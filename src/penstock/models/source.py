"""The model that a pipeline is built from: an object, a config, or a local Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from penstock.errors import ModelError
from penstock.models.weights import weight_files

ModelLike: TypeAlias = PreTrainedModel | PretrainedConfig | str | Path


@dataclass(frozen=True)
class Source:
    """model: the whole model, on the meta device unless the caller gave one with values
    files: where its weights lie; none: they are in `model`, or to be initialised
    """

    model: PreTrainedModel
    files: tuple[Path, ...] = ()


def open_source(given: ModelLike, dtype: torch.dtype | None, attention: str | None) -> Source:
    """Find the model without reading any weight. Raises ModelError, CheckpointError."""
    if isinstance(given, PreTrainedModel):
        return _taken_as_it_is(given, dtype, attention)
    files: tuple[Path, ...] = ()
    if isinstance(given, str | Path):
        files = tuple(weight_files(Path(given))) if Path(given).is_dir() else ()
        given = _config_of(Path(given))
    if not isinstance(given, PretrainedConfig):
        raise ModelError(
            f"a model given as {type(given).__name__}",
            "AutoPipeline takes a transformers model, a config of one, or a local folder with config.json",
            "Pass one of these, or build stages of your own with Pipeline.from_provider",
        )
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(given, dtype=dtype or given.dtype, **options)
    except (ValueError, ImportError, KeyError) as cause:
        raise ModelError(
            f"model_type={given.model_type!r}",
            f"transformers builds no causal LM from it: {str(cause).splitlines()[0]}",
            "Take a config of a decoder-only language model",
        ) from cause
    return Source(model, files)


def _taken_as_it_is(model: PreTrainedModel, dtype: torch.dtype | None, attention: str | None) -> Source:
    """A model object; raises ModelError where another dtype or attention is asked for than it has."""
    for option, wanted, own in (
        ("dtype", dtype, model.dtype),
        ("attention", attention, model.config._attn_implementation),
    ):
        if wanted not in (None, own):
            raise ModelError(
                f"{option}={wanted} for a model object with {own}",
                "a model object is taken as it is",
                "Build the object so, or give its config or folder in its place",
            )
    return Source(model)


def _config_of(folder: Path) -> PretrainedConfig:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model folder {folder}",
            "it holds no config.json" if folder.is_dir() else "there is no such folder",
            "Give the path of a local Hugging Face model folder",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as cause:
        raise ModelError(
            str(folder / "config.json"), f"transformers cannot read it: {cause}", "Mend or replace the file"
        ) from cause
    return config
