"""The model that the config names, in the form that AutoPipeline takes."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from penstock.errors import ConfigError
from penstock.models.source import ModelLike, open_source
from penstock.train.config.sections import ModelSection

# keys that older config.json files bear and transformers still reads, and one that no config.json bears
_MORE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "experts_implementation")


def named_model(section: ModelSection) -> ModelLike:
    """A folder whose weights are to be read, or a config. Raises ConfigError, ModelError; reads no weight."""
    if section.config is not None:
        return inline_config(section.config)
    assert section.path is not None
    folder = Path(section.path).expanduser()
    if section.weights == "random":
        config: PretrainedConfig = open_source(folder, None, section.attention).model.config
        return config
    return folder


def positions(config: PretrainedConfig) -> int | None:
    """How many tokens a row may have; None where the config does not say."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def inline_config(given: dict[str, Any]) -> PretrainedConfig:
    """The transformers config with these keys. Raises ConfigError for a key that its class does not have.

    transformers itself keeps an unknown key as it is and takes the default for the one that was meant.
    """
    keys = dict(given)
    model_type = keys.pop("model_type")
    try:
        known = AutoConfig.for_model(model_type)
    except (ValueError, KeyError):
        raise ConfigError(
            f"model.config.model_type={model_type!r}",
            "transformers knows no such model type",
            _suggest(model_type, _model_types(), "Take the model_type of some config.json"),
        ) from None
    names = {*known.to_dict(), *known.attribute_map, *_MORE_KEYS}
    for key, value in keys.items():
        if key not in names:
            raise ConfigError(
                f"model.config.{key}={value}",
                f"{type(known).__name__} has no such key",
                _suggest(key, names, f"See the keys of {type(known).__name__} in transformers"),
            )
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # each config class checks its keys in a way of its own
        raise ConfigError(
            f"model.config of type {model_type}",
            f"transformers refuses it: {' '.join(str(error).split())}",
            "Mend the key that it names",
        ) from error
    return config


def _model_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


def _suggest(name: str, known: Any, otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else otherwise
