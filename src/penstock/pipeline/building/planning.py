"""Make a BuildPlan: check the options, open the model, find its chain, and split its layers.

options -> schedule -> model -> chain -> split -> schedule without the weight gradients of frozen stages
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from transformers import PreTrainedModel

from penstock.errors import ConfigError, ModelError, PartitionError
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.activation_offloading import check_modules
from penstock.models.adapters import unwrap
from penstock.models.huggingface.head import check_for_liger
from penstock.models.module_names import ModuleNames, named_split
from penstock.models.source import ModelLike, Source, open_source
from penstock.models.split.balanced_split import Memory
from penstock.models.split.model_costs import model_costs
from penstock.models.split.partition import (
    check_enough,
    check_one_description,
    descriptions,
    partition,
    stages_of_size,
)
from penstock.models.tracing.chain import Chain, find_chain, under_autocast
from penstock.models.tracing.meta import shadow
from penstock.models.tracing.provenance import Provenance
from penstock.parallel.axes import Axes
from penstock.parallel.expert.replay import ModelRouting
from penstock.pipeline.building.auto_options import AutoOptions
from penstock.pipeline.building.build_plan import BuildPlan, fastest_split, frozen_stages, plan_stages
from penstock.pipeline.building.check_model import check_fits, check_source
from penstock.pipeline.building.experts import choose_experts
from penstock.schedule import Schedule, simulate, verify
from penstock.schedule.choose import open_stages, with_option
from penstock.schedule.frozen import without_weight_gradients
from penstock.schedule.layout import read_layout
from penstock.schedule.simulation.recompute import first_in_flight


def plan_build(options: AutoOptions, model: ModelLike) -> BuildPlan:
    """Plan the build of `model`. Raises the errors of AutoPipeline.build_plan."""
    _check_options(options)
    chosen = options.chosen_schedule()
    _check_compile(options)
    verify(chosen)  # a user's wrong schedule raises before any file is read
    source = _open(options, model)
    check_source(source, options)
    routed = _routed(source.model) if options.replay_routing else None
    chain = _find_chain(options, source.model, trains=chosen.trains)
    with source.with_room():  # recognising the loss takes logits with values
        replace(options, compile=False).loss_of(source.model, chain)  # the compiler is checked in the build
    schedule = _in_stages_of_size(options, chain.count, chosen)
    plan = _planned(source, chain, schedule, _layer_ranges(options, source.model, chain, schedule), routed)
    if options.axes is not None and not options.axes.resolved:
        return plan
    return _within_memory(options, plan, schedule)


def _planned(
    source: Source, chain: Chain, schedule: Schedule, split: list[range], routed: ModelRouting | None
) -> BuildPlan:
    """The plan of this split. schedule: still with weight gradients of frozen stages"""
    stages = plan_stages(source.model, chain, schedule, split)
    schedule = without_weight_gradients(schedule, frozen_stages(source.model, stages))
    return BuildPlan(schedule, verify(schedule), stages, source, chain, routed)


def _check_options(options: AutoOptions) -> None:
    """Raise ConfigError, PartitionError for options that are wrong for any model and schedule."""
    check_one_description(options, **_other_descriptions(options))
    if options.layout is not None:
        read_layout(options.layout)
    if options.load not in ("each", "broadcast"):
        rule = "every rank reads its stages' weights, or one rank reads for all with the same stages"
        raise ConfigError(f"load={options.load!r}", rule, "Take 'each' or 'broadcast'")


def _check_compile(options: AutoOptions) -> None:
    """Raise ConfigError for options whose changes to a layer a compiler would not see."""
    for name in ("replay_routing", "quantize"):
        if options.compile and (value := getattr(options, name)):
            rule = "it adds code around module calls that a compiler does not follow"
            raise ConfigError(f"compile with {name}={value!r}", rule, "Leave out one of the two")


def _open(options: AutoOptions, model: ModelLike) -> Source:
    source = open_source(
        model,
        options.dtype,
        options.attention,
        options.adapter,
        options.quantize,
        options.mtp_loss_scaling_factor,
        revision=options.revision,
        trusted=options.trust_remote_code,
        new_weights=options.new_weights,
    )
    if options.experts is not None:
        choose_experts(source.model, options.experts, given=isinstance(unwrap(model), PreTrainedModel))
    return source


def _routed(model: PreTrainedModel) -> ModelRouting:
    """The routers to replay. Raises ConfigError, ModelError for routers that cannot be replayed."""
    with shadow(model) as without_values, Provenance() as marks:
        return ModelRouting(without_values, marks)


def _find_chain(options: AutoOptions, model: PreTrainedModel, *, trains: bool) -> Chain:
    """The chain of layers of `model`, under autocast if the options set it.

    trains: whether the schedule has backwards
    Raises ConfigError, ModelError for a chain that the options do not support.
    """
    chain = find_chain(model)
    if options.chunked_loss == "liger":
        check_for_liger(model, chain)
    if (offloading := options.offloading()) is not None:
        check_modules(offloading, model.get_submodule(chain.layers).children())
    if options.autocast is not None:
        chain = under_autocast(model, chain, options.autocast)
    if options.axes is not None:
        check_fits(model, chain, options.axes, options.parallel_options(), trains=trains)
    if options.exchange == "batched" and not chain.only_hidden_states:
        raise ConfigError(
            f"exchange='batched' for {type(model).__name__}",
            "more than hidden states cross its edges, in messages that carry their shapes",
            "Take exchange='channels'",
        )
    return chain


# ---- the split: a layout, numbers of layers or costs; other descriptions become one of these here


def _other_descriptions(options: AutoOptions) -> dict[str, object]:
    """Descriptions of the split that SplitOptions lacks."""
    return {"balance": options.balance, "module_fqns_per_stage": options.module_fqns_per_stage}


def _splits_by_default(options: AutoOptions) -> bool:
    return not descriptions(options, **_other_descriptions(options))


def _layer_ranges(
    options: AutoOptions, model: PreTrainedModel, chain: Chain, schedule: Schedule
) -> list[range]:
    """The layers of each stage."""
    placement = schedule.placement
    names = options.modules_per_stage or options.module_fqns_per_stage
    if names is not None:
        known = {n: any(True for _ in m.parameters()) for n, m in model.named_modules() if n}
        return named_split(names, placement.depth, ModuleNames.of(chain), known)
    if placement.depth > 1 and _splits_by_default(options):
        return _fastest(options, model, chain, schedule)
    return partition(
        chain.count,
        placement.depth,
        options,
        balance=options.balance,
        holders=placement.holders,
        prediction_layers=chain.prediction_layers,
    )


def _fastest(
    options: AutoOptions,
    model: PreTrainedModel,
    chain: Chain,
    schedule: Schedule,
    memory: Memory | None = None,
    again: float | None = None,
) -> list[range]:
    """again: the share of forwards that run again; None: by the options, all of them with `memory`"""
    check_enough(chain.count, schedule.placement.depth)
    checkpointing = options.checkpointing()
    if again is None:
        again = 1.0 if memory is not None else _share_again(schedule, checkpointing)
    shape, axes = None if checkpointing is None else checkpointing.shape, options.axes or Axes()
    costs = model_costs(
        model,
        chain,
        options.sequence_length,
        options.image_tokens,
        together=None if shape is None else -(-shape[0] * shape[1] // max(axes.tp, 1)),
        chunked=options.own_loss and options.chunked_loss if not axes.uses_fsdp else False,
        save=() if checkpointing is None else checkpointing.save,
        every=1 if checkpointing is None else checkpointing.every,
    )
    return fastest_split(costs.of_step(again, trains=schedule.trains), schedule, memory)


def _share_again(schedule: Schedule, checkpointing: Checkpointing | None) -> float:
    """The share of forwards that run again; a memory limit says it only after the split."""
    if checkpointing is None or checkpointing.memory_limit is not None:
        return 0.0
    again = first_in_flight(schedule, checkpointing.in_flight)
    return len(again) / (schedule.stages * schedule.microbatches)


def _in_stages_of_size(options: AutoOptions, layers: int, schedule: Schedule) -> Schedule:
    """`schedule` with the stages per rank that a single `layers_per_stage` gives, if their number is open.

    Raises PartitionError for a number that does not fit; ConfigError where the schedule cannot have them.
    """
    size, option = options.layers_per_stage, open_stages(options.schedule)
    if not isinstance(size, int) or option is None:
        return schedule
    name, count = option
    wanted = stages_of_size(size, layers, schedule.ranks, count) // count
    return replace(options, schedule=with_option(options.schedule, name, wanted)).chosen_schedule()


def _within_memory(options: AutoOptions, plan: BuildPlan, schedule: Schedule) -> BuildPlan:
    """`plan`, or if its default split exceeds the memory limit, the fastest split within the limit.

    schedule: that of the plan, still with weight gradients of frozen stages

    Raises ConfigError for a memory limit that is too small.
    """
    try:
        again = options.account(plan).recomputed()
    except ConfigError:
        limited = _limited_split(options, plan)
        if limited is None:
            raise
        plan = _planned(plan.source, plan.chain, schedule, limited, plan.routed)
        options.account(plan).recomputed()
        return plan
    return _split_again(options, plan, schedule, len(again))


def _split_again(options: AutoOptions, plan: BuildPlan, schedule: Schedule, again: int) -> BuildPlan:
    """`plan`, or with a memory limit the plan of a split for what runs again, where one is faster.

    again: number of forwards that run again; the split of `plan` is for none
    """
    checkpointing = options.checkpointing()
    if checkpointing is None or checkpointing.shape is None or checkpointing.memory_limit is None:
        return plan
    if not again or schedule.placement.depth == 1 or not _splits_by_default(options):
        return plan
    shape, share = checkpointing.shape, again / (schedule.stages * schedule.microbatches)

    def seconds(plan: BuildPlan) -> float:
        try:
            return simulate(plan.schedule, options.account(plan).timed(shape)).makespan
        except ConfigError:  # it exceeds the limit
            return inf

    plans = {tuple(stage.layers for stage in plan.stages[: schedule.placement.depth]): plan}
    for share_again in (share, 1.0):  # the fullest rank may run all again, and the others nothing
        split = _fastest(options, plan.source.model, plan.chain, schedule, again=share_again)
        if tuple(split) not in plans:  # whose sizes are known
            plans[tuple(split)] = _planned(plan.source, plan.chain, schedule, split, plan.routed)
    return min(plans.values(), key=seconds)


def _limited_split(options: AutoOptions, plan: BuildPlan) -> list[range] | None:
    """The fastest split under the memory limit. None if there is none, or if the options set the split."""
    checkpointing = options.checkpointing()
    if checkpointing is None or checkpointing.memory_limit is None or checkpointing.shape is None:
        return None
    if not _splits_by_default(options):
        return None
    try:
        memory = options.account(plan).of_layers(
            checkpointing.memory_limit, checkpointing.shape, recomputed=True
        )
        return _fastest(options, plan.source.model, plan.chain, plan.schedule, memory)
    except (ModelError, PartitionError):
        return None
