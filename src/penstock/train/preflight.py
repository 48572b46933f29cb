"""The checks before a run: `preflight`, or `dry_run` alone.

`preflight` raises every error that can be detected without loading a weight. The command calls it once before
it starts any rank, and each rank calls it again. `dry_run` plans a run on a machine that may have neither the
run's data nor its GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.batch.loss import OwnLoss, RowLabels, TokenLabels
from penstock.batch.packing import refuse_packed
from penstock.errors import ConfigError
from penstock.models import hub
from penstock.models.adapters import names_in_file
from penstock.models.auto_class import is_language_model
from penstock.models.source import ModelLike, Source, open_without_flash
from penstock.models.weights.files import tied_names
from penstock.models.weights.saved_adapter import adapter_file, check_adapter, check_base
from penstock.parallel.axes import Axes
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.building.experts import choose_experts
from penstock.pipeline.whole_step import WholeStepLoss, check_dropout
from penstock.planner.hardware import Cluster
from penstock.schedule.choose import schedule_config
from penstock.train.adapter import adapter_folder
from penstock.train.checkpoints import Start, checkpoint_folder, find_start, recorded_model
from penstock.train.config.data import LabelsOf
from penstock.train.config.loss import AnyLoss, DistillationSection
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data
from penstock.train.data.loading import load_data, tokenizer_of
from penstock.train.encoding.images import Processor
from penstock.train.encoding.labels import LabelSpace
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.epochs import counted
from penstock.train.model import config_in, has_hub_weights, named_model, positions_of
from penstock.train.optimizers.optimizer import trained_by
from penstock.train.planned import chosen
from penstock.train.records.sample import check_prompt
from penstock.train.records.trackers import check_trackers
from penstock.train.settings import (
    axes_of,
    check_machine,
    for_world,
    largest_microbatch,
    make_auto,
    make_padding,
    sizes_of,
)
from penstock.train.teacher import check_teacher, planned_teacher


@dataclass(frozen=True)
class Planned:
    """A run without its data.

    Attributes:
        auto: the pipeline's settings
        model: what `auto` builds
        plan: the pipeline before it is built
        kinds: the class of optimizer that trains each parameter, by name
        start: where the run begins
        notes: lines to show before it begins
        choice: what `pipeline.schedule: planned` has taken, in a line that is also a note; else empty
        teacher: the pipeline of train.loss.teacher before it is built; None without one
    """

    config: TrainConfig
    auto: AutoPipeline
    model: ModelLike
    plan: BuildPlan
    kinds: Mapping[str, str]
    start: Start
    notes: tuple[str, ...]
    choice: str
    teacher: BuildPlan | None

    @property
    def axes(self) -> Axes:
        """The mesh's axes other than the pipeline's."""
        return self.auto.axes or Axes()


@dataclass(frozen=True)
class Prepared(Planned):
    """A run in which `preflight` found no error."""

    tokenizer: Tokenizer
    data: Data


def preflight(config: TrainConfig, resume: str | None = None, cluster: Cluster | None = None) -> Prepared:
    """Prepare a run, without loading a weight or communicating with another process.

    Args:
        resume: as for `find_start`
        cluster: for `pipeline.schedule: planned`, whose devices the run has; None: those at hand

    Raises: ConfigError, WorldSizeError, ModelError, PartitionError, CheckpointError, DataError, HubError.
    """
    axes = axes_of(config)
    _check_output(config)
    check_trackers(config.output.trackers)
    check_machine(config)
    part: hub.ModelPart = "weights" if config.model.weights == "auto" else "tokenizer"
    config, choice = chosen(pinned(config, resume, part), resume, cluster)
    named, auto = named_model(config.model), make_auto(config)
    planned = _planned(config, auto, named, auto.build_plan(named), resume)
    model = planned.plan.source.model
    tokenizer = tokenizer_of(config)
    if isinstance(tokenizer, Processor):
        tokenizer.check_fits(model)
    check_prompt(config.output, tokenizer, model.config)
    check_teacher(config, model.config, tokenizer)
    data = load_data(
        config,
        tokenizer,
        int(model.config.get_text_config().vocab_size),
        padding=make_padding(config.pipeline),
        flash="flash" in str(model.config._attn_implementation),  # the test of transformers itself
        parts=axes.batch_parts,
        space=LabelSpace.of(model.config),
    )
    start = planned.start
    config, line = counted(config, data, start)
    notes = (*filter(None, [choice, line]), *planned.notes, *_data_notes(config, data, start))
    data = data_at(config, data, start)
    changed = {"config": config, "notes": notes, "choice": choice}
    return Prepared(**{**vars(planned), **changed}, tokenizer=tokenizer, data=data)


def pinned(config: TrainConfig, resume: str | None, part: hub.ModelPart) -> TrainConfig:
    """The config with the commit of the model's Hub name, of which `part` is downloaded.

    A resumed run keeps its commit, unless the config has another name or revision by now. A config without a
    Hub name is returned as it is. Raises HubError, CheckpointError.
    """
    section = config.model
    if not hub.is_name(section.path):
        for key in ("revision", "commit"):
            if (value := getattr(section, key)) is not None:
                raise hub.not_on_the_hub(f"model.{key}={value}", section.path)
        return config
    before, commit = recorded_model(config.output.path, resume), section.commit
    if before is not None and (before.path, before.revision) == (section.path, section.revision):
        commit = commit or before.commit
    trusted = section.trust_remote_code
    folder = hub.fetch(str(section.path), commit or section.revision, part, trusted=trusted)
    return config.model_copy(update={"model": section.model_copy(update={"commit": folder.name})})


def dry_run(
    config: TrainConfig,
    resume: str | None = None,
    world: int | None = None,
    cluster: Cluster | None = None,
) -> Planned:
    """Plan a run. The notes list what this machine lacks. Reads no text, and calls no other process.

    Call it inside of `sdpa_for_flash`.

    Args:
        resume, cluster: as for `preflight`
        world: the number of processes of the run; None takes it from the sizes, or from torchrun

    Raises: what `preflight` raises, except for data, tokenizer, output folder and GPUs.
    """
    config, choice = chosen(pinned(for_world(config, world), resume, "config"), resume, cluster)
    named = config_in(config.model) if has_hub_weights(config.model) else named_model(config.model)
    auto = replace(make_auto(config), revision=None)
    source, flash = open_without_flash(
        named,
        auto.attention,
        dtype=auto.dtype,
        adapter=auto.adapter,
        quantize=auto.quantize,
        mtp_factor=auto.mtp_loss_scaling_factor,
        trusted=auto.trust_remote_code,
        new_weights=() if has_hub_weights(config.model) else auto.new_weights,
    )
    if auto.experts is not None:
        choose_experts(source.model, auto.experts, given=False)
    # options that `source.model` already has
    opened = replace(
        auto, dtype=None, attention=None, adapter=None, mtp_loss_scaling_factor=None, new_weights=()
    )
    plan = replace(opened.build_plan(source.model), source=source)
    planned = _planned(config, auto, named, plan, resume)
    notes = (*filter(None, [choice]), *planned.notes, *_not_here(planned, flash))
    return replace(planned, notes=notes, choice=choice)


def _not_here(planned: Planned, flash: str | None) -> Iterator[str]:
    """A line for each thing that the run needs and this machine lacks, or that was not checked."""
    config, model = planned.config, planned.plan.source.model.config
    if isinstance(config.train.loss, DistillationSection) and planned.teacher is None:
        yield "train.loss.teacher: not on this machine, so neither counted nor checked"
    for path in (source.path for source in config.data.sources if source.kind != "dummy"):
        if not Path(path).expanduser().exists():
            yield f"data.path={path}: not on this machine, so not checked"
        else:
            yield f"data.path={path}: not read, so that the number of rows is unknown"
    name = config.data.tokenizer or str(config.model.path)
    if name == "bytes" or Path(name).expanduser().is_dir():
        check_prompt(config.output, tokenizer_of(config), model)
    else:
        yield f"data.tokenizer={name}: not on this machine, so not checked"
    if config.pipeline.balance == "measured":
        yield "pipeline.balance=measured: layers are measured when the run starts, and may go to other stages"
    if flash is not None:
        yield f"{flash}: not installed on this machine; planned with sdpa, which holds as much memory"
    for check in (check_machine, _check_output):
        try:
            check(config)
        except ConfigError as error:
            yield f"{error.value}: not checked on this machine ({error.rule})"


def _planned(
    config: TrainConfig, auto: AutoPipeline, named: ModelLike, plan: BuildPlan, resume: str | None
) -> Planned:
    if not plan.schedule.trains:
        value = f"pipeline.schedule={plan.schedule.name}"
        raise ConfigError(value, "it holds no backward", "Take one that trains: 1f1b")
    model = plan.source.model
    source = plan.source
    _check_head(config, auto, plan)
    if not source.files and config.adapter is not None and not has_hub_weights(config.model):
        rule = "an adapter needs a model with trained weights, and here they are random"
        raise ConfigError("adapter", rule, "Give the folder of a trained model as model.path")
    if config.data.packing in ("sequential", "best_fit"):
        refuse_packed(model)
    _check_lengths(config, positions_of(model))
    _check_counts(config, auto, plan)
    kinds = trained_by(config.optimizer, model, plan.chain.layers)
    start = find_start(config, model, resume, kinds)
    trained = start.checkpoint or adapter_folder(config.adapter)
    if trained is not None and source.adapter is not None:
        check_base(trained, source.base_fingerprint(config.model.seed))
        if start.checkpoint is None:
            with adapter_file(trained) as file:
                check_adapter(file, model, names_in_file(model, source.adapter), tied_names(model))
    notes = (*_notes(config, source), *start.notes)
    return Planned(config, auto, named, plan, kinds, start, notes, "", planned_teacher(config, auto))


# the loss of the head for each kind of labels, the ending of its name, and its size in the model's config
_HEADS: dict[LabelsOf, tuple[type[OwnLoss], str, str]] = {
    "rows": (RowLabels, "...ForSequenceClassification", "num_labels"),
    "tokens": (TokenLabels, "...ForTokenClassification", "num_labels"),
    "masked tokens": (TokenLabels, "...ForMaskedLM", "vocab_size"),
}
_TAKE = "Take a model {}: its name stands in architectures of its config"


def _check_head(config: TrainConfig, auto: AutoPipeline, plan: BuildPlan) -> None:
    """Raise ConfigError for a head that is not of the kind that the loss reads."""
    wanted, model, loss = config.data.labels, plan.source.model, config.train.loss
    if loss is not None:
        _check_compared(loss, auto, plan)
    if wanted == "next tokens":  # a build refuses other heads
        return
    own, value = auto.loss_of(model, plan.chain), f"data.kind={config.data.kind} for {type(model).__name__}"
    kind, ending, size = _HEADS[wanted]
    remedy = _TAKE.format(ending)
    if type(own) is not kind:
        raise ConfigError(value, f"labels are of {wanted}, and the loss of its head is of others", remedy)
    if isinstance(own, TokenLabels) and own.classes != getattr(model.config, size):
        rule = f"its head has {own.classes} outputs, and {size}={getattr(model.config, size)}"
        raise ConfigError(value, rule, remedy)


def _check_compared(loss: AnyLoss, auto: AutoPipeline, plan: BuildPlan) -> None:
    """Raise ConfigError for a head that does not give what a loss of rows, or of a teacher, compares."""
    model = plan.source.model
    value, head = f"train.loss={loss.kind} for {type(model).__name__}", loss.head
    if head is None:
        if not is_language_model(model):
            rule = "it compares log-probabilities of tokens, and the head is none of a causal language model"
            raise ConfigError(value, rule, "Take such a model, or train.loss=reward for one score a row")
        return
    own = replace(auto, loss_fn=None).loss_of(model, plan.chain)  # with the options that such a head refuses
    if type(own) is not RowLabels or (model.config.num_labels == 1) != head.one:
        has = f"num_labels={model.config.num_labels}" if type(own) is RowLabels else "labels of tokens"
        rule = f"such a model gives {head.gives} a row, and its head has {has}"
        raise ConfigError(value, rule, f"{_TAKE.format('...ForSequenceClassification')}, with {head.size}")
    if isinstance(auto.loss_fn, WholeStepLoss):
        check_dropout(model)


def _check_counts(config: TrainConfig, auto: AutoPipeline, plan: BuildPlan) -> None:
    """Raise ConfigError for a step of a ramp whose number of microbatches the schedule does not accept."""
    if schedule_config(auto.schedule).schedule == "searched":  # it accepts any number, after a search
        return
    make, known = auto.schedules(plan.schedule, plan.frozen), {plan.schedule.microbatches}
    for _, size in sizes_of(config).phases:
        for count in sorted({*size.calls} - known):
            known.add(count)
            try:
                make(count)
            except ConfigError as error:
                rule = f"its {size.rows} rows make {count} microbatches, and {error.value}: {error.rule}"
                remedy = "Give a number of rows that fits, or another schedule"
                raise ConfigError("a phase of train.ramp", rule, remedy) from error


def _notes(config: TrainConfig, source: Source) -> Iterator[str]:
    """Lines on a deprecated key, on the commit of a Hub name, and on weights that are initialised."""
    if config.parallel.param_dtype is not None:
        key = f"parallel.param_dtype={config.parallel.param_dtype} is deprecated"
        yield f"penstock: warning: {key}: write train.precision=mixed, which works on every mesh"
    if (commit := config.model.commit) is not None:
        yield f"model.path={config.model.path}: commit {commit} of {config.model.revision or 'main'}"
    if source.new:
        yield f"model.new_weights: {', '.join(source.new)}: initialised"


def _check_output(config: TrainConfig) -> None:
    """Raise ConfigError if the first checkpoint could not be written."""
    output = config.output.path
    below = checkpoint_folder(output, 0).absolute()
    existing = next(folder for folder in below.parents if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        rule = "nothing can be written there" if existing.is_dir() else f"{existing} is no folder"
        raise ConfigError(f"output.folder={output}", rule, "Name a folder that you may write")


def _check_lengths(config: TrainConfig, longest: int | None) -> None:
    """Raise ConfigError if a row has more tokens than the model has positions (`longest`)."""
    section, padded = config.data, largest_microbatch(config)[1]
    length = section.longest_document
    if section.document_length is not None:  # padding has documents and positions of its own
        padded = length
    if longest is None or max(length, padded) <= longest:
        return
    rule = f"the model takes {longest} positions (max_position_embeddings)"
    if length > longest:
        key = "sequence_length" if section.document_length is None else "document_length"
        packed = key == "sequence_length" and section.packing in ("sequential", "best_fit")
        shorter = f"; for longer rows of short documents set data.document_length={longest}" if packed else ""
        remedy = f"Give {longest} or less, or a model with more{shorter}"
        raise ConfigError(f"data.{key}={length}", rule, remedy)
    remedy = f"Give a multiple and buckets that keep rows at {longest} or less"
    raise ConfigError(f"pipeline.padding, to {padded} tokens a row", rule, remedy)


def data_at(config: TrainConfig, data: Data, start: Start) -> Data:
    """The data from the run's start on. Raises CheckpointError for other data than the checkpoint's."""
    return data.at(start.done, start.state.data, config.train.last, accept=config.data.changed == "accept")


def _data_notes(config: TrainConfig, data: Data, start: Start) -> Iterator[str]:
    """Lines on changed data, on the tokens that the loss counts, and on the share of padding, if any."""
    if change := data.change(start.state.data):
        yield f"changed since then: the data: {change}"
    if start.done and start.state.data is None:
        yield "the checkpoint does not say which data it is of, so penstock cannot check whether they changed"
    counted, tokens, dropped = (sum(getattr(source.store.facts, name) for source in data.rows.sources)
                                for name in ("counted", "tokens", "dropped"))  # fmt: skip
    if dropped and not config.counts_labels:
        yield f"{dropped} records without a token to train on are left out"
    elif config.counts_labels and (counted < tokens or dropped):
        left = f"; {dropped} records without such a token are left out" if dropped else ""
        yield f"the loss counts {counted:,} of {tokens:,} tokens, {counted / tokens:.1%}{left}"
    share = data.expected(config.train.last).padding
    if config.data.packing != "stream" or share:
        settings = f"data.packing={config.data.packing}, pipeline.shapes={config.pipeline.shapes}"
        yield f"padding {share:.1%} of the tokens ({settings})"
