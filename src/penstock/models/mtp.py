"""Multi-token prediction (MTP): layers that predict tokens after the next (DeepSeek-V3, arXiv 2412.19437).

    tokens      t0 t1 t2 t3 ...        hidden states of the previous layer: h
    layer N     h'[i] = layer(eh_proj(enorm(embedding(t[i+1])), hnorm(h[i])))     predicts t[i+2]
    layer N+1   the same with t[i+2] and h'                                       predicts t[i+3]

transformers trains no such layers: its `MtpModel` drafts tokens for `generate`. `with_mtp` adds the layers to
a model, by the same equations, under the names of the model's checkpoints (model.layers.61.enorm). They
follow the decoder layers in the same list, so a pipeline can cut the model between any two of them:

    layers 0 .. N-1    (rows, sequence, width)
    layer N            the final norm; its result, and below it the layer's prediction       2 * rows
    layer N+1          its input, and below it the layer's prediction                        3 * rows
    head               logits of all

Embedding and head are the model's own; the copies of the embedding in these layers are tied weights. Where a
cache is used, as in `generate`, the layers predict nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from penstock.batch.loss import IGNORED, ahead, prediction_labels
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.runtime.around import around

FACTOR = 0.1  # the default of mtp_loss_scaling_factor, as in Megatron
_LISTS = ("layer_types", "mlp_layer_types")  # of a config, with an entry for each layer


@dataclass
class MTPOutput(ModelOutput):  # type: ignore[misc]
    """The model's output; logits are (rows, sequence, vocabulary).

    mtp_logits: of each prediction layer; [:, i] of the first layer predicts token i + 2
    loss: the next-token loss plus the mean of the prediction layers' losses, times mtp_loss_scaling_factor
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mtp_logits: tuple[Tensor, ...] | None = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None


class PredictionModel(PreTrainedModel):  # type: ignore[misc]
    """A causal model with prediction layers, made by `with_mtp`."""

    prediction_layers: int = 0

    @property
    def mtp_loss_scaling_factor(self) -> float:
        """The factor for the mean of the prediction layers' losses."""
        factor = getattr(self.config, "mtp_loss_scaling_factor", None)
        return FACTOR if factor is None else float(factor)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # transformers returns no ties if the config ties no embeddings
        tied: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)
        own: dict[str, str] = self.__dict__.get("_prediction_ties", {})
        return tied | own

    def set_experts_implementation(self, experts_implementation: str | dict[str, Any]) -> None:
        super().set_experts_implementation(experts_implementation)
        chosen = self.config._experts_implementation  # transformers skips configs of the same class
        self.get_decoder().config._experts_implementation_internal = chosen


_made: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def with_mtp(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The model class `kind`, such as DeepseekV3ForCausalLM, with its prediction layers.

    Its config sets their number (num_nextn_predict_layers) and the factor of their loss
    (mtp_loss_scaling_factor, 0.1 by default). It is built, loaded and saved like `kind`:

        model = with_mtp(DeepseekV3ForCausalLM).from_pretrained(folder)
        model(input_ids=ids, labels=ids).loss

    Its constructor raises ModelError if transformers has no such layers for `kind`, or different ones.
    """
    if issubclass(kind, PredictionModel):
        return kind
    if kind not in _made:
        _made[kind] = _make(kind)
    return _made[kind]


def _make(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def init(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        _add_layers(self)
        self.post_init()  # again, for values and ties of the new layers

    ignored = [*(kind._keys_to_ignore_on_load_unexpected or ()), r"\.shared_head\.head\."]
    made = {
        "__init__": init,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "forward": _forward(kind),
        "_keys_to_ignore_on_load_unexpected": ignored,  # checkpoints also have a copy of the head
    }
    return type(kind.__name__, (PredictionModel, kind), made)


def prediction_layers(model: nn.Module) -> int:
    """The number of prediction layers, which are the last layers of `model`."""
    return model.prediction_layers if isinstance(model, PredictionModel) else 0


def check_factor(factor: float | None) -> None:
    """Raise ConfigError for a factor that no loss can have."""
    if factor is not None and not 0 <= factor < float("inf"):
        rule = "the loss of the prediction layers is multiplied by it"
        raise ConfigError(f"mtp_loss_scaling_factor={factor}", rule, "Give 0 or more, such as 0.1")


def _forward(kind: type[PreTrainedModel]) -> Callable[..., Any]:
    names = [*signature(kind.forward).parameters][1:]  # without self

    @wraps(kind.forward)
    def forward(self: PredictionModel, *args: Any, **inputs: Any) -> Any:
        inputs |= zip(names, args, strict=False)
        labels, shift_labels = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        use_cache = inputs.pop("use_cache", None)
        caches = not self.training if use_cache is None else use_cache
        if labels is None and caches:
            return kind.forward(self, **inputs, use_cache=use_cache, return_dict=True)
        input_ids = inputs.get("input_ids")
        if input_ids is None:
            raise BatchError(
                f"a batch without input_ids for {kind.__name__} with prediction layers",
                "these layers embed the following tokens",
                "Give input_ids, or build the model without mtp_loss_scaling_factor",
            )
        result = kind.forward(self, **inputs, use_cache=False, mtp_tokens=input_ids, return_dict=True)
        rows, logits = len(input_ids), result.logits
        output = MTPOutput(**{field.name: getattr(result, field.name, None) for field in fields(MTPOutput)})
        output.logits = logits[:rows]
        output["mtp_logits"] = tuple(
            logits[(depth + 1) * rows : (depth + 2) * rows] for depth in range(self.prediction_layers)
        )
        if labels is None:
            return output
        shifted = ahead(labels, 1, IGNORED) if shift_labels is None else shift_labels
        loss = _loss(self, output, shifted, inputs)
        return MTPOutput(loss=loss, **{name: value for name, value in output.items() if name != "loss"})

    return can_return_tuple(forward)  # type: ignore[no-any-return]


def _loss(model: PredictionModel, output: MTPOutput, shifted: Tensor, inputs: dict[str, Any]) -> Tensor:
    """shifted: the next token of each token"""
    count = inputs.get("num_items_in_batch")
    count = (shifted != IGNORED).sum() if count is None else count

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model.loss_function(
            logits, None, logits.shape[-1], num_items_in_batch=count, shift_labels=labels
        )
        return loss

    assert output.logits is not None
    assert output.mtp_logits is not None
    total = loss_of(output.logits, shifted)
    for depth, logits in enumerate(output.mtp_logits, 1):
        labels = prediction_labels(shifted, depth, inputs.get("position_ids"))
        total = total + model.mtp_loss_scaling_factor / len(output.mtp_logits) * loss_of(logits, labels)
    return total


# ---- the layers


def _predicting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a prediction layer, around that of a decoder layer; see the top of this file."""

    def forward(
        layer: Any, hidden_states: Tensor, *args: Any, mtp_tokens: Tensor | None = None, **options: Any
    ) -> Any:
        if layer.depth == 1:
            hidden_states = layer.final_norm(hidden_states)
        if mtp_tokens is None:
            return hidden_states
        previous = hidden_states[-len(mtp_tokens) :]
        following = layer.embed_tokens(ahead(mtp_tokens, layer.depth, 0))
        joined = layer.eh_proj(torch.cat([layer.enorm(following), layer.hnorm(previous)], -1))
        predicted = layer.shared_head["norm"](plain(layer, joined, *args, **options))
        return torch.cat([hidden_states, predicted])

    return forward


def _passes_on(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the final norm, which the first prediction layer applies; keeps the weight's name."""
    return lambda norm, hidden_states: hidden_states


def _add_layers(model: Any) -> None:
    """Append the prediction layers to the decoder layers of `model`, which is new."""
    base, config = model.get_decoder(), model.config
    extended = _config_of_layers(model)
    count, first = extended.num_hidden_layers, len(base.layers)
    name = next(name for name, module in model.named_modules() if module is base)
    ties = {}
    for depth in range(1, count + 1):
        index = first + depth - 1
        base.layers.append(_layer(base, extended, depth, first))
        ties[f"{name}.layers.{index}.embed_tokens.weight"] = f"{name}.embed_tokens.weight"
    ties[f"{name}.layers.{first}.final_norm.weight"] = f"{name}.norm.weight"
    for key in _LISTS:
        if getattr(extended, key, None) is not None:
            setattr(extended, key, [*getattr(config, key), *getattr(extended, key)])
    extended.num_hidden_layers = first + count  # so that the model's own loop runs all layers
    base.config = extended
    around(base.norm, forward=_passes_on)
    model.prediction_layers, model._prediction_ties = count, ties
    model._tied_weights_keys = {**(model._tied_weights_keys or {}), **ties}  # left out of files


def _layer(base: Any, config: PretrainedConfig, depth: int, first: int) -> nn.Module:
    """The layer of this depth, which embeds the token `depth` positions later.

    depth: from 1; first: the index of the first such layer in the whole model
    """
    layer: Any = type(base.layers[first - 1])(config, depth - 1)
    for part in layer.modules():
        if hasattr(part, "layer_idx"):
            part.layer_idx += first
    around(layer, forward=_predicting)
    norm, width = type(base.norm), config.hidden_size
    layer.depth = depth
    layer.embed_tokens = _twin(base.embed_tokens)
    if depth == 1:
        layer.final_norm = _twin(base.norm)
    layer.enorm, layer.hnorm = (norm(width, eps=config.rms_norm_eps) for _ in range(2))
    layer.eh_proj = nn.Linear(2 * width, width, bias=False)
    layer.shared_head = nn.ModuleDict({"norm": norm(width, eps=config.rms_norm_eps)})
    return layer  # type: ignore[no-any-return]


def _twin(module: nn.Module) -> nn.Module:
    """A second module with the same weights."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    return twin


def _config_of_layers(model: Any) -> Any:
    """The config from which the prediction layers are made. Raises ModelError."""
    kind, config = type(model).__name__, model.config
    value = f"prediction layers (mtp) of {kind}"
    remedy = "Leave out mtp_loss_scaling_factor, and m in a layout"
    count = getattr(config, "num_mtp_layers", None)
    if not count:
        rule = (
            "transformers has none for it" if count is None else "its config has num_nextn_predict_layers=0"
        )
        raise ModelError(value, rule, remedy)
    base = model.get_decoder()
    named = [p for p in model._keys_to_ignore_on_load_unexpected or () if "layers" in p]
    if not named or type(base.embed_tokens) is not nn.Embedding or hasattr(config, "chain_hidden_post_norm"):
        rule = "its checkpoints have other names and structures for them than DeepSeek-V3's"
        raise ModelError(value, rule, remedy)
    try:
        return config.get_mtp_config()
    except ValueError as cause:
        rule = f"transformers makes none from its config: {cause}"
        raise ModelError(value, rule, f"Add that key to the config. {remedy}") from cause
