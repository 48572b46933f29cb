"""Run forwards only, for the loss and the last stage's outputs; gather the last step's routed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.batch.loss import OwnLoss, check_labels, labels_of
from penstock.batch.microbatches import Collect, batch_rows
from penstock.batch.payload import EdgeSpecs, Payload, flatten, pack_specs, unflatten, unpack_specs
from penstock.batch.row_loss import row_logps, token_logps
from penstock.batch.shapes import Microbatch, logits_in
from penstock.errors import BatchError, ConfigError, ShapeError
from penstock.models.adapters import without_adapters
from penstock.parallel.expert.replay import Recorded, StageRouting
from penstock.parallel.world import World
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.steps.runner import StepRunner
from penstock.pipeline.steps.schedules import LoweredSchedule
from penstock.pipeline.steps.split_batch import BatchLike, as_list
from penstock.pipeline.steps.step import Step, StepPart, StepResult
from penstock.runtime.executor import run_together
from penstock.runtime.stage import evaluating


class Evaluation(NamedTuple):
    """The outcome of an evaluation with outputs.

    Args:
        loss: mean over the valid tokens; None for a batch without labels, if the loss reads labels
        tokens: number of valid tokens; 0 without labels
        bubble: as in StepResult
        outputs: those of the last stage, or a function's results for them; None on ranks without outputs
    """

    loss: float | None
    tokens: int
    bubble: float
    outputs: Any


class Evaluations:
    """Runs forwards of any number of microbatches on a pipeline's stages. All methods are collective."""

    def __init__(self, built: BuiltStages, steps: StepRunner) -> None:
        self._built, self._steps = built, steps

    def outputs(self, batch: BatchLike, wanted: Collect | bool, everywhere: bool) -> Evaluation:
        """Evaluate `batch`, and return its outputs too.

        wanted: True for the last stage's outputs, or a function of (output, microbatch's number)

        Raises ConfigError where each copy of the model has the outputs of half the batch.
        """
        schedule, processes = self._built.schedule, self._built.world.processes
        if schedule.placement.replicas > 1 and processes.count > 1 and not everywhere:
            raise ConfigError(
                f"outputs with schedule {schedule.name!r}",
                "two copies of the model run, and the last stage of each has the outputs of half the batch",
                "Give everywhere=True",
            )
        collect: Collect = wanted if callable(wanted) else lambda output, microbatch: output
        labelled = any("labels" in part for part in as_list(batch))
        scored = labelled or not isinstance(self._built.loss, OwnLoss)
        result, collected, count = self.run(batch, collect, scored)
        if everywhere:
            collected = send_to_all(collected, self._built.world)
        outputs = [collected.get(microbatch) for microbatch in range(count)] if collected else None
        if outputs is not None and not callable(wanted):
            outputs = in_rows(outputs)
        loss, tokens = (result.loss, result.tokens) if scored else (None, 0)
        return Evaluation(loss, tokens, result.bubble, outputs)

    def run(
        self,
        batch: BatchLike,
        collect: Collect | None = None,
        scored: bool = True,
        parts: Sequence[StepPart] = (),
    ) -> tuple[StepResult, dict[int, Any], int]:
        """Evaluate `batch`.

        scored: whether to compute the loss
        parts: those of this evaluation alone
        Returns the result, this process's results of `collect` by microbatch, and the number of microbatches.
        """
        lowered, mesh_plan, keep = self._forwards(batch), self._built.mesh_plan, collect
        if collect is not None and mesh_plan is not None:  # each rank of cp has a part of an output

            def keep(output: Any, microbatch: int) -> Any:
                return collect(mesh_plan.gather_output(output, microbatch), microbatch)

        modules = [stage.module for stage in self._built.stages]
        with (
            evaluating(*modules),
            self._steps.running(lowered, batch, parts, collect=keep, scored=scored) as step,
        ):
            run_together(lowered.executors, step.input)
        collected: dict[int, Any] = {}
        for executor in lowered.executors:
            collected |= executor.results
            executor.results = {}
        return step.result, dict(sorted(collected.items())), lowered.schedule.microbatches

    def logprobs(self, batch: BatchLike, adapters: bool, by_token: bool) -> Tensor:
        """The log-probability of each row's labels, on every process. See Pipeline.logprobs"""
        part = RowLogprobs([stage.module for stage in self._built.stages], adapters)
        collect: Collect = part.of_tokens if by_token else part.of_rows
        _, collected, _ = self.run(batch, collect, scored=False, parts=(part,))
        results = send_to_all(collected, self._built.world)
        rows = [of_rows.to(self._built.world.device) for _, of_rows in sorted(results.items())]
        if by_token:
            widths = self._built.splitter.unpadded_lengths(batch) or [of_rows.shape[1] for of_rows in rows]
            rows = [F.pad(of_rows, (0, max(widths) - of_rows.shape[1])) for of_rows in rows]  # it also cuts
        return torch.cat(rows)

    def _forwards(self, batch: BatchLike) -> LoweredSchedule:
        """The forwards of the microbatches of `batch`, equally many on all ranks. Collective on a mesh."""
        if isinstance(batch, Mapping):
            try:
                rows = batch_rows(batch, self._built.splitter.sharding)
            except BatchError:  # splitting the batch raises it again, on all ranks
                rows = 1
            count = min(self._built.schedule.microbatches, rows // self._built.splitter.group)
        else:
            count = len(batch)
        return self._steps.schedules.forwards(self._built.world.reductions.min(max(count, 1)))


def in_rows(outputs: Sequence[Any]) -> Any:
    """One tensor with the rows of all microbatches if all rows are tensors of one shape, else a list."""
    tensors = [output for output in outputs if isinstance(output, Tensor) and output.dim()]
    if len(tensors) < len(outputs) or len({(t.shape[1:], t.dtype) for t in tensors}) > 1:
        return list(outputs)
    return torch.cat(tensors)


# ---- results on every process


_SLICE = 1 << 24  # bytes that a process sends in one exchange, to every other


def send_to_all(local_results: Mapping[int, Any], world: World) -> dict[int, Any]:
    """Every process's results, by microbatch, on every process. Collective, over the mesh where there is one.

    Tensors are sent as bytes; numbers and strings in lists, tuples and dicts as text.
    Raises ShapeError, on every process, for anything else.
    """
    if world.processes.count == 1:
        return dict(local_results)
    payloads: dict[int, Payload] = {}

    def pack() -> dict[int, str]:
        try:
            for microbatch, value in local_results.items():
                tensors, form = flatten(value)
                payloads[microbatch] = Payload(tensors, EdgeSpecs.of(tensors, form))
        except ShapeError as error:
            rule = "tensors, numbers, strings and None go to all ranks, in lists, tuples and dicts"
            remedy = "Return these, or leave everywhere out"
            raise ShapeError(f"a result that cannot be sent ({error.value})", rule, remedy) from error
        return {microbatch: pack_specs(payload.specs).decode() for microbatch, payload in payloads.items()}

    texts = world.everyone.attempt("send its results to all ranks", pack)
    results: dict[int, Any] = {}
    for owner, texts_of_owner in enumerate(world.processes.gather(texts)):
        for microbatch, text in texts_of_owner.items():
            specs = unpack_specs(text.encode())
            mine = payloads[int(microbatch)].tensors if owner == world.processes.index else None
            received = [
                _broadcast(owner, None if mine is None else mine[at], spec.shape, spec.dtype, world)
                for at, spec in enumerate(specs.tensors)
            ]
            results[int(microbatch)] = unflatten(received, specs.form)
    return dict(sorted(results.items()))


def _broadcast(
    owner: int, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, world: World
) -> Tensor:
    """The owner's tensor, on every process. Collective."""
    received = torch.empty(tuple(shape), dtype=dtype, device=world.device)
    flat = received.reshape(-1).view(torch.uint8)
    if tensor is not None:
        flat.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    for start in range(0, flat.numel(), _SLICE):
        piece = flat[start : start + _SLICE]
        sent = piece if tensor is not None else torch.zeros_like(piece)
        piece.copy_(world.transport.all_gather([sent])[owner])
    return received


# ---- log-probabilities of rows


class RowLogprobs(StepPart):
    """Computes the log-probabilities of labels from the last stage's outputs. adapters: False runs without"""

    def __init__(self, modules: Sequence[nn.Module], adapters: bool) -> None:
        self._modules, self._adapters = modules, adapters
        self._microbatches: Sequence[Microbatch] = ()

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        for microbatch in microbatches:
            check_labels("labels", labels_of(microbatch, "labels", "the tokens of each row that count"))

    def begin(self, step: Step) -> None:
        self._microbatches = step.microbatches

    def around(self, step: Step) -> AbstractContextManager[object]:
        return nullcontext() if self._adapters else without_adapters(*self._modules)

    def of_rows(self, output: Any, microbatch: int) -> Tensor:
        """Those of a microbatch (rows,). output: logits, or a mapping with "logits" """
        return row_logps(logits_in(output), self._microbatches[microbatch]["labels"])[0]

    def of_tokens(self, output: Any, microbatch: int) -> Tensor:
        """Those of a microbatch (rows, sequence). output: as for `of_rows`"""
        return token_logps(logits_in(output), self._microbatches[microbatch]["labels"])[0]


# ---- the experts that the last step chose


class RoutedExperts(StepPart):
    """Keeps the form of the last step's batch, and gathers the choices of its routers."""

    def __init__(self, built: BuiltStages) -> None:
        self._built, self._microbatches = built, built.schedule.microbatches
        # lengths of rows before padding, one for all microbatches or one for each; empty without padding
        self._lengths: list[int] = []

    def end(self, step: Step) -> None:
        self._microbatches = len(step.microbatches)
        self._lengths = self._built.splitter.unpadded_lengths(step.batch)

    def gather(self) -> Tensor | list[Tensor]:
        """Experts of this pipeline's part of the batch, (rows, sequence, mixtures, top_k), on its processes.

        A list by microbatch where these differ in length. Collective over the pipeline, and over cp.
        Raises ConfigError, on all of them, where the last step recorded nothing.
        """
        count, local = self._microbatches, dict[int, tuple[list[int], Tensor]]()
        for stage in self._built.stages:
            routing = stage.part(StageRouting)
            recorded: Mapping[int, Recorded] = {} if routing is None else routing.recorded
            for microbatch, (places, chosen, length) in sorted(recorded.items()):
                if length is not None and self._built.mesh_plan is not None:
                    chosen = self._built.mesh_plan.gather_sequence(chosen, length)
                local[stage.index * count + microbatch] = list(places), chosen
        pieces: dict[int, list[tuple[list[int], Tensor]]] = {}
        for key, piece in send_to_all(local, self._built.world).items():
            pieces.setdefault(key % count, []).append(piece)
        if len(pieces) < count:
            raise ConfigError(
                f"routed_experts() of {len(pieces)} microbatches, where a step has {count}",
                "they are those of the last step, with replay_routing=True and in training mode",
                "Call step() first",
            )
        rows = [_in_layer_order(pieces[microbatch]) for microbatch in range(count)]
        ends = self._lengths if len(self._lengths) == count else self._lengths * count
        if ends:
            rows = [of_tokens[:, :end] for of_tokens, end in zip(rows, ends, strict=True)]
        return in_rows(rows)  # type: ignore[no-any-return]


def _in_layer_order(pieces: list[tuple[list[int], Tensor]]) -> Tensor:
    """One microbatch's mixtures of all stages."""
    order = [mixture for mixtures, _ in pieces for mixture in mixtures]
    together = torch.cat([chosen for _, chosen in pieces], 2)
    return together[:, :, torch.tensor(order, device=together.device).argsort()]
