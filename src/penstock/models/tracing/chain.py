"""A Hugging Face model as a chain: the modules before its layers, the layers, and the modules after them.

    embed_tokens -> layers.0 -> layers.1 -> ... -> norm -> lm_head
    (before)        each takes the hidden states   (after)
                    of the previous one

The model itself shows the chain: a forward without values whose layers are placeholders (probe.py) shows
which other modules run before and after them, what the layers return, and which further arguments they take.
There is no list of model names. For a model whose list of layers is not recognised, use `register_chain`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.models.mtp import prediction_layers
from penstock.models.tracing.autocast import AutocastWithoutValues
from penstock.models.tracing.probe import (
    FORMS,
    Findings,
    NoChainError,
    check_reads_tokens,
    layer_list,
    no_chain,
    path_to,
    probe,
    run_layers,
    siblings,
)
from penstock.models.tracing.towers import encodes, feature_names
from penstock.private import CAN_RECORD_REGISTRY


@dataclass(frozen=True)
class Chain:
    """A model as a chain of layers: all facts that a stage needs to begin and end between two layers.

    layers, count: the name of the module list, and its length
    output_form: what a layer returns, one of probe.FORMS
    before, after: the modules with parameters that run before and after the layers
    called_before: modules before the layers that are called themselves, or modules inside them that are
    direct_parameters: parameters of the modules around the layers -> whether they are used before the layers
    buffers_after: modules after the layers with buffers to save and no parameters

    Values that cross an edge in addition to the hidden states:
    early_inputs: for each layer, its arguments that were computed from weights before the layers: path of the
        argument -> index of the value (several layers may take one value)
    layer_outputs_passed_on: whether a layer takes further results of the previous one than hidden states
    mappings_shared: whether layers store values for others in a mapping that all of them get
    recorded: names of values that the model's own head collects from the layers, such as router_logits
    features: arguments of the module around the layers with image features for later layers, see towers.py

    only_hidden_states: whether only (rows, sequence, `width`) of `dtype` crosses an edge
    prediction_layers: number of prediction layers among the last layers (mtp.py); each adds as many rows to
        the hidden states as the input has
    """

    layers: str
    count: int
    output_form: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    called_before: tuple[str, ...]
    direct_parameters: Mapping[str, bool]
    buffers_after: tuple[str, ...] = ()
    early_inputs: tuple[Mapping[str, int], ...] = ()
    layer_outputs_passed_on: bool = False
    mappings_shared: bool = False
    recorded: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    only_hidden_states: bool = True
    width: int = 0
    dtype: torch.dtype = torch.float32
    prediction_layers: int = 0

    def parts_after(self, layers: int) -> int:
        """How many times the input's rows the hidden states have after the first `layers` layers."""
        return 1 + max(layers - self.count + self.prediction_layers, 0)

    @property
    def has_early_inputs(self) -> bool:
        return any(self.early_inputs)

    @property
    def more_crosses(self) -> bool:
        """Whether anything in addition to hidden states crosses an edge."""
        more = self.layer_outputs_passed_on or self.mappings_shared or bool(self.recorded)
        return more or self.has_early_inputs or bool(self.features)

    def early_values_from(self, layer: int) -> tuple[int, ...]:
        """The indices of the early values that this layer and later ones take."""
        return tuple(sorted({value for taken in self.early_inputs[layer:] for value in taken.values()}))


_REMEMBERED = 64  # results of a cached function
_LIBRARIES = frozenset({"torch", "transformers", "peft", "penstock"})
_NAME_OR_PATH = re.compile(r'"_name_or_path": "(?:[^"\\]|\\.)*"')
_NO_MATTER = frozenset({"training", "name_or_path"})  # attributes of a module: find_chain runs both modes
_PLAIN, _TENSORS = (bool, int, float, str), ("_parameters", "_buffers")
P = ParamSpec("P")
T = TypeVar("T")


class remembered(Generic[P, T]):  # noqa: N801 - a decorator
    """A cache for `find`: one result for all models that are built the same way."""

    def __init__(self, find: Callable[Concatenate[PreTrainedModel, P], T]) -> None:
        functools.update_wrapper(self, find)
        self._find = find
        self.known: dict[object, T] = {}

    def __call__(self, model: PreTrainedModel, *args: P.args, **kwargs: P.kwargs) -> T:
        kind = built_alike(model)
        if kind is None:
            return self._find(model, *args, **kwargs)
        if kind not in self.known:
            if len(self.known) >= _REMEMBERED:
                self.known.pop(next(iter(self.known)))
            self.known[kind] = self._find(model, *args, **kwargs)
        return self.known[kind]


def under_autocast(model: PreTrainedModel, chain: Chain, dtype: torch.dtype) -> Chain:
    """`chain` with the dtype that its hidden states have under autocast in `dtype`."""
    return replace(chain, dtype=_dtype_under(dtype)(model, chain) or chain.dtype)


@functools.cache
def _dtype_under(dtype: torch.dtype) -> remembered[[Chain], torch.dtype | None]:
    """What finds the dtype of hidden states under autocast in `dtype`; None where a run does not show it."""

    def find(model: PreTrainedModel, chain: Chain) -> torch.dtype | None:
        with AutocastWithoutValues(dtype):
            return run_layers(model, chain.layers, chain.output_form)

    return remembered(find)


def config_key(config: PretrainedConfig) -> str:
    """`config` as text, equal for equal configs, from whatever folder or Hub name they were read."""
    return _NAME_OR_PATH.sub("", config.to_json_string(use_diff=False))


def built_alike(model: PreTrainedModel) -> Hashable | None:
    """A key, equal for models whose forwards run the same ops; None where hooks may change the forward.

    None also for modules of a user's class, whose forward may read values that no key contains.
    """
    facts: list[object] = [layer_list(model)[0], config_key(model.config)]
    attentions: dict[str | None, None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        attributes, kind = vars(module), type(module)
        if "forward" in attributes or module._forward_hooks or module._forward_pre_hooks:
            return None
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            return None
        facts += [name, kind]
        attentions[getattr(attributes.get("config"), "_attn_implementation", None)] = None
        for key, value in attributes.items():
            if isinstance(value, _PLAIN) and key not in _NO_MATTER:
                facts += [key, value]
            elif key in _TENSORS and value:
                facts += [(key, own, t.shape, t.dtype) for own, t in value.items() if t is not None]
    for name in attentions:  # not in a config's JSON, and users register others under any name
        facts += [name, ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)]
    return tuple(facts)


@remembered
def find_chain(model: PreTrainedModel) -> Chain:
    """The chain of `model`, on the meta device or not. Raises ModelError for a model without one."""
    check_reads_tokens(model)
    name, layers = layer_list(model)
    reason = ""
    for form in FORMS:
        try:
            chain, training = (
                _chain(model, name, form, probe(model, name, len(layers), form, training=mode))
                for mode in (False, True)
            )
            if chain != training:
                raise NoChainError("the forward differs between training and evaluation")
            return replace(chain, dtype=run_layers(model, name, form) or chain.dtype)
        except NoChainError as error:
            reason = str(error)
        except Exception as error:  # any error of the model's own code for a wrong form
            reason = reason or f"its forward could not be followed: {error}"
    raise no_chain(model, f"a pipeline cuts a chain of layers, and in this model {reason}")


def _chain(model: PreTrainedModel, layers: str, form: str, seen: Findings) -> Chain:
    before, after, buffers_after = _sides(model, layers, seen)
    chain = Chain(
        layers=layers,
        count=len(seen.calls),
        output_form=form,
        before=before,
        after=after,
        called_before=tuple(sorted(n for n in seen.before if seen.before.isdisjoint({*prefixes(n)} - {n}))),
        direct_parameters={
            name: name not in seen.used_after
            for prefix, module in path_to(model, layers)
            for name, _ in module.named_parameters(prefix, recurse=False)
        },
        buffers_after=buffers_after,
        early_inputs=_numbered(seen.early_inputs),
        layer_outputs_passed_on=seen.layer_outputs_passed_on,
        mappings_shared=seen.mappings_shared,
        recorded=_recorded(model),
        features=feature_names(model.get_submodule(layers.rpartition(".")[0])),
        width=seen.width,
        dtype=model.dtype,
        prediction_layers=prediction_layers(model),
    )
    return replace(chain, only_hidden_states=seen.rows_and_sequence_kept and not chain.more_crosses)


def _sides(model: PreTrainedModel, layers: str, seen: Findings) -> tuple[tuple[str, ...], ...]:
    """The siblings of the layer list: with parameters and before it, after it, and after it with buffers.

    A forward of text does not run towers, which are around what the text goes through, and before it.
    """
    text, has_towers = layers.rpartition(".")[0], bool(encodes(model))
    before: list[str] = []
    after: list[str] = []
    buffers_after: list[str] = []
    for name, module in siblings(model, layers):
        inside = {inner for inner, _ in module.named_modules(prefix=name)}
        parameters = {inner for inner, _ in module.named_parameters(prefix=name)}
        if not parameters:  # no need to assign it: every stage keeps it
            if inside & seen.after and not inside & seen.before and module.state_dict():
                buffers_after.append(name)
            continue
        if both := inside & seen.before & seen.after:
            raise NoChainError(f"{min(both)} runs both before and after the layers")
        is_before = bool(inside & seen.before or parameters & seen.used_before)
        is_after = bool(inside & seen.after or parameters & seen.used_after)
        is_before |= has_towers and not is_after and not name.startswith(f"{text}.")
        if is_before and is_after:
            raise NoChainError(f"a part of {name} is used before the layers, and another after them")
        (before if is_before else after).append(name)
    return tuple(before), tuple(after), tuple(buffers_after)


def prefixes(name: str) -> Iterator[str]:
    """a, a.b, a.b.c of a.b.c"""
    return accumulate(name.split("."), lambda prefix, last: f"{prefix}.{last}")


def _numbered(taken: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, int], ...]:
    """An index for each value; one index if several layers take the same tensor."""
    numbers: dict[int, int] = {}
    return tuple(
        {name: numbers.setdefault(id(value), len(numbers)) for name, value in of_layer.items()}
        for of_layer in taken
    )


def _recorded(model: PreTrainedModel) -> tuple[str, ...]:
    """The names that transformers' hooks collect from the layers for the loss, if the config enables it."""
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return ()
    kinds: list[Any] = []
    for module in model.modules():
        known = (CAN_RECORD_REGISTRY.get(module) or {}) if isinstance(module, PreTrainedModel) else {}
        recorders = known.get("router_logits", ())
        kinds += recorders if isinstance(recorders, list | tuple) else [recorders]
    routers = tuple(getattr(recorder, "target_class", recorder) for recorder in kinds)
    has_routers = any(isinstance(module, routers) for module in model.modules())  # a dense model has none
    return ("router_logits",) if has_routers else ()
