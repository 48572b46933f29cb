"""One forward of a model without values, in which every layer is a placeholder: what it shows of the chain.

Each placeholder returns fresh tensors, and so do the modules before the layers. What a later value was made
of is then read off autograd's graph: the hidden states of a layer may hang on the layer just before and on
nothing else; what else a layer takes was made before all layers, or is no function of trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from penstock.models.doors import Placeholder, hidden_of, is_shared, places
from penstock.models.layer_list import siblings
from penstock.models.shadow import shadow

# what a layer may return: h; (h,); (h, something for the next layer); (h, None)
FORMS = ("tensor", "tuple", "tuple with more", "tuple with None")
_SHAPE = (2, 5)  # rows and sequence


class NoChainError(Exception):
    """Why the layers are no chain, as the end of a sentence."""


@dataclass
class Seen:
    """What placeholders and hooks saw.

    made: the fresh tensors by id, each with the layer that made it; -1: a module before the layers
    given: what layers take beside the hidden states, by layer and place; kept, so that ids stay theirs
    """

    calls: list[int] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
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
    kept: list[Any] = field(default_factory=list)

    def fresh(self, tensor: Tensor, layer: int) -> Tensor:
        new = tensor.detach().clone().requires_grad_()
        self.made[id(new)] = layer
        self.made[id(new)] = layer
        self.kept.append(new)
        return new.clone()  # which the model may write into

    def reach(self, tensor: Tensor) -> tuple[set[int], set[str]]:
        """The layers, and the parameters, that `tensor` was made of."""
        layers: set[int] = set()
        names: set[str] = set()
        for leaf in _leaves(tensor):
            if id(leaf) in self.made:
                layers.add(self.made[id(leaf)])
            elif id(leaf) in self.parameters:
                names.add(self.parameters[id(leaf)])
        return layers, names


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
        """What of its arguments was made of trained weights before the layers, by their places."""
        seen = self._seen
        for place, value in places(args, kwargs):
            if is_shared(value):
                seen.shares = True
            elif seen.handed and value is seen.handed[-1]:
                seen.hands = True
            elif isinstance(value, Tensor) and value is not hidden and value.requires_grad:
                self._check_made_before(value)
                yield place, value

    def _check_made_before(self, value: Tensor) -> None:
        made_by, names = self._seen.reach(value)
        if later := made_by - {-1}:
            layer = f"layer {self._index} takes more of layer {max(later)} than its hidden states"
            raise NoChainError(f"{layer} and what it hands to the next")
        self._seen.used_before |= names
        self._seen.kept.append(value)


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that autograd would give a gradient for `tensor`."""
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            yield tensor
        return
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions if following is not None]


def probe(model: PreTrainedModel, layers: str, count: int, form: str) -> Seen:
    """What a forward shows in which `count` layers return `form`.

    Raises NoChainError, or what the model raises.
    """
    seen = Seen()
    children = enumerate(model.get_submodule(layers).children())
    probes = {id(layer): _Probe(layer, form, index, seen) for index, layer in children}
    with shadow(model, probes) as without_values, torch.enable_grad():
        _untie(without_values)
        _ask_no_routers(without_values)
        for name, parameter in without_values.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point())
            seen.parameters[id(parameter)] = name
        _watch(without_values, layers, seen)
        output = without_values.eval()(input_ids=torch.zeros(_SHAPE, dtype=torch.long), use_cache=False)
        if seen.calls != list(range(count)):
            raise NoChainError(f"the layers run in the order {seen.calls}, not once each from first to last")
        seen.used_after = _of_the_head(output.logits, seen, count)
    return seen


def _untie(model: nn.Module) -> None:
    """Give each place a parameter of its own, so that it can be told where it is used."""
    met: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in met:
                module._parameters[name] = parameter = nn.Parameter(parameter.detach().clone())
            met.add(id(parameter))


def _ask_no_routers(model: nn.Module) -> None:
    """Placeholders hold none, and the head would miss their logits."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.get_text_config().output_router_logits = False


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
    """Also what has no gradient is told apart by one: a table of positions, say, that is a frozen weight."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if seen.calls:
            return output
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point():
                raise NoChainError(f"{name} returns integers, and where these go no gradient tells")
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
