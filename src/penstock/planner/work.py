"""The work of a model: the ops of each of its parts, with what they compute, read, write and keep.

A part is the embedding, a layer, or the head with its loss. Its work is that of a microbatch on a process.
Layers that are alike share one `PartWork`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    """

    activation: int
    for_weight: int
    forward_peak: int
    backward_peak: int
    recomputed_activation: int
    recomputed_backward_peak: int
    sent: int


class PartWork(NamedTuple):
    """The ops of a part for one microbatch.

    input_grad: of I, without a forward that checkpointing runs again
    weight_grad: of W. A whole backward is I and W
    recomputed: what I or B runs again first where the layer is checkpointed; a part of `forward`, or all
    parameters: how many the process holds of the part, after tp, ep and FSDP have sharded them
    """

    forward: tuple[OpWork, ...]
    input_grad: tuple[OpWork, ...]
    weight_grad: tuple[OpWork, ...]
    recomputed: tuple[OpWork, ...]
    nbytes: PartBytes
    parameters: int


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
