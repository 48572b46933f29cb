"""Sizes of activations, estimated from the model without a run; measured sizes are better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from penstock.batch.liger import Chunked
from penstock.batch.loss import NextToken
from penstock.batch.packing import PER_TOKEN
from penstock.batch.payload import EdgeSpecs, Payload
from penstock.batch.shapes import Microbatch, logits_in
from penstock.models.huggingface.stages import HFCall, HFEdges
from penstock.models.split.kernels import kernels_of_runs, one_document
from penstock.models.stage import StageInfo
from penstock.models.tracing.autocast import AutocastWithoutValues
from penstock.models.tracing.meta import shadow
from penstock.private import LOOKS_AT_VALUES
from penstock.runtime.device.footprints import footprint
from penstock.runtime.device.memory import Measured, MicrobatchBytes
from penstock.runtime.device.offload import Offload
from penstock.runtime.split_backward.deferred import without_autocast
from penstock.runtime.stage import Stage, StageCall
from penstock.runtime.stage_part import Forward
from penstock.schedule.ops import Kind


class _Under(NamedTuple):
    """A call of a stage under autocast, innermost, so that other modes see the casts."""

    autocast: AutocastWithoutValues
    call: StageCall

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        with self.autocast:
            return self.call(received, microbatch)


class _OfAnyHead(NextToken):
    """The next-token loss; of logits (rows, classes) the cross-entropy of a class for each row."""

    def total(self, output: Any, microbatch: Microbatch) -> Tensor:
        logits = logits_in(output)
        if len(logits.shape) != PER_TOKEN:
            return super().total(output, microbatch)
        return F.cross_entropy(logits, microbatch["labels"][:, 0].to(logits.device), reduction="sum")


AroundOp = Callable[[Kind], AbstractContextManager[object]]


def _unwatched(kind: Kind) -> AbstractContextManager[object]:
    return nullcontext()


class StageSizes(NamedTuple):
    """The bytes that one microbatch holds on a stage.

    kept: between ops
    in_forward, in_backward: the most while its F runs, and while its I or B runs
    input_stays: of `kept.activation`, what would be offloaded if it were not the stage's input
    """

    kept: MicrobatchBytes
    in_forward: int
    in_backward: int
    input_stays: int = 0


def stage_sizes(
    part: PreTrainedModel,
    info: StageInfo,
    edges: HFEdges,
    shape: tuple[int, int],
    split: bool = False,
    entries: frozenset[str] | None = None,
    shared: Sequence[object] = (),
    defers_head: Chunked = True,
    autocast: AutocastWithoutValues | None = None,
    offload: Offload | None = None,
    watch: AroundOp | None = None,
) -> StageSizes | None:
    """The bytes that one microbatch holds on a stage made by `cut`, and the most while an op of it runs.

    They come from a forward and the first half of a backward without values, with the next-token loss, or
    with that of classes where a head gives logits of rows. An autocast region of the caller has no effect.
    Each row counts as one document.

    Args:
        shape: rows and sequence of the microbatch.
        split: whether backwards are split, and something is held for W.
        entries: those of a microbatch that the model takes, if axes have changed its forward.
        shared: what a copy of the stage takes as it is, such as a mesh.
        autocast: that of forwards; None for none. Its casts of weights do not count.
        offload: of what leaves `part`; None where nothing does.
        watch: entered around F, I or B, and W, which it is called with. W runs only for it.

    Returns None if the model's forward reads values, so that only a real run can show the sizes.
    """
    if not edges.known:
        return None
    taken, around = (*shared, offload, autocast), watch or _unwatched
    with shadow(part, {id(each): each for each in taken}) as model, one_document(), kernels_of_runs():
        tokens = torch.zeros(shape, dtype=torch.long)
        microbatch = {"input_ids": tokens, "labels": tokens}
        edge, incoming = edges(info.stage, microbatch), _empty(edges(max(info.stage - 1, 0), microbatch))
        received = None if info.is_first else incoming
        call = HFCall(model, info, entries, defers_head=defers_head)
        lowering = call if autocast is None else _Under(autocast, call)
        stage = Stage(info.stage, model.train(), lowering, () if offload is None else (offload,))
        casts = tuple if autocast is None else lambda: autocast.casts.storages
        try:
            how = Forward(split, offload=offload is not None)
            with without_autocast(), Measured(casts) as measured, around("F"):
                sent = _forward(stage, received, microbatch, None if info.is_last else edge, how)
        except LOOKS_AT_VALUES:
            return None
        kept = footprint(measured.own_bytes, stage.live[0].inputs, sent)
        of_casts = measured.nbytes - measured.own_bytes
        in_forward = measured.peak - of_casts + (0 if received is None else incoming.nbytes)
        offloaded, input_stays = 0, 0
        if offload is not None:
            staying = stage.staying(0, microbatch) | {storage._cdata for storage in casts()}
            offloaded, input_stays = _offloaded(offload, staying, incoming)
        gradients = [torch.ones(())] if info.is_last else [torch.empty_like(tensor) for tensor in sent]
        del sent
        grown = _growth_in_backward(stage, gradients, measured, around)
        for_weight = stage.deferred[0].nbytes
        if watch is not None:
            with watch("W"):
                stage.weight_backward(0)
        sizes = MicrobatchBytes(kept.activation, kept.output, incoming.nbytes, for_weight, offloaded)
        return StageSizes(sizes, max(in_forward, kept.activation), kept.activation + grown, input_stays)


def _forward(
    stage: Stage, received: Payload | None, microbatch: Microbatch, edge: EdgeSpecs | None, how: Forward
) -> tuple[Tensor, ...]:
    """Run microbatch 0, and return what the next stage gets; without an edge, compute the loss."""
    if edge is None:
        stage.forward(0, received, microbatch, how=how, loss=_OfAnyHead())
        return ()
    return stage.forward(0, received, microbatch, edge, how).tensors


def _empty(edge: EdgeSpecs) -> Payload:
    """A message of the shapes of an edge, without values."""
    return Payload(tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in edge.tensors), edge)


def _offloaded(offload: Offload, staying: set[int], incoming: Payload) -> tuple[int, int]:
    """Bytes that leave the device, and bytes that would leave it if they were not the stage's input."""
    inputs = {tensor.untyped_storage()._cdata for tensor in incoming.tensors}
    leaving = sum(storage.nbytes for storage in offload.leaving(0, staying))
    return leaving, sum(storage.nbytes for storage in offload.leaving(0, staying - inputs)) - leaving


def _growth_in_backward(stage: Stage, gradients: list[Tensor], measured: Measured, watch: AroundOp) -> int:
    """The most bytes that the I or B of microbatch 0 holds beyond those held before it.

    Gradients of weights exist from the start, as after a first microbatch.
    """
    for parameter in stage.module.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    measured.peak = before = measured.nbytes
    with measured, watch("I"):
        stage.input_backward(0, gradients)
    return measured.peak - before
