"""AutoPipeline: a Hugging Face model, unchanged, as a pipeline.

build_plan    options and model -> schedule, proof, stages          no weight is read, nothing is sent
open_world    this process becomes one rank, or holds them all      all ranks agree on the facts
_Build        each stage: its model, its values, its shards         each rank reads its stages only
Pipeline      the stages, ready to step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.batch.liger import check_liger
from penstock.batch.loss import Loss, NextToken, OwnLoss, TokenLabels
from penstock.errors import ConfigError, ModelError, PartitionError
from penstock.models.activation_offloading import check_modules
from penstock.models.adapters import LoraConfig, names_in_file, unwrap
from penstock.models.huggingface.boundary import compute_in
from penstock.models.huggingface.entries import BatchCheck, MicrobatchCompleter, taken
from penstock.models.huggingface.head import check_for_liger
from penstock.models.huggingface.own_loss import own_loss
from penstock.models.huggingface.padded import effect_of_padding
from penstock.models.huggingface.stages import HFCall, HFEdges, refuse_unsupported_options
from penstock.models.module_names import ModuleNames, named_split
from penstock.models.quantized import Quantize
from penstock.models.source import (
    ModelLike,
    Source,
    check_language_model,
    is_language_model,
    open_source,
)
from penstock.models.split.balanced_split import LayerCosts, Memory
from penstock.models.split.multiply_adds import multiply_adds
from penstock.models.split.partition import check_enough, check_one_description, partition, stages_of_size
from penstock.models.tracing.chain import Chain, find_chain, under_autocast
from penstock.models.tracing.meta import placed, shadow, write_through
from penstock.models.tracing.provenance import Provenance
from penstock.models.weights import files as weights
from penstock.models.weights.hashes import hashed_meanwhile
from penstock.models.weights.saved import SavedModel
from penstock.models.weights.saved_adapter import SavedAdapter
from penstock.parallel.axes import Axes
from penstock.parallel.context.check import check_padded
from penstock.parallel.expert.balance import asks_for_balance
from penstock.parallel.expert.replay import ModelRouting
from penstock.parallel.mesh_plan import check_model
from penstock.parallel.world import World, close_on_error, open_world
from penstock.pipeline.building.build_plan import (
    BuildPlan,
    check_adapter,
    check_fits,
    fastest_split,
    frozen_stages,
    plan_stages,
    shared_weights,
)
from penstock.pipeline.building.compiling import as_compile, compiled_loss
from penstock.pipeline.building.experts import choose_experts
from penstock.pipeline.building.memory import Account
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
from penstock.pipeline.options import Options
from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.health.agreement import compare_values, shared_errors
from penstock.runtime.sharded_weights import materialize
from penstock.runtime.stage import Stage
from penstock.runtime.stage_part import StagePart
from penstock.runtime.transport.groups import Processes
from penstock.schedule import Costs, Proof, Schedule, verify
from penstock.schedule.choose import open_stages, with_option
from penstock.schedule.collector import collector_paused
from penstock.schedule.frozen import without_weight_gradients
from penstock.schedule.layout import read_layout
from penstock.schedule.simulation.recompute import StageMicrobatches


@dataclass(frozen=True)
class AutoPipeline(Options):
    """Options to build a pipeline from a Hugging Face model. Takes those of `Options` too.

    Describe which layers each stage holds in one way at most: `layout`, `layers_per_stage`,
    `first_stage_layers` with `last_stage_layers`, `modules_per_stage`, `balance`, or `embedding_weight` with
    `head_weight`. Without any, the slowest rank becomes as fast as can be by the multiply-adds of layers,
    embedding and head, within `memory_limit` of the checkpointing. Stages may be empty.

    Args:
        embedding_weight: number of layers that the embedding counts as, in an even division of layers
        head_weight: number of layers that the head counts as, in an even division of layers
        sequence_length: tokens of a row, to count multiply-adds for; None takes 4096, or the most that the
            model's positions allow if that is less
        image_tokens: how many of these tokens stand for images, for a vision-language model: so many does the
            first stage's tower work for. None takes a quarter
        layout: a layout string such as ``Ett|(ttt|)*2tL``, or a list of Megatron's names for each stage
            (penstock.schedule.layout)
        layers_per_stage: number of layers of each stage. A single number is the most for all, and chooses how
            many stages a rank has, where the schedule takes several and does not say how many
        first_stage_layers: number of layers of the first stage; the other stages share the rest evenly
        last_stage_layers: number of layers of the last stage; the other stages share the rest evenly
        modules_per_stage: names of each stage's modules
        module_fqns_per_stage: the same as modules_per_stage, under torch's name for it
        balance: cost of each layer, as Pipeline.layer_costs measures it, in place of multiply-adds
        seed: seed of the initial values, if the model comes without any
        dtype: dtype of the weights, as transformers names it; None takes the config's
        attention: attention implementation, as transformers names it; None takes the config's
        experts: how a mixture's experts are computed, as transformers names it (eager, batched_mm,
            grouped_mm); None takes the config's. A model object is taken as it is.
        replay_routing: whether activation checkpointing, when it runs a layer again, replays the experts that
            routers chose the first time, however nearly others tie with them. Steps then take
            `routed_experts`, the experts that tokens are to choose, and `Pipeline.routed_experts` returns
            those they chose.
        adapter: a LoraConfig of PEFT: the pipeline of a folder or a config trains a new adapter, and the rest
            is frozen. A model object brings its own: give get_peft_model(model, config).
        quantize: "nf4" puts the matrices under the adapter in 4 bits (QLoRA, by torchao). Not with other
            axes.
        mtp_loss_scaling_factor: None leaves out the prediction layers (MTP) of a folder or a config; a number
            builds them, as many as its num_nextn_predict_layers, and multiplies the mean of their losses,
            which is added to the next-token loss. They count as layers, the last ones, and are the `m` of a
            layout. A model object has them by its class (penstock.with_mtp). Not with cp and tp.
        trust_remote_code: whether Python code in the model's folder may run, for a model that transformers
            has no code for
        revision: branch, tag or commit of a model that is given by its Hub name; None takes the main branch
        load: who reads the weights of a folder. "each": every rank those of its stages. "broadcast": one rank
            reads each tensor once for all ranks of the other axes that host the same stages, and sends it to
            them: for a file system that is slower than the network.
        new_weights: patterns of names, such as "score.*", of weights that a folder's files lack: they get
            initial values from the seed. Without it a weight that no file gives is an error, as is a pattern
            that is not needed.
    """

    embedding_weight: int | None = None
    head_weight: int | None = None
    sequence_length: int | None = None
    image_tokens: int | None = None
    layout: str | Sequence[Sequence[str]] | None = None
    layers_per_stage: int | Sequence[int] | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    modules_per_stage: Sequence[Sequence[str]] | None = None
    module_fqns_per_stage: Sequence[Sequence[str]] | None = None
    balance: LayerCosts | Sequence[float] | None = None
    seed: int = 0
    dtype: torch.dtype | None = None
    attention: str | None = None
    experts: str | None = None
    replay_routing: bool = False
    adapter: LoraConfig = None
    quantize: Quantize | None = None
    mtp_loss_scaling_factor: float | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    load: Literal["each", "broadcast"] = "each"
    new_weights: Sequence[str] = ()

    @collector_paused()
    def build_plan(self, model: ModelLike) -> BuildPlan:
        """Plan the build: find everything that `build` would refuse, without weights or other processes.

        Args:
            model: as for `build`

        Raises ConfigError, ScheduleError, ModelError, PartitionError, CheckpointError, HubError.
        """
        self._check_options()
        chosen = self.chosen_schedule()
        self._check_compile()
        verify(chosen)  # a wrong schedule of the user's raises before any file is read
        source = open_source(
            model,
            self.dtype,
            self.attention,
            self.adapter,
            self.quantize,
            self.mtp_loss_scaling_factor,
            revision=self.revision,
            trusted=self.trust_remote_code,
            new_weights=self.new_weights,
        )
        if self.experts is not None:
            choose_experts(source.model, self.experts, given=isinstance(unwrap(model), PreTrainedModel))
        self._check_model(source)
        routed = self._routed(source.model)
        chain = self._find_chain(source.model, trains=chosen.trains)
        with source.with_room():  # the loss is found on logits with values
            replace(self, compile=False).loss_of(source.model, chain)  # a build looks at the compiler
        staged = self._in_stages_of_size(chain.count, chosen)
        stages = plan_stages(source.model, chain, staged, self._ranges(source.model, chain, staged))
        trained = without_weight_gradients(staged, frozen_stages(source.model, stages))
        plan = BuildPlan(trained, verify(trained), stages, source, chain, routed)
        return self._within_memory(plan, staged) if self.axes is None or self.axes.resolved else plan

    def _check_options(self) -> None:
        """Raise ConfigError, PartitionError for options that are wrong whatever the model and schedule."""
        check_one_description(
            **self._layer_options(),
            modules_per_stage=self.modules_per_stage,
            module_fqns_per_stage=self.module_fqns_per_stage,
        )
        if self.layout is not None:
            read_layout(self.layout)
        if self.load not in ("each", "broadcast"):
            rule = "every rank reads the weights of its stages, or one reads them for those with the same"
            raise ConfigError(f"load={self.load!r}", rule, "Take 'each' or 'broadcast'")

    def _check_model(self, source: Source) -> None:
        """Raise ConfigError, ModelError for a model that the options do not take."""
        refuse_unsupported_options(source.model, own_loss=self.own_loss)
        if isinstance(self.loss_fn, NextToken):
            check_language_model(source.model)
        if (padding := self.padding()) is not None:
            effect_of_padding(source.model, padding)
            check_padded(source.model)
        options = self.parallel_options()
        if self.axes is not None:
            check_adapter(source, self.axes)
            check_model(source.model, self.axes, options)

    def loss_of(self, model: PreTrainedModel, chain: Chain | None = None) -> Loss:
        """The loss of a pipeline of `model`: the model's own without a loss_fn. chain: where it is known

        Raises ModelError where the own one is none that penstock computes; ConfigError for options that it
        does not take.
        """
        loss = self.loss()
        if type(loss) is not NextToken:
            return loss
        try:
            model_loss = own_loss(model, chain or find_chain(model))
        except ModelError:
            if self.loss_fn is None:
                raise
            return loss
        if isinstance(model_loss, NextToken):
            return loss.as_own() if model_loss.of_model and loss.penalties == model_loss.penalties else loss
        if self.loss_fn is not None:
            return loss
        self._check_own(model, model_loss)
        return compiled_loss(model_loss, as_compile(self.compile))

    def _check_own(self, model: PreTrainedModel, loss: OwnLoss) -> None:
        """Raise ConfigError for options that only the loss of next tokens takes."""
        axes, kind = self.axes or Axes(), type(model).__name__
        if (axes.cp, axes.tp) != (1, 1):
            what = "tokens" if isinstance(loss, TokenLabels) else "rows"
            raise ConfigError(
                f"the axes {axes} for {kind}",
                f"its own loss compares labels of {what}, and only that of next tokens takes cp and tp",
                "Leave out cp and tp, or give a loss_fn",
            )
        if self.padding() is not None and not is_language_model(model):
            raise ConfigError(
                f"shapes={self.shapes!r} for {kind}",
                "its tokens may see padding, or its head may look for the last token of a row",
                "Take shapes='inferred', which pads nothing",
            )

    def _find_chain(self, model: PreTrainedModel, *, trains: bool) -> Chain:
        """The chain of layers of `model`, under autocast where it is asked for.

        trains: whether the schedule has backwards
        Raises ConfigError, ModelError for a chain that the options do not take.
        """
        chain = find_chain(model)
        if self.chunked_loss == "liger":
            check_for_liger(model, chain)
        if (offloading := self.offloading()) is not None:
            check_modules(offloading, model.get_submodule(chain.layers).children())
        if self.autocast is not None:
            chain = under_autocast(model, chain, self.autocast)
        if self.axes is not None:
            check_fits(model, chain, self.axes, self.parallel_options(), trains=trains)
        if self.exchange == "batched" and not chain.only_hidden_states:
            raise ConfigError(
                f"exchange='batched' for {type(model).__name__}",
                "more than hidden states crosses its edges, in messages that carry their shapes",
                "Take exchange='channels'",
            )
        return chain

    def _in_stages_of_size(self, layers: int, schedule: Schedule) -> Schedule:
        """`schedule` with as many stages a rank as one number of `layers_per_stage` makes, if that is open.

        Raises PartitionError for a number that does not fit; ConfigError where the schedule cannot have them.
        """
        size, option = self.layers_per_stage, open_stages(self.schedule)
        if not isinstance(size, int) or option is None:
            return schedule
        name, count = option
        wanted = stages_of_size(size, layers, schedule.ranks, count) // count
        return replace(self, schedule=with_option(self.schedule, name, wanted)).chosen_schedule()

    def _within_memory(self, plan: BuildPlan, schedule: Schedule) -> BuildPlan:
        """`plan`, or where its default split exceeds the memory limit, the fastest split that keeps it.

        schedule: that of the plan, with the weight gradients of frozen stages

        Raises ConfigError for a memory limit that is too small.
        """
        account = self.account(plan)
        try:
            account.recomputed()
        except ConfigError:
            limited = self._limited_split(account)
            if limited is None:
                raise
            model = plan.source.model
            stages = plan_stages(model, plan.chain, schedule, limited)
            schedule = without_weight_gradients(schedule, frozen_stages(model, stages))
            plan = replace(plan, schedule=schedule, proof=verify(schedule), stages=stages)
            self.account(plan).recomputed()
        return plan

    def _limited_split(self, account: Account) -> list[range] | None:
        """The default split under the memory limit. None where none keeps it, or another was asked for."""
        checkpointing, plan = account.checkpointing, account.plan
        if checkpointing is None or checkpointing.memory_limit is None or checkpointing.shape is None:
            return None
        if not self._splits_by_default:
            return None
        try:
            memory = account.of_layers(checkpointing.memory_limit, checkpointing.shape, recomputed=True)
            return self._fastest(plan.source.model, plan.chain, plan.schedule, memory)
        except (ModelError, PartitionError):
            return None

    def build(self, model: ModelLike) -> Pipeline:
        """Build the pipeline of `model`. Collective under torchrun.

        Under torchrun this process becomes one rank; otherwise it holds them all.

        Args:
            model: a transformers model, whose values are copied stage by stage while it stays as it is, or
                a PeftModel of one, with LoRA; a local folder, from which each rank reads its stages'
                weights; a Hub name such as Qwen/Qwen3-8B, whose files one process of each host fetches into
                the cache; or a config. A config or a folder without weights gets initial values from `seed`.
                The pipeline is in training mode, also where the model is in evaluation mode, as
                from_pretrained returns it.

        Raises what `build_plan` raises, WorldSizeError and HandshakeError.
        """
        plan = self.build_plan(model)
        has_values = plan.source.model.device != torch.device("meta")
        without = "a folder's" if plan.source.files else f"seed {self.seed}"
        values = "the model's own" if has_values else "; ".join((without, *plan.source.new))
        facts = {**plan.facts, "values": values, "load": self.load}
        facts["replay_routing"] = str(self.replay_routing)
        options = replace(self.world_options(), exchange=exchange_of(self, plan))
        world = open_world(plan.schedule, options, {**self.facts(), **facts})
        with close_on_error(world.transport):
            return Pipeline(_Build(self, plan, world).run())

    def account(self, plan: BuildPlan, axes: Axes | None = None) -> Account:
        """The memory that `plan` will take on each rank. axes: in place of its own, if these have a -1"""
        return Account(
            plan,
            axes or self.axes or Axes(),
            self.parallel_options(),
            self.checkpointing(),
            self.own_loss and self.chunked_loss,
            self.offloading(),
        )

    def memory_costs(self, plan: BuildPlan, shape: tuple[int, int]) -> Costs | None:
        """Bytes that microbatches of `shape` (rows, sequence) will hold, for `simulate`.

        Durations are those of Costs(). None where only a step can measure them. Not for axes of -1.
        """
        return self.account(plan).costs(shape)

    def _check_compile(self) -> None:
        """Raise ConfigError for options whose work on a layer a compiler would not see."""
        for name, value in (("replay_routing", self.replay_routing), ("quantize", self.quantize)):
            if value and self.compile:
                rule = "a compiler does not follow what this does around each call of a module"
                raise ConfigError(f"compile with {name}={value!r}", rule, "Leave out one of the two")

    def _routed(self, model: PreTrainedModel) -> ModelRouting | None:
        """Raises ConfigError, ModelError for routers that cannot be replayed."""
        if not self.replay_routing:
            return None
        with shadow(model) as without_values, Provenance() as marks:
            return ModelRouting(without_values, marks)

    def _layer_options(self) -> dict[str, Any]:
        names = ("layout", "layers_per_stage", "first_stage_layers", "last_stage_layers", "balance")
        return {name: getattr(self, name) for name in names}

    @property
    def _splits_by_default(self) -> bool:
        names = ("modules_per_stage", "module_fqns_per_stage", "embedding_weight", "head_weight")
        given = [*self._layer_options().values(), *(getattr(self, name) for name in names)]
        return all(value is None for value in given)

    def _ranges(self, model: PreTrainedModel, chain: Chain, schedule: Schedule) -> list[range]:
        """The layers of each stage."""
        placement = schedule.placement
        names = self.modules_per_stage or self.module_fqns_per_stage
        if names is not None:
            known = {n: any(True for _ in m.parameters()) for n, m in model.named_modules() if n}
            return named_split(names, placement.depth, ModuleNames.of(chain), known)
        if placement.depth > 1 and self._splits_by_default:
            return self._fastest(model, chain, schedule)
        named = {"embedding_weight": self.embedding_weight, "head_weight": self.head_weight}
        weights: dict[str, Any] = {name: weight for name, weight in named.items() if weight is not None}
        return partition(
            chain.count,
            placement.depth,
            **self._layer_options(),
            **weights,
            holders=placement.holders,
            prediction_layers=chain.prediction_layers,
        )

    def _fastest(
        self, model: PreTrainedModel, chain: Chain, schedule: Schedule, memory: Memory | None = None
    ) -> list[range]:
        check_enough(chain.count, schedule.placement.depth)
        costs = multiply_adds(model, chain, self.sequence_length, self.image_tokens)
        return fastest_split(costs, schedule, memory)


def exchange_of(auto: AutoPipeline, plan: BuildPlan) -> str:
    """The exchange that the messages of `plan` can have: those that carry their shapes go one by one."""
    carry_shapes = auto.shapes == "exchanged" or not plan.chain.only_hidden_states
    return "channels" if auto.exchange == "auto" and carry_shapes else auto.exchange


def _recomputation(
    auto: AutoPipeline, plan: BuildPlan, axes: Axes | None
) -> Callable[[Proof], StageMicrobatches]:
    """Finds the (stage, microbatch) whose layers run again in the backward, for any number of microbatches.

    axes: resolved, where there are any
    """
    checkpointing = auto.checkpointing()
    if checkpointing is None or checkpointing.memory_limit is None:
        return recomputed_by(checkpointing)
    plan = plan.without_values()
    return lambda proof: auto.account(replace(plan, schedule=proof.schedule, proof=proof), axes).recomputed()


class _Build:
    """Builds this process's stages as `plan` says. Collective over the world's processes."""

    def __init__(self, auto: AutoPipeline, plan: BuildPlan, world: World) -> None:
        self._auto, self._plan, self._world = auto, plan, world
        self._ties, self._entries = weights.tied_names(plan.source.model), taken(plan.source.model)
        self._mesh_plan = auto.mesh_plan(world)

    def run(self) -> BuiltStages:
        auto, plan, world, mesh_plan = self._auto, self._plan, self._world, self._mesh_plan
        schedule, source = plan.schedule, plan.source
        if mesh_plan is not None:  # by now sizes of -1 are known
            axes, options = mesh_plan.axes, auto.parallel_options()
            check_adapter(source, axes)
            check_model(source.model, axes, options)
            check_fits(source.model, plan.chain, axes, options, trains=schedule.trains)
        everyone = world.everyone
        self._compare_values(everyone)
        # an altered file must not load silently
        hashed = nullcontext() if source.written is None else hashed_meanwhile(source.written, everyone)
        with hashed, shared_errors(everyone), source.with_room():  # of one stage, which only its ranks make
            return self._built()

    @collector_paused()
    def _built(self) -> BuiltStages:
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
            # without an adapter a frozen stage may be unfrozen later, as parallelize_fn may do
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

    def _compare_values(self, everyone: Processes) -> None:
        """Raise an error on every rank where ranks gave a model with other values."""
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
        # the whole dtype's weights may not fit where those in 4 bits do
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
        shard = None if self._mesh_plan is None else self._sharding(model)
        routing = None if plan.routed is None else plan.routed.for_stage(model)
        defers_head = shard is None and auto.own_loss and auto.chunked_loss
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
        """Lay the model out over the mesh while it is on meta: no rank ever holds all of it.

        Returns what shards its weights once parallelize_fn has run, and fills them.
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

        fill_first = self._auto.parallelize_fn is not None  # it takes a module with values
        if fill_first:
            fill()

        def shard(draft: StageDraft) -> StagePart | None:
            shards = mesh_plan.fully_shard(draft.module, draft.plain_layers)
            if not fill_first:
                fill()
            return shards

        return shard
