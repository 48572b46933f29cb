"""One stage on its rank: it runs its part of the model and holds its live activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from penstock.runtime.backward import Live, hold, input_backward, leaf, whole_backward
from penstock.runtime.deferred import Deferred
from penstock.runtime.loss import Loss
from penstock.runtime.shapes import Microbatch
from penstock.runtime.sharding import Sharding
from penstock.runtime.tape import deferring

# (what came over the edge from the stage before, the microbatch) -> what goes to the stage after
StageCall = Callable[[tuple[Tensor, ...], Microbatch], tuple[Tensor, ...]]
_WHOLE = nullcontext()  # of a forward whose backward will not be split: made once, as each op counts


class Stage:
    """Stage `index` of the model.

    module: what holds its parameters; call: how to run it (often the module itself)
    """

    def __init__(self, index: int, module: nn.Module, call: StageCall) -> None:
        self.index, self.module = index, module
        self._call = call
        # both by microbatch, and empty after every step
        self.live: dict[int, Live] = {}  # from F to the end of B or I
        self.deferred: dict[int, Deferred] = {}  # from I to the end of W
        self._sharding: Sharding | None = None

    @property
    def held(self) -> int:
        """Its live activations."""
        return len(self.live) + len(self.deferred)

    def forward(
        self, number: int, received: Sequence[Tensor], microbatch: Microbatch, split: bool = False
    ) -> tuple[Tensor, ...]:
        """Run microbatch `number`; keep what its backward needs.

        received: tensors that are this stage's alone. The outputs are still part of its graph: what is sent
        to another process needs no detaching, and each call between two ops counts.
        split: whether its backward will come in two halves
        """
        inputs = tuple([leaf(tensor) for tensor in received])
        with deferring() if split else _WHOLE as tape:
            outputs = self._call(inputs, microbatch)
        self.live[number] = hold(inputs, outputs, tape)
        return outputs

    def forward_loss(
        self,
        number: int,
        received: Sequence[Tensor],
        microbatch: Microbatch,
        loss: Loss,
        split: bool = False,
    ) -> Tensor:
        """The last stage's forward: the microbatch's total loss."""
        inputs = tuple([leaf(tensor) for tensor in received])
        with deferring() if split else _WHOLE as tape:
            outputs = self._call(inputs, microbatch)
            total = loss.total(outputs[0], microbatch)
        self.live[number] = hold(inputs, (total,), tape)
        return total.detach()  # kept to the end of the step, and its graph would keep the inputs

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

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        self.live.clear()
        self.deferred.clear()

    @torch.no_grad()
    def infer(self, received: Sequence[Tensor], microbatch: Microbatch) -> tuple[Tensor, ...]:
        """A forward that holds nothing."""
        return self._call(tuple(received), microbatch)


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
