"""Pipeline: a model cut into stages, a proven schedule, and the step that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from penstock.choices import chosen_experts
from penstock.clip import global_norm, scale_
from penstock.cutter import Given, Refused
from penstock.equivalence import Report, compare
from penstock.errors import BatchError, ConfigError, ModelError, PeerError
from penstock.evaluation import Evaluation, Evaluations
from penstock.measured import layer_costs, step_costs
from penstock.models.balance import LayerCosts
from penstock.models.protocol import Provider
from penstock.options import Options, Shapes
from penstock.parts import Parts
from penstock.provided import provided_parts, taking
from penstock.runtime import report
from penstock.runtime.memory import Held
from penstock.runtime.microbatch import with_entries
from penstock.runtime.shapes import Microbatch
from penstock.runtime.shared import SharedGradients
from penstock.runtime.stage import gradients_aside
from penstock.runtime.step import Collect
from penstock.schedule import Costs, Proof, Timeline, verify
from penstock.split_model import SplitModel
from penstock.steps import StepResult, Steps, Told
from penstock.summary import summary

__all__ = ["Pipeline", "Shapes"]


class Pipeline(SplitModel):
    """Stages of one model, and the schedule that they run.

    Made by AutoPipeline.build or Pipeline.from_provider. All its methods but the properties and `summary` are
    to be called on every rank.
    """

    def __init__(self, parts: Parts) -> None:
        """Collective."""
        super().__init__(parts)
        self._loss, self._cutter = parts.loss, parts.cutter
        self._shared = SharedGradients(parts.shared, parts.world.transport, self.processes)
        traces = None if parts.trace_folder is None else Path(parts.trace_folder)
        self._steps = Steps(parts.world, self._stages, parts.edges, parts.loss, parts.cutter, traces)
        self._proof = verify(parts.schedule)
        recomputed = parts.recomputed if parts.schedule.trains else frozenset()
        self._training = self._steps.lower(self._proof, recomputed)
        self._evaluations = Evaluations(parts, self._steps)
        self._last: Told | None = None
        mine = sum(parameter.numel() for _, parameter in self.owned_parameters())
        self._weights: int = sum(self.processes.gather(mine))

    @classmethod
    @taking(Options)
    def from_provider(cls, provider: Provider, options: Options) -> Pipeline:
        """A pipeline of modules of one's own: `provider` builds the module of one stage.

        It is called for this process's stages, and where they do not declare their shapes
        (penstock.models.protocol.DeclaresShapes) once for each on the meta device, to learn what goes over
        the edges: a tensor, or any nest of tuples, lists and dicts with tensors in it. A stage's forward gets
        what came over the edge (a mapping by name, a tuple by position), and by name each entry of the
        microbatch that it has a parameter for.

        The options are keywords: penstock.options.Options tells of each. Raises TypeError for any other.
        Activation checkpointing is of the layers in the module lists of each stage.
        """
        pipe = cls(provided_parts(provider, options))
        pipe._shared.make_alike([parameter for _, parameter in pipe.owned_parameters()])
        return pipe

    def step(self, batch: Given, **entries: Any) -> StepResult:
        """Forward and backward of one batch: every parameter's gradient is added to its `.grad`.

        batch: tensors by name, e.g. input_ids and labels of shape (rows, sequence), the same on every rank;
            or a list of as many microbatches as the schedule has, which may differ in rows and in length
        entries: more of the batch, by name; what is no tensor goes to every microbatch as it is.
            `routed_experts`, where the pipeline was built with replay_routing=True, tells which experts each
            token is to choose, in the form of `Pipeline.routed_experts`, and -1 for those of the routers' own
            choice; `evaluate` and `infer` take it as well
        After an error gradients may be partial: clear them before the next step.
        Raises BatchError where it cannot be split or differs between ranks, ShapeError where a stage gives
        another shape than it should, PeerLostError or StalledPeerError where another rank fails.
        """
        if not self.schedule.trains:
            raise ConfigError(
                f"step() with schedule {self.schedule.name!r}", "it holds no backward", "Call evaluate()"
            )
        if not any(stage.trainable for stage in self._info):
            rule = "no parameter of it requires a gradient"
            raise ModelError("step() of a model", rule, "Unfreeze a part before build, or call evaluate()")
        self._shared.begin_step()
        try:
            with torch.enable_grad():
                result, self._last = self._steps.run(
                    self._training, self._with(batch, entries), changed=self._shared.changed
                )
            if report.any_changed(self._last[1]):
                self._shared.compare()
            self._shared.end_step()
        except BaseException as error:
            if isinstance(error, PeerError):  # perhaps in the sum over shared weights
                self._steps.tell_of(error, self._training)
                self._steps.fail()
            self._shared.restore()
            raise
        return result

    def _with(self, batch: Given, entries: Mapping[str, Any]) -> Given:
        try:
            return with_entries(batch, entries, self._cutter.sharding)
        except BatchError as error:  # which other ranks may not find
            return Refused(error)

    @overload
    def evaluate(self, batch: Given, outputs: Literal[False] = ..., **entries: Any) -> StepResult: ...

    @overload
    def evaluate(
        self, batch: Given, outputs: Literal[True] | Collect, everywhere: bool = ..., **entries: Any
    ) -> Evaluation: ...

    def evaluate(
        self, batch: Given, outputs: bool | Collect = False, everywhere: bool = False, **entries: Any
    ) -> StepResult | Evaluation:
        """Loss of one batch of any number of rows, in evaluation mode, without gradients.

        outputs: True to have what the last stage returned as well: one tensor with all rows in their order,
            or a list by microbatch where it is none or rows differ in shape. A function of (what the last
            stage returned, number of the microbatch) to have a list of its results in their place, so that
            logits need not be kept. Labels are not needed then; without them there is no loss.
        everywhere: whether every rank has the outputs, and not just the one that hosts the last stage: the
            last rank, or rank 0 where the placement goes out and back. Where two copies of the model run
            (dualpipe), no rank hosts all of it: outputs over several processes then ask for everywhere=True
        Beside other axes outputs are of the rows of this pipeline's own part of the batch (`batch_part`); the
        loss is of all parts. Each rank of cp has the outputs of whole sequences.
        Raises ConfigError without it.
        """
        given = self._with(batch, entries)
        if outputs is False:
            return self._evaluations.loss(given)
        return self._evaluations.outputs(given, outputs, everywhere)

    def infer(self, batch: Given, collect: Collect | None = None, **entries: Any) -> dict[int, Any]:
        """Run the forward alone, in evaluation mode, and keep what comes out of it.

        collect: called with what the last stage returned and the microbatch's number as soon as it is there,
            on the rank of the last stage, of whole sequences under cp too; None keeps the output itself
        Returns what `collect` returned by microbatch, on the rank of the last stage; nothing on others.
        """
        given = self._with(batch, entries)
        return self._evaluations.results(given, collect or (lambda output, number: output))[1]

    def microbatches(self, batch: Given, count: int | None = None) -> list[Microbatch]:
        """`batch` on this process's device, as a step sees it, or split into `count`. Raises BatchError.

        Collective beside other axes, and where they are padded to the longest.
        """
        return self._steps.cut(batch, count or self.schedule.microbatches)

    def routed_experts(self) -> Tensor | list[Tensor]:
        """Which experts each token of the last step chose: int32 (rows, sequence, mixtures, top_k), of this
        pipeline's own part of the batch, on each of its ranks; a list by microbatch where these differ in
        length. `step` takes them as `routed_experts`, with the same batch.

        Rows are as long as they were made (`shapes="padded"`). Collective.
        Raises ConfigError, on every rank, where the pipeline was not built with replay_routing=True, which
        keeps them until the next step, and before the first step.
        """
        return chosen_experts(self._stages, self.schedule.microbatches, self._cutter, self._world)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

        One norm over all stages, a shared weight counted once; the same number on every rank.
        """
        counted = [parameter.grad for _, parameter in self.owned_parameters() if parameter.grad is not None]
        norm = global_norm(counted, self._world)
        scale = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if scale < 1:
            scale_([p.grad for p in self.parameters() if p.grad is not None], scale)
        return norm

    def summary(self) -> str:
        """A table of all stages: rank, layers, parameters, memory, and share of the last step's time."""
        measured = None if self._last is None else self.memory
        timeline = None if self._last is None else self.timeline
        return summary(self.schedule, self._info, self._weights, measured, timeline)

    __str__ = summary

    @property
    def proof(self) -> Proof:
        """What was proven of the schedule before anything ran."""
        return self._proof

    @property
    def draws(self) -> bool:
        """Whether a step in training seeds what it draws, by layer and microbatch: the same on any mesh.

        It does where some rank holds a dropout, as far as one can be told (penstock.runtime.chance.dropouts).
        """
        return self._steps.draws

    @property
    def timeline(self) -> Timeline:
        """What the last step really did, on all ranks; known on every rank, so nothing is sent."""
        if self._last is None:
            raise ConfigError("timeline before the first step", "it shows the last step", "Call step() first")
        return report.measured(*self._last)

    @property
    def memory(self) -> tuple[Held, ...]:
        """By rank, the bytes that it held when the last step held most: activations, buffers, and for W."""
        return report.peak_held(self._last[1]) if self._last else (Held(),) * self.schedule.ranks

    def costs(self) -> Costs:
        """What the last step took and held, to simulate other schedules with: seconds and bytes.

        The median time of each stage's ops; the bytes of each stage and microbatch. Not what of an op is
        exchange, see `Costs.measured`. Collective.
        """
        if self._last is None:
            raise ConfigError("costs before the first step", "they are measured in one", "Call step() first")
        return step_costs(self._last, self._training.executors, self.processes)

    def layer_costs(self, batch: Given, repeats: int = 3, **entries: Any) -> LayerCosts:
        """Seconds that each layer, embedding and head take for a microbatch, in steps on `batch`: what
        AutoPipeline(balance=...) splits the model by.

        Parameters and gradients stay as they are. Collective.
        """

        def step() -> Timeline:
            self.zero_grad()
            self.step(batch, **entries)
            return self.timeline

        with gradients_aside(self.parameters()):
            return layer_costs(step, repeats, self._layers, self._info, self._world.device, self.processes)

    @property
    def deferred_bytes(self) -> tuple[int, ...]:
        """By rank, the most that the last step held between I and W; 0 where no backward is split."""
        return report.deferred_bytes(self._last[1]) if self._last else (0,) * self.schedule.ranks

    def verify_against(self, model: nn.Module, batch: Given) -> Report:
        """Compare loss and every gradient of one batch with the whole `model`'s; `.grad` is left as it was.

        In evaluation mode, so that dropout does not count. Returns what was compared, and how it differs.

        Raises EquivalenceError that names what differs where; its `report` has all of it.
        """
        found = compare(self, model, batch, self._loss)
        found.raise_if_wrong()
        return found

    def close(self) -> None:
        """Let go of the pipeline's thread and process groups; the modules stay usable."""
        self._world.transport.close()
