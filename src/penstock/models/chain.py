"""A Hugging Face model seen as a chain: what comes before its layers, the layers, what comes after.

The model object itself tells, by one forward without values in which every layer is a placeholder:
which module list the layers are, that each takes exactly what the one before gave, in which form they
return it, and which other modules run before and which after them. No list of model names is consulted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from penstock.errors import ModelError
from penstock.models.shadow import shadow

_FORMS = ("tensor", "tuple", "tuple with cache")  # what a layer may return: h, (h,), (h, None)


@dataclass(frozen=True)
class Chain:
    """layers: the name of the module list, and how many it holds; form: what a layer returns

    before, after: names of the modules with parameters that run before and after the layers
    """

    layers: str
    count: int
    form: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class Placeholder(nn.Module):
    """Stands where a layer of another stage stood: same place, same plain attributes, no parameters."""

    def __init__(self, layer: nn.Module | None, form: str) -> None:
        super().__init__()
        self._form = form
        for name, value in vars(layer).items() if layer is not None else ():
            if not name.startswith("_") and name not in ("training", "gradient_checkpointing", "forward"):
                setattr(self, name, copy.copy(value))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._give(self._pass(hidden_of(args, kwargs)))

    def _pass(self, hidden: Tensor) -> Tensor:
        return hidden

    def _give(self, hidden: Tensor) -> Any:
        if self._form == "tensor":
            return hidden
        return (hidden,) if self._form == "tuple" else (hidden, None)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among a layer's arguments."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise ModelError(
            f"a layer called with {type(hidden).__name__} for its hidden states",
            "each layer takes the hidden states first",
            "This model cannot be cut between its layers",
        )
    return hidden


@dataclass
class _Observed:
    """What the placeholders and hooks saw during the forward."""

    calls: list[int] = field(default_factory=list)
    last_given: Tensor | None = None
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)


class _Probe(Placeholder):
    """A placeholder that checks the chain: its input is the very tensor that the layer before returned."""

    def __init__(self, layer: nn.Module, form: str, index: int, seen: _Observed) -> None:
        super().__init__(layer, form)
        self._seen = seen
        self._index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        for other in tree_leaves((args, kwargs)):
            if isinstance(other, Tensor) and other.requires_grad and other is not hidden:
                raise _NotAChainError(
                    f"layer {self._index} takes, beside the hidden states, something made of trained weights"
                )
        return super().forward(*args, **kwargs)

    def _pass(self, hidden: Tensor) -> Tensor:
        seen = self._seen
        if seen.last_given is not None and hidden is not seen.last_given:
            raise _NotAChainError(f"layer {self._index} does not take what layer {self._index - 1} returned")
        seen.calls.append(self._index)
        seen.last_given = hidden.clone()
        return seen.last_given


class _NotAChainError(Exception):
    pass


def find_chain(model: PreTrainedModel) -> Chain:
    """The chain of `model` (weights may be on the meta device). Raises ModelError where there is none."""
    name, layers = _layer_list(model)
    refusal = "its forward could not be followed"
    for form in _FORMS:
        try:
            return _probe(model, name, len(layers), form)
        except _NotAChainError as reason:
            refusal = str(reason)
        except Exception as reason:  # whatever the model's own code raises on a wrong form
            refusal = refusal if refusal != "its forward could not be followed" else f"{refusal}: {reason}"
    raise ModelError(
        f"{type(model).__name__}",
        f"a pipeline cuts a chain of layers, and in this model {refusal}",
        "Use a decoder-only model, or build the stages yourself with Pipeline.from_provider",
    )


def _layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The module list with as many entries as the config names layers, the outermost one."""
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [found for found in lists if len(found[1]) == wanted]
    if getattr(model.config, "is_encoder_decoder", False) or not fitting:
        raise ModelError(
            f"{type(model).__name__}",
            f"a pipeline cuts one list of {wanted} layers, and this model has none",
            "Use a decoder-only model, or build the stages yourself with Pipeline.from_provider",
        )
    return min(fitting, key=lambda found: found[0].count("."))


def siblings(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that stand beside the layer list and beside each module around it."""
    around: nn.Module = model
    prefix = ""
    for part in layers.split("."):
        for child, module in around.named_children():
            if child != part:
                yield prefix + child, module
        around = around.get_submodule(part)
        prefix += part + "."


def _probe(model: PreTrainedModel, layers: str, count: int, form: str) -> Chain:
    seen = _Observed()
    children = enumerate(model.get_submodule(layers).children())
    probes = {id(layer): _Probe(layer, form, index, seen) for index, layer in children}
    with shadow(model, probes) as probe:
        for name, module in siblings(probe, layers):
            for part in module.modules():
                part.register_forward_pre_hook(_note(name, seen))
        for parameter in probe.parameters():  # so that whatever is made of them can be told
            parameter.requires_grad_(parameter.is_floating_point())
        probe.eval()(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    if seen.calls != list(range(count)):
        raise _NotAChainError(f"the layers run in the order {seen.calls}, not once each from first to last")
    return Chain(layers, count, form, *_sides(model, layers, seen))


def _note(name: str, seen: _Observed) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        (seen.after if seen.calls else seen.before).add(name)

    return hook


def _sides(model: nn.Module, layers: str, seen: _Observed) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The siblings with parameters, by the side of the layers on which they run."""
    before: list[str] = []
    after: list[str] = []
    for name, module in siblings(model, layers):
        if not any(True for _ in module.parameters()):
            continue  # nothing to place: every stage keeps it
        if name in seen.before and name in seen.after:
            raise _NotAChainError(f"{name} runs both before and after the layers")
        (before if name in seen.before else after).append(name)
    placed = {p for side in (*before, *after, layers) for p in model.get_submodule(side).parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in placed:
            raise _NotAChainError(f"the parameter {name} belongs to no module before, in or after the layers")
    return tuple(before), tuple(after)
