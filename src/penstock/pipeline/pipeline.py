"""Pipeline, the main object for users: a model split into stages, its proven schedule, and its steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.batch.microbatches import Collect, check_rows, with_entries
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, InputError, ModelError
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.stage import Provider
from penstock.pipeline.building.provided_stages import stages_from_provider
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.compare import TOLERANCE, Report, compare
from penstock.pipeline.generation import Generations
from penstock.pipeline.options import Options, takes_options
from penstock.pipeline.split_model import SplitModel
from penstock.pipeline.steps.deferral import WholeBackwards
from penstock.pipeline.steps.evaluate import Evaluation, Evaluations, RoutedExperts
from penstock.pipeline.steps.optimizer_step import optimizer_step
from penstock.pipeline.steps.optimizer_watch import OptimizerWatch
from penstock.pipeline.steps.run_parts import Autocast, Edges, SameWeights, Seeds
from penstock.pipeline.steps.runner import StepRunner
from penstock.pipeline.steps.schedules import LoweredSchedule
from penstock.pipeline.steps.shared_gradients import SharedGradients
from penstock.pipeline.steps.split_batch import BatchLike, RefusedBatch
from penstock.pipeline.steps.step import StepPart, StepRecord, StepResult
from penstock.pipeline.summary import layer_costs, step_costs, summary
from penstock.runtime import step_report as report
from penstock.runtime.device.memory import Held, PeakMemory
from penstock.runtime.executor import run_together
from penstock.runtime.ranks import collective, named_call
from penstock.runtime.stage import without_gradients
from penstock.schedule import Costs, Proof, Schedule, Timeline
from penstock.schedule.ops import check_size

_STEP = named_call("step()")


class Pipeline(SplitModel):
    """Stages of one model, and the schedule that they run.

    AutoPipeline.build and Pipeline.from_provider make it. All ranks call its methods together, except
    properties and `summary`. `schedule` and `proof` are those of the build; a step of another number of
    microbatches runs the schedule for that number, which is made and proven when it is first needed.
    """

    def __init__(self, built: BuiltStages) -> None:
        """Collective."""
        super().__init__(built)
        self._built = built
        self._shared, self._routed = SharedGradients(built, self.modules), RoutedExperts(built)
        self._seeds = Seeds(built)
        self._every_step: list[StepPart] = [
            SameWeights(built), Edges(built), self._seeds, Autocast(built)
        ]  # fmt: skip
        # parts of steps that train, after those of every step; the optimizer's step comes between these two
        self._parts: Sequence[StepPart] = (OptimizerWatch(self.parameters()), self._shared, self._routed)
        # the last part, as its warning may become an error on this rank alone
        self._whole_backwards = WholeBackwards(self.stages)
        self._steps = StepRunner(built, self._every_step)
        self._training = self._steps.schedules.training(built.schedule.microbatches)  # of the last step
        self._proof = self._training.proof
        self._evaluations = Evaluations(built, self._steps)
        self._generations = Generations(built, self._steps)
        self._last: StepRecord | None = None
        local = sum(parameter.numel() for _, parameter in self.owned_parameters())
        self._weights: int = sum(self.processes.gather(local))

    @classmethod
    @takes_options(Options)
    def from_provider(cls, provider: Provider, options: Options) -> Pipeline:
        """Build a pipeline of a user's own modules. Collective under torchrun.

        The provider is called for this process's stages. If they do not declare their shapes
        (penstock.models.stage.DeclaresShapes), it is also called once for every stage on the meta device, to
        infer the shapes on the edges. A value is a tensor, or any nest of tuples, lists and dicts of tensors.

        Args:
            provider: function of a StageInfo that returns the stage's module. Its forward gets the value from
                the previous stage (a mapping by name, a tuple by position), and by name each entry of the
                microbatch that it has a parameter for. Activation checkpointing applies to the layers in its
                module lists.
            options: keywords, described in penstock.pipeline.options.Options

        Raises TypeError for an unknown keyword; ConfigError, ModelError, WorldSizeError, HandshakeError.
        """
        pipe = cls(stages_from_provider(provider, options))
        pipe._shared.copy_first([parameter for _, parameter in pipe.owned_parameters()])
        return pipe

    def use(self, part: StepPart) -> None:
        """Add a part of your own to each later step and evaluation. Every rank adds it."""
        self._every_step.append(part)

    # ---- run

    def step(
        self,
        batch: BatchLike,
        *,
        microbatches: int | None = None,
        total_tokens: int | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        max_norm: float = math.inf,
        max_loss: float = math.inf,
        **entries: Any,
    ) -> StepResult:
        """Run forward and backward of one batch and add each parameter's gradient to its `.grad`.

        The number of microbatches may change from call to call. The first call with a number makes and proves
        its schedule; later calls reuse it (penstock.pipeline.steps.schedules keeps the most recent ones).

        With an optimizer the step ends as with `clip_grad_norm_(max_norm)` and `optimizer.step()` after it,
        bit for bit, and its result has the norm. If loss or norm is not finite, or the loss is above
        `max_loss`, the optimizer does not step.

        After an error gradients may be partial: clear them before the next step. Parameters are as before.

        Args:
            batch: tensors by name, e.g. input_ids and labels of shape (rows, sequence), the same on every
                rank of the pipeline; or a list of microbatches, which may differ in rows and length
            microbatches: number of microbatches to split tensors by name into; None takes the number of the
                build. A list has its own number
            total_tokens: divisor of the summed loss, in place of the batch's own number of valid tokens. For
                gradient accumulation, pass the tokens of all calls, from `count_tokens`, to each call: then
                gradients, and the sum of the losses, are those of one batch
            optimizer: one or several, over this process's `parameters()`. Every rank gives one, or none
            max_norm: the largest norm of all gradients, the same on every rank
            max_loss: the largest loss with which the optimizer steps, the same on every rank
            entries: further entries of the batch; a value that is no tensor goes to every microbatch.
                `routed_experts`, for replay_routing=True, sets the experts of each token, in the form of
                `Pipeline.routed_experts`, with -1 for the routers' own choice; `evaluate` and `infer` take it
                as well.

        Raises BatchError for a batch that cannot be split or differs between ranks, ConfigError for a number
        of microbatches that the schedule does not support, an optimizer over other parameters or one that
        needs a closure (LBFGS), ShapeError where a stage returns another shape than inferred, PeerLostError
        or StalledPeerError where another rank fails.
        """
        if not self.schedule.trains:
            raise ConfigError(
                f"step() with schedule {self.schedule.name!r}", "it has no backward", "Call evaluate()"
            )
        if not any(stage.trainable for stage in self._info):
            rule = "no parameter of it requires a gradient"
            raise ModelError("step() of a model", rule, "Unfreeze a part before build, or call evaluate()")
        with self.processes.calling(_STEP):
            update = optimizer_step(self, optimizer, max_norm, max_loss)
            parts = [*self._parts, *update, self._whole_backwards]
            lowered, batch = self._scheduled(self._with(batch, entries), microbatches)
            with self._steps.running(lowered, batch, parts, total_tokens=total_tokens) as step:
                run_together(lowered.executors, step.input)
            self._training, self._last = lowered, step.record
            return step.result

    @overload
    def evaluate(self, batch: BatchLike, outputs: Literal[False] = ..., **entries: Any) -> StepResult: ...

    @overload
    def evaluate(
        self, batch: BatchLike, outputs: Literal[True] | Collect, everywhere: bool = ..., **entries: Any
    ) -> Evaluation: ...

    @collective
    def evaluate(
        self, batch: BatchLike, outputs: bool | Collect = False, everywhere: bool = False, **entries: Any
    ) -> StepResult | Evaluation:
        """Compute the loss of one batch of any number of rows, in evaluation mode, without gradients.

        On a mesh, the loss is over all parts of the batch, and outputs are of this pipeline's part
        (`batch_part`); each rank of cp gets the outputs of whole sequences.

        Args:
            batch: as for `step`
            entries: as for `step`
            outputs: True also returns the last stage's outputs: one tensor with all rows in order, or a list
                by microbatch if they are no tensors or their rows differ in shape. With a function of
                (output, microbatch's number), a list of its results is returned instead, so that logits need
                not be kept. Labels are then optional; without labels there is no loss.
            everywhere: return outputs on every rank, not only on the one that hosts the last stage (the last
                rank; rank 0 for a V placement). Schedules that run two copies of the model (dualpipe) over
                several processes need it.

        Raises the errors of `step`, and ConfigError for outputs of two copies without everywhere=True.
        """
        batch = self._with(batch, entries)
        if outputs is False:
            return self._evaluations.run(batch)[0]
        return self._evaluations.outputs(batch, outputs, everywhere)

    @collective
    def infer(self, batch: BatchLike, collect: Collect | None = None, **entries: Any) -> dict[int, Any]:
        """Run the forward in evaluation mode and return the last stage's outputs by microbatch, on its rank.

        Args:
            batch: as for `step`
            entries: as for `step`
            collect: called with (output, microbatch's number) as soon as an output exists, with whole
                sequences under cp; its results are returned in place of the outputs

        Returns an empty dict on ranks without a last stage. Raises the errors of `step`.
        """
        collect = collect or (lambda output, microbatch: output)
        return self._evaluations.run(self._with(batch, entries), collect, scored=False)[1]

    @collective
    def logprobs(
        self, batch: BatchLike, adapters: bool = True, by_token: bool = False, **entries: Any
    ) -> Tensor:
        """Compute the log-probability of each row: the sum over its labels, in evaluation mode. Collective.

        Args:
            batch: as for `step`, with labels (rows, sequence), unshifted, -100 ignored; on a mesh, this
                pipeline's part
            adapters: False runs the base model of a PEFT adapter, the reference model of its training
            by_token: True returns that of each label, (rows, sequence), 0 where it is ignored, and beyond the
                end of microbatches shorter than the longest
            entries: as for `step`

        Returns (rows,) on every rank of the pipeline, in the order of the rows, without a gradient; half
        precision is summed in float32. Raises the errors of `step`.
        """
        return self._evaluations.logprobs(self._with(batch, entries), adapters, by_token)

    @collective
    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        microbatches: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Tensor:
        """Generate tokens after prompts, with a cache on each stage. Collective.

        In evaluation mode, without gradients; random states of training stay as they are. A greedy choice
        gives the tokens of transformers' `generate`. So does sampling with microbatches=1, after
        `torch.manual_seed(seed)`; with more, other numbers are drawn for the rows after the first microbatch.

        Args:
            input_ids: prompts, (rows, tokens), padded on the left, the same on every rank of the pipeline
            max_new_tokens: the most tokens to generate for a row
            microbatches: number of microbatches to split the rows into; None takes one for each rank, or for
                each row if there are fewer
            seed: of the generator that samples with do_sample=True; the same seed draws the same tokens
            options: attention_mask, of the shape of input_ids, and other entries of the model's forward; and
                arguments of transformers' `generate`, such as do_sample, temperature, top_k, top_p,
                eos_token_id, pad_token_id, logits_processor, stop_strings with tokenizer. Others are those of
                the model's generation_config

        Returns the prompts with the new tokens, (rows, tokens), on every rank; rows that end earlier are
        padded. On a mesh, they are those of this pipeline's part of the rows (`batch_part`).

        Raises BatchError for prompts or a mask that do not fit, ConfigError for options that transformers or
        a pipeline does not support, such as num_beams above 1, ModelError for a model without a cache.
        """
        options = {"max_new_tokens": max_new_tokens, **options}
        return self._generations.run(input_ids, microbatches, seed, options)

    @collective
    def microbatches(self, batch: BatchLike, count: int | None = None) -> list[Microbatch]:
        """Split `batch` as a step does, on this process's device.

        Collective on a mesh, and where microbatches are padded to the longest.

        Args:
            batch: as for `step`
            count: as `microbatches` for `step`

        Raises BatchError.
        """
        return self._steps.split(batch, self._count(batch, count or None))

    @collective
    def count_tokens(self, *batches: BatchLike) -> int:
        """Count the valid tokens of batches, over all parts of the mesh, as `step` reports them.

        For `total_tokens` of `step`. With a loss of your own it is the sum of all microbatches' weights;
        tensors by name are then split into the build's number of microbatches, so give a list for another
        number. Collective on a mesh; without one, each rank counts its own batches.

        Args:
            batches: each as for `step`; equally many on every rank

        Raises BatchError.
        """
        return self._steps.count_tokens([self._with(batch, {}) for batch in batches])

    @collective
    def routed_experts(self) -> Tensor | list[Tensor]:
        """The experts that each token of the last step chose, on each rank of the pipeline. Collective.

        Returns int32 (rows, sequence, mixtures, top_k) of this pipeline's part of the batch; a list by
        microbatch where these differ in length, as they were before padding. `step` takes it as
        `routed_experts`, with the same batch.
        Raises ConfigError, on every rank, without replay_routing=True and before the first step.
        """
        return self._routed.gather()

    def close(self) -> None:
        """Release the pipeline's process groups; the modules stay usable."""
        for part in (*self._steps.every_step, *self._parts, self._whole_backwards):
            part.close()
        self._world.transport.close()

    def _count(self, batch: BatchLike, count: int | None) -> int:
        """The number of microbatches of a batch."""
        if count is not None:
            return count
        return self.schedule.microbatches if isinstance(batch, Mapping) else max(len(batch), 1)

    def _scheduled(self, batch: BatchLike, count: int | None) -> tuple[LoweredSchedule, BatchLike]:
        """Find the schedule for `batch`.

        If none fits, return the build's schedule and a RefusedBatch, which raises when the ranks agree.
        """
        find, built, count = self._steps.schedules.training, self.schedule, self._count(batch, count)
        if count == built.microbatches or isinstance(batch, RefusedBatch):
            return find(built.microbatches), batch
        try:
            check_size(built.ranks, count)
            if isinstance(batch, Mapping):  # before a schedule of that size is made
                check_rows(batch, count, self._built.splitter.sharding, self._built.splitter.group)
            return find(count), batch
        except InputError as error:
            return find(built.microbatches), RefusedBatch(error)

    def _with(self, batch: BatchLike, entries: Mapping[str, Any]) -> BatchLike:
        """The batch with more entries, or a RefusedBatch, which raises when the ranks agree."""
        try:
            return with_entries(batch, entries, self._built.splitter.sharding)
        except BatchError as error:  # other ranks may not raise it
            return RefusedBatch(error)

    # ---- compare with the whole model

    @collective
    def compare(self, model: nn.Module, batch: BatchLike, tolerance: float | None = None) -> Report:
        """Compare loss and every gradient of one batch with those of the whole `model`. Collective.

        Both models run in evaluation mode; their earlier gradients are restored afterwards. If weights
        differ, only the weights are reported.

        Args:
            tolerance: relative to each gradient's largest entry; None takes the dtype's, and on a mesh that
                of `autocast`
        """
        built = self._built
        if tolerance is None and built.autocast is not None and built.mesh_plan is not None:
            tolerance = TOLERANCE[built.autocast]  # the ranks of a mesh round partial sums to it
        return compare(
            self, self.step, self.microbatches, model, batch, built.loss, tolerance, built.autocast
        )

    @collective
    def verify_against(self, model: nn.Module, batch: BatchLike) -> Report:
        """Compare, and unless all is equal, raise EquivalenceError, which names every difference.

        The error's `report` is the whole comparison. Collective.
        """
        comparison = self.compare(model, batch)
        comparison.raise_if_wrong()
        return comparison

    # ---- measurements and facts

    @property
    def proof(self) -> Proof:
        """The proof of the schedule, from `verify`."""
        return self._proof

    @property
    def last_schedule(self) -> Schedule:
        """The schedule of the last step; before the first step, that of the build."""
        return self._training.schedule

    @property
    def draws(self) -> bool:
        """Whether steps seed random numbers by layer and microbatch, so that they are equal on any mesh.

        They do if some rank has dropout (penstock.runtime.rng.dropouts).
        """
        return self._seeds.draws

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of torch.autocast in every forward; None without it."""
        return self._built.autocast

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the last step, on all ranks. Raises ConfigError before the first step."""
        return report.measured(*self._last_step("timeline"))

    @property
    def memory(self) -> tuple[Held, ...]:
        """By rank, the bytes at the last step's peak: activations, buffers, and deferred for W."""
        if not self._last:
            return (Held(),) * self.schedule.ranks
        return tuple(of_rank.held for of_rank in self._last[1])

    @property
    def peak_memory(self) -> tuple[PeakMemory, ...]:
        """By process, its peak memory up to the end of the last step or evaluation, in order of the ranks.

        With tp, only of the ranks with this process's index on that axis. Empty before the first step.
        """
        return self._steps.peaks

    @property
    def op_seconds(self) -> tuple[tuple[report.OpSeconds, ...], ...]:
        """By pipeline and rank, the seconds of the last step's ops by kind, without the waits between them.

        The pipelines are those with other rows or tokens, and this process's index on tp. Empty before the
        first step.
        """
        return self._steps.seconds

    @property
    def deferred_bytes(self) -> tuple[int, ...]:
        """By rank, the most bytes that the last step kept between I and W; 0 without split backwards."""
        if not self._last:
            return (0,) * self.schedule.ranks
        return tuple(of_rank.peak_deferred for of_rank in self._last[1])

    @contextmanager
    def measuring_device(self) -> Iterator[None]:
        """Inside, a step measures the GPUs' own time for its ops, without waits for their hosts.

        The time of an op has gaps where a GPU waits for its host to launch the rest of it. So the GPU's
        stream stops before each op, for longer than the host took to launch such an op in the last step: run
        a step first. The measuring step takes up to three times as long, and computes the same. From then on
        the timeline, the summary and `StepResult.host_share` show how far the host is the limit, and `costs`
        uses the time of the GPU. Where GPUs run behind their hosts, all of this is known without it. On the
        CPU nothing changes.
        """
        recorders = self._steps.schedules.recorders.values()
        for recorder in recorders:
            recorder.holds_back = True
        try:
            yield
        finally:
            for recorder in recorders:
                recorder.holds_back = False

    @collective
    def costs(self) -> Costs:
        """The measured costs of the last step, in seconds and bytes, to simulate other schedules. Collective.

        These are the median time of each stage's ops, without the exchanges within an op (`Costs.measured`)
        and, if known, without a GPU's waits for its host (`measuring_device`), and the bytes of each stage
        and microbatch. Raises ConfigError before the first step.
        """
        ahead = self._built.lowering.ahead or 1
        return step_costs(self._last_step("costs"), self._training.executors, self.processes, ahead)

    @collective
    def layer_costs(self, batch: BatchLike, repeats: int = 3, **entries: Any) -> LayerCosts:
        """Measure the seconds that each layer, embedding and head take for a microbatch. Collective.

        The result is for AutoPipeline(balance=...). Parameters and gradients do not change.

        Args:
            batch: as for `step`
            entries: as for `step`
            repeats: number of measured steps
        """

        def step() -> Timeline:
            self.zero_grad()
            self.step(batch, **entries)
            return self.timeline

        with without_gradients(self.parameters()):
            step()  # compiles, and warms up
            with self.measuring_device():
                return layer_costs(
                    step, repeats, self._layers, self._info, self._world.device, self.processes
                )

    def summary(self) -> str:
        """A table of all stages: rank, layers, parameters, memory, and share of the last step's time."""
        memory = None if self._last is None else self.memory
        timeline = None if self._last is None else self.timeline
        carried_by = self._world.transport.messages.carried_by
        on_gpu = any(recorder.runs_behind for recorder in self._steps.schedules.recorders.values())
        return summary(
            self._training.schedule, self._info, self._weights, memory, timeline, carried_by,
            self._built.balances, on_gpu,
        )  # fmt: skip

    __str__ = summary

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Deprecated: `modules` has them by stage."""
        warnings.warn(
            "Pipeline.parts is deprecated: use Pipeline.modules.values()", DeprecationWarning, stacklevel=2
        )
        return tuple(self.modules.values())

    def _last_step(self, asked: str) -> StepRecord:
        if self._last is None:
            raise ConfigError(f"{asked} before the first step", "it is of the last step", "Call step() first")
        return self._last
