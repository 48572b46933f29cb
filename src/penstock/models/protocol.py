"""What a model of one's own offers a pipeline: how each stage is built, run, and what goes between stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Protocol

from torch import nn

from penstock.errors import ModelError
from penstock.models.partition import partition
from penstock.runtime.shapes import Microbatch


@dataclass(frozen=True)
class StageInfo:
    """Where a stage stands: `stage` of `stages`, counted from 0 along the data's way."""

    stage: int
    stages: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


Provider = Callable[[StageInfo], nn.Module]


def distribute_layers(layers: int, info: StageInfo, *, before: int = 1, after: int = 1) -> range:
    """The layers of one stage, where `layers` of them are dealt out as evenly as can be.

    before, after: how many layers what stands before the first one (an embedding) and after the last one (a
    head) count for. Raises PartitionError.
    """
    return partition(layers, info.stages, embedding_weight=before, head_weight=after)[info.stage]


def own_layers(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The layers of a stage, with their numbers: what its module lists and dicts hold.

    Of lists within lists the innermost, but none within a layer. The number is the name in the list, so that
    a ModuleDict can go on where the stage before ended. A stage without such a list is one layer.
    """
    lists = list(_layer_lists(module))
    if not lists:
        yield 0, module
    for layers in lists:
        for place, (key, layer) in enumerate(layers.named_children()):
            yield int(key) if key.isdigit() else place, layer


def _layer_lists(module: nn.Module) -> Iterator[nn.Module]:
    held = [child for child in module.children() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and not held:
        yield module
        return
    # beside a list in a list stand parts that are no layers: nanoGPT keeps its embedding there
    for child in held if isinstance(module, nn.ModuleDict) else module.children():
        yield from _layer_lists(child)


class DeclaresShapes(Protocol):
    """A stage's module that tells by arithmetic what crosses its edges; a pipeline's stages all do, or none.

    Without it the stages before have to be built on every rank, on the meta device, to learn what they give.
    Both return what forward takes or returns, with tensors on the meta device or TensorSpecs in place of the
    tensors.
    """

    def infer_inputs(self, microbatch: Microbatch) -> Any:
        """What comes over the edge for `microbatch`, a whole one as it was given to step(); not asked of the
        first stage."""

    def infer_outputs(self, microbatch: Microbatch) -> Any:
        """What goes on to the next stage; not asked of the last stage."""


class ProvidedCall:
    """Runs a module of the user's own as a stage.

    What came over the edge is given to its forward by name where it is a mapping, by position where it is a
    tuple or a list, else as the first argument. Beside it, forward gets by name each entry of the microbatch
    that it has a parameter for.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        parameters = inspect.signature(module.forward).parameters.values()
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [p.name for p in parameters if p.kind in by_name]
        self._places = [p.name for p in parameters if p.kind in by_place]
        self._takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self._takes_more = any(p.kind == p.VAR_POSITIONAL for p in parameters)
        self._taken: dict[tuple[object, ...], list[str]] = {}  # of a microbatch, by what is given
        self._needed = {p.name for p in parameters if p.name in self._names and p.default is p.empty}

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        given, by_name = self.arguments(received[0]) if received else ((), {})
        return self._module(*given, **self._with_entries(given, by_name, microbatch))

    def check(self, value: Any, microbatch: Microbatch) -> None:
        """Raise ModelError where forward cannot be called on what comes over the edge."""
        self._with_entries(*self.arguments(value), microbatch)

    def _with_entries(
        self, given: tuple[Any, ...], by_name: dict[str, Any], microbatch: Microbatch
    ) -> dict[str, Any]:
        form = len(given), *by_name, None, *microbatch
        if (names := self._taken.get(form)) is None:
            placed = {*self._places[: len(given)], *by_name}
            names = [name for name in self._names if name in microbatch and name not in placed]
            if missing := self._needed - placed - set(names):
                self._refuse(missing, microbatch)
            self._taken[form] = names
        return {**{name: microbatch[name] for name in names}, **by_name}

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What comes over the edge, by position and by name. Raises ModelError for what does not fit in."""
        if isinstance(value, Mapping):
            named = sorted(map(str, value))
            unknown = [name for name in named if name not in self._names]
            if unknown and not self._takes_any:
                raise ModelError(
                    self._signature,
                    f"the stage before gives {', '.join(named)}, and it has no {', '.join(unknown)}",
                    "Name its parameters as the entries are named that the stage before returns",
                )
            return (), dict(value)
        # a named tuple is one value
        spread = isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))
        given = tuple(value) if spread else (value,)
        if len(given) > len(self._places) and not self._takes_more:
            raise ModelError(
                self._signature,
                f"the stage before gives {len(given)} values, and it takes {len(self._places)} by position",
                "Give it a parameter for each, or return a dict, whose entries are given by name",
            )
        return given, {}

    @property
    def _signature(self) -> str:
        names = dict.fromkeys([*self._places, *self._names])
        return f"{type(self._module).__name__}.forward({', '.join(names)})"

    def _refuse(self, missing: set[str], microbatch: Microbatch) -> None:
        raise ModelError(
            self._signature,
            f"neither the stage before nor the batch ({', '.join(sorted(microbatch))}) gives "
            f"{', '.join(sorted(missing))}",
            "Give it a default, put it into the batch, or return it from the stage before under that name",
        )
