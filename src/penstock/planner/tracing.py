"""Run the parts of a model without values, and note each op: what it computes, reads, writes and leaves.

A part runs as a stage does: F with its loss, I, and W, on fake tensors, once keeping its activations and once
recomputing them. Views and allocations take no time. Casts of weights happen once a step, and are left out.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.batch.loss import NextToken
from penstock.batch.payload import Payload
from penstock.errors import ModelError
from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.models.huggingface.entries import taken
from penstock.models.huggingface.stages import HFCall, HFEdges, cut
from penstock.models.source import Source
from penstock.models.split.activation_sizes import _Fused, _one_document
from penstock.models.stage import StageInfo
from penstock.models.tracing.autocast import AutocastWithoutValues
from penstock.models.tracing.chain import Chain
from penstock.models.tracing.meta import shadow
from penstock.models.tracing.probe import layer_kind
from penstock.parallel.mesh import imagined
from penstock.parallel.tensor.shard import tensor_parallel
from penstock.planner.candidate import GROUPS, Candidate
from penstock.planner.work import ModelWork, OpKind, OpWork, PartBytes, PartWork
from penstock.private import TorchDispatchMode, tree_leaves
from penstock.runtime.device.footprints import footprint
from penstock.runtime.device.memory import Measured
from penstock.runtime.split_backward.deferred import without_autocast
from penstock.runtime.stage import Stage
from penstock.runtime.stage_part import Forward

_FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::alias",
    "aten::lift",
    "aten::t",
    "aten::_unsafe_view",
)


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that run under it. weights: storages whose casts are made once a step, by address"""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: list[OpWork] = []
        self._weights = weights

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if func.is_view or name in _FREE or not name.startswith("aten::"):
            return result
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if name == "aten::_to_copy" and all(t.untyped_storage()._cdata in self._weights for t in inputs):
            return result
        nbytes = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        floating = next((t.dtype for t in (*inputs, *outputs) if t.is_floating_point()), torch.float32)
        kind, flops = _flops(name, func, args, kwargs, result)
        if nbytes:
            self._ops.append(OpWork(kind, str(floating).removeprefix("torch."), float(flops), float(nbytes)))
        return result

    def take(self) -> tuple[OpWork, ...]:
        """The ops since the last call."""
        ops, self._ops = self._ops, []
        return tuple(ops)


def _flops(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[OpKind, int]:
    """The kind of an op and its FLOPs; of attention half, as the causal mask hides the other."""
    if "attention" in name and "backward" in name:
        gradient, *heads = (tensor.shape for tensor in args[:4])
        return "attention", sdpa_backward_flop_count(gradient, *heads) // 2  # type: ignore[no-untyped-call]
    if "attention" in name:
        return "attention", sdpa_flop_count(*(tensor.shape for tensor in args[:3])) // 2  # type: ignore[no-untyped-call]
    if "grouped_mm" in name:
        return "matmul", 2 * args[0].numel() * args[1].shape[-1]
    counted = flop_registry.get(func._overloadpacket)
    return ("other", 0) if counted is None else ("matmul", counted(*args, **kwargs, out_val=result))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Ran(NamedTuple):
    """One pass over a part."""

    forward: tuple[OpWork, ...]
    input_grad: tuple[OpWork, ...]
    weight_grad: tuple[OpWork, ...]
    activation: int
    for_weight: int
    forward_peak: int
    backward_peak: int
    sent: int
    shared: int


class Measurement(NamedTuple):
    """The work of a model's parts, without the bytes that all layers of a stage share."""

    work: ModelWork
    shared: int


def measured_work(
    source: Source, chain: Chain, candidate: Candidate, known: dict[Hashable, Any]
) -> Measurement:
    """The work of each part for a microbatch of `candidate` on one process.

    known: runs of parts with candidates that differ in nothing but what is recomputed; more are put into it
    Raises ModelError where the forward cannot run without values.
    """
    layers = [layer_kind(layer) for layer in source.model.get_submodule(chain.layers).children()]
    kinds = list(dict.fromkeys(layers))
    with nullcontext() if candidate.axes.tp == 1 else imagined("tp", candidate.axes.tp) as mesh:
        parts = _Parts(source, chain, candidate, mesh, known)
        of_kinds = [parts.work(range(first, first + 1), 1) for first in map(layers.index, kinds)]
        embedding = parts.work(range(0), 0)
        head = parts.work(range(chain.count, chain.count), 2)
    work = ModelWork(tuple(of_kinds), tuple(map(kinds.index, layers)), embedding, head)
    return Measurement(work, parts.shared)


class _Parts:
    """Runs parts of a model on a mesh."""

    def __init__(
        self,
        source: Source,
        chain: Chain,
        candidate: Candidate,
        mesh: DeviceMesh | None,
        known: dict[Hashable, Any],
    ) -> None:
        self._source, self._chain, self._candidate, self._mesh = source, chain, candidate, mesh
        self._known = known
        self.shared = 0

    def work(self, layers: range, stage: int) -> PartWork:
        """stage: 0 for the embedding, 1 for layers, 2 for the head"""
        kept = self._run(layers, stage, None, split=True)
        again = kept
        recomputed: tuple[OpWork, ...] = ()
        if stage == 1:
            self.shared = max(self.shared, kept.shared)
            save = GROUPS if self._candidate.recomputed == "selective" else ()
            again = self._run(layers, stage, Checkpointing(save=save), split=False)
            recomputed = tuple(op for op in kept.forward if op.kind not in save)
        own, other = kept.shared, again.shared
        nbytes = PartBytes(
            kept.activation - own, kept.for_weight, kept.forward_peak - own, kept.backward_peak - own,
            again.activation - other, again.backward_peak - other, kept.sent,
        )  # fmt: skip
        ops = map(self._in_context, (kept.forward, kept.input_grad, kept.weight_grad, recomputed))
        return PartWork(*ops, nbytes=nbytes, parameters=0)  # type: ignore[call-arg]

    def _run(self, layers: range, stage: int, checkpointing: Checkpointing | None, *, split: bool) -> _Ran:
        key = layers, stage, checkpointing, split, stage == 2 and self._defers_head
        if key not in self._known:
            try:
                self._known[key] = self._measured(layers, stage, checkpointing, split=split)
            except RuntimeError as cause:  # torch's
                raise ModelError(
                    f"{type(self._source.model).__name__} in {self._candidate.precision} precision",
                    f"its forward cannot run without values: {str(cause).splitlines()[0]}",
                    "Take precision bfloat16, or another attention or experts implementation",
                ) from cause
        run: _Ran = self._known[key]
        return run

    @property
    def _defers_head(self) -> bool:
        return self._candidate.axes.ranks_per_stage == 1

    def _in_context(self, ops: tuple[OpWork, ...]) -> tuple[OpWork, ...]:
        """With cp each token meets those of all ranks, by as many fewer heads."""
        cp = self._candidate.axes.cp
        return tuple(op._replace(flops=op.flops * cp) if op.kind == "attention" else op for op in ops)

    def _measured(
        self, layers: range, stage: int, checkpointing: Checkpointing | None, *, split: bool
    ) -> _Ran:
        model, chain, candidate = self._source.model, self._chain, self._candidate
        info = StageInfo(stage, 3)
        part = cut(model, chain, layers, info, values=False)
        if self._mesh is not None:
            tensor_parallel(part, self._mesh, sequence_parallel=candidate.sequence_parallel)
        if checkpointing is not None:
            install([(n, part.get_submodule(f"{chain.layers}.{n}")) for n in layers], checkpointing)
        edges = HFEdges(model, chain, None, ends=(layers.start, layers.stop, chain.count))
        shared = () if self._mesh is None else (self._mesh,)
        shape = candidate.axes.local_shape(candidate.shape)
        entries = taken(model)
        with shadow(part, {id(one): one for one in shared}) as whole, _one_document(whole):
            tokens = torch.zeros(shape, dtype=torch.long)
            microbatch = {"input_ids": tokens, "labels": tokens}
            edge, before = edges(stage, microbatch), edges(max(stage - 1, 0), microbatch)
            incoming = Payload(tuple(torch.empty(s.shape, dtype=s.dtype) for s in before.tensors), before)
            lowered = AutocastWithoutValues(torch.bfloat16) if candidate.precision == "mixed" else None
            call = HFCall(whole, info, entries, defers_head=self._defers_head)

            def lower(received: Any, microbatch: Any) -> Any:
                with lowered or nullcontext():
                    return call(received, microbatch)

            run = Stage(stage, whole.train(), lower, ())
            weights = {p.untyped_storage()._cdata for p in whole.parameters()}
            recorder = OpRecorder(weights)
            measured = Measured((lambda: lowered.casts.storages) if lowered else tuple)
            before_layer = dict[int, int]()
            for n in layers[:1]:
                inner = whole.get_submodule(f"{chain.layers}.{n}")
                inner.register_forward_pre_hook(lambda *_: before_layer.update(measured.alive))
            with without_autocast(), _Fused(), measured, recorder:
                result = run.forward(
                    0,
                    None if info.is_first else incoming,
                    microbatch,
                    None if info.is_last else edge,
                    Forward(split),
                    NextToken() if info.is_last else None,
                )
            sent = () if info.is_last else result.tensors
            size = footprint(measured.own_bytes, run.live[0].inputs, sent)
            alive = measured.alive
            shared = sum(
                nbytes for at, nbytes in before_layer.items() if at not in weights and alive.get(at) == nbytes
            )
            received_bytes = 0 if info.is_first else incoming.nbytes
            forward_peak = measured.peak + received_bytes
            forward = recorder.take()
            gradients = [torch.ones(())] if info.is_last else [torch.empty_like(tensor) for tensor in sent]
            nbytes = sum(tensor.nbytes for tensor in sent)
            del sent, result
            for parameter in whole.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            measured.peak = start = measured.nbytes
            with lowered or nullcontext(), measured, recorder:
                run.input_backward(0, gradients)
            grown, input_grad = measured.peak - start, recorder.take()
            for_weight = run.deferred[0].nbytes
            with recorder:
                run.weight_backward(0)
            return _Ran(
                forward, input_grad, recorder.take(), size.activation, for_weight, forward_peak,
                size.activation + grown, nbytes, shared,
            )  # fmt: skip
