"""Forwards alone: their loss, and what comes out of the last stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batch.loss import NextToken
from penstock.batch.microbatches import Collect, batch_rows
from penstock.batch.payload import EdgeSpecs, Payload, pack_specs, put_together, take_apart, unpack_specs
from penstock.errors import BatchError, ConfigError, ShapeError
from penstock.parallel.expert.replay import Recorded
from penstock.parallel.world import World
from penstock.pipeline.built import BuiltStages
from penstock.pipeline.split_batch import BatchLike, BatchSplitter, MeshBatchSplitter
from penstock.pipeline.step import LoweredSchedule, StepResult, StepRunner
from penstock.runtime.stage import RoutedStage, Stage, evaluating
from penstock.schedule import verify
from penstock.schedule.builders.gpipe import forwards


class Evaluation(NamedTuple):
    """loss: None for a batch without labels, where it is the next-token loss; tokens: then 0

    bubble: as StepResult has it
    outputs: what the last stage returned, or what a function made of it; None on ranks that have none of it
    """

    loss: float | None
    tokens: int
    bubble: float
    outputs: Any


class Evaluations:
    """Runs forwards of any number of microbatches on the stages of a pipeline."""

    def __init__(self, parts: BuiltStages, steps: StepRunner) -> None:
        self._parts, self._steps = parts, steps
        self._lowered: dict[int, LoweredSchedule] = {}  # by number of microbatches
        self._count = 0  # of microbatches, the last time

    def loss(self, given: BatchLike) -> StepResult:
        with evaluating(*(stage.module for stage in self._parts.stages)):
            return self._steps.run(self._of(given), given)[0]

    def results(
        self, given: BatchLike, collect: Collect, *, scored: bool = False
    ) -> tuple[StepResult, dict[int, Any]]:
        """What `collect` returned by microbatch, on the rank where it ran; the loss too where `scored`."""
        lowered = self._of(given)
        if isinstance(self._parts.splitter, MeshBatchSplitter):
            collect = self._parts.splitter.joining(collect)
        with evaluating(*(stage.module for stage in self._parts.stages)):
            result, _ = self._steps.run(lowered, given, collect, scored=scored)
        found: dict[int, Any] = {}
        for executor in lowered.executors:
            found |= executor.ops.results
            executor.ops.results = {}
        return result, dict(sorted(found.items()))

    def outputs(self, given: BatchLike, wanted: Collect | bool, everywhere: bool) -> Evaluation:
        """wanted: True for what the last stage returned, or what takes it and the microbatch's number

        Raises ConfigError where the copies of a model on several ranks would each have a part of it.
        """
        schedule, processes = self._parts.schedule, self._parts.world.processes
        if schedule.placement.replicas > 1 and processes.count > 1 and not everywhere:
            raise ConfigError(
                f"outputs with schedule {schedule.name!r}",
                "two copies of the model run, and the last stage of each has the outputs of half the batch",
                "Give everywhere=True",
            )
        collect: Collect = wanted if callable(wanted) else lambda output, number: output
        scored = not isinstance(self._parts.loss, NextToken) or _has_labels(given)
        result, found = self.results(given, collect, scored=scored)
        if everywhere:
            found = self._to_all(found)
        outputs = [found.get(number) for number in range(self._count)] if found else None
        if outputs is not None and not callable(wanted):
            outputs = in_rows(outputs)
        if not scored:
            return Evaluation(None, 0, result.bubble, outputs)
        return Evaluation(*result, outputs)

    def _to_all(self, found: Mapping[int, Any]) -> dict[int, Any]:
        """As `to_all`, and what one pipeline of a mesh refuses all do. Collective over the mesh."""
        refusal, everyone = None, dict[int, Any]()
        try:
            everyone = to_all(found, self._parts.world)
        except ShapeError as error:
            refusal = error
        self._parts.world.reductions.all_accept(self._count, True, refusal)
        if refusal is not None:
            raise refusal
        return everyone

    def _of(self, given: BatchLike) -> LoweredSchedule:
        """The forwards of as many microbatches as an evaluation makes of it."""
        count = self._count = self._counted(given)
        if count not in self._lowered:
            proof = verify(forwards(self._parts.schedule.placement, count))
            self._lowered[count] = self._steps.lower(proof)
        return self._lowered[count]

    def _counted(self, given: BatchLike) -> int:
        """The number of microbatches, the same for all parts of a batch. Collective over the mesh."""
        most = self._parts.schedule.microbatches
        if isinstance(given, Mapping):
            try:
                count = min(most, batch_rows(given, self._parts.splitter.sharding))
            except BatchError:  # once more where it is split, and there on all ranks alike
                count = 1
        else:
            count = len(given)
        return self._parts.world.reductions.min(max(count, 1))


def in_rows(outputs: Sequence[Any]) -> Any:
    """One tensor with the rows of all microbatches, where each is a tensor and the rows have one shape."""
    tensors = [output for output in outputs if isinstance(output, Tensor) and output.dim()]
    if len(tensors) < len(outputs) or len({(t.shape[1:], t.dtype) for t in tensors}) > 1:
        return list(outputs)
    return torch.cat(tensors)


def _has_labels(given: BatchLike) -> bool:
    return any("labels" in part for part in ([given] if isinstance(given, Mapping) else given))


_SLICE = 1 << 24  # bytes that go at once: everyone receives as many of everyone


def to_all(found: Mapping[int, Any], world: World) -> dict[int, Any]:
    """Every process's results, by microbatch, on every process. Collective.

    Tensors travel as their bytes, numbers and strings in lists, tuples and dicts as text.
    Raises ShapeError, on every process, for anything else.
    """
    if world.processes.count == 1:
        return dict(found)
    payloads: dict[int, Payload] = {}
    refusal = None
    try:
        for number, value in found.items():
            tensors, form = take_apart(value)
            payloads[number] = Payload(tensors, EdgeSpecs.of(tensors, form))
        mine = {number: pack_specs(payload.specs).decode() for number, payload in payloads.items()}
    except ShapeError as error:  # others are about to wait for this process
        refusal, mine = error.value, {}
    told = world.processes.gather([refusal, mine])
    for refused, _ in told:
        if refused is not None:
            rule = "tensors, numbers, strings and None go to all ranks, in lists, tuples and dicts"
            raise ShapeError(
                f"a result that cannot be sent ({refused})", rule, "Return these, or leave everywhere out"
            )
    everyone: dict[int, Any] = {}
    for owner, (_, held) in enumerate(told):
        for number, text in held.items():
            specs = unpack_specs(text.encode())
            own = payloads[int(number)].tensors if owner == world.processes.index else None
            received = [_from(owner, None if own is None else own[at], spec.shape, spec.dtype, world)
                        for at, spec in enumerate(specs.tensors)]  # fmt: skip
            everyone[int(number)] = put_together(received, specs.form)
    return dict(sorted(everyone.items()))


def _from(
    owner: int, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, world: World
) -> Tensor:
    """The owner's tensor, on every process."""
    received = torch.empty(tuple(shape), dtype=dtype, device=world.device)
    flat = received.reshape(-1).view(torch.uint8)
    if tensor is not None:
        flat.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    for start in range(0, flat.numel(), _SLICE):
        piece = flat[start : start + _SLICE]
        given = piece if tensor is not None else torch.zeros_like(piece)
        piece.copy_(world.transport.exchange([given])[owner])
    return received


# ---- Which experts the tokens of the last step chose, put together from all stages.


def chosen_experts(
    stages: Mapping[int, Stage], microbatches: int, splitter: BatchSplitter, world: World
) -> Tensor | list[Tensor]:
    """(rows, sequence, mixtures, top_k) of this pipeline's part of the batch, on each of its processes; a
    list by microbatch where these differ in length. Collective over the pipeline, and over cp.

    Raises ConfigError, on all of them, where the last step recorded nothing.
    """
    mine: dict[int, tuple[list[int], Tensor]] = {}
    for index, stage in stages.items():
        found: Mapping[int, Recorded] = stage.routing.recorded if isinstance(stage, RoutedStage) else {}
        for number, (places, chosen, length) in sorted(found.items()):
            if length is not None and isinstance(splitter, MeshBatchSplitter):
                chosen = splitter.beside.gather_sequence(chosen, length)
            mine[index * microbatches + number] = list(places), chosen
    parts: dict[int, list[tuple[list[int], Tensor]]] = {}
    for key, part in to_all(mine, world).items():
        parts.setdefault(key % microbatches, []).append(part)
    if len(parts) < microbatches:
        raise ConfigError(
            f"routed_experts() of {len(parts)} microbatches, where a step has {microbatches}",
            "they are what the last step chose, in a pipeline with replay_routing=True and in training mode",
            "Call step() first",
        )
    return in_rows([_in_order(parts[number]) for number in range(microbatches)])  # type: ignore[no-any-return]


def _in_order(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """The mixtures of all stages, in the order of the layers."""
    order = [place for places, _ in parts for place in places]
    together = torch.cat([chosen for _, chosen in parts], 2)
    return together[:, :, torch.tensor(order, device=together.device).argsort()]
