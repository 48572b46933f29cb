"""What stands in a stage's model in the place of other stages' layers, and how things pass in and out of it.

A stage is the whole model object in which the layers of other stages are placeholders without parameters. In
place of the layer just before the stage's own stands the entry: it gives the hidden states that were received
in place of what it gets. The last of the stage's own layers is the exit: what it returns is the stage's
output, and the forward ends there. Whatever the model does before its layers runs on a dummy and is dropped,
and whatever it does between two layers runs once, after the entry.

Where the stages before hold the embedding alone, no layer's place is free for the entry: then the model's
first layer takes what was received itself. A first stage with the embedding alone ends at the first layer's
place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten
from transformers.utils.output_capturing import _active_collector

from penstock.errors import ModelError

if TYPE_CHECKING:
    from penstock.models.chain import Chain
    from penstock.models.protocol import StageInfo


class Placeholder(nn.Module):
    """Stands where a layer of another stage stood: same place, same plain attributes, no parameters."""

    def __init__(self, layer: nn.Module, form: str) -> None:
        super().__init__()
        self._form = form
        self._kind = type(layer)
        for name, value in vars(layer).items():
            if not name.startswith("_") and name not in ("training", "gradient_checkpointing", "forward"):
                setattr(self, name, copy.copy(value))

    def __getattr__(self, name: str) -> Any:
        """What the layer's class makes of its plain attributes."""
        made = getattr(self.__dict__.get("_kind"), name, None)
        return made.fget(self) if isinstance(made, property) and made.fget else super().__getattr__(name)

    def give(self, hidden: Tensor, more: tuple[Any, ...] = (None,)) -> Any:
        """As a layer returns it; more: what it returns beside the hidden states, where that is a tuple."""
        if self._form == "tensor":
            return hidden
        return (hidden,) if self._form == "tuple" else (hidden, *more)


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


def places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every leaf of a call's arguments, with a name for its place."""
    for path, value in tree_flatten_with_path((args, kwargs))[0]:
        yield keystr(path), value


class StageDone(BaseException):
    """Ends a stage's forward once its output is there. No error: nothing may catch it on the way."""


class Passage:
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
            raise skipped(f"stage {self._info.stage}")
        return output

    def arrive(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """What one of the stage's own layers works on, in place of what it is called with."""
        if self._entry == -1 and index == 0:
            hidden_of(args, kwargs)  # for its refusal
            hidden = self._enter(args, kwargs)
            args, kwargs = (
                ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
            )
        taken = self._chain.given[index]
        if taken and not self._info.is_first:
            given = self._received["given"]
            return _replaced(args, kwargs, {place: given[str(number)] for place, number in taken.items()})
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
            raise skipped("a layer before the stage's own, run twice")
        self._entered, received = True, self._received
        if self._chain.plain:
            return received  # type: ignore[no-any-return]
        for mapping in _mappings(args, kwargs) if self._chain.shares else ():
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
                name: value for m in _mappings(args, kwargs) for name, value in m.items()
            }
        if self._chain.records:
            collected = _active_collector.get()
            self._output["recorded"] = {name: tuple(collected[name]) for name in self._chain.records}
        self._end_when_whole()

    def _end_when_whole(self) -> None:
        if len(self._output["given"]) == len(self._needed):
            raise StageDone


def _mappings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    """Those among the arguments that torch does not take apart: layers hand each other values in them."""
    return (value for value in (*args, *kwargs.values()) if is_shared(value))


def is_shared(value: object) -> bool:
    return isinstance(value, MutableMapping) and not isinstance(value, dict)


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Tensor]) -> tuple[Any, Any]:
    """The arguments with other values in some places."""
    leaves, tree = tree_flatten_with_path((args, kwargs))
    args, kwargs = tree_unflatten([values.get(keystr(path), leaf) for path, leaf in leaves], tree)
    return args, kwargs


class Door(Placeholder):
    """A placeholder that tells the passage when the forward comes by."""

    def __init__(self, layer: nn.Module, form: str, index: int, passage: Passage) -> None:
        super().__init__(layer, form)
        self._index, self._passage = index, passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(*self._passage.go_by(self._index, args, kwargs))


class LayerDoor(nn.Module):
    """Mixed into the class of a real layer: it tells the passage when it is called, and what it returns.

    Before and after all else that the layer does, hooks too. So activation checkpointing, which stands
    further in, keeps what was received, and calls the layer's inside again, not this.
    """

    passage: Passage
    passage_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage, index = self.passage, self.passage_index
        args, kwargs = passage.arrive(index, args, kwargs)
        return passage.depart(index, args, kwargs, super().__call__(*args, **kwargs))


def make_door(layer: nn.Module, index: int, passage: Passage) -> None:
    """Make the layer, and no other of its class, a door too; everything it holds keeps its name."""
    own = type(layer)
    layer.__class__ = type(own.__name__, (LayerDoor, own), {"__module__": own.__module__})
    layer.passage, layer.passage_index = passage, index  # type: ignore[assignment]


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


def skipped(where: str) -> ModelError:
    return ModelError(
        where,
        "the forward passed by the placeholder of a layer, and each layer runs once in a forward",
        "Set the config's layer dropping to 0",
    )
