"""Where a stage begins and ends inside the model's own forward.

A stage is the whole model object, in which placeholders without parameters replace the layers of other
stages. For a stage with layers 2 and 3 of 6:

    embed*   0*    1*     2     3      4*   5*   norm*  head*        * placeholder
                   |            |
                 entry         exit

The entry, the placeholder just before the stage's first layer, returns the received hidden states. The exit,
the stage's last layer, ends the forward: its result is the stage's output. So the model's code before its
layers runs on a dummy, whose result is dropped, and its code between two layers runs once, after the entry.
If the previous stages have only the embedding, the model's first layer itself takes the received hidden
states. A first stage with only the embedding ends at the placeholder of the first layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.batch.payload import TensorSpec
from penstock.errors import ModelError
from penstock.models.tracing.meta import without_values
from penstock.models.tracing.placeholder import (
    Placeholder,
    hidden_of,
    leaves,
    mappings,
    replaced,
    with_hidden,
)
from penstock.models.tracing.towers import features_from, with_zeros
from penstock.private import active_collector, disable_current_modes, tree_leaves, tree_map_only
from penstock.runtime.around import around
from penstock.runtime.unseen import unseen

if TYPE_CHECKING:
    from penstock.models.stage import StageInfo
    from penstock.models.tracing.chain import Chain

_REMEMBERED = 4096  # shapes of a placeholder's result


class StageDone(BaseException):
    """Ends a stage's forward once its output exists. It is no error, and a model's code must not catch it."""


class Boundary:
    """The inputs and outputs of one stage during one forward.

    The hidden states cross an edge; or, if the chain has more, a dict of

        "hidden"      the hidden states
        "early"       values computed before the layers that later layers take, by index
        "passed_on"   a layer's further results for the next layer
        "shared"      values that layers store in a mapping that all of them get
        "recorded"    values that the head collects from the layers
        "features"    image features that are added to the hidden states between later layers
    """

    def __init__(self, chain: Chain, layers: range, info: StageInfo) -> None:
        self._chain, self._info = chain, info
        self._entry = None if info.is_first else layers.start - 1  # -1: the first layer itself
        self._exit = None if info.is_last else max(layers.stop - 1, 0)  # 0 for a stage without layers
        self._needed = () if info.is_last else chain.early_values_from(layers.stop)
        self._next = layers.stop
        self._features: dict[str, Any] = {}
        self._received: Any = None
        self._entered = False
        self._output: Any = None

    def begin(self, received: Any) -> None:
        self._received, self._entered, self._output = received, False, None
        self._features = {}

    def end(self) -> Any:
        """The output, if the forward ended at the exit. Raises ModelError if it skipped entry or exit."""
        output, self._received, self._output = self._output, None, None
        self._features = {}
        if self._entered is self._info.is_first or (self._exit is not None and output is None):
            raise _skipped(f"stage {self._info.stage}")
        return output

    def around_layers(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the module around the layers, with the received features."""
        if not self._info.is_first:
            self._features = self._received["features"]
            return kwargs | with_zeros(self._features, self._received["hidden"])
        names = self._chain.features
        self._features = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return kwargs

    def before_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of one of the stage's layers, from those with which the model calls it."""
        if self._entry == -1 and index == 0:
            args, kwargs = with_hidden(args, kwargs, self._enter(args, kwargs))
        taken = self._chain.early_inputs[index]
        if taken and not self._info.is_first:
            early = self._received["early"]
            return replaced(args, kwargs, {name: early[str(value)] for name, value in taken.items()})
        return args, kwargs

    def after_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Take the result of one of the stage's layers. The last layer's result is the output."""
        if index == self._exit:
            hidden, *more = (result,) if isinstance(result, Tensor) else result
            self._leave(hidden, tuple(more), args, kwargs)
        return result

    def at_placeholder(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The result of a layer's placeholder: hidden states, and the further entries of a tuple."""
        hidden = hidden_of(args, kwargs)
        if index == self._entry:
            states = self._enter(args, kwargs)
            return states, self._received["passed_on"] if self._chain.layer_outputs_passed_on else (None,)
        if index == self._exit:
            self._leave(hidden, None, args, kwargs)
        taken = self._chain.early_inputs[index]
        if self._output is not None and taken:  # on a first stage, as later ones cannot compute these
            values = dict(leaves(args, kwargs))
            self._output["early"] |= {str(value): values[name] for name, value in taken.items()}
            self._stop_when_complete()
        return hidden, (None,)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self._entered:
            raise _skipped("a layer before the stage's own, run twice")
        self._entered, received = True, self._received
        if self._chain.only_hidden_states:
            return received  # type: ignore[no-any-return]
        for mapping in mappings(args, kwargs) if self._chain.mappings_shared else ():
            mapping.update(received["shared"])
        for name in self._chain.recorded:
            active_collector.get()[name].extend(received["recorded"][name])
        return received["hidden"]  # type: ignore[no-any-return]

    def _leave(
        self, hidden: Tensor, more: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        chain = self._chain
        if chain.only_hidden_states:
            self._output = hidden
            raise StageDone
        early = {} if self._info.is_first else self._received["early"]
        needed = {} if self._info.is_first else {str(n): early[str(n)] for n in self._needed}
        self._output = {"hidden": hidden, "early": needed}
        if chain.layer_outputs_passed_on and more is not None:
            self._output["passed_on"] = more
        if chain.mappings_shared:
            self._output["shared"] = {
                name: value for mapping in mappings(args, kwargs) for name, value in mapping.items()
            }
        if chain.recorded:
            collected = active_collector.get()
            self._output["recorded"] = {name: tuple(collected[name]) for name in chain.recorded}
        if chain.features:
            self._output["features"] = features_from(self._features, self._next)
        self._stop_when_complete()

    def _stop_when_complete(self) -> None:
        if len(self._output["early"]) == len(self._needed):
            raise StageDone


def _skipped(where: str) -> ModelError:
    return ModelError(
        where,
        "the forward skipped the placeholder of a layer, and each layer runs once in a forward",
        "Set the config's layer dropping to 0",
    )


class BoundaryPlaceholder(Placeholder):
    """A placeholder of a layer that gets its result from the boundary."""

    def __init__(self, layer: nn.Module, form: str, index: int, boundary: Boundary) -> None:
        super().__init__(layer, form)
        self._index, self._boundary = index, boundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(*self._boundary.at_placeholder(self._index, args, kwargs))


def at_boundary(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's call, with arguments from the boundary, which also gets the result.

    Activation checkpointing works inside it: it keeps the received arguments, and runs only the layer again.
    """

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        boundary, index = layer.boundary, layer.boundary_index
        args, kwargs = boundary.before_layer(index, args, kwargs)
        return boundary.after_layer(index, args, kwargs, plain(layer, *args, **kwargs))

    return call


def _with_features(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(module, *args, **module.boundary.around_layers(kwargs))

    return call


def pass_features(module: nn.Module, boundary: Boundary) -> None:
    """Make the boundary pass image features to the module around the layers."""
    around(module, __call__=_with_features)
    vars(module)["boundary"] = boundary


def make_boundary_layer(layer: nn.Module, index: int, boundary: Boundary) -> None:
    """Put the boundary around the calls of this layer."""
    around(layer, __call__=at_boundary)
    vars(layer).update(boundary=boundary, boundary_index=index)


def _whole_slices(plain: Callable[..., Any]) -> Callable[..., Any]:
    def getitem(layers: nn.ModuleList, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(layers)) == (0, len(layers), 1):
            return layers
        return plain(layers, index)

    return getitem


def keep_whole_slices(layers: nn.Module) -> None:
    """Make a slice of all layers return the list itself, unless its class is the model's own.

    Models of transformers iterate over `layers[:config.num_hidden_layers]`.
    """
    if type(layers) is nn.ModuleList:
        around(layers, __getitem__=_whole_slices)


def _whole_dtype(plain: Any) -> property:
    return property(lambda module: vars(module)["_whole_dtype"])


def _device_of_stage(plain: Any) -> property:
    return property(lambda module: next(vars(module)["_stage"].parameters()).device)


def mark_without_weights(stage: PreTrainedModel, dtype: torch.dtype) -> None:
    """Set dtype and device of models inside `stage` without weights, as on a stage with only a head.

    transformers reads both from a model's first weight. Some forwards make masks with them.

    dtype: of the whole model
    """
    for module in stage.modules():
        if isinstance(module, PreTrainedModel) and next(module.parameters(), None) is None:
            around(module, dtype=_whole_dtype, device=_device_of_stage)
            vars(module).update(_stage=stage, _whole_dtype=dtype)  # not as a child of its own


# ---- Placeholders of the other modules: embeddings before the layers, norm and head after them


class ModulePlaceholder(nn.Module):
    """Replaces a module of another stage that is no layer.

    It has the attributes of the real module, such as an embedding's width or its weight's dtype. Its weights
    are zeros that take no memory.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # in __dict__, or nn.Module would list them among its modules and buffers
        self.__dict__["_module"] = without_values(module)
        self.__dict__["_here"] = torch.zeros((), dtype=torch.bool, device="cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)  # only the cache of shapes changes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.__dict__["_here"] = fn(self._here)  # `to` moves it with the model
        return self

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_module"], name)
        if isinstance(value, nn.Module):
            value = ModulePlaceholder(value)
            value.to(self._here.device)
        elif isinstance(value, Tensor):
            value = self._zeros((), value.dtype).expand(value.shape)
        return value

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        narrow: torch.dtype | None = self.__dict__.get("_compute_dtype")  # see compute_in
        if narrow is not None and dtype.is_floating_point:
            dtype = narrow
        return torch.zeros(shape, dtype=dtype, device=self._here.device)


class PlaceholderBefore(ModulePlaceholder):
    """Replaces a module that runs before the layers. Returns zeros of the shape of its result.

    The stage drops that result. The shape comes from one run of the real module without values for each shape
    of the arguments.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.__dict__["_known"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # as of an embedding
            key: object = (args[0].shape, args[0].dtype)
        else:
            leaves = tree_leaves((args, kwargs))
            key = tuple(
                (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
            )
        known = self.__dict__["_known"]
        if key not in known:
            if len(known) >= _REMEMBERED:
                known.pop(next(iter(known)))
            known[key] = self._run_without_values(args, kwargs)
        result = known[key]
        if isinstance(result, TensorSpec):
            return self._zeros(result.shape, result.dtype)
        return tree_map_only(TensorSpec, lambda spec: self._zeros(spec.shape, spec.dtype), result,
                             is_leaf=lambda value: isinstance(value, TensorSpec))  # fmt: skip

    @torch.no_grad()
    def _run_without_values(self, args: Any, kwargs: Any) -> Any:
        with unseen(), disable_current_modes():  # such as modes that count bytes or make fake tensors
            args, kwargs = tree_map_only(
                Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
            )
            return tree_map_only(Tensor, TensorSpec.of, self.__dict__["_module"](*args, **kwargs))


class PlaceholderAfter(ModulePlaceholder):
    """Replaces a module that runs after the layers, or never: the forward ends before it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.__dict__["_name"] = name

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise ModelError(
            f"{self._name}, called on a stage that does not have it",
            "only the last stage has modules that run after the layers or that no text passes through",
            "Set the config's layer dropping to 0",
        )


def compute_in(stage: nn.Module, dtype: torch.dtype) -> None:
    """Make the weights of placeholders have the dtype in which mixed precision computes."""
    for module in stage.modules():
        if isinstance(module, ModulePlaceholder):
            module.__dict__["_compute_dtype"] = dtype
