"""A forward of a model without values, in which every layer is a placeholder: what it shows of the chain.

What the placeholders return is marked, and so are the model's weights and what modules before the layers
return; marks follow values (trail.py). The hidden states of a layer may hang on the layer just before and on
nothing else; what else a layer takes was made before all layers, or of no weight.

A second forward, with the real layers, shows what layers hand to each other in ways that no argument tells,
and in which dtype they return hidden states. It is left out where layers look at values, as some experts do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from penstock.errors import ModelError
from penstock.models.tracing.meta import shadow
from penstock.models.tracing.placeholder import Placeholder, hidden_of, is_shared, places
from penstock.models.tracing.provenance import Provenance, layers_in, names_in

# ---- Which module list of a Hugging Face model holds its layers, and what stands beside it.


Rule = Callable[[PreTrainedModel], str]
_RULES: dict[type[PreTrainedModel], Rule] = {}


def register_chain(model: type[PreTrainedModel], rule: Rule) -> None:
    """For models of this class, `rule` names the module list of the layers, e.g. "model.blocks".

    Only where it is not the outermost list with as many entries as the config names layers. Everything else
    is still told by the model's own forward, and refused where that shows no chain.
    """
    _RULES[model] = rule


def no_chain(model: PreTrainedModel, rule: str) -> ModelError:
    return ModelError(
        type(model).__name__,
        rule,
        "Use a decoder-only model, or build the stages yourself with Pipeline.from_provider",
    )


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The module list of the layers: by the model's rule, or the outermost with as many entries as the config
    names layers, or the outermost that holds most. Raises ModelError.
    """
    for kind in type(model).__mro__:
        if kind in _RULES:
            name = _RULES[kind](model)
            found = dict(model.named_modules()).get(name)
            if isinstance(found, nn.ModuleList):
                return name, found
            raise no_chain(model, f"its rule names {name!r} for the list of its layers, and that is none")
    if getattr(model.config, "is_encoder_decoder", False):
        raise no_chain(model, "a pipeline cuts one list of layers, and this model has two")
    wanted = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [found for found in lists if len(found[1]) == wanted] or [
        found for found in lists if len(found[1])
    ]
    if not fitting:
        raise no_chain(model, "a pipeline cuts one list of layers, and this model has none")
    return min(
        fitting, key=lambda found: (found[0].count("."), -sum(p.numel() for p in found[1].parameters()))
    )


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


# what a layer may return: h; (h,); (h, something for the next layer); (h, None)
FORMS = ("tensor", "tuple", "tuple with more", "tuple with None")
_SHAPE = (2, 5)  # rows and sequence
_OF_A_KIND = 4  # layers


class NoChainError(Exception):
    """Why the layers are no chain, as the end of a sentence."""


@dataclass
class Seen:
    """What placeholders and hooks saw.

    trail: a layer's number marks what was made of what it returned, -1 what was made of the modules before
        the layers, a name what was made of that parameter
    given: what layers take beside the hidden states, by layer and place; kept, so that ids stay theirs
    """

    trail: Provenance = field(default_factory=Provenance)
    calls: list[int] = field(default_factory=list)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    given: list[dict[str, Tensor]] = field(default_factory=list)
    used_before: set[str] = field(default_factory=set)
    used_after: set[str] = field(default_factory=set)
    handed: list[Tensor] = field(default_factory=list)
    hands: bool = False
    shares: bool = False
    plain: bool = True
    width: int = 0

    def fresh(self, tensor: Tensor, layer: int) -> Tensor:
        new = tensor.clone()  # which the model may write into
        self.trail.mark(new, {layer})
        return new

    def reach(self, tensor: Tensor) -> tuple[set[int], set[str]]:
        """The layers, and the parameters, that `tensor` was made of."""
        marks = self.trail.marks(tensor)
        return layers_in(marks), names_in(marks)


class _Probe(Placeholder):
    """A placeholder that looks at what it is called with."""

    def __init__(self, layer: nn.Module, form: str, index: int, seen: Seen) -> None:
        super().__init__(layer, form)
        self._seen, self._index = seen, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen, index = self._seen, self._index
        hidden = hidden_of(args, kwargs)
        made_by, names = seen.reach(hidden)
        in_order = seen.calls == list(range(index))  # else it is the order that is to be told of
        if index and in_order and made_by != {index - 1}:
            raise NoChainError(f"layer {index} does not take what layer {index - 1} returned")
        if index and in_order and names:
            raise NoChainError(f"{min(names)} is used between layers {index - 1} and {index}")
        seen.used_before |= names
        seen.given.append(dict(self._beside(hidden, args, kwargs)))
        seen.calls.append(index)
        seen.width = hidden.shape[-1]
        seen.plain &= hidden.shape == (*_SHAPE, seen.width)
        if self._form != "tuple with more":
            return self.give(seen.fresh(hidden, index))
        seen.handed.append(seen.fresh(hidden, index))
        return self.give(seen.fresh(hidden, index), (seen.handed[-1],))

    def _beside(self, hidden: Tensor, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """What of its arguments was made of weights before the layers, by their places."""
        seen = self._seen
        for place, value in places(args, kwargs):
            if is_shared(value):
                seen.shares = True
            elif seen.handed and value is seen.handed[-1]:
                seen.hands = True
            elif isinstance(value, Tensor) and value is not hidden and seen.trail.marks(value):
                self._check_made_before(value)
                yield place, value

    def _check_made_before(self, value: Tensor) -> None:
        made_by, names = self._seen.reach(value)
        if later := made_by - {-1}:
            layer = f"layer {self._index} takes more of layer {max(later)} than its hidden states"
            raise NoChainError(f"{layer} and what it hands to the next")
        self._seen.used_before |= names


def probe(model: PreTrainedModel, layers: str, count: int, form: str, *, training: bool) -> Seen:
    """What a forward shows in which `count` layers return `form`.

    Raises NoChainError, or what the model raises.
    """
    seen = Seen()
    children = enumerate(model.get_submodule(layers).children())
    probes = {id(layer): _Probe(layer, form, index, seen) for index, layer in children}
    with _without_values(model, training, probes) as whole:
        _untie(whole)
        for name, parameter in whole.named_parameters():
            seen.trail.mark(parameter, {name})
        _watch(whole, layers, seen)
        with seen.trail:
            output = whole(input_ids=torch.zeros(_SHAPE, dtype=torch.long), use_cache=False)
        if seen.calls != list(range(count)):
            raise NoChainError(f"the layers run in the order {seen.calls}, not once each from first to last")
        seen.used_after = _of_the_head(output.logits, seen, count)
    return seen


@contextmanager
def _without_values(
    model: PreTrainedModel, training: bool, replaced: dict[int, Any] | None = None
) -> Iterator[PreTrainedModel]:
    with shadow(model, replaced) as whole, torch.no_grad():
        for module in whole.modules():
            if isinstance(
                module, PreTrainedModel
            ):  # placeholders hold no routers, and the head would miss them
                module.config.get_text_config().output_router_logits = False
        yield whole.train(training)


class _PassingBy(Placeholder):
    """Gives what it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(hidden_of(args, kwargs))


def run_layers(model: PreTrainedModel, layers: str, form: str) -> torch.dtype | None:
    """The dtype of the hidden states that the real layers return; None where it varies, or cannot be told.

    Of layers that are built alike the first few run: a deep model would take seconds.
    Raises NoChainError where a layer takes something of another one that is not among its arguments.
    """
    trail, dtypes, met = Provenance(), set[torch.dtype](), Counter[object]()
    passing: dict[int, Any] = {}
    for layer in model.get_submodule(layers).children():
        met[kind := tuple((name, type(part)) for name, part in layer.named_modules())] += 1
        if met[kind] > _OF_A_KIND:
            passing[id(layer)] = _PassingBy(layer, form)
    with _without_values(model, training=False, replaced=passing) as whole:
        for index, layer in enumerate(whole.get_submodule(layers).children()):
            _accompany(layer, index, trail, dtypes)
        try:
            with trail:
                whole(input_ids=torch.zeros(_SHAPE, dtype=torch.long), use_cache=False)
        except NoChainError:
            raise
        except Exception:  # whatever a layer does that looks at values
            return None
    return dtypes.pop() if len(dtypes) == 1 else None


def _accompany(layer: nn.Module, index: int, trail: Provenance, dtypes: set[torch.dtype]) -> None:
    """Look at what comes into the layer and what goes out, and mark the latter as its own."""
    given: set[int] = set()

    def comes(module: nn.Module, args: Any, kwargs: Any) -> None:
        if index == 0:
            trail.mark(hidden_of(args, kwargs), {-1})
        for value in (*args, *kwargs.values()):
            if isinstance(value, list | dict) and layers_in(trail.marks(value)) - {-1}:
                raise NoChainError(f"layer {index} takes what others left in a {type(value).__name__}")
            shared = [dict(value)] if isinstance(value, MutableMapping) else [value]
            given.update(layers_in(trail.marks(shared)))

    def goes(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        if unseen := layers_in(trail.marks(result)) - given:
            whose = "the embeddings" if min(unseen) < 0 else f"layer {min(unseen)}"
            raise NoChainError(f"layer {index} takes something of {whose} that it is not given")
        if not isinstance(module, _PassingBy):
            dtypes.add((result if isinstance(result, Tensor) else result[0]).dtype)
        return tree_map_only(Tensor, own, result)

    def own(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        trail.mark(new, {index})
        return new

    layer.register_forward_pre_hook(comes, with_kwargs=True)
    layer.register_forward_hook(goes, with_kwargs=True)


def _untie(model: nn.Module) -> None:
    """Give each place a parameter of its own, so that it can be told where it is used."""
    met: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in met:
                module._parameters[name] = parameter = nn.Parameter(parameter.detach().clone())
            met.add(id(parameter))


def _watch(model: nn.Module, layers: str, seen: Seen) -> None:
    """Note which modules beside the layers run when, and tell apart what those before the layers give."""
    for name, module in siblings(model, layers):
        for inner, part in module.named_modules(prefix=name):
            part.register_forward_pre_hook(_note(inner, seen))
            if any(True for _ in part.parameters()):  # else every stage keeps it
                part.register_forward_hook(_freshen(inner, seen))


def _note(name: str, seen: Seen) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        (seen.after if seen.calls else seen.before).add(name)

    return hook


def _freshen(name: str, seen: Seen) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if seen.calls:
            return output
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point():
                raise NoChainError(f"{name} returns integers, which no stand-in can give")
            if isinstance(leaf, Tensor):
                seen.used_before |= seen.reach(leaf)[1]
        return tree_map_only(Tensor, lambda tensor: seen.fresh(tensor, -1), output)

    return hook


def _of_the_head(logits: Tensor, seen: Seen, count: int) -> set[str]:
    """The parameters that logits are made of, beyond the last layer. Raises NoChainError."""
    made_by, names = seen.reach(logits)
    if -1 in made_by:
        raise NoChainError("what comes before the layers reaches the head past them")
    if earlier := made_by - {count - 1}:
        raise NoChainError(f"what layer {min(earlier)} returned reaches the head past the layers after it")
    if both := names & seen.used_before:
        raise NoChainError(f"{min(both)} is used both before and after the layers")
    return names
