"""The model that a pipeline is built from: an object, a config, or a local Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from penstock.errors import CheckpointError, ModelError
from penstock.models.weights.files import weight_files

ModelLike: TypeAlias = PreTrainedModel | PretrainedConfig | str | Path

# files of a model folder, beside weights and config, that transformers reads: of tokenizers (the vocabularies
# of each kind, chat templates), and of generation and processors
TOKENIZER = (
    "*token*.json", "*vocab*.json", "*vocab*.txt", "*vocab*.bpe", "merges.txt", "*.model", "*.spm",
    "*.tiktoken", "*.codes", "*.tokenizer", "dict.txt", "emoji.json", "normalizer.json", "byte_maps.json",
    "word_*.json", "chat_template*", "additional_chat_templates/*.jinja",
)  # fmt: skip
OTHERS = ("generation_config.json", "*processor*.json")


@dataclass(frozen=True)
class Source:
    """model: the whole model, on the meta device unless the caller gave one with values
    files: where its weights lie; none: they are in `model`, or to be initialised
    beside: what else of its folder goes with the model, by its name there
    """

    model: PreTrainedModel
    files: tuple[Path, ...] = ()
    beside: Mapping[str, Path] = field(default_factory=dict)

    def read_beside(self) -> dict[str, bytes]:
        """At once: the folder may be gone when the model is saved. Raises CheckpointError."""
        try:
            return {name: file.read_bytes() for name, file in self.beside.items()}
        except OSError as cause:
            raise CheckpointError(
                str(cause.filename),
                f"it belongs to the model and is unreadable ({cause.strerror})",
                "Put it back",
            ) from cause


def open_source(given: ModelLike, dtype: torch.dtype | None, attention: str | None) -> Source:
    """Find the model without reading any weight. Raises ModelError, CheckpointError."""
    if isinstance(given, PreTrainedModel):
        return _taken_as_it_is(given, dtype, attention)
    files: tuple[Path, ...] = ()
    found: dict[str, Path] = {}
    if isinstance(given, str | Path):
        folder = Path(given).absolute()
        if folder.is_dir():
            files, found = tuple(weight_files(folder)), beside(folder)
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
    return Source(model, files, found)


def beside(folder: Path, patterns: tuple[str, ...] = (*TOKENIZER, *OTHERS)) -> dict[str, Path]:
    """The files of a model's folder, by their names in it, that belong to its tokenizer, generation and
    processors.
    """
    found = (*sorted(folder.glob("*")), *sorted(folder.glob("*/*.jinja")))
    files = {file.relative_to(folder).as_posix(): file for file in found if file.is_file()}
    return {name: file for name, file in files.items() if any(fnmatch(name, pattern) for pattern in patterns)}


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
