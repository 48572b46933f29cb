"""What goes over the edges between the stages of a model of one's own, told before anything is sent."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from penstock.batch.payload import EdgeSpecs, declared, put_together, take_apart
from penstock.batch.shapes import Known, Microbatch, microbatch_key
from penstock.errors import ModelError, PenstockError, ShapeError
from penstock.models.partition import partition
from penstock.runtime.transport.groups import Processes

# ---- What a model of one's own offers a pipeline: how each stage is built, run, and what goes between
# stages.


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


_REMEMBERED = 4096  # shapes


class InferredEdges:
    """What goes over each edge of a provided model, learnt on the meta device, once for each shape."""

    def __init__(self, provider: Provider, stages: int) -> None:
        self._provider, self._stages = provider, stages
        self._calls: list[ProvidedCall] = []  # of all stages but the last
        self._last: ProvidedCall | None = None
        self._known = Known(self._infer)

    def __call__(self, stage: int, microbatch: Microbatch) -> EdgeSpecs:
        return self._known(stage, microbatch)

    def _infer(self, microbatch: Microbatch) -> tuple[EdgeSpecs, ...]:
        # a provider may seed torch: the step that happens to be the first is to draw what any other would
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            return self._learn(microbatch)

    def _learn(self, microbatch: Microbatch) -> tuple[EdgeSpecs, ...]:
        if self._last is None:
            *self._calls, self._last = map(ProvidedCall, self._build())
        shadow = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), dict(microbatch))
        received: tuple[Any, ...] = ()
        edges = []
        for stage, call in enumerate(self._calls):
            tensors, form = take_apart(_run_without_values(stage, call, received, shadow))
            edges.append(EdgeSpecs.of(tensors, form))
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            received = (put_together(leaves, form),)
        if self._last is not None and received:  # else it would fail on its own rank, in the middle of a step
            self._last.check(received[0], shadow)
        return tuple(edges)

    def _build(self) -> list[nn.Module]:
        """All stages, without values. What a provider gives may be its own, and is left as it is."""
        try:
            with torch.device("meta"):
                built = [self._provider(StageInfo(stage, self._stages)) for stage in range(self._stages)]
        except NotImplementedError as cause:
            raise ModelError(
                "a stage built on the meta device, to learn what it gives",
                f"its provider fails there: {cause}",
                "Leave it to the pipeline to move modules to a device, or declare the shapes of the edges "
                "(penstock.models.stage.DeclaresShapes)",
            ) from cause
        return [_without_values(module) for module in built]


def _without_values(module: nn.Module) -> nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return module
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
    return copy.deepcopy(module, memo)


class DeclaredEdges:
    """What the stages of this process say by arithmetic of their own edges.

    A rank knows its own edges only: the one that comes in from its modules' inputs, the one that goes out
    from their outputs. That both ends of an edge say the same is made sure of once for each shape (`agree`).
    """

    def __init__(self, modules: Mapping[int, nn.Module], stages: int) -> None:
        """modules: by stage within the copy of the model"""
        self._modules, self._stages = modules, stages
        self._known = Known(self._declare)
        self._agreed: set[object] = set()

    def __call__(self, stage: int, microbatch: Microbatch) -> EdgeSpecs:
        return self._known(stage, microbatch)

    def unseen(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """One microbatch of each shape that nobody has agreed upon."""
        found = {microbatch_key(microbatch): microbatch for microbatch in microbatches}
        return [microbatch for key, microbatch in found.items() if key not in self._agreed]

    def agree(self, microbatches: Sequence[Microbatch], processes: Processes) -> None:
        """Raise ShapeError, or ModelError for names, on all ranks where the ends of an edge do not fit.

        Collective, with the same microbatches.
        """
        edges = range(self._stages - 1)
        told = [[self._ends(edge, microbatch) for edge in edges] for microbatch in microbatches]
        for edges_told in zip(*processes.gather(told), strict=True):
            for edge in edges:
                _compare(edge, [of[edge] for of in edges_told])
        if len(self._agreed) > _REMEMBERED:
            self._agreed.clear()  # on all ranks at once, as they see the same
        self._agreed.update(map(microbatch_key, microbatches))

    def _ends(self, edge: int, microbatch: Microbatch) -> tuple[str | None, str | None, str | None]:
        """What this process knows of an edge: what goes in, what is taken, and what is wrong with names."""
        before, after = self._modules.get(edge), self._modules.get(edge + 1)
        gives = takes = None
        try:
            if before is not None:
                gives = _in_words(_declared(before, "infer_outputs", microbatch))
            if after is not None:
                takes = _in_words(_declared(after, "infer_inputs", microbatch))
                with torch.device("meta"):
                    ProvidedCall(after).check(after.infer_inputs(microbatch), microbatch)  # type: ignore[operator]
        except Exception as error:  # whatever a user's own arithmetic raises: the others must not wait
            return gives, takes, str(error) if isinstance(error, PenstockError) else repr(error)
        return gives, takes, None

    def _declare(self, microbatch: Microbatch) -> tuple[EdgeSpecs, ...]:
        edges = []
        for edge in range(self._stages - 1):
            if edge in self._modules:
                edges.append(_declared(self._modules[edge], "infer_outputs", microbatch))
            elif edge + 1 in self._modules:
                edges.append(_declared(self._modules[edge + 1], "infer_inputs", microbatch))
            else:
                edges.append(EdgeSpecs(()))  # between other ranks
        return tuple(edges)


def provided_edges(
    provider: Provider, modules: Mapping[int, nn.Module], stages: int, processes: Processes
) -> InferredEdges | DeclaredEdges:
    """Declared where every stage of every process declares its own. Collective.

    modules: this process's, by stage; stages: how many make up a copy of the model
    """
    own = {stage % stages: module for stage, module in modules.items()}
    declares = all(_declares(module, StageInfo(stage, stages)) for stage, module in own.items())
    return DeclaredEdges(own, stages) if all(processes.gather(declares)) else InferredEdges(provider, stages)


def _declares(module: nn.Module, info: StageInfo) -> bool:
    """Whether it declares what is asked of it. Nothing comes into the first stage or goes out of the last."""
    takes = info.is_first or hasattr(module, "infer_inputs")
    return takes and (info.is_last or hasattr(module, "infer_outputs")) and info.stages > 1


def _run_without_values(
    stage: int, call: ProvidedCall, received: tuple[Any, ...], microbatch: Microbatch
) -> Any:
    """`call` on the meta device, which raises either of these where it would need a value."""
    try:
        return call(received, microbatch)
    except (NotImplementedError, RuntimeError) as cause:
        raise ShapeError(
            f"stage {stage} run without values, to learn what it gives",
            f"it fails: {cause}",
            "Where its shapes depend on values use shapes='exchanged', else let its module declare them with "
            "infer_inputs and infer_outputs (penstock.models.stage.DeclaresShapes)",
        ) from cause


def _in_words(specs: EdgeSpecs) -> str:
    """Equal where what goes over an edge is, and what comes back."""
    could = [spec._replace(differentiable=True).carries_gradient for spec in specs.tensors]
    cut = [at for at, spec in enumerate(specs.tensors) if could[at] and not spec.carries_gradient]
    return str(specs) + "".join(f", tensor {at} without a gradient" for at in cut)


def _compare(edge: int, told: Sequence[Sequence[str | None]]) -> None:
    """told: by process"""
    gives, takes, wrong = (next((of[i] for of in told if of[i] is not None), None) for i in range(3))
    if wrong is not None:
        raise ModelError(
            f"what stages {edge} and {edge + 1} declare of the edge between them",
            f"one of them cannot tell, or its forward does not take it: {wrong}",
            "Mend infer_outputs of the one, or infer_inputs of the other",
        )
    if gives is not None and takes is not None and gives != takes:
        raise ShapeError(
            f"stage {edge} says that it gives {gives}",
            f"stage {edge + 1} says that it takes {takes}",
            "Make infer_outputs of the one agree with infer_inputs of the other",
        )


def _declared(module: nn.Module, method: str, microbatch: Microbatch) -> EdgeSpecs:
    with torch.device("meta"):
        return declared(getattr(module, method)(microbatch))
