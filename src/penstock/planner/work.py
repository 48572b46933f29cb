"""The work of a model: the ops of each of its parts, with what they compute, read, write and keep.

A part is the embedding, a layer, or the head with its loss. Its work is that of a microbatch on a process.
Layers that are alike share one `PartWork`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.batch.liger import Chunked
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.split.counting import flops_of, is_attention
from penstock.models.tracing.probe import layer_kind
from penstock.parallel.axes import Axes
from penstock.parallel.expert.experts import mixtures
from penstock.parallel.mesh_plan import ParallelOptions
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.building.memory import Account
from penstock.private import TorchDispatchMode, tree_leaves, tree_map
from penstock.schedule.ops import Kind

OpKind = Literal["matmul", "attention", "other"]


class OpWork(NamedTuple):
    """`calls` ops of one kind, dtype and size.

    dtype: of the operands, as torch names it without its prefix: "bfloat16", "float32"
    flops: of one op; a multiply-add counts two. 0 for "other" ops, which memory bounds
    nbytes: that one op reads and writes
    """

    kind: OpKind
    dtype: str
    flops: float
    nbytes: float
    calls: float = 1.0


class PartBytes(NamedTuple):
    """Bytes of one microbatch on a part, without weights and their gradients.

    A peak counts all that the part holds for this microbatch at that moment, `activation` included.

    activation: kept from F to the end of I or B, the part's input included
    for_weight: kept from then to the end of W, where backwards are split
    forward_peak, backward_peak: the most while F runs, and while I or B runs
    recomputed_activation, recomputed_backward_peak: the same where the layer's forward runs again
    sent: the result, for the next part
    offloaded: of `activation`, what waits in host memory where activations are offloaded
    offloaded_input: of that, what the part before it made; it stays where that is on another rank
    offloaded_backward_peak: `backward_peak` with all that was offloaded, of a whole backward
    """

    activation: int
    for_weight: int
    forward_peak: int
    backward_peak: int
    recomputed_activation: int
    recomputed_backward_peak: int
    sent: int
    offloaded: int = 0
    offloaded_input: int = 0
    offloaded_backward_peak: int = 0


class PartWork(NamedTuple):
    """The ops of a part for one microbatch.

    input_grad: of I, without a forward that checkpointing runs again
    weight_grad: of W, whose products add to the gradients of earlier microbatches
    whole_grad: the same in a whole backward, where autograd adds each gradient by an op of its own
    recomputed: what I or B runs again first where the layer is checkpointed; a part of `forward`, or all
    """

    forward: tuple[OpWork, ...]
    input_grad: tuple[OpWork, ...]
    weight_grad: tuple[OpWork, ...]
    whole_grad: tuple[OpWork, ...]
    recomputed: tuple[OpWork, ...]
    nbytes: PartBytes


@dataclass(frozen=True)
class ModelWork:
    """The work of a whole model for one microbatch.

    kinds: a `PartWork` for each kind of layer
    layers: for each layer of the model, the index of its kind
    """

    kinds: tuple[PartWork, ...]
    layers: tuple[int, ...]
    embedding: PartWork
    head: PartWork

    def parts(self, layers: range) -> tuple[PartWork, ...]:
        """The parts of a stage with these layers: the embedding and the head where they belong to it."""
        first = (self.embedding,) if layers.start == 0 else ()
        last = (self.head,) if layers.stop == len(self.layers) else ()
        return (*first, *(self.kinds[self.layers[layer]] for layer in layers), *last)


def model_work(
    plan: BuildPlan,
    shape: tuple[int, int],
    axes: Axes | None = None,
    options: ParallelOptions | None = None,
    *,
    checkpointing: Checkpointing | None = None,
    chunked_loss: Chunked = True,
) -> ModelWork:
    """The work of the model of `plan`, from F, I and W of each kind of part without values.

    Args:
        plan: any plan of the model: its schedule and its split do not matter
        shape: rows and sequence of a microbatch, before cp and tp shard it. Each row is one document
        axes: the mesh's other than the pipeline's; None for none
        options: how they work, and the dtype of autocast
        checkpointing: what a layer keeps that runs again; None keeps its inputs
        chunked_loss: as in Options

    Experts share tokens evenly. Collectives are left out. Raises ModelError where a forward looks at values.
    """
    account = Account(plan, axes or Axes(), options or ParallelOptions(), chunked_loss=chunked_loss)
    again = checkpointing or Checkpointing()
    kinds = [layer_kind(layer) for layer in plan.source.model.get_submodule(plan.chain.layers).children()]
    distinct = list(dict.fromkeys(kinds))
    works = []
    for kind in distinct:
        layer = kinds.index(kind)
        works.append(_part(account, shape, range(layer, layer + 1), 1, again))
    return ModelWork(
        tuple(works),
        tuple(map(distinct.index, kinds)),
        _part(account, shape, range(0), 0, None),
        head_work(account, shape),
    )


def head_work(account: Account, shape: tuple[int, int]) -> PartWork:
    """The work of the head with its loss, as in `model_work`."""
    count = account.plan.chain.count
    return _part(account, shape, range(count, count), 2, None)


def _part(
    account: Account, shape: tuple[int, int], layers: range, stage: int, again: Checkpointing | None
) -> PartWork:
    """again: how its layers are checkpointed where they are; None: the part never is"""
    once = _Recorder(account)
    sizes = account.of_part(shape, layers, stage, watch=once.during)
    twice, recomputed = once, sizes
    if again is not None:
        twice = _Recorder(account)
        recomputed = account.of_part(shape, layers, stage, again, twice.during)
    more = twice.ops["I"] - once.ops["I"]
    kept = sizes.kept
    nbytes = PartBytes(
        kept.activation,
        kept.held_for_weight,
        sizes.in_forward,
        sizes.in_backward,
        recomputed.kept.activation,
        recomputed.in_backward,
        kept.buffer,
    )
    forward, input_grad, weight_grad, whole = (_as_work(once.ops[kind]) for kind in ("F", "I", "W", "B"))
    return PartWork(forward, input_grad, weight_grad, whole, _as_work(more), nbytes)


def _as_work(ops: Counter[OpWork]) -> tuple[OpWork, ...]:
    return tuple(op._replace(calls=float(calls)) for op, calls in ops.items())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops of F, I and W, by what they are.

    ops: of each kind of op of the stage, how many there are of each kind, dtype and size; of B, those of W in
        a whole backward
    """

    supports_higher_order_operators = True

    def __init__(self, account: Account) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: dict[Kind, Counter[OpWork]] = {kind: Counter() for kind in ("F", "B", "I", "W")}
        self._axes = account.axes
        self._experts = _expert_shapes(account)
        self._kind: Kind = "F"

    @contextmanager
    def during(self, kind: Kind) -> Iterator[None]:
        self._kind = kind
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            # under this mode, the first op of a shape would also show the ops on whole tensors by which torch
            # finds the shape of the result
            args, kwargs, result = tree_map(_shard, (args, kwargs, result))
        if getattr(func, "namespace", "") == "aten" and not func.is_view and func not in _WITHOUT_DATA:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        packet = func._overloadpacket
        flops = flops_of(packet, args, kwargs, result)
        read, written = _tensors((args, kwargs)), _tensors(result)
        nbytes = sum(tensor.nbytes / self._sharing(tensor) for tensor in written)
        nbytes += sum(_stored(tensor) / self._sharing(tensor) for tensor in read)
        if packet in _LOOKUPS:  # as many rows of its table as it returns
            nbytes += written[0].nbytes - _stored(read[0])
        floating = [tensor for tensor in (*read, *written) if tensor.is_floating_point()]
        if not floating:
            return
        attends = is_attention(packet)
        kind: OpKind = "other" if flops is None else "attention" if attends else "matmul"
        dtype = str(floating[0].dtype).removeprefix("torch.")
        # each rank of cp attends to as many pairs as the others: a cp-th of those of the whole rows
        whole = (flops or 0) * (self._axes.cp if attends else 1)
        work = OpWork(kind, dtype, float(whole), nbytes)
        self.ops[self._kind][work] += 1
        if self._kind == "W":
            self.ops["B"].update(self._in_whole_backward(packet, work, written))

    def _in_whole_backward(self, packet: Any, work: OpWork, written: Sequence[Tensor]) -> list[OpWork]:
        """An op of W as autograd does it, which does not add within a product."""
        if packet is not torch.ops.aten.addmm_:
            return [work]
        gradient = written[0].nbytes / self._sharing(written[0])
        return [
            work._replace(nbytes=work.nbytes - gradient),
            OpWork("other", work.dtype, 0.0, 3 * gradient),  # reads two, writes one
        ]

    def _sharing(self, tensor: Tensor) -> int:
        """How many ranks of ep share a tensor: here are the weights, and gradients, of all experts."""
        return self._axes.ep if tuple(tensor.shape) in self._experts else 1


def _expert_shapes(account: Account) -> frozenset[tuple[int, ...]]:
    """The shapes of the matrices of a mixture's experts, and of these transposed; none without ep."""
    model = account.plan.source.model
    experts = mixtures(model).values() if account.axes.ep > 1 else ()
    shapes = {tuple(weight.shape) for part in experts for weight in part.parameters() if weight.dim() == 3}
    return frozenset(shapes | {(count, inner, outer) for count, outer, inner in shapes})


_LOOKUPS = frozenset({
    getattr(torch.ops.aten, name) for name in ("embedding", "index", "index_select", "gather")
})  # fmt: skip
_WITHOUT_DATA = frozenset({
    getattr(torch.ops.aten, name).default
    for name in ("detach", "_unsafe_view", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
})  # fmt: skip


def _shard(value: Any) -> Any:
    """The shard of a DTensor on this process; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _stored(tensor: Tensor) -> int:
    """Bytes that an op reads of it: an expanded dimension counts once."""
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return math.prod(sizes) * tensor.itemsize
