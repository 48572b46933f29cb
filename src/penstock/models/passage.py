"""How things pass into and out of a stage's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.utils.output_capturing import _active_collector

from penstock.errors import ModelError
from penstock.models.arguments import hidden_of, mappings, places, replaced, with_hidden

if TYPE_CHECKING:
    from penstock.models.chain import Chain
    from penstock.models.protocol import StageInfo


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
