"""What goes over the edges between the stages of a model of one's own, told before anything is sent."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from penstock.errors import ModelError, PenstockError, ShapeError
from penstock.models.protocol import ProvidedCall, Provider, StageInfo
from penstock.runtime.parcel import EdgeSpecs, declared, put_together, take_apart
from penstock.runtime.processes import Processes
from penstock.runtime.shapes import Known, Microbatch, microbatch_key

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
                "(penstock.models.protocol.DeclaresShapes)",
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
            "infer_inputs and infer_outputs (penstock.models.protocol.DeclaresShapes)",
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
