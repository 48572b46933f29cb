"""Build the stages of this process by a plan: the model of each stage, its values and its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from penstock.batch.liger import check_liger
from penstock.batch.loss import OwnLoss
from penstock.errors import InputError
from penstock.models.adapters import names_in_file
from penstock.models.huggingface.boundary import compute_in
from penstock.models.huggingface.entries import BatchCheck, MicrobatchCompleter, taken
from penstock.models.huggingface.head import defer_head
from penstock.models.huggingface.padded import effect_of_padding
from penstock.models.huggingface.stages import HFCall, HFEdges
from penstock.models.tracing.meta import placed, write_through
from penstock.models.weights import files as weights
from penstock.models.weights.hashes import hashed_meanwhile
from penstock.models.weights.saved import SavedModel
from penstock.models.weights.saved_adapter import SavedAdapter
from penstock.parallel.axes import Axes
from penstock.parallel.expert.balance import asks_for_balance
from penstock.parallel.world import World
from penstock.pipeline.building.auto_options import AutoOptions
from penstock.pipeline.building.build_plan import BuildPlan, shared_weights
from penstock.pipeline.building.check_model import check_fits, check_on_axes
from penstock.pipeline.building.stages import (
    AddPart,
    BuiltStages,
    Lowering,
    StageDraft,
    StageWeights,
    make_stage,
    own_stages,
    parameter_names,
    recomputed_by,
    stage_parts,
)
from penstock.runtime.ranks import Ranks, compare_values
from penstock.runtime.sharded_weights import materialize
from penstock.runtime.stage import Stage
from penstock.runtime.stage_part import StagePart
from penstock.schedule import Proof
from penstock.schedule.collector import collector_paused
from penstock.schedule.simulation.recompute import StageMicrobatches


def _recomputation(
    auto: AutoOptions, plan: BuildPlan, axes: Axes | None
) -> Callable[[Proof], StageMicrobatches]:
    """A function for any schedule that returns the (stage, microbatch) pairs to recompute.

    axes: resolved; None without other axes
    """
    checkpointing = auto.checkpointing()
    if checkpointing is None or checkpointing.memory_limit is None:
        return recomputed_by(checkpointing)
    plan = plan.without_values()
    return lambda proof: auto.account(replace(plan, schedule=proof.schedule, proof=proof), axes).recomputed()


class StagesBuild:
    """Builds this process's stages by `plan`. Collective over the world's processes."""

    def __init__(self, auto: AutoOptions, plan: BuildPlan, world: World) -> None:
        self._auto, self._plan, self._world = auto, plan, world
        self._ties, self._entries = weights.tied_names(plan.source.model), taken(plan.source.model)
        self._mesh_plan = auto.mesh_plan(world)

    def run(self) -> BuiltStages:
        auto, plan, world, mesh_plan = self._auto, self._plan, self._world, self._mesh_plan
        schedule, source = plan.schedule, plan.source
        if mesh_plan is not None:  # sizes of -1 are known now
            axes, options = mesh_plan.axes, auto.parallel_options()
            check_on_axes(source, axes, options)
            check_fits(source.model, plan.chain, axes, options, trains=schedule.trains)
        everyone = world.everyone
        self._compare_values(everyone)
        # an altered file must not load silently
        hashed = nullcontext() if source.written is None else hashed_meanwhile(source.written, everyone)
        with hashed:
            return everyone.attempt("build its stages", self._built, InputError)

    def _built(self) -> BuiltStages:
        with self._plan.source.with_room():
            return self._built_in_room()

    @collector_paused()
    def _built_in_room(self) -> BuiltStages:
        auto, plan, world, mesh_plan = self._auto, self._plan, self._world, self._mesh_plan
        schedule, source = plan.schedule, plan.source
        if auto.chunked_loss == "liger":
            check_liger("chunked_loss='liger'", world.device.type)
        compile_layers = auto.layer_compiler(schedule, world.device)
        completer, loss = plan.completer(), auto.loss_of(source.model, plan.chain)
        models = {index: self._model(index) for index in own_stages(schedule, world.ranks)}
        names = {index: parameter_names(model) for index, model in models.items()}
        stages = [self._stage(index, model, completer, compile_layers) for index, model in models.items()]
        modules = {stage.index: stage.module for stage in stages}
        edges = None
        if auto.shapes != "exchanged" and plan.chain.only_hidden_states:
            computed = None if mesh_plan is None else mesh_plan.param_dtype
            # without an adapter, parallelize_fn or the user may unfreeze a frozen stage later
            fixed = source.adapter is not None and auto.parallelize_fn is None
            first_trained = plan.first_trained if fixed else 0
            edges = HFEdges(source.model, plan.chain, computed, first_trained, plan.ends)
        files = source.read_other_files() if world.processes.index == 0 else {}  # process 0 writes them
        return BuiltStages(
            schedule,
            world,
            stages,
            {index: plan.layers_of(module, index) for index, module in modules.items()},
            StageWeights(shared_weights(plan, self._ties, modules), self._saved(files), names),
            edges,
            loss,
            auto.batch_splitter(
                completer,
                BatchCheck(source.model, loss if auto.own_loss and isinstance(loss, OwnLoss) else None),
                **self._padding_of_model(),
            ),
            Lowering(
                auto.schedules(schedule, plan.frozen),
                _recomputation(auto, plan, None if mesh_plan is None else mesh_plan.axes),
                None if (offloading := auto.offloading()) is None else offloading.ahead,
            ),
            mesh_plan,
            auto.trace_folder,
            auto.autocast,
            balances=bool(plan.chain.recorded),
        )

    def _padding_of_model(self) -> dict[str, Any]:
        """The fields of Padding that the model decides."""
        padding, model = self._auto.padding(), self._plan.source.model
        if padding is None:
            return {}
        effect = effect_of_padding(model, padding)
        splits_rows = self._mesh_plan is not None and self._mesh_plan.axes.cp > 1
        return {
            "needs_mask": effect.needs_mask or asks_for_balance(model),
            "hidden": effect.hidden,
            "pools": True,
            "unpads": not (self._auto.own_loss or splits_rows),  # cp gives a loss a part of padded rows
        }

    def _saved(self, other_files: Mapping[str, bytes]) -> SavedModel:
        source = self._plan.source
        model, adapter = source.model, source.adapter
        generation = getattr(model, "generation_config", None)
        if adapter is None:
            whole = frozenset(model.state_dict())
            return SavedModel(model.config, generation, self._ties, other_files, type(model), whole)
        return SavedAdapter(
            model.config,
            generation,
            self._ties,
            other_files,
            type(model),
            adapter=adapter,
            names=names_in_file(model, adapter),
            base=source.base_fingerprint(self._auto.seed),
        )

    def _compare_values(self, everyone: Ranks) -> None:
        """Raise an error on every rank if the ranks' models have different values."""
        if self._world.alone:
            return
        (rank,) = self._world.ranks
        values = self._plan.values_of(rank, self._ties)
        compare_values(everyone, rank, values, self._plan.on_several_ranks(self._ties))

    def _model(self, index: int) -> PreTrainedModel:
        """The stage's model in training mode: with values, or on meta where a mesh shards it."""
        model = self._plan.model_of(index, values=self._mesh_plan is None)
        if self._mesh_plan is None:
            self._fill(model)
        elif self._plan.source.files:
            self._plan.source.check(model)
        return model if model.training else model.train()

    def _fill(self, model: PreTrainedModel) -> None:
        source = self._plan.source
        # weights in the model's dtype may not fit into memory where those in 4 bits do
        device = None if source.quantize else self._world.device
        reads = self._world.reductions.first_reads if self._auto.load == "broadcast" else None
        source.fill(model, self._auto.seed, device, reads)

    def _stage(
        self,
        index: int,
        model: PreTrainedModel,
        completer: MicrobatchCompleter,
        compile_layers: Callable[[Sequence[nn.Module]], None] | None,
    ) -> Stage:
        auto, plan = self._auto, self._plan
        info = plan.info(index)
        # FSDP2 frees the head's weight after its forward, before the loss
        frees_head = self._mesh_plan is not None and self._mesh_plan.axes.uses_fsdp
        defers_head = not frees_head and auto.own_loss and auto.chunked_loss
        if defers_head and info.is_last and self._mesh_plan is not None:
            defer_head(model, defers_head)  # inside the wrappers of tp
        shard = None if self._mesh_plan is None else self._sharding(model)
        routing = None if plan.routed is None else plan.routed.for_stage(model)
        parts = [
            lambda draft: routing,
            *stage_parts(
                checkpointing=auto.checkpointing(),
                offloading=auto.offloading(),
                parallelize_fn=auto.parallelize_fn,
                compile=compile_layers,
                after={name: model.get_submodule(name) for name in plan.chain.after} if info.is_last else {},
                placed=shard is not None,
            ),
            *(() if shard is None else (shard,)),
        ]

        def call(module: nn.Module, callee: nn.Module) -> HFCall:
            return HFCall(
                module,
                info,
                self._entries,
                callee=callee,
                defers_head=defers_head,
                shape_questions=lambda: completer.shape_questions,
            )

        layers = plan.layers_of(model, index)
        return make_stage(
            index, model, self._world.device, parts, layers=layers, call=call, position=info.stage
        )

    def _sharding(self, model: PreTrainedModel) -> AddPart:
        """Distribute the model over the mesh while it is on meta, so that no rank ever allocates all of it.

        Returns a function that shards its weights after parallelize_fn has run, and fills them.
        """
        mesh_plan, device = self._mesh_plan, self._world.device
        assert mesh_plan is not None
        unsharded = write_through(model)
        placed(model, device)
        mesh_plan.parallelize(model)
        if mesh_plan.param_dtype is not None:
            compute_in(model, mesh_plan.param_dtype)

        def fill() -> None:
            materialize(model, device)
            self._fill(unsharded)

        fill_first = self._auto.parallelize_fn is not None  # it gets a module with values
        if fill_first:
            fill()

        def shard(draft: StageDraft) -> StagePart | None:
            shards = mesh_plan.fully_shard(draft.module, draft.plain_layers)
            if not fill_first:
                fill()
            return shards

        return shard
