"""How things pass into and out of a stage's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils.output_capturing import _active_collector

from penstock.errors import ModelError
from penstock.models.tracing.placeholder import (
    Placeholder,
    hidden_of,
    mappings,
    places,
    replaced,
    with_hidden,
)

if TYPE_CHECKING:
    from penstock.models.stage import StageInfo
    from penstock.models.tracing.chain import Chain


class StageDone(BaseException):
    """Ends a stage's forward once its output is there. No error: nothing may catch it on the way."""


class Boundary:
    """What is on its way into, and out of, one stage during one forward.

    What crosses an edge is the hidden states; or, where the chain has more, a dict: "hidden"; "given", what
    later layers take that was made before the layers; "handed", what a layer returns for the next one beside
    the hidden states; "shared", what layers leave in a mapping; "recorded", what the head collects.
    """

    def __init__(self, chain: Chain, layers: range, info: StageInfo) -> None:
        self._chain, self._info = chain, info
        self._entry = None if info.is_first else layers.start - 1  # -1: the first layer itself
        self._exit = None if info.is_last else max(layers.stop - 1, 0)  # 0, without layers: the first place
        self._needed = () if info.is_last else chain.given_from(layers.stop)
        self._received: Any = None
        self._entered = False
        self._output: Any = None

    def begin(self, received: Any) -> None:
        self._received, self._entered, self._output = received, False, None

    def end(self) -> Any:
        """The output, if the forward ended at the exit. Raises ModelError where a door was passed by."""
        output, self._received, self._output = self._output, None, None
        if self._entered is self._info.is_first or (self._exit is not None and output is None):
            raise _skipped(f"stage {self._info.stage}")
        return output

    def arrive(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """What one of the stage's own layers works on, in place of what it is called with."""
        if self._entry == -1 and index == 0:
            hidden_of(args, kwargs)  # for its refusal
            args, kwargs = with_hidden(args, kwargs, self._enter(args, kwargs))
        taken = self._chain.given[index]
        if taken and not self._info.is_first:
            given = self._received["given"]
            return replaced(args, kwargs, {place: given[str(number)] for place, number in taken.items()})
        return args, kwargs

    def depart(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What one of the stage's own layers returned. The last one's is the output."""
        if index == self._exit:
            hidden, *more = (result,) if isinstance(result, Tensor) else result
            self._leave(hidden, tuple(more), args, kwargs)
        return result

    def go_by(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The hidden states that a placeholder gives, and what it hands to the next layer beside."""
        hidden = hidden_of(args, kwargs)
        if index == self._entry:
            return self._enter(args, kwargs), self._received["handed"] if self._chain.hands else (None,)
        if index == self._exit:
            self._leave(hidden, None, args, kwargs)
        if self._output is not None and self._chain.given[index]:  # a first stage: later ones cannot make it
            values = dict(places(args, kwargs))
            made = {str(number): values[place] for place, number in self._chain.given[index].items()}
            self._output["given"] |= made
            self._end_when_whole()
        return hidden, (None,)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self._entered:
            raise _skipped("a layer before the stage's own, run twice")
        self._entered, received = True, self._received
        if self._chain.plain:
            return received  # type: ignore[no-any-return]
        for mapping in mappings(args, kwargs) if self._chain.shares else ():
            mapping.update(received["shared"])
        for name in self._chain.records:
            _active_collector.get()[name].extend(received["recorded"][name])
        return received["hidden"]  # type: ignore[no-any-return]

    def _leave(
        self, hidden: Tensor, more: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._chain.plain:
            self._output = hidden
            raise StageDone
        self._output = {"hidden": hidden, "given": {}}
        if not self._info.is_first:
            self._output["given"] = {
                str(number): self._received["given"][str(number)] for number in self._needed
            }
        if self._chain.hands and more is not None:
            self._output["handed"] = more
        if self._chain.shares:
            self._output["shared"] = {
                name: value for m in mappings(args, kwargs) for name, value in m.items()
            }
        if self._chain.records:
            collected = _active_collector.get()
            self._output["recorded"] = {name: tuple(collected[name]) for name in self._chain.records}
        self._end_when_whole()

    def _end_when_whole(self) -> None:
        if len(self._output["given"]) == len(self._needed):
            raise StageDone


def _skipped(where: str) -> ModelError:
    return ModelError(
        where,
        "the forward passed by the placeholder of a layer, and each layer runs once in a forward",
        "Set the config's layer dropping to 0",
    )


# ---- What stands in a stage's model in the place of other stages' layers.
#
# A stage is the whole model object in which the layers of other stages are placeholders without
# parameters. In place of the layer just before the stage's own stands the entry: it gives the hidden
# states that were received in place of what it gets. The last of the stage's own layers is the exit: what
# it returns is the stage's output, and the forward ends there. Whatever the model does before its layers
# runs on a dummy and is dropped, and whatever it does between two layers runs once, after the entry. What
# passes at the doors is kept by the stage's `Passage`; modules beside the layers have stand-ins of their
# own (absent.py).
#
# Where the stages before hold the embedding alone, no layer's place is free for the entry: then the
# model's first layer takes what was received itself. A first stage with the embedding alone ends at the
# first layer's place.


class BoundaryPlaceholder(Placeholder):
    """A placeholder that tells the passage when the forward comes by."""

    def __init__(self, layer: nn.Module, form: str, index: int, boundary: Boundary) -> None:
        super().__init__(layer, form)
        self._index, self._boundary = index, boundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(*self._boundary.go_by(self._index, args, kwargs))


class BoundaryLayer(nn.Module):
    """Mixed into the class of a real layer: it tells the passage when it is called, and what it returns.

    Before and after all else that the layer does, hooks too. So activation checkpointing, which stands
    further in, keeps what was received, and calls the layer's inside again, not this.
    """

    boundary: Boundary
    passage_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        boundary, index = self.boundary, self.passage_index
        args, kwargs = boundary.arrive(index, args, kwargs)
        return boundary.depart(index, args, kwargs, super().__call__(*args, **kwargs))


def make_boundary_layer(layer: nn.Module, index: int, boundary: Boundary) -> None:
    """Make the layer, and no other of its class, a door too; everything it holds keeps its name."""
    own = type(layer)
    layer.__class__ = type(own.__name__, (BoundaryLayer, own), {"__module__": own.__module__})
    layer.boundary, layer.passage_index = boundary, index  # type: ignore[assignment]


# ---- What stands on a stage in the place of other stages' modules beside the layers.


class Absent(nn.Module):
    """Stands where a module of another stage stood. What is asked of it, such as an embedding's width or the
    dtype of its weight, the module itself answers; its weights are zeros that take no memory.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        memo: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in module.buffers()}
        memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in module.parameters()}
        self.__dict__["_module"] = copy.deepcopy(module, memo)  # not among the parts, or its weights would be
        self.__dict__["_here"] = torch.zeros((), dtype=torch.bool, device="cpu")  # and nobody's buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)  # nothing in it ever changes but what is known

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.__dict__["_here"] = fn(self._here)  # of `to`: it goes where the model goes
        return self

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_module"], name)
        if isinstance(value, nn.Module):
            value = Absent(value)
            value.to(self._here.device)
        elif isinstance(value, Tensor):
            dtype = self._computed(value.dtype)
            value = torch.zeros((), dtype=dtype, device=self._here.device).expand(value.shape)
        return value

    def _computed(self, dtype: torch.dtype) -> torch.dtype:
        """What weights of `dtype` are computed in, see `compute_in`."""
        narrow: torch.dtype | None = self.__dict__.get("_narrow")
        return dtype if narrow is None or not dtype.is_floating_point else narrow


class Before(Absent):
    """Of a module that runs before the layers, where its result is thrown away: it gives zeros of its shape.

    The shape is learnt from the module itself without values, once for each shape that comes in.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.__dict__["_known"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        known = self.__dict__["_known"]
        if key not in known:
            known[key] = self._learn(args, kwargs)
        device = self._here.device
        return tree_map_only(
            Shape,
            lambda given: torch.zeros(given.of, dtype=self._computed(given.dtype), device=device),
            known[key],
        )

    @torch.no_grad()
    def _learn(self, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():  # of who counts bytes, or has fake tensors only
            args, kwargs = tree_map_only(
                Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
            )
            given = self.__dict__["_module"](*args, **kwargs)
            return tree_map_only(Tensor, lambda t: Shape(t.shape, t.dtype), given)


@dataclass(frozen=True)
class Shape:
    of: torch.Size
    dtype: torch.dtype


class After(Absent):
    """Of a module that runs after the layers, or never, on a stage whose forward does not get there."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.__dict__["_name"] = name

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise ModelError(
            f"{self._name}, called on a stage that does not hold it",
            "the last stage alone holds what runs after the layers, and what no text goes through",
            "Set the config's layer dropping to 0; give images and sounds as inputs_embeds",
        )


def compute_in(stage: nn.Module, dtype: torch.dtype) -> None:
    """Let what stands for other stages' modules answer as those do, whose weights are computed in `dtype`."""
    for module in stage.modules():
        if isinstance(module, Absent):
            module.__dict__["_narrow"] = dtype
