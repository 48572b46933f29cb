"""The one file where a run is wired together: `preflight`, then `run`; or `dry_run` alone.

`preflight` finds every error that can be found without loading a weight. The command calls it once before it
starts any rank, and each rank calls it again. `run` builds the pipeline, checks the split and trains.
`dry_run` plans a run on a machine that may have neither its data nor its GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path

import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PretrainedConfig

from penstock.batch.packing import refuse_packed
from penstock.checkpoint.in_memory import MemoryCheckpoints
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint
from penstock.checkpoint.shards import remove_superseded
from penstock.errors import CheckpointError, ConfigError, PeerError, UnfitError
from penstock.launch.failures import record_stop
from penstock.launch.stop import Stop
from penstock.models import hub
from penstock.models.source import ModelLike, open_without_flash
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.weights.files import weight_files
from penstock.models.weights.saved_adapter import check_base
from penstock.parallel.axes import Axes
from penstock.parallel.world import close_on_error
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.building.experts import choose_experts
from penstock.pipeline.pipeline import Pipeline
from penstock.schedule.choose import schedule_config
from penstock.train.check.before_training import Reference, check_split
from penstock.train.checkpoints import (
    NEWEST,
    Start,
    check_unchanged,
    checked_state,
    checkpoint_folder,
    find_start,
    recorded_model,
    remove_unfinished,
    set_aside,
    start_after,
)
from penstock.train.config.sections import TrainConfig
from penstock.train.data.loading import Data, load_data, tokenizer_of
from penstock.train.data.rows import Content, has_labels
from penstock.train.encoding.images import Processor
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.loop import Run, train
from penstock.train.model import config_in, has_hub_weights, named_model, positions
from penstock.train.optimizers.optimizer import make_optimizers, trained_by
from penstock.train.owner import Owner, check_shared, last_run, new_run, owned
from penstock.train.records.metrics import Display, Metrics, make_display
from penstock.train.records.outcome import Outcome, check_prompt, report_outcome
from penstock.train.records.profile import profile_note
from penstock.train.records.record import recorded
from penstock.train.records.slow_ranks import watch_ranks
from penstock.train.records.throughput import Throughput
from penstock.train.records.trackers import check_trackers
from penstock.train.settings import (
    axes_of,
    check_machine,
    for_world,
    is_first,
    largest_microbatch,
    make_auto,
    make_padding,
    sizes_of,
    trace_folder,
)
from penstock.train.sizes import calls_of


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
    """

    config: TrainConfig
    auto: AutoPipeline
    model: ModelLike
    plan: BuildPlan
    kinds: Mapping[str, str]
    start: Start
    notes: tuple[str, ...]

    @property
    def axes(self) -> Axes:
        """The mesh's axes other than the pipeline's."""
        return self.auto.axes or Axes()


@dataclass(frozen=True)
class Prepared(Planned):
    """A run in which `preflight` found no error."""

    tokenizer: Tokenizer
    data: Data


def preflight(config: TrainConfig, resume: str | None = None) -> Prepared:
    """Prepare a run, without loading a weight or talking to another process.

    Args:
        resume: as for `find_start`

    Raises: ConfigError, WorldSizeError, ModelError, PartitionError, CheckpointError, DataError, HubError.
    """
    axes = axes_of(config)
    _check_output(config)
    check_trackers(config.output.trackers)
    check_machine(config)
    part: hub.ModelPart = "weights" if config.model.weights == "auto" else "tokenizer"
    config = pinned(config, resume, part)
    named, auto = named_model(config.model), make_auto(config)
    planned = _planned(config, auto, named, auto.build_plan(named), resume)
    model = planned.plan.source.model
    tokenizer = tokenizer_of(config)
    if isinstance(tokenizer, Processor):
        tokenizer.check_fits(model)
    check_prompt(config.output, tokenizer, model.config)
    data = load_data(
        config,
        tokenizer,
        int(model.config.get_text_config().vocab_size),
        padding=make_padding(config.pipeline),
        flash="flash" in str(model.config._attn_implementation),  # as transformers itself asks
        parts=axes.batch_parts,
    )
    start, known = planned.start, {field.name: getattr(planned, field.name) for field in fields(planned)}
    known["notes"] += tuple(_data_notes(config, data, start))
    return Prepared(**known, tokenizer=tokenizer, data=_data_at(config, data, start))


def pinned(config: TrainConfig, resume: str | None, part: hub.ModelPart) -> TrainConfig:
    """The config with the commit that the model's Hub name stands for, of which `part` is fetched.

    A run that goes on keeps its commit, unless the config has another name or revision by now. A config
    without a Hub name is returned as it is. Raises HubError, CheckpointError.
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


def dry_run(config: TrainConfig, resume: str | None = None, world: int | None = None) -> Planned:
    """Plan a run, with what this machine lacks in the notes. No text is read, no process is asked.

    Call it inside of `sdpa_for_flash`.

    Args:
        resume: as for `preflight`
        world: the number of processes that are to run it; None where the sizes say it, or torchrun

    Raises: what `preflight` raises, but for data, tokenizer, output folder and GPUs.
    """
    config = pinned(for_world(config, world), resume, "config")
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
    # of the model itself, which is opened by now
    opened = replace(
        auto, dtype=None, attention=None, adapter=None, mtp_loss_scaling_factor=None, new_weights=()
    )
    plan = replace(opened.build_plan(source.model), source=source)
    planned = _planned(config, auto, named, plan, resume)
    return replace(planned, notes=planned.notes + tuple(_not_here(config, source.model.config, flash)))


def _not_here(config: TrainConfig, model: PretrainedConfig, flash: str | None) -> Iterator[str]:
    """A line for each thing that the run needs and this machine lacks, or that was not looked at."""
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
    if not source.files and config.adapter is not None and not has_hub_weights(config.model):
        rule = "it is for a model with weights, and here they are random"
        raise ConfigError("adapter", rule, "Give the folder of a trained model as model.path")
    if config.data.packing in ("sequential", "best_fit"):
        refuse_packed(model)
    _check_lengths(config, positions(model.config))
    _check_counts(config, auto, plan)
    kinds = trained_by(config.optimizer, model, plan.chain.layers)
    start = find_start(config, model, resume, kinds)
    if start.checkpoint is not None and source.adapter is not None:
        check_base(start.checkpoint, source.base_fingerprint(config.model.seed))
    new = [f"model.new_weights: {', '.join(source.new)}: initialised"] if source.new else []
    notes = *_deprecated(config), *_of_the_hub(config), *new, *start.notes
    return Planned(config, auto, named, plan, kinds, start, notes)


def _check_counts(config: TrainConfig, auto: AutoPipeline, plan: BuildPlan) -> None:
    """Raise ConfigError for a step of a ramp whose microbatches the schedule does not take."""
    if schedule_config(auto.schedule).schedule == "searched":  # for any number, in its time
        return
    make, known = auto.schedules(plan.schedule, plan.frozen), {plan.schedule.microbatches}
    for _, size in sizes_of(config).phases:
        for count in sorted({*size.calls} - known):
            known.add(count)
            try:
                make(count)
            except ConfigError as error:
                rule = f"its {size.rows} rows make {count} microbatches, and {error.value}: {error.rule}"
                remedy = "Give a number of rows for which it does, or another schedule"
                raise ConfigError("a phase of train.ramp", rule, remedy) from error


def _deprecated(config: TrainConfig) -> Iterator[str]:
    """A line for each key of the config that has another name now."""
    if config.parallel.param_dtype is not None:
        key = f"parallel.param_dtype={config.parallel.param_dtype} is deprecated"
        yield f"penstock: warning: {key}: write train.precision=mixed, which every mesh takes"


def _of_the_hub(config: TrainConfig) -> Iterator[str]:
    """A line for a model's Hub name."""
    if (commit := config.model.commit) is not None:
        yield f"model.path={config.model.path}: commit {commit} of {config.model.revision or 'main'}"


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(
            f"output.folder={str(output)!r}",
            f"it cannot be made ({cause.strerror})",
            "Name a folder that this user may write into",
        ) from cause


def run(prepared: Prepared, stop: Stop | None = None) -> Outcome:
    """Train. Collective: every rank calls it with what its own preflight returned.

    Args:
        stop: what signals ask of this process; None ignores them

    Raises FolderInUseError, on the first process, where another run writes into the output folder; RunError
    where one has written a checkpoint there since the preflight.
    """
    output = prepared.config.output.path
    owning: AbstractContextManager[Owner | None] = nullcontext()
    if is_first():
        _make_folder(output)
        start = prepared.start  # of a run that was killed before its first checkpoint some may be in memory
        run = start.run or start.remembered or new_run()
        owning = owned(output, run, partial(print, flush=True))
    with owning as owner:
        if owner is not None:
            check_unchanged(output, prepared.start)
            with suppress(OSError):  # it costs room alone
                remove_unfinished(output)
                set_aside(output, prepared.start.done, partial(print, flush=True))
        return _run(prepared, owner, stop or Stop())


def _run(prepared: Prepared, owner: Owner | None, stop: Stop) -> Outcome:
    """owner: on the first process"""
    config, output = prepared.config, prepared.config.output.path
    common = {"config": config.model_dump(mode="json"), "steps done": prepared.start.done}
    common["data"] = prepared.data.digest
    auto = _balanced(prepared) if config.pipeline.balance == "measured" else prepared.auto
    pipe = replace(auto, common=common).build(prepared.model)
    optimizers = make_optimizers(config.optimizer, pipe.named_parameters(), prepared.kinds)
    memory = _memory(config, pipe, optimizers, owner)
    with close_on_error(memory) if memory else nullcontext():
        prepared = _recalled(prepared, pipe, memory) or _resumed(prepared, pipe, optimizers)
    start = prepared.start
    pipe.ranks.attempt("make the output folder", lambda: _make_folder(output))
    check_shared(output, pipe.ranks)
    old_trace = trace_folder(config, prepared.axes) / f"rank-{pipe.processes.index}.json"
    old_trace.unlink(missing_ok=True)
    metrics = Metrics(output / "metrics.jsonl", owner.run, start.done or None) if owner else None
    throughput = Throughput.of(config, prepared.plan, pipe.device)
    measured = auto.balance if isinstance(auto.balance, LayerCosts) else None
    slow_ranks = watch_ranks(pipe, throughput.works, measured, config)
    display = make_display(is_first(), config.train.steps, start.done, config.train.log_every)
    notes = *prepared.notes, profile_note(config.train, start.done), throughput.note
    record = recorded(config, owner, start.done, pipe.schedule.ranks, pipe.device, display.say)
    writer = CheckpointWriter(pipe, background=config.train.checkpoint_background)
    with display, record as trackers, writer, memory or nullcontext():
        for note in filter(None, notes):
            display.say(note)
        _check_split(prepared, pipe, display)
        data = prepared.data.of(pipe.batch_part[0])
        with _noted(pipe):
            outcome = train(Run(
                config, pipe, data, optimizers, prepared.tokenizer, display, metrics, throughput, writer,
                start, owner, stop, memory, slow_ranks if metrics else None,
            ))  # fmt: skip
        trackers.stopped = outcome.ended if outcome.stopped else ""
    if metrics:
        schedule, count = pipe.schedule, outcome.timeline.microbatches
        if count != schedule.microbatches:  # it ended within a ramp
            schedule = auto.schedules(schedule, prepared.plan.frozen)(count)
        report_outcome(outcome, schedule, config, trackers.lines, slow_ranks.by_host())
    pipe.processes.gather(None)  # no rank leaves while process 0 still writes
    if dist.is_initialized() and prepared.axes.ranks_per_stage > 1:
        dist.barrier()  # nor does another pipeline
    if memory is not None:
        memory.remove()
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if outcome.stopped:
        record_stop(outcome.ended)
    return outcome


@contextmanager
def _noted(pipe: Pipeline) -> Iterator[None]:
    """Leave a note of what this rank alone raises, as on a full disk: the others wait for it, and name it."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, PeerError):
            pipe.ranks.fail(f"{type(error).__name__}: {error}")
        raise


def _memory(
    config: TrainConfig, pipe: Pipeline, optimizers: Sequence[Optimizer], owner: Owner | None
) -> MemoryCheckpoints | None:
    """The in-memory checkpoints, if the config has some. Collective. What others left for ever is removed."""
    remove_superseded(last_run)
    if config.train.memory_checkpoint_every is None:
        return None
    run, timeout = None if owner is None else owner.run, config.pipeline.timeout_seconds
    return MemoryCheckpoints(pipe, optimizers, run, config.output.path, timeout)


def _recalled(prepared: Prepared, pipe: Pipeline, memory: MemoryCheckpoints | None) -> Prepared | None:
    """Put back what is in memory, where it is newer than the checkpoint of `prepared.start`. Collective.

    The result starts there; None where there is nothing newer. Raises what `start_after` and `Data.at` raise.
    """
    config, start = prepared.config, prepared.start
    if memory is None:
        return None
    if pipe.ranks.gather(start.remembered)[0] != memory.run:  # others looked when it had begun, perhaps
        memory.forget()
        return None
    recalled = memory.recall(start.done)
    if is_first():  # the display comes later
        for line in recalled.passed:
            print(f"penstock: warning: passed over {line}", flush=True)
    if recalled.state is None:
        return None
    state = checked_state({**recalled.state, "run": memory.run}, f"the checkpoint in {memory.folder}")
    newer = replace(start_after(config, state, "the checkpoint in memory"), checkpoint=start.checkpoint)
    others = [note for note in prepared.notes if note not in start.notes]
    where = f"going on from step {newer.done}, which was in memory ({memory.folder})"
    notes = *others, where, *newer.notes
    return replace(prepared, start=newer, notes=notes, data=_data_at(config, prepared.data, newer))


def _resumed(prepared: Prepared, pipe: Pipeline, optimizers: Sequence[Optimizer]) -> Prepared:
    """Load the checkpoint of `prepared.start`. Collective.

    Where it is altered or cannot be read, and only the newest was asked for, it is the one before; the result
    starts there.
    """
    config, model, start = prepared.config, prepared.plan.source.model, prepared.start
    if start.checkpoint is None:
        return prepared
    try:
        load_checkpoint(start.checkpoint, pipe, optimizers, learning_rates=False)  # each step sets its own
        return prepared
    except CheckpointError as error:  # the same on all ranks
        if isinstance(error, UnfitError) or not start.is_newest:
            raise
        passed = f"penstock: warning: passed over {error}"
        older = find_start(config, model, NEWEST, prepared.kinds, before=start.checkpoint)
        pipe.ranks.same("load_checkpoint()", {"checkpoint to go on from": str(older.checkpoint)})
    notes = dict.fromkeys((*prepared.notes, passed, *older.notes))
    data = _data_at(config, prepared.data, older)
    return _resumed(replace(prepared, start=older, notes=tuple(notes), data=data), pipe, optimizers)


def _balanced(prepared: Prepared) -> AutoPipeline:
    """The settings with a split by the time that each layer takes here, in a few steps. Collective."""
    auto = prepared.auto
    pipe = auto.build(prepared.model)
    costs = [pipe.layer_costs(_first_call(prepared, pipe.batch_part[0]))]
    pipe.close()
    if dist.is_initialized():
        dist.broadcast_object_list(costs)  # the pipelines of a mesh measure apart, and are split alike
    return replace(auto, balance=costs[0])


def _check_split(prepared: Prepared, pipe: Pipeline, display: Display) -> None:
    """Compare the pipeline with the whole model, as train.check says. Collective."""
    mode, folder, auto = prepared.config.train.check, prepared.start.checkpoint, prepared.auto
    if mode == "off" or (mode == "auto" and prepared.start.done):
        return
    source = prepared.plan.source
    if folder is not None and source.adapter is None:
        source = replace(source, files=tuple(weight_files(folder)))
    dtypes = (auto.wire_dtype, auto.sharded.param_dtype, auto.sharded.reduce_dtype)
    reference = Reference(
        source, auto.seed, auto.loss_of(source.model), dtypes, prepared.axes, folder, auto.autocast
    )
    first = _first_call(prepared, 0)  # the same one in every pipeline of a mesh
    display.say(check_split(pipe, reference, first, mode))


def _first_call(prepared: Prepared, part: int) -> Content:
    """What that part of the batch has of the first pipeline call of the run in which a token counts."""
    step, data = prepared.start.done + 1, prepared.data
    calls, microbatches = data.sizes.at(step).calls, prepared.config.pipeline.microbatches

    @cache
    def calls_of_part(part: int) -> list[Content]:
        return calls_of(data.of(part).batch(step).content, calls, microbatches)

    for number in range(len(calls) - 1):  # rows that a ramp cuts may have none
        if any(has_labels(calls_of_part(each)[number]) for each in range(data.parts)):
            return calls_of_part(part)[number]
    return calls_of_part(part)[-1]


def _check_output(config: TrainConfig) -> None:
    """Raise ConfigError now, and not when the first checkpoint is due."""
    output = config.output.path
    below = checkpoint_folder(output, 0).absolute()
    existing = next(folder for folder in below.parents if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        rule = "nothing can be written there" if existing.is_dir() else f"{existing} is no folder"
        raise ConfigError(f"output.folder={output}", rule, "Name a folder that you may write")


def _check_lengths(config: TrainConfig, longest: int | None) -> None:
    """Raise ConfigError where a row has more tokens than the model has positions (`longest`)."""
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


def _data_at(config: TrainConfig, data: Data, start: Start) -> Data:
    """The data from the run's start on. Raises CheckpointError for other data than the checkpoint's."""
    return data.at(start.done, start.data, config.train.steps, accept=config.data.changed == "accept")


def _data_notes(config: TrainConfig, data: Data, start: Start) -> Iterator[str]:
    """Lines on what changed, which tokens the loss counts, and the share of padding, where there is some."""
    if change := data.change(start.data):
        yield f"changed since then: the data: {change}"
    if start.done and start.data is None:
        yield "the checkpoint does not say which data it is of, so that nobody knows whether that has changed"
    counted, tokens, dropped = (sum(getattr(each.store.facts, name) for each in data.rows.sources)
                                for name in ("counted", "tokens", "dropped"))  # fmt: skip
    if counted < tokens or dropped:
        left = f"; {dropped} records without such a token are left out" if dropped else ""
        yield f"the loss counts {counted:,} of {tokens:,} tokens, {counted / tokens:.1%}{left}"
    share = data.expected(config.train.steps).padding
    if config.data.packing != "stream" or share:
        settings = f"data.packing={config.data.packing}, pipeline.shapes={config.pipeline.shapes}"
        yield f"padding {share:.1%} of the tokens ({settings})"
