"""The one file where a run is wired together: it builds the pipeline, makes the run's parts, and trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from penstock.checkpoint.save_load import CheckpointWriter
from penstock.errors import PeerError
from penstock.launch.failures import record_stop
from penstock.launch.stop import Stop
from penstock.parallel.world import close_on_error
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.whole_step import WholeStepLoss
from penstock.train.before_steps import balanced, compare, open_memory, recalled, resumed
from penstock.train.checkpoints import Start, check_unchanged, remove_unfinished, set_aside
from penstock.train.loop import train
from penstock.train.optimizers.optimizer import make_optimizers
from penstock.train.owner import Owner, check_shared, new_run, owned
from penstock.train.part import Run, Steps, TrainStep
from penstock.train.parts import parts_of
from penstock.train.preference import with_references
from penstock.train.preflight import Prepared
from penstock.train.records.metrics import Log, Metrics, make_display
from penstock.train.settings import is_first, trace_folder


def run(prepared: Prepared, stop: Stop | None = None) -> TrainStep:
    """Train. Collective: every rank calls it with what its own preflight returned. Returns the last step.

    Args:
        stop: the signals that this process gets; None ignores them

    Raises FolderInUseError, on the first process, if another run writes into the output folder; RunError if
    one has written a checkpoint there since the preflight.
    """
    output = prepared.config.output.path
    owning: AbstractContextManager[Owner | None] = nullcontext()
    if is_first():
        with suppress(OSError):  # `owned` raises the error, with its cause
            output.mkdir(parents=True, exist_ok=True)
        start = prepared.start  # a run killed before its first checkpoint on disk may have some in memory
        owning = owned(output, start.state.run or start.remembered or new_run(), partial(print, flush=True))
    with owning as owner:
        return _run(prepared, owner, stop or Stop())


def _run(prepared: Prepared, owner: Owner | None, stop: Stop) -> TrainStep:
    """owner: on the first process"""
    this, prepared = _wired(prepared, owner, stop)
    with this.display, ExitStack() as entered:
        for part in this.parts:
            entered.enter_context(part.running())
        for note in filter(None, (*prepared.notes, *(part.note for part in this.parts))):
            this.display.say(note)
        compare(prepared, this.pipe, this.display.say, this.prepare, this.referred)
        with _noted(this.pipe):
            last = train(this)
    if owner is not None:
        _report(this, last)
    this.pipe.processes.gather(None)  # no rank leaves while process 0 still writes
    if dist.is_initialized() and prepared.axes.ranks_per_stage > 1:
        dist.barrier()  # nor does another pipeline
    for part in this.parts:
        part.end()
    this.pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if last.stopped:
        record_stop(last.ended)
    return last


def _wired(prepared: Prepared, owner: Owner | None, stop: Stop) -> tuple[Run, Prepared]:
    """Build the pipeline, load what the run goes on from, and make its parts. Collective.

    Returns the run; and `prepared`, perhaps with another start.
    """
    config, output = prepared.config, prepared.config.output.path
    common = {"config": config.model_dump(mode="json"), "steps done": prepared.start.done}
    common["data"] = prepared.data.digest
    auto = balanced(prepared) if config.pipeline.balance == "measured" else prepared.auto
    pipe = replace(auto, common=common).build(prepared.model)
    if owner is not None:
        _clear(output, prepared.start, owner)
    data = with_references(prepared.data, config, pipe, owner.run if owner else None)
    prepared = replace(prepared, data=data)
    optimizers = make_optimizers(config.optimizer, pipe.named_parameters(), prepared.kinds)
    memory = open_memory(prepared, pipe, optimizers, owner)
    with close_on_error(memory) if memory else nullcontext():
        newer = recalled(prepared, pipe, memory) if memory else None
        prepared = newer or resumed(prepared, pipe, optimizers)
    start = prepared.start
    check_shared(output, pipe.ranks)
    old_trace = trace_folder(config, prepared.axes) / f"rank-{pipe.processes.index}.json"
    old_trace.unlink(missing_ok=True)
    display = make_display(is_first(), config.train.last, start.done, config.train.log_every)
    metrics = Metrics(output / "metrics.jsonl", owner.run, start.done or None) if owner else None
    steps = Steps(prepared.data.of(pipe.batch_part[0]), start.done, config.train.last, pipe.device)
    writer = CheckpointWriter(pipe, background=config.train.checkpoint_background)
    whole = auto.loss_fn if isinstance(auto.loss_fn, WholeStepLoss) else None
    this = Run(
        config, pipe, optimizers, start, steps, display, Log(display, metrics), writer, owner, (), whole
    )
    this.parts = parts_of(this, prepared, auto, memory, stop)
    return this, prepared


def _clear(output: Path, start: Start, owner: Owner) -> None:
    """Remove or rename what would be in this run's way. From here on the folder is its own."""
    owner.settle()
    check_unchanged(output, start)
    with suppress(OSError):  # what stays costs disk space only
        remove_unfinished(output)
        set_aside(output, start.done, partial(print, flush=True))


def _report(run: Run, last: TrainStep) -> None:
    """Print why the run ended, and where its results are."""
    print(f"ended       {last.ended}")
    if last.stopped:  # there may be no time for more
        print(f"checkpoint  {run.checkpoint}: --resume goes on from it", flush=True)
        return
    print(f"checkpoint  {run.checkpoint}")
    for part in run.parts:
        for line in part.summary():
            print(line, flush=True)


@contextmanager
def _noted(pipe: Pipeline) -> Iterator[None]:
    """Write a note of an error of this rank alone, as on a full disk, so that waiting ranks can name it."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, PeerError):
            pipe.ranks.fail(f"{type(error).__name__}: {error}")
        raise
