"""A teacher beside the model: cut over the same ranks, it runs forward before each step and evaluation.

    rank 0     teacher 0F0 0F1 ..              model 0F0 0F1 0F2 .. 0B0
    rank 1             1F0 1F1 -> logits                 1F0 1B0 1F1 ..     the loss reads these logits

Both have the same placement, so that the logits are where the loss needs them, and none are sent. They are
exact, as those that a file would hold are not: a file has room for a few of each token's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from penstock.batch.deferred_logits import whole
from penstock.batch.distillation import TEACHER, Taught, of_counted
from penstock.batch.microbatches import split
from penstock.batch.shapes import Microbatch, logits_in
from penstock.errors import ConfigError
from penstock.models.model_folder import TOKENIZER, config_of, other_files
from penstock.models.weights.files import weight_files
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.steps.step import Step, StepPart
from penstock.train.check.before_training import Reference
from penstock.train.config.loss import DistillationSection
from penstock.train.config.sections import TrainConfig
from penstock.train.encoding.tokenizer import ByteTokenizer, HuggingFace, Tokenizer
from penstock.train.part import Run, RunPart


class Teacher(RunPart):
    """Builds the teacher for the time of the run. Collective. auto: the settings of the run's pipeline"""

    def __init__(self, run: Run, auto: AutoPipeline, loss: Taught) -> None:
        super().__init__(run)
        self._auto, self._loss = auto, loss
        self._teacher: Pipeline | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        section = self.run.config.train.loss
        assert isinstance(section, DistillationSection)
        if (copies := self.run.pipe.schedule.placement.replicas) > 1:
            rule = f"its {copies} copies of the model have a last stage each, with other microbatches"
            raise ConfigError(
                f"train.loss=distillation with {self.run.pipe.schedule.name}", rule, "Take 1f1b"
            )
        self._teacher = _settings(self._auto).build(_folder(section))
        self.run.pipe.use(Teaching(self._teacher, self._loss))
        yield
        self._teacher.close()

    def referred(self, reference: Reference) -> Reference:
        """The reference with the teacher's logits in its microbatches."""
        assert self._teacher is not None
        return replace(reference, loss=self._loss.plain(), beside=partial(_logits_beside, self._teacher))


def _logits_beside(teacher: Pipeline, microbatches: Sequence[Microbatch]) -> list[dict[str, Any]]:
    """The teacher's logits of each microbatch, on every rank. Collective."""
    taught = teacher.evaluate(microbatches, lambda output, _: whole(logits_in(output)), everywhere=True)
    return [{TEACHER: logits} for logits in taught.outputs]


class Teaching(StepPart):
    """Before a step or an evaluation, gives the loss the teacher's logits of the tokens that count."""

    def __init__(self, teacher: Pipeline, loss: Taught) -> None:
        self._teacher, self._loss = teacher, loss

    def begin(self, step: Step) -> None:
        if not step.input.scored:
            return
        count = len(step.microbatches)
        parts = split(step.batch, count, {}) if isinstance(step.batch, Mapping) else step.batch

        def collect(output: Any, number: int) -> Tensor:
            return of_counted(logits_in(output), parts[number]["labels"])

        self._loss.logits.update(self._teacher.infer(parts, collect))

    def end(self, step: Step) -> None:
        self._loss.logits.clear()

    def failed(self) -> None:
        self._loss.logits.clear()


def _settings(auto: AutoPipeline) -> AutoPipeline:
    """Those of the run, without what is of its model alone: its split, its adapter, and how it trains."""
    plain = AutoPipeline(ranks=auto.ranks, schedule=auto.schedule, microbatches=auto.microbatches)
    shared = ("dtype", "attention", "transport", "wire_dtype", "exchange", "shapes", "sequence_length",
              "autocast", "device", "timeout", "axes", "sharded", "trust_remote_code")  # fmt: skip
    return replace(plain, **{name: getattr(auto, name) for name in shared})


def _folder(section: DistillationSection) -> Path:
    return Path(section.teacher).expanduser()


def planned_teacher(config: TrainConfig, auto: AutoPipeline) -> BuildPlan | None:
    """The teacher before it is built; None without one, or where its folder is not on this machine.

    auto: the settings of the run's pipeline. Flash attention, which may be missing here, is left out.
    """
    section = config.train.loss
    if not isinstance(section, DistillationSection) or not _folder(section).is_dir():
        return None
    attention = None if "flash" in (auto.attention or "") else auto.attention
    return replace(_settings(auto), attention=attention).build_plan(_folder(section))


def check_teacher(config: TrainConfig, model: PretrainedConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError, ModelError for a teacher that has other tokens than the model. Reads no weight."""
    section = config.train.loss
    if not isinstance(section, DistillationSection):
        return
    folder, value = _folder(section), f"train.loss.teacher={section.teacher}"
    trusted = config.model.trust_remote_code
    sizes = [int(of.get_text_config().vocab_size) for of in (config_of(folder, trusted), model)]
    rule = "the loss compares the two probabilities of each token"
    remedy = "Take a teacher with the model's own tokenizer and vocab_size"
    if sizes[0] != sizes[1]:
        raise ConfigError(value, f"its vocab_size is {sizes[0]}, and the model's {sizes[1]}: {rule}", remedy)
    if not weight_files(folder):
        rule = "its folder has no weights, and a teacher of random weights teaches nothing"
        raise ConfigError(value, rule, "Give the folder of a trained model")
    if isinstance(tokenizer, ByteTokenizer) or not other_files(folder, TOKENIZER):
        return
    own, other = tokenizer.own.get_vocab(), _vocabulary(folder, trusted)
    if different := sorted(
        token for token in own.keys() | other.keys() if own.get(token) != other.get(token)
    ):
        shown = f"{different[0]!r} is {other.get(different[0])} there, and {own.get(different[0])} here"
        rule = f"its tokenizer is another one, in {len(different)} tokens ({shown}): {rule}"
        raise ConfigError(value, rule, remedy)


def _vocabulary(folder: Path, trusted: bool) -> dict[str, int]:
    vocabulary: dict[str, int] = HuggingFace(str(folder), None, trusted).own.get_vocab()
    return vocabulary
