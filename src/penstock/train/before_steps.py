"""What a run does between its build and its first step.

It loads a checkpoint: `preflight` has chosen one by its headers, and here its tensors are read. It measures
the time of each layer, if the split needs it, and compares the pipeline with the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch.distributed as dist
from torch.optim import Optimizer

from penstock.checkpoint.in_memory import MemoryCheckpoints
from penstock.checkpoint.save_load import load_checkpoint
from penstock.checkpoint.shards import remove_superseded
from penstock.errors import CheckpointError, UnfitError
from penstock.models.weights.files import weight_files
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.whole_step import WholeStepLoss
from penstock.train.adapter import adapter_folder
from penstock.train.check.before_training import Reference, check_split
from penstock.train.checkpoints import NEWEST, find_start, start_after
from penstock.train.data.batches import LoadedBatch
from penstock.train.data.rows import Content, has_labels
from penstock.train.owner import Owner, last_run
from penstock.train.preflight import Prepared, data_at
from penstock.train.settings import is_first
from penstock.train.sizes import calls_of
from penstock.train.state import RunState


def open_memory(
    prepared: Prepared, pipe: Pipeline, optimizers: Sequence[Optimizer], owner: Owner | None
) -> MemoryCheckpoints | None:
    """The in-memory checkpoints, if the config has some. Removes superseded ones of other runs. Collective.

    owner: on the first process
    """
    remove_superseded(last_run)
    config = prepared.config
    if config.train.memory_checkpoint_every is None:
        return None
    run, timeout = None if owner is None else owner.run, config.pipeline.timeout_seconds
    return MemoryCheckpoints(pipe, optimizers, run, config.output.path, timeout)


def recalled(prepared: Prepared, pipe: Pipeline, memory: MemoryCheckpoints) -> Prepared | None:
    """Restore the state in memory, if it is newer than the checkpoint of `prepared.start`. Collective.

    The result starts there; None without a newer state. Raises what `start_after` and `Data.at` raise.
    """
    config, start = prepared.config, prepared.start
    if pipe.ranks.gather(start.remembered)[0] != memory.run:  # process 0's: others may have looked too late
        memory.forget()
        return None
    shards = memory.recall(start.done)
    if is_first():  # the display is made later
        for line in shards.passed:
            print(f"penstock: warning: passed over {line}", flush=True)
    if shards.state is None:
        return None
    state = RunState.of({**shards.state, "run": memory.run}, f"the checkpoint in {memory.folder}")
    newer = replace(start_after(config, state, "the checkpoint in memory"), checkpoint=start.checkpoint)
    others = [note for note in prepared.notes if note not in start.notes]
    where = f"going on from step {newer.done}, which was in memory ({memory.folder})"
    notes = *others, where, *newer.notes
    return replace(prepared, start=newer, notes=notes, data=data_at(config, prepared.data, newer))


def resumed(prepared: Prepared, pipe: Pipeline, optimizers: Sequence[Optimizer]) -> Prepared:
    """Load the checkpoint of `prepared.start`, or in a fresh run the adapter that it begins with. Collective.

    If it is altered or cannot be read, and the user named no path, an older one is loaded; the result starts
    there.
    """
    config, model, start = prepared.config, prepared.plan.source.model, prepared.start
    if start.checkpoint is None:
        if (trained := adapter_folder(config.adapter)) is not None:
            pipe.ranks.attempt(f"read adapter {trained}", lambda: pipe.load_weights(trained))
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
    data = data_at(config, prepared.data, older)
    return resumed(replace(prepared, start=older, notes=tuple(notes), data=data), pipe, optimizers)


def balanced(prepared: Prepared) -> AutoPipeline:
    """The settings with a split by the measured time of each layer, over a few steps. Collective."""
    auto = prepared.auto
    pipe = auto.build(prepared.model)
    costs = [pipe.layer_costs(_first_call(prepared, pipe.batch_part[0]))]
    pipe.close()
    if dist.is_initialized():
        dist.broadcast_object_list(costs)  # each pipeline of a mesh measures; all take the first one's costs
    return replace(auto, balance=costs[0])


def compare(
    prepared: Prepared,
    pipe: Pipeline,
    say: Callable[[str], None],
    prepare: Callable[[LoadedBatch], LoadedBatch] = lambda batch: batch,
    referred: Callable[[Reference], Reference] = lambda reference: reference,
) -> None:
    """Compare the pipeline with the whole model, as train.check says. Collective.

    say: shows a line; prepare, referred: add to a batch, and to the reference, as the run's parts do
    """
    mode, auto = prepared.config.train.check, prepared.auto
    folder = prepared.start.checkpoint or adapter_folder(prepared.config.adapter)
    if mode == "off" or (mode == "auto" and prepared.start.done):
        return
    source = prepared.plan.source
    if folder is not None and source.adapter is None:
        source = replace(source, files=tuple(weight_files(folder)))
    dtypes = (auto.wire_dtype, auto.sharded.param_dtype, auto.sharded.reduce_dtype)
    reference = Reference(
        source, auto.seed, auto.loss_of(source.model), dtypes, prepared.axes, folder, auto.autocast
    )
    first = _first_call(prepared, 0, prepare)  # the same one in every pipeline of a mesh
    if isinstance(reference.loss, WholeStepLoss):
        first = reference.loss.linear([first] if isinstance(first, dict) else first)
    say(check_split(pipe, referred(reference), first, mode))


def _first_call(
    prepared: Prepared, part: int, prepare: Callable[[LoadedBatch], LoadedBatch] = lambda batch: batch
) -> Content:
    """A part's content of the first pipeline call of the run in which a token counts. part: of the batch"""
    step, data = prepared.start.done + 1, prepared.data
    calls, microbatches = data.sizes.at(step).calls, prepared.config.pipeline.microbatches
    loss = prepared.auto.loss_of(prepared.plan.source.model)

    @cache
    def calls_of_part(part: int) -> list[Content]:
        return calls_of(prepare(data.of(part).batch(step)).content, calls, microbatches)

    for call in range(len(calls) - 1):  # rows that a ramp cuts may have no token that counts
        if any(has_labels(calls_of_part(other)[call], loss) for other in range(data.parts)):
            return calls_of_part(part)[call]
    return calls_of_part(part)[-1]
