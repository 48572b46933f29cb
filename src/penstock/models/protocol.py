"""What a model offers a stage: how each part of it is built, run, and what comes out of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.runtime.shapes import EdgeSpecs, Microbatch, TensorSpec, microbatch_key


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


class ProvidedCall:
    """Runs a module of the user's own as a stage.

    Its forward gets what came over the edge as its first arguments (nothing on the first stage), and by
    name each entry of the microbatch that is a parameter of it. It returns a tensor or a tuple of tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = list(inspect.signature(module.forward).parameters)

    def __call__(self, received: tuple[Tensor, ...], microbatch: Microbatch) -> tuple[Tensor, ...]:
        by_name = {name: microbatch[name] for name in self._names[len(received) :] if name in microbatch}
        result = self._module(*received, **by_name)
        if isinstance(result, Tensor):
            return (result,)
        outputs = result if isinstance(result, tuple) else (result,)
        for output in outputs:
            if not isinstance(output, Tensor):
                raise ModelError(
                    f"{type(self._module).__name__} returned a {type(output).__name__}",
                    "a stage returns a tensor or a tuple of tensors",
                    "Return only what the next stage needs, as tensors",
                )
        return outputs


class ProvidedEdges:
    """What goes over each edge of a provided model: found on the meta device, once per microbatch shape."""

    def __init__(self, provider: Provider, stages: int) -> None:
        self._provider, self._stages = provider, stages
        self._calls: list[ProvidedCall] = []
        self._known: dict[object, tuple[EdgeSpecs, ...]] = {}

    def __call__(self, stage: int, microbatch: Microbatch) -> EdgeSpecs:
        key = microbatch_key(microbatch)
        if key not in self._known:
            self._known[key] = self._infer(microbatch)
        return self._known[key][stage]

    @torch.no_grad()
    def _infer(self, microbatch: Microbatch) -> tuple[EdgeSpecs, ...]:
        if not self._calls:
            with torch.device("meta"):
                built = [self._provider(StageInfo(s, self._stages)) for s in range(self._stages - 1)]
            self._calls = [ProvidedCall(module.to("meta")) for module in built]
        shadow = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in microbatch.items()}
        received: tuple[Tensor, ...] = ()
        specs = []
        for call in self._calls:
            received = call(received, shadow)
            specs.append(tuple(TensorSpec.of(tensor) for tensor in received))
        return tuple(specs)
