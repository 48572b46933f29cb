"""One stage on its rank: it runs its part of the model and holds its live activations.

F  forward          input leaves -> graph -> outputs; live[m] holds the leaves and the graph's roots
B  backward         live.pop(m) -> input gradients, and all weight gradients
I  input_backward   live.pop(m) -> input gradients; deferred[m] holds what W needs
W  weight_backward  deferred.pop(m) -> weight gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn

from penstock.batch.loss import Loss, total_of
from penstock.batch.payload import EdgeSpecs, Payload, flatten, unflatten
from penstock.batch.shapes import Microbatch, check
from penstock.errors import ModelError
from penstock.private import UNSAFE_VIEW, is_any_autocast_enabled, tree_leaves
from penstock.runtime.device.footprints import Footprints
from penstock.runtime.sharded_weights import FSDPGradients, local_shard
from penstock.runtime.split_backward.backward import Live, hold, input_backward, leaves, whole_backward
from penstock.runtime.split_backward.casts import WeightCasts
from penstock.runtime.split_backward.deferred import PLAIN, Deferred
from penstock.runtime.split_backward.modules import ProductModules
from penstock.runtime.split_backward.recording import Tape, casting, deferring
from penstock.runtime.stage_part import WHOLE, Forward, StagePart, overriding
from penstock.schedule import Op

P = TypeVar("P", bound=StagePart)
_PLAIN = nullcontext()  # made once, as every op uses it


class StageCall(Protocol):
    """How a stage's part of the model is run."""

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        """Return the value for the next stage, or on the last stage the loss's input.

        received: the value from the previous stage, as a tuple; empty on the first stage
        """


class Stage:
    """Stage `index` of the model.

    Args:
        module: has the stage's parameters.
        call: runs the stage, often the module itself.
        parts: features that act around its ops, in this order.
    """

    def __init__(
        self, index: int, module: nn.Module, call: StageCall, parts: Sequence[StagePart] = ()
    ) -> None:
        self.index, self.module, self.call = index, module, call
        # empty after every step: the first two by microbatch
        self.live: dict[int, Live] = {}  # from F to the end of B or I
        self.deferred: dict[int, Deferred] = {}  # from I to the end of W
        self.casts = WeightCasts()  # under autocast
        self.products = ProductModules(module)
        self.footprints = Footprints()  # of its forwards
        self._sharding: FSDPGradients | None = None
        self.use(parts)

    def use(self, parts: Sequence[StagePart]) -> None:
        """Replace the stage's parts by these."""
        self.parts = tuple(parts)
        self._before_forward = overriding(parts, "before_forward")
        self._after_forward = overriding(parts, "after_forward")
        self._before_inference = overriding(parts, "before_inference")
        self._after_inference = overriding(parts, "after_inference")
        self._before_backward = overriding(parts, "before_backward")
        self._after_backward = overriding(parts, "after_backward")

    def with_call(self, call: StageCall) -> Stage:
        """A stage with the same module and parts, whose forward runs by another call."""
        return Stage(self.index, self.module, call, self.parts)

    def part(self, kind: type[P]) -> P | None:
        """The stage's part of this kind, if it has one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def reduces(self) -> bool:
        """Whether a part sums gradients over the mesh after the last backward of a step."""
        return any(part.reduces for part in self.parts)

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        in_parts = sum(part.left_over for part in self.parts)
        return len(self.live) + len(self.deferred) + len(self.casts) + in_parts

    def forward(
        self,
        number: int,
        received: Payload | None,
        microbatch: Microbatch,
        expected: EdgeSpecs | None = None,
        how: Forward = WHOLE,
        loss: Loss | None = None,
    ) -> Payload:
        """Run microbatch `number`; keep what its backward needs.

        Args:
            received: tensors that belong to this stage alone.
            expected: the specs that the next rank expects; None where they are sent with the outputs.
            loss: on the last stage, which returns only the microbatch's total loss.

        Returns:
            The outputs, still attached to the stage's graph, as a message to another process needs no detach.

        Raises ShapeError for outputs of other specs, ModelError for a loss that trains nothing.
        """
        inputs = () if received is None else leaves(received)
        for begin in self._before_forward:
            begin(number, microbatch, how)
        with self._recording(how.split) as tape:
            value = self.call(_value(inputs, received), microbatch)
            if loss is not None:
                value = total_of(loss, value, microbatch, number)
            tensors, form = flatten(value)
        for end in self._after_forward:
            end()
        if loss is not None and not value.requires_grad:
            raise ModelError(
                f"a loss of stage {self.index} that depends on no trained weight",
                "it would train nothing, on this stage or before",
                "Do not detach the inputs of the loss; freeze only a part of the model, or call evaluate()",
            )
        if expected is not None:
            check(Op(self.index, "F", number), tensors, form, expected)
        outputs = Payload(tensors, expected or EdgeSpecs.of(tensors, form))
        if tape is not None:
            self.products.saw(tape)
        self.live[number] = hold(inputs, tensors, tape, outputs.specs.carrying)
        return outputs

    def _recording(self, split: bool) -> AbstractContextManager[Tape | None]:
        """A context for a forward, which records products for I and W, and shares the casts of weights."""
        return deferring(self.casts, every_call=self.products.every_call) if split else self._casting()

    def _casting(self) -> AbstractContextManager[Tape | None]:
        if not is_any_autocast_enabled():
            return _PLAIN
        return casting(self.casts, every_call=self.products.every_call)

    @torch.no_grad()
    def infer(self, received: Payload | None, microbatch: Microbatch) -> Any:
        """Run a forward that keeps nothing. Returns the stage's output."""
        inputs = () if received is None else received.tensors
        for begin in self._before_inference:
            begin(microbatch)
        with self._casting():
            output = self.call(_value(inputs, received), microbatch)
        for end in self._after_inference:
            end()
        return output

    def backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """B: return the gradients of the inputs; accumulate those of the weights."""
        for begin in self._before_backward:
            begin(number)
        inputs = whole_backward(self.live.pop(number), gradients)
        for end in self._after_backward:
            end(number, "B")
        return inputs

    @property
    def sharding(self) -> FSDPGradients:
        if self._sharding is None:  # not earlier: the user may have wrapped the module since the build
            self._sharding = FSDPGradients(self.module)
        return self._sharding

    def input_backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """I: return the gradients of the inputs; keep the deferred work for `weight_backward`."""
        for begin in self._before_backward:
            begin(number)
        live = self.live.pop(number)
        if self.sharding.reduces_in_backward:
            inputs, deferred = whole_backward(live, gradients), Deferred()
        else:
            inputs, deferred = input_backward(live, gradients)
        self.deferred[number] = deferred
        for end in self._after_backward:
            end(number, "I")
        return inputs

    def weight_backward(self, number: int) -> None:
        """W: run what `input_backward` deferred."""
        for begin in self._before_backward:
            begin(number)
        self.deferred.pop(number).run()
        for end in self._after_backward:
            end(number, "W")

    def reduce(self) -> None:
        """Sum the gradients over the mesh, after all backwards of the step."""
        for part in self.parts:
            part.reduce()

    @property
    def shared_storages(self) -> Iterator[UntypedStorage]:
        """Memory that forwards leave but share: gathered weights, and casts of weights."""
        yield from self.sharding.gathered
        yield from self.casts.storages

    def staying(self, number: int, microbatch: Microbatch) -> set[int]:
        """Addresses of storages that a forward may have saved, but that have other users as well.

        These are parameters, their casts and gathered copies, buffers, and inputs of the stage.
        """
        weights = [local_shard(w) for w in (*self.module.parameters(), *self.module.buffers())]
        given = [value for value in tree_leaves(dict(microbatch)) if isinstance(value, Tensor)]
        tensors = (
            tensor for tensor in (*weights, *given, *self.live[number].inputs) if type(tensor) in PLAIN
        )
        storages = (*(tensor.untyped_storage() for tensor in tensors), *self.shared_storages)
        return {storage._cdata for storage in storages}

    def begin_step(self) -> None:
        """Called before the first op of a step with backwards."""
        self.products.begin_step()
        for part in self.parts:
            part.begin_step()

    def end_step(self) -> None:
        """Free what the microbatches of the step shared, after all its ops."""
        self.casts.clear()
        self.products.end_step()

    def end_forwards(self) -> None:
        """Called after the forwards of a step without backwards."""
        for part in self.parts:
            part.end_forwards()

    def reset(self) -> None:
        """Forget a failed step."""
        for part in self.parts:  # wait for copies under way before their tensors are freed
            part.reset()
        self.live.clear()
        self.deferred.clear()
        self.end_step()


def _value(inputs: tuple[Tensor, ...], received: Payload | None) -> tuple[Any, ...]:
    """The stage's input. A stage may write into it, which autograd forbids for a leaf."""
    if received is None:
        return ()
    # the same memory, but not a view for autograd
    entering = [UNSAFE_VIEW(t, t.shape) if t.requires_grad else t for t in inputs]
    return (unflatten(entering, received.specs.form),)


def autocasting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """torch.autocast in `dtype`; None leaves the caller's own region, if there is one, as it is."""
    return _PLAIN if dtype is None else torch.autocast(device.type, dtype)


# ---- Context managers that change modules for a while


@contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters without gradients inside the block; afterwards the earlier ones are back."""
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
    """Modules in evaluation mode inside the block; afterwards each submodule is back in its own mode."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
