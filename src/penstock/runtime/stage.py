"""One stage on its rank: it runs its part of the model and holds its live activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.runtime.backward import Live, hold, leaf, whole_backward
from penstock.runtime.loss import Loss
from penstock.runtime.shapes import Microbatch

# (what came over the edge from the stage before, the microbatch) -> what goes to the stage after
StageCall = Callable[[tuple[Tensor, ...], Microbatch], tuple[Tensor, ...]]


class Stage:
    """Stage `index` of the model.

    module: what holds its parameters; call: how to run it (often the module itself)
    """

    def __init__(self, index: int, module: nn.Module, call: StageCall) -> None:
        self.index, self.module = index, module
        self._call = call
        self.live: dict[int, Live] = {}  # by microbatch; empty after every step

    def forward(self, number: int, received: Sequence[Tensor], microbatch: Microbatch) -> tuple[Tensor, ...]:
        """Run microbatch `number`; keep what its backward needs.

        received: tensors that are this stage's alone. The outputs are still part of its graph: what is sent
        to another process needs no detaching, and each call between two ops counts.
        """
        inputs = tuple([leaf(tensor) for tensor in received])
        outputs = self._call(inputs, microbatch)
        self.live[number] = hold(inputs, outputs)
        return outputs

    def forward_loss(
        self, number: int, received: Sequence[Tensor], microbatch: Microbatch, loss: Loss
    ) -> Tensor:
        """The last stage's forward: the microbatch's total loss."""
        inputs = tuple([leaf(tensor) for tensor in received])
        outputs = self._call(inputs, microbatch)
        total = loss.total(outputs[0], microbatch)
        self.live[number] = hold(inputs, (total,))
        return total.detach()  # kept to the end of the step, and its graph would keep the inputs

    def backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Whole backward of microbatch `number`; lets its activations go."""
        return whole_backward(self.live.pop(number), gradients)

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
