"""The section `train`: the steps of a run, and what is checked, logged and saved."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.options import Count, LayerOptions, Natural, NotNegative, RoutingOptions, at_most
from penstock.train.config.loss import LossValue
from penstock.train.config.values import (
    CheckpointingValue,
    CompileValue,
    Length,
    OffloadingValue,
    Positive,
    Seconds,
    Section,
)


class ProfileSection(Section):
    """What torch's profiler records, into profile/rank-0.json.gz of the output folder: a trace a process."""

    steps: Annotated[tuple[Count, Count], Field(strict=False)]  # [first, last]

    def check_keys(self) -> None:
        first, last = self.steps
        if first > last:
            rule = f"steps=[{first}, {last}]: the first step to profile comes after the last"
            raise ValueError(f"{rule}; write [{last}, {first}], or one step twice")


class PhaseSection(Section):
    """The first steps of a run, with fewer rows or with shorter ones. Full steps follow the last phase."""

    until: Count  # the last step of the phase
    batch_size: Count | None = None  # with fewer rows, fewer microbatches; null: train.batch_size
    # tokens after which a row is cut; the rest of it is not trained on; null: data.sequence_length
    sequence_length: Length | None = None


class EarlyStopSection(Section):
    """When a run ends before its last step: if evaluations do not lower the held-out loss any more."""

    patience: Count  # number of evaluations in a row that do not lower it
    min_delta: NotNegative = 0.0  # nats a token; a smaller fall of the loss counts as none


class SpikeSection(Section):
    """What happens if the loss of a step rises far above those before it. All ranks do the same."""

    # a loss above this many times the median of the last ones is a spike
    factor: Annotated[float, Field(gt=1)] = 3.0
    # losses in the median, of steps that changed the weights; before there are so many no step is a spike
    window: Annotated[int, Field(ge=2, le=10_000)] = 100
    # skip: the step is left out, and ten in a row end the run; rewind: weights and optimizer go back to the
    # last checkpoint, and the run goes on with the rows after the step's, without the rows since that
    # checkpoint. Before the first checkpoint the step is skipped
    then: Literal["skip", "rewind"] = "skip"


class TrainSection(Section, RoutingOptions, LayerOptions):
    """How many steps, of how many rows, and what is checked, logged and saved."""

    # in all: those before a --resume count; null: those of `epochs`, or 100 without them
    steps: Count | None = None
    # in place of steps: how often the rows are trained on, such as 3 or 0.5; packed rows count as one. In a
    # mixture an epoch has as many rows as its sources together. The run shows the steps when it begins
    epochs: Annotated[Positive, at_most(10**6)] | None = None
    batch_size: Count = 8  # rows a step, over all microbatches; with data.kind=preference, pairs
    # of preferences, with data.kind=preference or unpaired; distillation; null: of next tokens
    loss: LossValue = None
    # The dtype of the computation, on any mesh. mixed: weights, gradients and the optimizer's states in
    # float32, and products in bfloat16, by torch.autocast; null: model.dtype
    precision: Literal["float32", "bfloat16", "mixed"] | None = None
    # pipeline calls a step, each with its part of the rows in pipeline.microbatches microbatches. The
    # gradients are those of one call with all rows, and the memory is that of one call with its part
    accumulate: Count = 1
    # smaller steps at the beginning, phase by phase: a ramp of the batch size, of the rows' length, or both
    ramp: Annotated[tuple[PhaseSection, ...], Field(strict=False)] = ()
    seed: Natural = 0  # of the order of the rows, and of dropout
    clip_norm: Positive | None = 1.0  # the largest norm of the gradients; null: any
    # Share of each token's target that is spread evenly over the vocabulary; evaluations have it too
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0
    z_loss: Annotated[float, Field(ge=0)] = 0.0  # factor of the squared log-sum-exp of each token's logits
    # What happens if loss or gradient norm is not finite. stop: the run ends; skip: the step is left out,
    # and ten in a row end the run. All ranks do the same
    nonfinite: Literal["stop", "skip"] = "stop"
    spike: SpikeSection | None = None  # null: no step is a spike
    evaluate_every: Count = 100  # and before the first step and after the last
    evaluate_batches: Count = 4  # at most, of batch_size rows or fewer, spread evenly over the held-out rows
    early_stop: EarlyStopSection | None = None  # null: the run does all its steps
    checkpoint_every: Count | None = None  # and at the last step; null: only then
    checkpoint_background: bool = True  # write while training goes on, from copies in host memory
    # Every so many steps each rank's state is kept in its host's memory (/dev/shm), and with several hosts in
    # another host's too: a lost process then costs at most so many steps; null: never
    memory_checkpoint_every: Count | None = None
    # seconds from SIGTERM, SIGUSR1 or Ctrl-C until a checkpoint is written and the run has ended; a second
    # signal ends it at once
    stop_seconds: Seconds = 60.0
    log_every: Count = 10  # steps to a line of a log; a terminal has a bar instead
    activation_checkpointing: CheckpointingValue = None
    compile: CompileValue = None
    activation_offloading: OffloadingValue = None
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if torch sees a GPU
    # Before the first step, compare loss and gradients of a short batch with the whole model's. auto: not on
    # resume, and only if the model fits into half of process 0's free memory; always: else refuse the run
    check: Literal["auto", "always", "off"] = "auto"
    profile: ProfileSection | None = None  # a trace of some steps; null: none
    # of a device, in the dtype of the model's products, for mfu in metrics.jsonl; null: by its data sheet, if
    # penstock knows the GPU
    peak_tflops: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def with_steps(cls, keys: Any) -> Any:
        """Fill in the default of `steps`, which a run by epochs does not have."""
        if isinstance(keys, dict) and keys.get("steps") is keys.get("epochs") is None:
            return keys | {"steps": 100}
        return keys

    @property
    def last(self) -> int:
        """The number of the run's last step; of a run by epochs, once they are counted (train/epochs.py)."""
        assert self.steps is not None
        return self.steps

    def check_keys(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"train.steps={self.steps} and train.epochs={self.epochs:g} are two lengths of the run; "
                "leave one of them out"
            )
        if self.profile is not None and self.steps is not None and self.profile.steps[1] > self.steps:
            first, last = self.profile.steps
            rule = f"profile.steps=[{first}, {last}] goes beyond steps={self.steps}, the last step of the run"
            raise ValueError(f"{rule}; profile steps up to {self.steps}")
        if self.spike is not None and self.spike.then == "rewind" and self.checkpoint_every is None:
            rule = "spike.then=rewind goes back to the last checkpoint, and checkpoint_every is not set"
            raise ValueError(f"{rule}; give checkpoint_every, or spike.then=skip")
        for before, phase in pairwise(self.ramp):
            if phase.until <= before.until:
                rule = f"ramp has a phase until step {phase.until} after one until step {before.until}"
                raise ValueError(f"{rule}; give the phases in their order, each with a later step")
        if self.memory_checkpoint_every is not None and self.check == "always":
            raise ValueError(
                "check=always compares a resumed run with the files of its checkpoint, and a checkpoint in "
                "memory has none; take check=auto, or leave memory_checkpoint_every out"
            )

    @field_validator("check", mode="before")
    @classmethod
    def off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads the bare word as false
