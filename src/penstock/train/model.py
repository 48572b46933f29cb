"""The model that the config names, in a form that AutoPipeline accepts, and the folder of its tokenizer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from penstock.errors import ConfigError
from penstock.models import hub
from penstock.models.model_folder import check_numbers, config_of
from penstock.models.source import ModelLike
from penstock.train.config.model import ModelSection
from penstock.train.config.sections import TrainConfig

# keys of older config.json files that transformers still reads, one that no config.json has, and those of
# heads for labels
_MORE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "experts_implementation",
              "num_labels", "classifier_dropout")  # fmt: skip

# keys that a model reads from its config.json, though its config class does not list them
_READ_ALL_THE_SAME = {"qwen3_moe": ("head_dim",)}


def named_model(section: ModelSection) -> ModelLike:
    """A folder or a Hub name whose weights are to be read, or a config. Reads no weight.

    Raises ConfigError, ModelError, HubError.
    """
    if section.config is not None or section.weights == "random":
        return config_in(section)
    return str(section.path) if hub.is_name(section.path) else _folder(section)


def config_in(section: ModelSection) -> PretrainedConfig:
    """The model's config alone. Raises ConfigError, ModelError, HubError."""
    if section.config is not None:
        return inline_config(section.config)
    trusted, folder = section.trust_remote_code, _folder(section)
    if hub.is_name(section.path):
        folder = hub.fetch(str(section.path), section.commit or section.revision, "config", trusted=trusted)
    return config_of(folder, trusted)


def _folder(section: ModelSection) -> Path:
    assert section.path is not None
    return Path(section.path).expanduser()


def has_hub_weights(section: ModelSection) -> bool:
    """Whether the weights are those of a Hub name."""
    return section.weights == "auto" and hub.is_name(section.path)


def tokenizer_folder(config: TrainConfig) -> str:
    """The folder of the tokenizer that the config names, or the word "bytes". Raises HubError."""
    section = config.model
    name = config.data.tokenizer or str(section.path)
    if not hub.is_name(name):
        return name
    revision = section.commit or section.revision if name == section.path else None
    return str(hub.fetch(name, revision, "tokenizer", trusted=section.trust_remote_code))


def positions(config: PretrainedConfig) -> int | None:
    """The most tokens of a row; None if the config has no limit."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def positions_of(model: PreTrainedModel) -> int | None:
    """Likewise. RoBERTa and its like number tokens from behind the id of padding on: fewer are left."""
    longest = positions(model.config)
    taken = (
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    )
    return None if longest is None else longest - next(taken, 0)


def inline_config(keys: dict[str, Any]) -> PretrainedConfig:
    """The transformers config with these keys, `model_type` among them.

    Raises: ConfigError for a key that the config's class does not have; transformers would keep it, and use
        the default of the key that was meant.
    """
    model_type, keys = keys["model_type"], {key: keys[key] for key in keys if key != "model_type"}
    try:
        known = AutoConfig.for_model(model_type)
    except (ValueError, KeyError):
        rule = "transformers knows no such model type"
        remedy = _suggest(model_type, CONFIG_MAPPING_NAMES, "Take the model_type of some config.json")
        raise ConfigError(f"model.config.model_type={model_type!r}", rule, remedy) from None
    kind = type(known).__name__
    names = {*known.to_dict(), *known.attribute_map, *_MORE_KEYS, *_READ_ALL_THE_SAME.get(model_type, ())}
    for key, value in keys.items():
        if key not in names:
            remedy = _suggest(key, names, f"See the keys of {kind} in transformers")
            raise ConfigError(f"model.config.{key}={value}", f"{kind} has no such key", remedy)
    check_numbers(keys, "model.config.", ConfigError)
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # each config class checks its keys in its own way
        rule = f"transformers refuses it: {' '.join(str(error).split())}"
        raise ConfigError(f"model.config of type {model_type}", rule, "Fix the key that it names") from error
    return config


def _suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise
