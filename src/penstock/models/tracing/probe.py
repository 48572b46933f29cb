"""Two forwards of a model without values, which show its chain of layers.

In the first, every layer is a placeholder. Three kinds of tensors get marks: results of placeholders, weights
and results of modules before the layers. Marks follow values through every op (provenance.py). In a chain the
hidden states of a layer depend only on the layer before it. Its other arguments come from modules before the
layers, or depend on no weight.

The second runs the real layers. It detects values that layers pass to each other outside of their arguments,
and the dtype of the hidden states. Layers that read values, as some experts do, cannot run without values;
then the dtype stays unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ModelError
from penstock.models.tracing.meta import shadow
from penstock.models.tracing.placeholder import Placeholder, hidden_of, is_shared, leaves
from penstock.models.tracing.provenance import Provenance
from penstock.private import tree_leaves, tree_map_only

# what a layer may return: h; (h,); (h, something for the next layer); (h, None)
FORMS = ("tensor", "tuple", "tuple with more", "tuple with None")
_SHAPE = (2, 5)  # rows and sequence of a probe
_RUN_OF_A_KIND = 4  # layers


class NoChainError(Exception):
    """The reason why the layers are no chain, as the end of a sentence."""


# ---- The list of the layers

Rule = Callable[[PreTrainedModel], str]
_RULES: dict[type[PreTrainedModel], Rule] = {}


def register_chain(model: type[PreTrainedModel], rule: Rule) -> None:
    """Register `rule`, which returns the name of the nn.ModuleList of layers in this class: "model.blocks".

    Needed only if that is not the outermost module list with `config.num_hidden_layers` entries. The rest of
    the chain still comes from the model's forward, and a model without a chain raises ModelError.
    """
    _RULES[model] = rule


def no_chain(model: PreTrainedModel, rule: str) -> ModelError:
    remedy = "Use a decoder-only model, or build the stages yourself with Pipeline.from_provider"
    return ModelError(type(model).__name__, rule, remedy)


def check_reads_tokens(model: PreTrainedModel) -> None:
    """Raise ModelError for a model of images or sound alone, such as ViT."""
    takes = signature(model.forward).parameters
    variable = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    first = model.main_input_name
    if "input_ids" not in takes and first != "input_ids" and (first in takes or not variable):
        rule = (
            f"it reads {first}, and a pipeline cuts models whose layers read the tokens of a text (input_ids)"
        )
        raise no_chain(model, rule)


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the module list of the layers.

    By the registered rule; else the outermost list with as many entries as the config has layers; else the
    outermost list with any entries. Of several, the one with the most parameters. Raises ModelError.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for kind in type(model).__mro__:
        if kind in _RULES:
            name = _RULES[kind](model)
            if name in lists:
                return name, lists[name]
            paths = [path for path, layers in lists.items() if len(layers)]
            raise ModelError(
                f"{type(model).__name__}, whose rule returns {name!r}",
                "a rule of register_chain names the nn.ModuleList of the model's layers",
                f"Return {' or '.join(map(repr, paths))}" if paths else "Keep the layers in an nn.ModuleList",
            )
    if getattr(model.config, "is_encoder_decoder", False):
        raise no_chain(model, "a pipeline cuts one list of layers, and this model has two")
    wanted = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    filled = [(name, module) for name, module in lists.items() if len(module)]
    fitting = [pair for pair in filled if len(pair[1]) == wanted] or filled
    if not fitting:
        raise no_chain(model, "a pipeline cuts one list of layers, and this model has none")
    outermost = min(name.count(".") for name, _ in fitting)
    fitting = [pair for pair in fitting if pair[0].count(".") == outermost]
    if len(fitting) > 1:
        return max(fitting, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    return fitting[0]


def path_to(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules around the layer list by their names, outermost first."""
    steps = layers.split(".")
    for end in range(len(steps)):
        name = ".".join(steps[:end])
        yield name, model.get_submodule(name)


def siblings(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of the modules around the layer list, without these modules and the list."""
    for prefix, around in path_to(model, layers):
        for child, module in around.named_children():
            name = f"{prefix}.{child}" if prefix else child
            if not f"{layers}.".startswith(f"{name}."):
                yield name, module


# ---- The first forward: placeholders for layers


@dataclass
class Findings:
    """The findings of placeholders and hooks.

    provenance: the origins of tensors: an index is the layer that returned it, -1 the modules before the
        layers, a name the parameter of that name
    calls: the layers in the order in which they ran
    before, after: the modules that ran before the first layer, and after it began
    used_before, used_after: the parameters from which layers' arguments, and the logits, were computed
    early_inputs: for each layer, its arguments that were computed from weights before the layers, by path;
        the tensors are kept, so that no other tensor gets their ids
    passed_on: further results of placeholders, in addition to the hidden states
    width, dims: of the hidden states: their last dimension, and how many they have
    """

    provenance: Provenance = field(default_factory=Provenance)
    calls: list[int] = field(default_factory=list)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    used_before: set[str] = field(default_factory=set)
    used_after: set[str] = field(default_factory=set)
    early_inputs: list[dict[str, Tensor]] = field(default_factory=list)
    passed_on: list[Tensor] = field(default_factory=list)
    layer_outputs_passed_on: bool = False
    mappings_shared: bool = False
    rows_and_sequence_kept: bool = True
    width: int = 0
    dims: int = 0


def probe(model: PreTrainedModel, layers: str, count: int, form: str, *, training: bool) -> Findings:
    """Run a forward in which `count` placeholders return `form`.

    Raises NoChainError, or any error of the model.
    """
    seen = Findings()
    children = enumerate(model.get_submodule(layers).children())
    probes = {id(layer): _Probe(layer, form, index, seen) for index, layer in children}
    with model_without_values(model, training, probes) as whole:
        _untie(whole)
        for name, parameter in whole.named_parameters():
            seen.provenance.mark(parameter, {name})
        _watch_siblings(whole, layers, seen)
        with seen.provenance:
            output = whole(input_ids=torch.zeros(_SHAPE, dtype=torch.long), use_cache=False)
        if seen.calls != list(range(count)):
            raise NoChainError(f"the layers run in the order {seen.calls}, not once each from first to last")
        if getattr(output, "logits", None) is None:
            raise NoChainError(f"the forward returns no logits, but {', '.join(output)}")
        seen.used_after = _used_by_head(output.logits, seen, count)
    return seen


class _Probe(Placeholder):
    """A placeholder that records the origins of its arguments."""

    def __init__(self, layer: nn.Module, form: str, index: int, seen: Findings) -> None:
        super().__init__(layer, form)
        self._seen, self._index = seen, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen, index = self._seen, self._index
        hidden = hidden_of(args, kwargs)
        made_by, names = seen.provenance.origins(hidden)
        in_order = seen.calls == list(range(index))  # else the wrong order is reported
        if index and in_order and made_by != {index - 1}:
            raise NoChainError(f"layer {index} does not take what layer {index - 1} returned")
        if index and in_order and hidden.dim() != seen.dims:  # [0] of a tensor, not of a tuple
            raise NoChainError(f"layer {index} takes a part of what layer {index - 1} returned")
        if index and in_order and names:
            raise NoChainError(f"{min(names)} is used between layers {index - 1} and {index}")
        seen.used_before |= names
        seen.early_inputs.append(dict(self._early_inputs(hidden, args, kwargs)))
        seen.calls.append(index)
        seen.width, seen.dims = hidden.shape[-1], hidden.dim()
        seen.rows_and_sequence_kept &= hidden.shape == (*_SHAPE, seen.width)
        if self._form != "tuple with more":
            return self.give(seen.provenance.marked(hidden, index))
        seen.passed_on.append(seen.provenance.marked(hidden, index))
        return self.give(seen.provenance.marked(hidden, index), (seen.passed_on[-1],))

    def _early_inputs(self, hidden: Tensor, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        seen = self._seen
        for name, value in leaves(args, kwargs):
            if is_shared(value):
                seen.mappings_shared = True
            elif seen.passed_on and value is seen.passed_on[-1]:
                seen.layer_outputs_passed_on = True
            elif isinstance(value, Tensor) and value is not hidden and seen.provenance.marks(value):
                made_by, names = seen.provenance.origins(value)
                if later := made_by - {-1}:
                    layer = f"layer {self._index} takes more of layer {max(later)} than its hidden states"
                    raise NoChainError(f"{layer} and what it passes to the next")
                seen.used_before |= names
                yield name, value


def _used_by_head(logits: Tensor, seen: Findings, count: int) -> set[str]:
    """The parameters from which the head computes logits. Raises NoChainError."""
    made_by, names = seen.provenance.origins(logits)
    if -1 in made_by:
        raise NoChainError("a result from before the layers reaches the head past them")
    if earlier := made_by - {count - 1}:
        raise NoChainError(f"what layer {min(earlier)} returned reaches the head past the layers after it")
    if both := names & seen.used_before:
        raise NoChainError(f"{min(both)} is used both before and after the layers")
    return names


def _untie(model: nn.Module) -> None:
    """Give each module its own parameter, so that the provenance shows which one is used."""
    met: set[int] = set()
    for module in list(model.modules()):
        for name, child in module._modules.items():  # such as trained rows of a tied embedding
            if isinstance(child, nn.ParameterDict):
                module._modules[name] = nn.ParameterDict({**child}) if id(child) in met else child
                met.add(id(child))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in met:
                module._parameters[name] = parameter = nn.Parameter(parameter.detach().clone())
            met.add(id(parameter))


def _watch_siblings(model: nn.Module, layers: str, seen: Findings) -> None:
    """Record when the other modules run, and mark the results of those before the layers."""

    def note(name: str) -> Callable[..., None]:
        return lambda *_: (seen.after if seen.calls else seen.before).add(name)

    def mark(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if seen.calls:
                return output
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and not leaf.is_floating_point():
                    raise NoChainError(f"{name} returns integers, which no stand-in can give")
                if isinstance(leaf, Tensor):
                    seen.used_before |= seen.provenance.origins(leaf)[1]
            return tree_map_only(Tensor, lambda tensor: seen.provenance.marked(tensor, -1), output)

        return hook

    for name, module in siblings(model, layers):
        for inner, part in module.named_modules(prefix=name):
            part.register_forward_pre_hook(note(inner))
            if next(part.parameters(), None) is not None:  # else every stage keeps it
                part.register_forward_hook(mark(inner))


@contextmanager
def model_without_values(
    model: PreTrainedModel, training: bool, replaced: dict[int, Any]
) -> Iterator[PreTrainedModel]:
    with shadow(model, replaced) as whole, torch.no_grad():
        for module in whole.modules():
            if isinstance(module, PreTrainedModel):
                text = module.config.get_text_config()
                text.output_router_logits = False  # placeholders have no routers, whose logits heads need
                if getattr(text, "pad_token_id", 0) is None:  # heads of rows refuse several rows without it
                    text.pad_token_id = 0
        yield whole.train(training)


# ---- Layers that are alike


_PLAIN = frozenset({bool, int, float, str, type(None)})
_NUMBER = re.compile("idx|index|layer_(id|number)")  # attributes with a layer's own index


def layer_kind(layer: nn.Module) -> Hashable:
    """Equal for layers that are built alike and train the same parts, so that only their indices differ."""
    return tuple(
        (name, type(part), *_settings(part),
         *((p.shape, p.dtype, p.requires_grad) for p in part._parameters.values() if p is not None))
        for name, part in layer.named_modules()
    )  # fmt: skip


def _settings(part: nn.Module) -> Iterator[Hashable]:
    for name, value in vars(part).items():
        if type(value) in _PLAIN and not _is_number(name):
            yield name, value


@cache
def _is_number(name: str) -> bool:
    return _NUMBER.search(name) is not None


class Identity(Placeholder):
    """Returns its input, in the form of a layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(hidden_of(args, kwargs))


def after_first(layers: nn.Module, kinds: Sequence[Hashable], form: str, most: int = 1) -> dict[int, Any]:
    """Identities for all layers of a kind but its first `most` ones, by the id of the layer they replace."""
    met = Counter[Hashable]()
    identities: dict[int, Any] = {}
    for layer, kind in zip(layers.children(), kinds, strict=True):
        met[kind] += 1
        if met[kind] > most:
            identities[id(layer)] = Identity(layer, form)
    return identities


# ---- The second forward: the real layers


def run_layers(model: PreTrainedModel, layers: str, form: str) -> torch.dtype | None:
    """The dtype of the hidden states that the real layers return; None if it varies or is unknown.

    Of layers with the same modules only the first few run, as all layers of a deep model would take seconds.
    Raises NoChainError if a layer uses a value of another one that is not among its arguments.
    """
    provenance, dtypes, real = Provenance(), set[torch.dtype](), model.get_submodule(layers)
    kinds = [tuple((name, type(part)) for name, part in layer.named_modules()) for layer in real.children()]
    replaced = after_first(real, kinds, form, _RUN_OF_A_KIND)
    with model_without_values(model, False, replaced) as whole:
        run = [*whole.get_submodule(layers).children()]
        for index, (layer, following) in enumerate(zip_longest(run, run[1:])):
            if not (isinstance(layer, Identity) and isinstance(following, Identity)):
                _watch_layer(layer, index, provenance, dtypes)  # the last of several identities marks last
        try:
            with provenance:
                whole(input_ids=torch.zeros(_SHAPE, dtype=torch.long), use_cache=False)
        except NoChainError:
            raise
        except Exception:  # any error of a layer that reads values
            return None
    return dtypes.pop() if len(dtypes) == 1 else None


def _watch_layer(layer: nn.Module, index: int, provenance: Provenance, dtypes: set[torch.dtype]) -> None:
    """Check that the layer's result depends on its arguments only, then mark it as this layer's."""
    arguments: set[int] = set()  # the layers from which they were computed

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if index == 0:
            provenance.mark(hidden_of(args, kwargs), {-1})
        for value in (*args, *kwargs.values()):
            if isinstance(value, list | dict) and provenance.origins(value)[0] - {-1}:
                raise NoChainError(f"layer {index} takes values that others left in a {type(value).__name__}")
            shared = dict(value) if isinstance(value, MutableMapping) else value
            arguments.update(provenance.origins(shared)[0])

    def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        if unseen := provenance.origins(result)[0] - arguments:
            whose = "the embeddings" if min(unseen) < 0 else f"layer {min(unseen)}"
            raise NoChainError(f"layer {index} uses a value of {whose} that is not among its arguments")
        if not isinstance(module, Identity):
            dtypes.add((result if isinstance(result, Tensor) else result[0]).dtype)
        return tree_map_only(Tensor, lambda tensor: provenance.marked(tensor, index), result)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)
