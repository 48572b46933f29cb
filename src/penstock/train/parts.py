"""The list of a run's parts. A new feature of a run is one class (part.py) and one line here."""

from __future__ import annotations

from penstock.batch.distillation import Taught
from penstock.batch.kto import KTO
from penstock.batch.row_loss import RowLoss
from penstock.checkpoint.in_memory import MemoryCheckpoints
from penstock.launch.stop import Stop
from penstock.models.split.balanced_split import LayerCosts
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.schedule import Schedule
from penstock.train.between_steps import (
    Checkpoints,
    HeldOutEvaluation,
    InMemoryCheckpoints,
    Signals,
    SignalsWait,
)
from penstock.train.epochs import Epochs
from penstock.train.part import Run, RunPart
from penstock.train.preference import KLTerm, Rewards
from penstock.train.preflight import Prepared
from penstock.train.records.profile import StepProfiler
from penstock.train.records.record import RunRecord, StepTimeline
from penstock.train.records.sample import Sample
from penstock.train.records.slow_ranks import SlowRankWatch
from penstock.train.records.throughput import Usage
from penstock.train.skips import Skips, Spikes
from penstock.train.teacher import Teacher


def parts_of(
    run: Run, prepared: Prepared, auto: AutoPipeline, memory: MemoryCheckpoints | None, stop: Stop
) -> list[RunPart]:
    """The parts of a run, in the order in which they are called (part.py). Collective."""
    usage = Usage(run, prepared.plan, prepared.teacher)
    measured = auto.balance if isinstance(auto.balance, LayerCosts) else None
    profile, prompt = run.config.train.profile, run.config.output.sample_prompt

    def schedule_of(microbatches: int) -> Schedule:
        schedule = run.pipe.schedule
        if microbatches == schedule.microbatches:
            return schedule
        return auto.schedules(schedule, prepared.plan.frozen)(microbatches)

    parts = (
        RunRecord(run),
        Checkpoints(run, prepared.tokenizer),
        StepProfiler(run, profile) if profile else None,
        StepTimeline(run, schedule_of),
        Teacher(run, auto, auto.loss_fn) if isinstance(auto.loss_fn, Taught) else None,
        Rewards(run, auto.loss_fn) if isinstance(auto.loss_fn, RowLoss) and auto.loss_fn.names else None,
        KLTerm(run) if isinstance(auto.loss_fn, KTO) else None,
        usage,
        Skips(run),
        InMemoryCheckpoints(run, memory) if memory else None,  # it forgets before a spike rewinds the run
        Spikes(run),
        Epochs(run),
        SlowRankWatch(run, usage.throughput.works, measured),
        SignalsWait(run, stop),
        HeldOutEvaluation(run),
        Signals(run),  # after the evaluation, during which a signal may come
        None if prompt is None else Sample(run, prepared.tokenizer, prompt),
    )
    return [part for part in parts if part is not None]
