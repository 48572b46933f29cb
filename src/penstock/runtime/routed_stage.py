"""A stage whose mixtures choose again what they chose before, or what a microbatch tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.runtime.parcel import Parcel
from penstock.runtime.shapes import Microbatch
from penstock.runtime.stage import Recomputing, Shards, Stage, StageCall
from penstock.runtime.tape import Tape


class Routing(Protocol):
    """What a stage's routers choose: the same where a forward is run again, or what a microbatch tells."""

    def forward(self, number: int, microbatch: Microbatch) -> AbstractContextManager[None]:
        """Of a forward that a backward follows."""

    def inference(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        """Of a forward that nothing follows."""

    def backward(self, number: int, last: bool) -> AbstractContextManager[None]:
        """Of a backward, or a half of it. last: no other one of that microbatch follows"""

    @property
    def recorded(self) -> Mapping[int, Any]:
        """By microbatch, what was chosen in the last step: of those whose backward has ended."""

    @property
    def held(self) -> Sequence[int]:
        """The microbatches that are on their way: none between steps."""

    def reset(self) -> None:
        """Forget a step that failed half-way."""


class RoutedStage(Stage):
    """Each of its ops runs under what `routing` has for it."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        call: StageCall,
        routing: Routing,
        recomputing: Recomputing | None = None,
        shards: Shards | None = None,
    ) -> None:
        super().__init__(index, module, call, recomputing, shards)
        self.routing = routing

    @property
    def left_over(self) -> int:
        return super().left_over + len(self.routing.held)

    @contextmanager
    def _run(
        self, number: int, microbatch: Microbatch, split: bool, recompute: bool
    ) -> Iterator[Tape | None]:
        plain = super()._run(number, microbatch, split, recompute)
        with self.routing.forward(number, microbatch), plain as tape:
            yield tape

    def backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with self.routing.backward(number, last=True):
            return super().backward(number, gradients)

    def input_backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with self.routing.backward(number, last=False):
            return super().input_backward(number, gradients)

    def weight_backward(self, number: int) -> None:
        with self.routing.backward(number, last=True):
            super().weight_backward(number)

    def infer(self, received: Parcel | None, microbatch: Microbatch) -> Any:
        with self.routing.inference(microbatch):
            return super().infer(received, microbatch)

    def reset(self) -> None:
        super().reset()
        self.routing.reset()
