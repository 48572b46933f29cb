"""A stage of a user's own model: how it is built and called, and the shapes on the edges between stages.

provider(StageInfo(1, 4))                  builds the module of stage 1
ProvidedCall(module)(received, batch)      runs it on the received values and on entries of the batch
provided_edges(...)                        shapes and dtypes on every edge, before anything is sent:
    DeclaredEdges                          from the modules' infer_inputs and infer_outputs, or
    InferredEdges                          from all stages run on the meta device
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.batch.payload import EdgeSpecs, declared, flatten, unflatten
from penstock.batch.shapes import CachedEdges, Microbatch, microbatch_key
from penstock.errors import ModelError, PenstockError, ShapeError
from penstock.models.split.partition import even_split
from penstock.models.tracing.autocast import AutocastWithoutValues
from penstock.models.tracing.meta import is_empty, without_values
from penstock.private import tree_map_only
from penstock.runtime.ranks import Ranks
from penstock.runtime.unseen import detach_hooks, unseen


@dataclass(frozen=True)
class StageInfo:
    """The position of a stage: `stage` of `stages`, counted from 0 in the order of the forward."""

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
    """The layers of one stage, if `layers` layers are divided as evenly as possible.

    Args:
        layers: number of layers of the whole model
        info: the stage, as a provider gets it
        before: number of layers that the modules before the first layer (an embedding) count as
        after: number of layers that the modules after the last layer (a head) count as

    Returns the stage's layers, by their indices in the whole model. Raises PartitionError.
    """
    return even_split(layers, info.stages, before, after)[info.stage]


def numbered_layers(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The layers of a stage with their indices: the entries of its module lists and dicts.

    Of nested lists the innermost count; lists inside a layer do not. A layer's index is its key, so that a
    ModuleDict can continue the indices of the previous stage. A stage without a list is one layer.
    """
    lists = list(_layer_lists(module))
    if not lists:
        yield 0, module
    for layers in lists:
        for index, (key, layer) in enumerate(layers.named_children()):
            yield int(key) if key.isdigit() else index, layer


def _layer_lists(module: nn.Module) -> Iterator[nn.Module]:
    inner = [child for child in module.children() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and not inner:
        yield module
        return
    # a dict that contains a list also contains modules that are no layers, such as nanoGPT's embedding
    for child in inner if isinstance(module, nn.ModuleDict) else module.children():
        yield from _layer_lists(child)


class DeclaresShapes(Protocol):
    """A stage's module that declares the shapes on its edges. Either all stages of a pipeline do, or none.

    Without declarations every rank builds all stages on the meta device, to infer the shapes. The methods
    return forward's input and output, with meta tensors or TensorSpecs in place of the tensors.
    """

    def infer_inputs(self, microbatch: Microbatch) -> Any:
        """The value from the previous stage. microbatch: as step() split it. Not called on stage 0."""

    def infer_outputs(self, microbatch: Microbatch) -> Any:
        """The value for the next stage. Not called on the last stage."""


def declared_on_every_stage(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a stage's module names in `on_every_stage`, of which all stages have copies.

    It lists names of parameters, or of modules for all their parameters, equal on every stage. All copies
    start with the first stage's values, and in each step they all get the sum of their gradients.
    Raises ModelError for unknown names.
    """
    parameters: dict[str, nn.Parameter] = {}
    for name in getattr(module, "on_every_stage", ()):
        path, _, last = name.rpartition(".")
        try:
            holder = module.get_submodule(path)
            parameter = holder._parameters.get(last)
            inner = holder if parameter is not None else module.get_submodule(name)
        except AttributeError as cause:
            value, rule = f"on_every_stage with {name!r}", f"{type(module).__name__} has nothing of that name"
            raise ModelError(value, rule, "Name parameters and modules of the stage's module") from cause
        named = {name: parameter} if parameter is not None else dict(inner.named_parameters(name))
        known = set(map(id, parameters.values()))
        parameters |= {name: tensor for name, tensor in named.items() if id(tensor) not in known}
    return parameters


class ProvidedCall:
    """Calls a user's module as a stage.

    A mapping from the previous stage becomes keyword arguments, a tuple or list positional arguments,
    anything else the first argument. Every other parameter gets the microbatch's entry of its name, if there
    is one.
    """

    def __init__(self, module: nn.Module, callee: nn.Module | None = None) -> None:
        """callee: a wrapper of `module` to call in its place; None: `module` is called"""
        self._module, self._signature = module, inspect.signature(module.forward)
        self._callee = module if callee is None else callee
        kinds = [(p.name, p.kind) for p in self._signature.parameters.values()]
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._by_name = [name for name, kind in kinds if kind in by_name]
        self._by_position = [name for name, kind in kinds if kind in by_position]
        self._entries: dict[tuple[object, ...], list[str]] = {}  # of the batch, for each form of arguments

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        args, kwargs = _as_arguments(received[0]) if received else ((), {})
        return self._callee(*args, **self._with_entries(args, kwargs, microbatch))

    def check(self, value: Any, microbatch: Microbatch) -> None:
        """Raise ModelError if forward cannot be called on `value` from the previous stage."""
        self._with_entries(*_as_arguments(value), microbatch)

    def _with_entries(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], microbatch: Microbatch
    ) -> dict[str, Any]:
        form = len(args), *kwargs, None, *microbatch
        if (names := self._entries.get(form)) is None:
            filled = {*self._by_position[: len(args)], *kwargs}
            names = [name for name in self._by_name if name in microbatch and name not in filled]
            self._check(args, kwargs, names, microbatch)
            self._entries[form] = names
        return {**{name: microbatch[name] for name in names}, **kwargs}

    def _check(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], entries: Sequence[str], microbatch: Microbatch
    ) -> None:
        """Raise ModelError if forward does not accept these arguments and entries of the batch."""
        try:
            self._signature.bind(*args, **kwargs, **dict.fromkeys(entries))
        except TypeError as cause:
            parameters, count = self._signature.parameters.values(), len(self._by_position)
            kinds = {p.kind for p in parameters}
            filled = {*self._by_position[: len(args)], *kwargs, *entries}
            required = {p.name for p in parameters if p.default is p.empty}
            missing = sorted(required.intersection(self._by_name) - filled)
            too_many = len(args) > count and Parameter.VAR_POSITIONAL not in kinds
            takes_any = Parameter.VAR_KEYWORD in kinds
            unknown = [n for n in kwargs if n not in self._by_name and not (takes_any and isinstance(n, str))]
            if unknown:
                given, odd = (", ".join(sorted(map(str, names))) for names in (kwargs, unknown))
                rule = f"the previous stage returns {given}, and it has no parameter {odd}"
                remedy = "Name its parameters like the entries that the previous stage returns"
            elif missing and not too_many:
                batch = ", ".join(sorted(microbatch))
                rule = f"neither the previous stage nor the batch ({batch}) has {', '.join(missing)}"
                remedy = (
                    "Give it a default, put it into the batch, or return it from the previous stage under "
                    "that name"
                )
            else:
                rule = f"the previous stage returns {len(args)} values, and it takes {count} by position"
                remedy = "Give it a parameter for each, or return a dict, whose entries are passed by name"
            name = f"{type(self._module).__name__}.forward({', '.join(self._signature.parameters)})"
            raise ModelError(name, rule, remedy) from cause


def _as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The value from the previous stage as positional and keyword arguments. A named tuple is one value."""
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        return tuple(value), {}
    return (value,), {}


# ---- Shapes on the edges


def provided_edges(
    provider: Provider,
    modules: Mapping[int, nn.Module],
    stages: int,
    processes: Ranks,
    autocast: torch.dtype | None = None,
) -> InferredEdges | DeclaredEdges:
    """Declared edges if every stage of every process declares its own, else inferred ones. Collective.

    modules: those of this process, by stage; stages: number of stages of a copy of the model
    autocast: the dtype of torch.autocast in forwards
    """
    mine = {stage % stages: module for stage, module in modules.items()}
    declares = all(_declares(module, StageInfo(stage, stages)) for stage, module in mine.items())
    if all(processes.gather(declares)):
        return DeclaredEdges(mine, stages)
    return InferredEdges(provider, stages, autocast)


def _declares(module: nn.Module, info: StageInfo) -> bool:
    """Whether the module declares its edges. The first stage has no input, and the last no output."""
    takes = info.is_first or hasattr(module, "infer_inputs")
    return takes and (info.is_last or hasattr(module, "infer_outputs")) and info.stages > 1


class InferredEdges(CachedEdges):
    """The specs of each edge, from one run of all stages on the meta device for each shape."""

    def __init__(self, provider: Provider, stages: int, autocast: torch.dtype | None = None) -> None:
        super().__init__(self._run_undisturbed)
        self._provider, self._stages, self._autocast = provider, stages, autocast

    def _run_undisturbed(self, microbatch: Microbatch) -> tuple[EdgeSpecs, ...]:
        # a provider may draw random numbers or seed torch: this run must not change those of the step
        lowered = nullcontext() if self._autocast is None else AutocastWithoutValues(self._autocast)
        with unseen(), torch.inference_mode(False), torch.enable_grad(), lowered:
            return self._run_all(microbatch)

    def _run_all(self, microbatch: Microbatch) -> tuple[EdgeSpecs, ...]:
        *calls, last = self._calls
        shadow = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), dict(microbatch))
        received: tuple[Any, ...] = ()
        edges = []
        for stage, call in enumerate(calls):
            tensors, form = flatten(_run_without_values(stage, call, received, shadow))
            edges.append(EdgeSpecs.of(tensors, form))
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            received = (unflatten(leaves, form),)
        if received:  # else forward would fail on its own rank, in the middle of a step
            last.check(received[0], shadow)
        return tuple(edges)

    @cached_property
    def _calls(self) -> list[ProvidedCall]:
        """All stages, without values. Modules to which the provider keeps references are not changed."""
        try:
            with torch.device("meta"):
                built = [self._provider(StageInfo(stage, self._stages)) for stage in range(self._stages)]
        except NotImplementedError as cause:
            raise ModelError(
                "a stage built on the meta device, to infer the shapes of its output",
                f"its provider fails there: {cause}",
                "Let the pipeline move modules to a device, or declare the shapes of the edges "
                "(penstock.models.stage.DeclaresShapes)",
            ) from cause
        for module in built:
            if is_empty(module):
                detach_hooks(module)
        return [ProvidedCall(module if is_empty(module) else without_values(module)) for module in built]


def _run_without_values(
    stage: int, call: ProvidedCall, received: tuple[Any, ...], microbatch: Microbatch
) -> Any:
    """Run the stage on the meta device, which raises one of these errors if it needs a value."""
    try:
        return call(received, microbatch)
    except (NotImplementedError, RuntimeError) as cause:
        raise ShapeError(
            f"stage {stage} run without values, to infer the shapes of its output",
            f"it fails: {cause}",
            "Where its shapes depend on values use shapes='exchanged', else let its module declare them with "
            "infer_inputs and infer_outputs (penstock.models.stage.DeclaresShapes)",
        ) from cause


class DeclaredEdges(CachedEdges):
    """The specs of each edge, declared by the modules of this process.

    `infer_inputs` of a module gives the edge into it, `infer_outputs` the edge out of it.
    `agree` checks once for each shape that both ends of an edge declare the same.
    """

    def __init__(self, modules: Mapping[int, nn.Module], stages: int) -> None:
        """modules: those of this process, by stage within the copy of the model"""
        super().__init__(self._declare)
        self._modules, self._stages = modules, stages
        self._agreed: set[object] = set()

    def unseen(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """One microbatch of each shape on which the ranks have not agreed yet."""
        by_key = {microbatch_key(microbatch): microbatch for microbatch in microbatches}
        return [microbatch for key, microbatch in by_key.items() if key not in self._agreed]

    def agree(self, microbatches: Sequence[Microbatch], processes: Ranks) -> None:
        """Raise on all ranks if the ends of an edge differ. Collective, with the same microbatches.

        Raises ShapeError, and ModelError for arguments that a forward does not accept.
        """
        edges = range(self._stages - 1)
        mine = [[self._ends(edge, microbatch) for edge in edges] for microbatch in microbatches]
        for of_processes in zip(*processes.gather(mine), strict=True):
            for edge in edges:
                _compare(edge, [ends[edge] for ends in of_processes])
        if len(self._agreed) > self.MOST:
            self._agreed.clear()  # on all ranks at once, as they have the same shapes
        self._agreed.update(map(microbatch_key, microbatches))

    def _ends(self, edge: int, microbatch: Microbatch) -> tuple[str | None, str | None, str | None]:
        """This process's declarations for an edge, as text: outputs, inputs, and an error."""
        before, after = self._modules.get(edge), self._modules.get(edge + 1)
        gives = takes = None
        try:
            if before is not None:
                gives = _described(_declared(before, "infer_outputs", microbatch))
            if after is not None:
                takes = _described(_declared(after, "infer_inputs", microbatch))
                with torch.device("meta"):
                    ProvidedCall(after).check(after.infer_inputs(microbatch), microbatch)  # type: ignore[operator]
        except Exception as error:  # any error of a user's code, for which the others must not wait
            return gives, takes, str(error) if isinstance(error, PenstockError) else repr(error)
        return gives, takes, None

    def _declare(self, microbatch: Microbatch) -> tuple[EdgeSpecs, ...]:
        def specs(edge: int) -> EdgeSpecs:
            if edge in self._modules:
                return _declared(self._modules[edge], "infer_outputs", microbatch)
            if edge + 1 in self._modules:
                return _declared(self._modules[edge + 1], "infer_inputs", microbatch)
            return EdgeSpecs(())  # between other ranks

        return tuple(specs(edge) for edge in range(self._stages - 1))


def _declared(module: nn.Module, method: str, microbatch: Microbatch) -> EdgeSpecs:
    with torch.device("meta"):
        return declared(getattr(module, method)(microbatch))


def _described(specs: EdgeSpecs) -> str:
    """A text that is equal if the tensors of an edge and their gradients are."""
    could = [replace(spec, differentiable=True).carries_gradient for spec in specs.tensors]
    cut = [at for at, spec in enumerate(specs.tensors) if could[at] and not spec.carries_gradient]
    return str(specs) + "".join(f", tensor {at} without a gradient" for at in cut)


def _compare(edge: int, ends: Sequence[Sequence[str | None]]) -> None:
    """Raise where the two stages at `edge` declare different shapes. ends: by process, from `_ends`"""
    gives, takes, wrong = (next((end[i] for end in ends if end[i] is not None), None) for i in range(3))
    if wrong is not None:
        raise ModelError(
            f"the shapes that stages {edge} and {edge + 1} declare for the edge between them",
            f"a declaration fails, or forward does not accept the declared inputs: {wrong}",
            "Fix infer_outputs of the first, or infer_inputs of the second",
        )
    if gives is not None and takes is not None and gives != takes:
        raise ShapeError(
            f"stage {edge} declares the output {gives}",
            f"stage {edge + 1} declares the input {takes}",
            "Make infer_outputs of the first agree with infer_inputs of the second",
        )
