"""A Hugging Face model seen as a chain: what comes before its layers, the layers, what comes after.

The model object itself tells, by one forward without values in which every layer is a placeholder
(probe.py): which module list the layers are, that each takes what the one before gave, in which form they
return it, what else they take, and which other modules run before and which after them. No list of model
names is consulted. Where a model cannot tell, `register_chain` lets a rule say it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from penstock.models.tracing.probe import (
    FORMS,
    NoChainError,
    Seen,
    layer_list,
    no_chain,
    probe,
    run_layers,
    siblings,
)


@dataclass(frozen=True)
class Chain:
    """layers: the name of the module list, and how many it holds; form: what a layer returns

    before, after: names of the modules with parameters that run before and after the layers
    loose: parameters of the modules around the layers themselves, by the side on which they are used
    embeds: those of the modules before the layers that are called, or the called ones in them
    given: by layer, what it takes beside the hidden states that was made before the layers of trained
        weights: where among its arguments, and the number of the value (several layers may take one)
    hands: whether a layer returns something for the next one beside the hidden states
    shares: whether layers leave something for others in a mapping that all get
    records: names of what the model's own head collects from the layers, such as router_logits
    plain: whether all that goes over an edge is hidden states of (rows, sequence, width), of `dtype`
    late: names of modules after the layers that have buffers to save and no parameters
    """

    layers: str
    count: int
    form: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    loose: Mapping[str, bool]
    embeds: tuple[str, ...]
    given: tuple[Mapping[str, int], ...] = ()
    hands: bool = False
    shares: bool = False
    records: tuple[str, ...] = ()
    plain: bool = True
    width: int = 0
    dtype: torch.dtype = torch.float32
    late: tuple[str, ...] = ()

    def given_from(self, layer: int) -> tuple[int, ...]:
        """The values that layers from this one on take, beside the hidden states."""
        return tuple(sorted({value for taken in self.given[layer:] for value in taken.values()}))


_MOST = 64  # chains that are remembered
_found: dict[object, Chain] = {}


def find_chain(model: PreTrainedModel) -> Chain:
    """The chain of `model` (weights may be on the meta device). Raises ModelError where there is none.

    Remembered for models that are built alike: a trial of several settings looks at its model once.
    """
    name, layers = layer_list(model)
    kind = _built(model, name)
    if kind is None or kind not in _found:
        chain = _find(model, name, len(layers))
        if kind is None:
            return chain
        if len(_found) >= _MOST:
            _found.pop(next(iter(_found)))
        _found[kind] = chain
    return _found[kind]


def _built(model: PreTrainedModel, layers: str) -> object | None:
    """Equal for two models whose forwards take the same way; None where hooks may make another."""
    parts: list[object] = [layers, model.config.to_json_string(use_diff=False)]
    for name, module in model.named_modules():
        own = vars(module)
        if "forward" in own or any(own[hooks] for hooks in _HOOKS):
            return None
        plain = tuple(
            (key, value) for key, value in own.items() if isinstance(value, _PLAIN) and key != "training"
        )
        parts.append((name, type(module), plain))
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    parts += [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
    return tuple(parts)


_PLAIN = (bool, int, float, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _find(model: PreTrainedModel, name: str, count: int) -> Chain:
    refusal = ""
    for form in FORMS:
        try:
            chain, training = (
                _chain(model, name, form, probe(model, name, count, form, training=mode))
                for mode in (False, True)
            )
            if chain != training:
                raise NoChainError("the forward takes another way in training than in evaluation")
            return replace(chain, dtype=run_layers(model, name, form) or chain.dtype)
        except NoChainError as reason:
            refusal = str(reason)
        except Exception as reason:  # whatever the model's own code raises on a wrong form
            refusal = refusal or f"its forward could not be followed: {reason}"
    raise no_chain(model, f"a pipeline cuts a chain of layers, and in this model {refusal}")


def _chain(model: PreTrainedModel, layers: str, form: str, seen: Seen) -> Chain:
    before, after = _sides(model, layers, seen)
    given, records = _numbered(seen.given), _recorded(model)
    return Chain(
        layers=layers,
        count=len(seen.calls),
        form=form,
        before=before,
        after=after,
        loose=_loose(model, layers, seen),
        embeds=tuple(sorted(name for name in seen.before if seen.before.isdisjoint(_around(name)))),
        given=given,
        hands=seen.hands,
        shares=seen.shares,
        records=records,
        plain=seen.plain and not (any(given) or seen.hands or seen.shares or records),
        width=seen.width,
        dtype=model.dtype,
        late=tuple(_late(model, layers, seen)),
    )


def _sides(model: nn.Module, layers: str, seen: Seen) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The siblings with parameters, by the side of the layers on which they run."""
    before: list[str] = []
    after: list[str] = []
    for name, module in siblings(model, layers):
        parameters = {inner for inner, _ in module.named_parameters(prefix=name)}
        if not parameters:
            continue  # nothing to place: every stage keeps it
        inside = {inner for inner, _ in module.named_modules(prefix=name)}
        if both := inside & seen.before & seen.after:
            raise NoChainError(f"{min(both)} runs both before and after the layers")
        is_before = bool(inside & seen.before or parameters & seen.used_before)
        if is_before and (inside & seen.after or parameters & seen.used_after):
            raise NoChainError(f"a part of {name} is used before the layers, and another after them")
        (before if is_before else after).append(name)
    return tuple(before), tuple(after)


def _late(model: nn.Module, layers: str, seen: Seen) -> Iterator[str]:
    for name, module in siblings(model, layers):
        inside = {inner for inner, _ in module.named_modules(prefix=name)}
        runs_after = inside & seen.after and not inside & seen.before
        if runs_after and module.state_dict() and next(module.parameters(), None) is None:
            yield name


def _loose(model: nn.Module, layers: str, seen: Seen) -> dict[str, bool]:
    """Parameters of the modules around the layers themselves: whether they are used before the layers."""
    found = {}
    around, prefix = model, ""
    for part in layers.split("."):
        for name, _ in around.named_parameters(prefix.removesuffix("."), recurse=False):
            found[name] = name not in seen.used_after
        around = around.get_submodule(part)
        prefix += part + "."
    return found


def _around(name: str) -> Iterator[str]:
    """The names of the modules that `name` is in."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _numbered(given: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, int], ...]:
    """A number for each value; the same one where layers take the same tensor."""
    numbers: dict[int, int] = {}
    return tuple(
        {place: numbers.setdefault(id(value), len(numbers)) for place, value in taken.items()}
        for taken in given
    )


def _recorded(model: PreTrainedModel) -> tuple[str, ...]:
    """What transformers' hooks collect from the layers for the loss, if the config asks for it."""
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return ()
    kinds = {type(m) for m in model.modules() if isinstance(m, PreTrainedModel)}
    known = {key for m in model.modules() if type(m) in kinds and isinstance(m, PreTrainedModel)
             for key in _CAN_RECORD_REGISTRY.get(m)}  # fmt: skip
    return ("router_logits",) if "router_logits" in known else ()
