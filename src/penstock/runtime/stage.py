"""One stage on its rank: it runs its part of the model and holds its live activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.batch.loss import Loss
from penstock.batch.payload import EdgeSpecs, Payload, put_together, take_apart
from penstock.batch.shapes import Microbatch, check
from penstock.errors import ModelError
from penstock.runtime.rng import StageRNG
from penstock.runtime.sharded_weights import Sharding
from penstock.runtime.split_backward.backward import Live, hold, input_backward, leaves, whole_backward
from penstock.runtime.split_backward.deferred import Deferred
from penstock.runtime.split_backward.recording import Tape, deferring
from penstock.schedule import Op

_WHOLE = nullcontext()  # of a forward whose backward will not be split: made once, as each op counts


class StageCall(Protocol):
    """How a stage's part of the model is run."""

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        """received: the one value that came over the edge from the stage before, none on the first stage.

        Returns what goes to the stage after; on the last stage, what the loss takes.
        """


class Recomputing(Protocol):
    """Activation checkpointing of a stage's layers: while `on`, a forward keeps less and is run again."""

    on: bool


class Shards(Protocol):
    """A stage's weights where each rank of a mesh holds a part of them, and gathers the rest to compute."""

    def accumulate(self) -> None:
        """A W has added to gradients."""

    def reduce(self) -> None:
        """Sum the gradients of all microbatches over the mesh, each rank its part; the whole weights go."""

    def reshard(self) -> None:
        """Let go of the whole weights, where no backward has come."""


class Stage:
    """Stage `index` of the model.

    module: what holds its parameters; call: how to run it (often the module itself)
    recomputing: the switch of its activation checkpointing, where it has any
    shards: None where its weights are whole
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        call: StageCall,
        recomputing: Recomputing | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.index, self.module, self.shards = index, module, shards
        self._call, self._recomputing = call, recomputing
        # both by microbatch, and empty after every step
        self.live: dict[int, Live] = {}  # from F to the end of B or I
        self.deferred: dict[int, Deferred] = {}  # from I to the end of W
        self._sharding: Sharding | None = None
        self.chance: StageRNG | None = None  # of a stage that draws random numbers

    @property
    def held(self) -> int:
        """Its live activations."""
        return len(self.live) + len(self.deferred)

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        return self.held

    def forward(
        self,
        number: int,
        received: Payload | None,
        microbatch: Microbatch,
        expected: EdgeSpecs | None = None,
        split: bool = False,
        recompute: bool = False,
    ) -> Payload:
        """Run microbatch `number`; keep what its backward needs.

        received: tensors that are this stage's alone. The outputs are still part of its graph: what is sent
        to another process needs no detaching, and each call between two ops counts.
        expected: what the next stage was told to expect; None where it is told with the outputs
        split: whether the backward will come in two halves
        recompute: whether to keep no more than the layers' inputs, and to run them again in the backward
        """
        inputs = () if received is None else leaves(received)
        with self._run(number, microbatch, split, recompute) as tape:
            tensors, form = take_apart(self._call(_given(inputs, received), microbatch))
        if expected is not None:
            check(Op(self.index, "F", number), tensors, form, expected)
        outputs = Payload(tensors, expected or EdgeSpecs.of(tensors, form))
        self.live[number] = hold(inputs, tensors, tape, outputs.specs.carrying)
        return outputs

    def forward_loss(
        self,
        number: int,
        received: Payload | None,
        microbatch: Microbatch,
        loss: Loss,
        split: bool = False,
        recompute: bool = False,
    ) -> Tensor:
        """The last stage's forward: the microbatch's total loss."""
        inputs = () if received is None else leaves(received)
        with self._run(number, microbatch, split, recompute) as tape:
            total = loss.total(self._call(_given(inputs, received), microbatch), microbatch)
        if not total.requires_grad:
            raise ModelError(
                f"a loss of stage {self.index} that hangs on no weight that is trained",
                "nothing would be trained by it, on this stage or before",
                "Do not detach what the loss is made of; freeze only a part of the model, or call evaluate()",
            )
        self.live[number] = hold(inputs, (total,), tape)
        return total.detach()  # kept to the end of the step, and its graph would keep the inputs

    def _run(
        self, number: int, microbatch: Microbatch, split: bool, recompute: bool
    ) -> AbstractContextManager[Tape | None]:
        if self._recomputing is not None:
            self._recomputing.on = recompute
        return deferring() if split else _WHOLE

    def backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Whole backward of microbatch `number`; lets its activations go."""
        return whole_backward(self.live.pop(number), gradients)

    def input_backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the inputs; what of the weights' is put off waits for `weight_backward`."""
        live = self.live.pop(number)
        if self._sharding is None:  # not earlier: the user may have wrapped the module since it was made
            self._sharding = Sharding(self.module)
        if self._sharding.reduces_in_backward:
            self.deferred[number] = Deferred()
            return whole_backward(live, gradients)
        inputs, self.deferred[number] = input_backward(live, gradients)
        return inputs

    def weight_backward(self, number: int) -> None:
        """What `input_backward` put off; lets go of what was held for it."""
        self.deferred.pop(number).run()
        if self.shards is not None:
            self.shards.accumulate()

    def reduce(self) -> None:
        """All its backwards of the step have run."""
        if self.shards is not None:
            self.shards.reduce()

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        self.live.clear()
        self.deferred.clear()
        self.end_forwards()

    def end_forwards(self) -> None:
        """No backward will come."""
        if self.shards is not None:
            self.shards.reshard()

    @torch.no_grad()
    def infer(self, received: Payload | None, microbatch: Microbatch) -> Any:
        """A forward that holds nothing: what the stage returned."""
        return self._call(_given(() if received is None else received.tensors, received), microbatch)


def _given(inputs: tuple[Tensor, ...], received: Payload | None) -> tuple[Any, ...]:
    return () if received is None else (put_together(inputs, received.specs.form),)


@contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters without gradients for a while; those that they had are put back afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Modules in evaluation mode for a while, each part of them put back into its own afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


# ---- A stage whose mixtures choose again what they chose before, or what a microbatch tells.


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

    def infer(self, received: Payload | None, microbatch: Microbatch) -> Any:
        with self.routing.inference(microbatch):
            return super().infer(received, microbatch)

    def reset(self) -> None:
        super().reset()
        self.routing.reset()
