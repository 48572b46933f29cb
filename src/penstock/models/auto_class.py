"""The class of transformers for a config, and the head that it has: for next tokens, or for other labels.

LlamaForCausalLM                    next tokens
BertForMaskedLM                     masked tokens
LlamaForSequenceClassification      a label for each row
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from penstock.errors import ModelError

# transformers' auto classes for heads other than a causal language model's
_HEADS: tuple[Any, ...] = (
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoModelForSequenceClassification,
    AutoModelForQuestionAnswering,
    AutoModelForMultipleChoice,
)


def _name_in(kind: Any, model_type: str) -> str | None:
    """The name of the class that `kind`, an auto class of transformers, has for a model type."""
    name: str | None = kind._model_mapping._model_mapping.get(model_type)
    return name


def _architectures(config: PretrainedConfig) -> list[str]:
    """The classes that a config names; a file may hold anything there."""
    named = config.architectures
    return [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []


def _head_of(model_type: str, names: Sequence[str]) -> Any:
    """The first class among `names` with another kind of head; None for a causal language model."""
    if _name_in(AutoModelForCausalLM, model_type) in names:
        return None
    return next((kind for kind in _HEADS if _name_in(kind, model_type) in names), None)


def is_language_model(model: PreTrainedModel) -> bool:
    """Whether the model's head may be one for next tokens: it is registered for no other task."""
    return _head_of(model.config.model_type, [type(model).__name__]) is None


def check_language_model(model: PreTrainedModel) -> None:
    """Raise ModelError for a model whose head is not for next tokens."""
    if not is_language_model(model):
        raise ModelError(
            f"{type(model).__name__} with the loss of next tokens",
            "its head is not that of a causal language model",
            "Take a causal language model; or train it on its own labels: penstock train with "
            "data.kind=classification, token_classification or masked, or AutoPipeline without a loss_fn",
        )


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' auto class for this config: by its architectures, if these have a head for labels of
    tokens or rows, or read images; else the one for causal language models, if it knows the config.
    """
    if (head := _head_of(config.model_type, _architectures(config))) is not None:
        return head
    seeing = _name_in(AutoModelForImageTextToText, config.model_type)
    known = type(config) in AutoModelForCausalLM._model_mapping
    sees = seeing is not None and (not known or seeing in _architectures(config))
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def check_causal(model: PreTrainedModel) -> None:
    """Raise ModelError for an encoder, such as BERT, which transformers makes a causal LM in name only."""
    config = model.config
    if (
        is_language_model(model)
        and _name_in(AutoModelForMaskedLM, config.model_type) is not None
        and getattr(config, "is_decoder", None) is False
    ):
        trained = f" ({', '.join(named)})" if (named := _architectures(config)) else ""
        raise ModelError(
            f"model_type={config.model_type!r}{trained} with is_decoder=False",
            "it is an encoder: its tokens attend to later ones, which a causal loss makes them predict",
            "Take a decoder-only model; if this one was trained as a decoder, set is_decoder to true in its "
            "config; for a loss_fn of your own give the model object",
        )
