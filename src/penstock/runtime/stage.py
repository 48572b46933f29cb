"""One stage on its rank: it runs its part of the model and holds its live activations.

F  forward          input leaves -> graph -> outputs; live[m] holds the leaves and the graph's roots
B  backward         live.pop(m) -> input gradients, and all weight gradients
I  input_backward   live.pop(m) -> input gradients; deferred[m] holds what W needs
W  weight_backward  deferred.pop(m) -> weight gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage, nn

from penstock.batch.loss import Loss, total_of
from penstock.batch.payload import EdgeSpecs, Payload, flatten, unflatten
from penstock.batch.shapes import Microbatch, check
from penstock.errors import ModelError
from penstock.private import UNSAFE_VIEW, is_any_autocast_enabled, tree_leaves
from penstock.runtime.device.footprints import Footprints
from penstock.runtime.device.offload import Offload
from penstock.runtime.rng import StageRNG
from penstock.runtime.sharded_weights import FSDPGradients, local_shard
from penstock.runtime.split_backward.backward import Live, hold, input_backward, leaves, whole_backward
from penstock.runtime.split_backward.casts import WeightCasts
from penstock.runtime.split_backward.deferred import PLAIN, Deferred, PutOff
from penstock.runtime.split_backward.modules import ProductModules
from penstock.runtime.split_backward.recording import Tape, casting, deferring
from penstock.schedule import Op

_PLAIN = nullcontext()  # made once: each op counts


class StageCall(Protocol):
    """How a stage's part of the model is run."""

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        """Return the value for the next stage, or on the last stage the loss's input.

        received: the one value from the stage before; none on the first stage
        """


class Recomputing(Protocol):
    """Activation checkpointing of a stage's layers: while `on`, a forward keeps less and runs again later."""

    on: bool


class Shards(Protocol):
    """A stage's sharded weights: each rank of a mesh holds a shard, and gathers the others to compute."""

    def after_forward(self) -> None:
        """Free the buffers of a forward."""

    def accumulate(self) -> None:
        """A W has added to gradients."""

    def reduce(self) -> None:
        """Reduce-scatter the gradients of all microbatches, and free the gathered weights. Collective."""

    def reshard(self) -> None:
        """Free the gathered weights where no backward has run."""


class Stage:
    """Stage `index` of the model.

    Args:
        module: what holds its parameters.
        call: how to run it, often the module itself.
        recomputing: the switch of its activation checkpointing, if it has any.
        shards: None where its weights are not sharded by penstock.
        offload: of its activations that wait in host memory, if any do.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        call: StageCall,
        recomputing: Recomputing | None = None,
        shards: Shards | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.index, self.module, self.shards, self.offload = index, module, shards, offload
        self._call, self._recomputing = call, recomputing
        # empty after every step: the first two by microbatch
        self.live: dict[int, Live] = {}  # from F to the end of B or I
        self.deferred: dict[int, Deferred] = {}  # from I to the end of W
        self.casts = WeightCasts()  # under autocast
        self.products = ProductModules(module)
        self.footprints = Footprints()  # of its forwards
        self._sharding: FSDPGradients | None = None
        # how much its I left to W, for a warning: looked at while it is to be said, in the first step
        self.put_off: PutOff | None = None
        self.watches_put_off = True
        self.rng: StageRNG | None = None  # of a stage that draws random numbers

    @property
    def left_over(self) -> int:
        """Entries in any cache: 0 between steps."""
        offloaded = 0 if self.offload is None else self.offload.left_over
        return len(self.live) + len(self.deferred) + len(self.casts) + offloaded

    def forward(
        self,
        number: int,
        received: Payload | None,
        microbatch: Microbatch,
        expected: EdgeSpecs | None = None,
        split: bool = False,
        recompute: bool = False,
    ) -> Payload:
        """Run microbatch `number`; hold what its backward needs.

        Args:
            received: tensors that belong to this stage alone.
            expected: the specs that the next rank expects; None where they are sent with the outputs.
            split: whether the backward is split into I and W.
            recompute: whether to keep only the layers' inputs, and run the layers again in the backward.

        Returns:
            The outputs, still attached to the stage's graph: a message to another process needs no detaching.
        """
        inputs = () if received is None else leaves(received)
        with self._run(number, microbatch, split, recompute) as tape:
            tensors, form = flatten(self._call(_value(inputs, received), microbatch))
        if self.shards is not None:
            self.shards.after_forward()
        if expected is not None:
            check(Op(self.index, "F", number), tensors, form, expected)
        outputs = Payload(tensors, expected or EdgeSpecs.of(tensors, form))
        if tape is not None:
            self.products.saw(tape)
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
        """The last stage's forward. Returns the microbatch's total loss, detached. Raises ModelError."""
        inputs = () if received is None else leaves(received)
        with self._run(number, microbatch, split, recompute) as tape:
            output = self._call(_value(inputs, received), microbatch)
            total = total_of(loss, output, microbatch, number)
        if not total.requires_grad:
            raise ModelError(
                f"a loss of stage {self.index} that depends on no trained weight",
                "nothing would be trained by it, on this stage or before",
                "Do not detach what the loss is made of; freeze only a part of the model, or call evaluate()",
            )
        if tape is not None:
            self.products.saw(tape)
        self.live[number] = hold(inputs, (total,), tape)
        return total.detach()  # kept to the end of the step: its graph would keep the inputs

    def _run(
        self, number: int, microbatch: Microbatch, split: bool, recompute: bool
    ) -> AbstractContextManager[Tape | None]:
        if self._recomputing is not None:
            self._recomputing.on = recompute
        return deferring(self.casts, every_call=self.products.every_call) if split else self._casting()

    def _casting(self) -> AbstractContextManager[Tape | None]:
        if not is_any_autocast_enabled():
            return _PLAIN
        return casting(self.casts, every_call=self.products.every_call)

    def backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """B: the gradients of the inputs; accumulates those of the weights."""
        return whole_backward(self.live.pop(number), gradients)

    @property
    def sharding(self) -> FSDPGradients:
        if self._sharding is None:  # not earlier: the user may have wrapped the module since the build
            self._sharding = FSDPGradients(self.module)
        return self._sharding

    def input_backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """I: the gradients of the inputs; what is deferred waits for `weight_backward`."""
        live = self.live.pop(number)
        if self.sharding.reduces_in_backward:
            inputs, deferred = whole_backward(live, gradients), Deferred()
        else:
            inputs, deferred = input_backward(live, gradients)
        if self.watches_put_off:
            self.put_off = deferred.put_off.after(self.put_off)
        self.deferred[number] = deferred
        return inputs

    def weight_backward(self, number: int) -> None:
        """W: what `input_backward` deferred."""
        self.deferred.pop(number).run()
        if self.shards is not None:
            self.shards.accumulate()

    def reduce(self) -> None:
        """All its backwards of the step have run: sum the gradients over the mesh."""
        if self.shards is not None:
            self.shards.reduce()

    def end_forwards(self) -> None:
        """No backward will come."""
        if self.shards is not None:
            self.shards.reshard()

    @property
    def shared_storages(self) -> Iterator[UntypedStorage]:
        """Memory that a forward may leave and that is no microbatch's: gathered weights, and their casts."""
        yield from self.sharding.gathered
        yield from self.casts.storages

    def staying(self, number: int, microbatch: Microbatch) -> set[int]:
        """The storages, by address, that a forward may have saved and that others hold as well.

        Parameters and what is made of them once, buffers, and all that the microbatch or another stage gave.
        """
        held = [local_shard(held) for held in (*self.module.parameters(), *self.module.buffers())]
        given = [value for value in tree_leaves(dict(microbatch)) if isinstance(value, Tensor)]
        tensors = (tensor for tensor in (*held, *given, *self.live[number].inputs) if type(tensor) in PLAIN)
        storages = (*(tensor.untyped_storage() for tensor in tensors), *self.shared_storages)
        return {storage._cdata for storage in storages}

    def begin_step(self) -> None:
        """The step's first op comes next."""
        self.products.begin_step()

    def end_step(self) -> None:
        """All its ops of the step have run: free what its microbatches shared."""
        self.casts.clear()
        self.products.end_step()

    def reset(self) -> None:
        """Forget a failed step."""
        if self.offload is not None:
            self.offload.reset()
        self.live.clear()
        self.deferred.clear()
        self.end_step()
        self.end_forwards()

    @torch.no_grad()
    def infer(self, received: Payload | None, microbatch: Microbatch) -> Any:
        """A forward that holds nothing. Returns what the stage returned."""
        inputs = () if received is None else received.tensors
        with self._casting():
            return self._call(_value(inputs, received), microbatch)


def _value(inputs: tuple[Tensor, ...], received: Payload | None) -> tuple[Any, ...]:
    """What the stage is called with; it may write into it, which autograd forbids of a leaf."""
    if received is None:
        return ()
    # the same memory, and for autograd no view
    entering = [UNSAFE_VIEW(t, t.shape) if t.requires_grad else t for t in inputs]
    return (unflatten(entering, received.specs.form),)


class Routing(Protocol):
    """Records and replays the experts that a stage's routers choose, or takes them from the microbatch."""

    def forward(self, number: int, microbatch: Microbatch) -> AbstractContextManager[None]:
        """Around a forward that a backward follows."""

    def inference(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        """Around a forward that nothing follows."""

    def backward(self, number: int, last: bool) -> AbstractContextManager[None]:
        """Around a backward, or half of one. last: no other backward of that microbatch follows"""

    @property
    def recorded(self) -> Mapping[int, Any]:
        """By microbatch, the choices of the last step, once its backward has ended."""

    @property
    def held(self) -> Sequence[int]:
        """The microbatches between forward and backward: none between steps."""

    def reset(self) -> None:
        """Forget what the last step has recorded, and what a failed one has left."""


class RoutedStage(Stage):
    """A stage whose ops run under `routing`."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        call: StageCall,
        routing: Routing,
        recomputing: Recomputing | None = None,
        shards: Shards | None = None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(index, module, call, recomputing, shards, offload)
        self.routing = routing

    @property
    def left_over(self) -> int:
        return super().left_over + len(self.routing.held)

    def begin_step(self) -> None:
        super().begin_step()
        self.routing.reset()  # a microbatch of that number may have gone through another copy of the model

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
