"""Measure what padding does to the tokens of a row; there is no list of models.

A small model of the same class, with random weights, gets the same rows three times:

    a b c d           as they are
    a b c d _ _       padded at their end, as `shapes='padded'` does: a to d must give the same
    _ _ c d _ _       hidden at their start by the caller's mask, and then padded: they must give the same too

Eager attention fails the last test in some models: a masked token that sees only masked tokens attends to all
tokens of the row equally, so its output depends on the row's length. It counts if the next token has a label.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from penstock.batch.loss import UNPAD
from penstock.batch.padding import Lengths, Padding
from penstock.batch.shapes import logits_in
from penstock.errors import ModelError
from penstock.models.huggingface.stages import outcome
from penstock.runtime.unseen import unseen

_ROWS, _LENGTH, _PADDED, _HIDDEN = 8, 9, 14, 3
_MOST = 60_000_000  # parameters of the small model
_DIFFERS = 1e-4  # relative to the largest output; rounding stays below a fifth of it
_VOCABULARY = 64

_FIRST_PLAIN = 3  # special tokens with smaller ids keep them
_LAYERS = 4
_DEPTH = r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_blocks|depth"

Limits = tuple[tuple[str, int], ...]  # the name of a field of a config, and the most that it may be
# sizes that must be small for a short row to show their effect
_SHORT: Limits = (
    (r"(.*_)?(sliding_window(_size)?|attention_window_size|window_size|window_len|chunk_size)", 4),
    (r"index_topk|keep_window_size|indexer_budget", 3),
    (r"index(er)?_n_heads", 1),
)
# sizes that need not be large; ids of special tokens follow the vocabulary
_SMALL: Limits = (
    (_DEPTH, _LAYERS),
    (r"(.*_)?vocab_size(_.*)?", _VOCABULARY),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size)|n_inner|mlp_dim|dff|d_ff", 128),
    (r"(.*_)?(num_|n_)?(\w+_)?experts", 16),
    (r"num_kv_shared_layers", 2),
)
# sizes that are all divided by one number, so that the width of a head does not change
_WIDTH = (
    r"(.*_)?(heads|n_head|hidden_size|embed_dim|embedding_size|n_embd|d_model|d_inner|lru_width|mamba_d_ssm)"
)


class PaddingEffect(NamedTuple):
    """needs_mask, hidden: as in Padding"""

    needs_mask: bool
    hidden: str


_seen: dict[object, PaddingEffect | ModelError] = {}


def effect_of_padding(model: PreTrainedModel, padding: Padding) -> PaddingEffect:
    """Measure what padding at the end of rows does to `model`, whose values do not matter.

    Cached by class and config.

    Raises ModelError if padding changes other tokens with any mask, and if no small model runs.
    """
    config = model.config
    key = type(model), config.to_json_string(use_diff=False), config._attn_implementation, repr(padding)
    if key not in _seen:
        try:
            _seen[key] = _look(model, padding)
        except ModelError as error:
            _seen[key] = error
    if isinstance(effect := _seen[key], ModelError):
        raise effect
    return effect


def _look(model: PreTrainedModel, padding: Padding) -> PaddingEffect:
    name, error = type(model).__name__, Exception("no config of it is small enough")
    remedy = "Take shapes='inferred', which pads nothing"
    for config in _configs(model):
        try:
            with unseen(), torch.no_grad():
                small = _small_model(model, config)
                right, masked, hidden = _differences(small, padding)
        except Exception as reason:  # sizes that do not fit each other
            error = reason
            continue
        if masked > _DIFFERS and right > _DIFFERS:
            change = f"{min(right, masked):.1g} of the largest"
            rule = f"a row's outputs change by {change} when it is padded on the right"
            raise ModelError(f"shapes='padded' for {name}", rule, remedy)
        words = f"outputs of {name} change by {hidden:.1g} of the largest" if hidden > _DIFFERS else ""
        return PaddingEffect(right > _DIFFERS, words)
    rule = f"a small model of its class, which would show the effect, ends in {str(error)[:200]!r}"
    raise ModelError(f"shapes='padded' for {name}", rule, remedy)


def _differences(model: PreTrainedModel, padding: Padding) -> tuple[float, float, float]:
    """Differences of outputs of rows padded at their end: without a mask, with one, and after masked tokens.

    The latter two are infinite and 0 for a model that takes no mask.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(_FIRST_PLAIN, _VOCABULARY - 3, (_ROWS, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    hidden = mask.clone()
    hidden[: _ROWS // 2, :_HIDDEN] = 0
    plain = _difference(model, padding, {"input_ids": ids})
    masked = plain
    try:
        if plain > _DIFFERS:
            masked = _difference(model, padding, {"input_ids": ids, "attention_mask": mask})
        return plain, masked, _difference(model, padding, {"input_ids": ids, "attention_mask": hidden})
    except Exception:  # the model's own, about a mask
        return plain, math.inf, 0.0


def _difference(model: PreTrainedModel, padding: Padding, batch: Mapping[str, Tensor]) -> float:
    longer = replace(padding, unpads=True).pad(batch, Lengths(_PADDED, _PADDED))
    unpad = longer.pop(UNPAD)
    expected = outcome(model, model(**batch, use_cache=False))
    padded = outcome(model, model(**longer, use_cache=False))
    plain, other = logits_in(expected), logits_in(padded)
    if other.dim() > 2 and other.shape[1] == _PADDED:
        other = unpad.output(other)
    if plain.shape != other.shape:
        raise ValueError(f"outputs of shape {list(plain.shape)}, and padded of {list(other.shape)}")
    return float((plain - other).abs().max() / plain.abs().max())


# ---- The small model


def _small_model(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    kind: Any = type(model)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > _MOST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    small: PreTrainedModel = kind(config).float().eval()
    return small


def _configs(model: PreTrainedModel) -> Iterator[PretrainedConfig]:
    """Configs of increasingly large models."""
    large = sum(parameter.numel() for parameter in model.parameters()) > _MOST // 50
    cuts: tuple[Limits, ...] = (_SMALL, _SMALL[1:]) if large else ((),)  # the second keeps the layers
    for short in (_SHORT, ()):
        for cut in cuts:
            for divisor in (16, 8, 4, 2, 1) if large else (1,):
                config = copy.deepcopy(model.config)
                try:
                    _shrink(config, (*short, *cut), divisor)
                except Exception:  # its own checks
                    continue
                implementation = model.config._attn_implementation
                config._attn_implementation = implementation if implementation == "eager" else "sdpa"
                config._experts_implementation = "eager"
                yield config


def _shrink(config: PretrainedConfig, limits: Limits, divisor: int) -> None:
    """Shrink a config and its parts, in place."""
    fields, smaller, fewer = vars(config), _SMALL[1] in limits, _SMALL[0] in limits
    depths = [value for name, value in fields.items() if fewer and re.fullmatch(_DEPTH, name)]
    for name, value in list(fields.items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value, limits, divisor)
        elif isinstance(value, list | tuple):
            cut = _of_all_kinds(value) if len(value) in depths and len(value) > _LAYERS else list(value)
            fields[name] = [_limited(name, v, limits, 1) if type(v) is int else v for v in cut]
        elif type(value) is int and name.endswith(("_token_id", "_token_index")):
            if smaller and value >= _FIRST_PLAIN:
                fields[name] = _VOCABULARY - (1 if name.startswith("pad") else 2)
        elif type(value) is int:
            fields[name] = _limited(name, value, limits, divisor)


def _limited(name: str, value: int, limits: Limits, divisor: int) -> int:
    most = next((most for pattern, most in limits if re.fullmatch(pattern, name)), None)
    if most is not None:
        return min(value, most)
    return value // divisor if re.fullmatch(_WIDTH, name) and value % divisor == 0 else value


def _of_all_kinds(layers: Sequence[Any]) -> list[Any]:
    """Entries of each kind of layer, as far as the small model has layers for them."""
    try:
        kinds = list(dict.fromkeys(layers))
    except TypeError:  # lists cannot be hashed
        return list(layers[:_LAYERS])
    return (kinds * _LAYERS)[:_LAYERS]
