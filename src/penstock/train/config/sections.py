"""A whole config of `penstock train`: its sections, and the rules that hold between them.

Each section stands in a file of this folder, with the meaning of every key, its default and its limits.
docs/config.md is written from the comments next to the keys (docs/config.py).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import yaml
from pydantic import model_validator

from penstock.errors import ConfigError
from penstock.findings import as_finding
from penstock.train.adapter import AdapterKey
from penstock.train.config.data import DataSection
from penstock.train.config.loss import LOSSES
from penstock.train.config.model import ModelSection, ParallelSection, PipelineSection
from penstock.train.config.output import OutputSection
from penstock.train.config.training import TrainSection
from penstock.train.config.values import Section, only
from penstock.train.optimizers.optimizer import AdamWSection, OptimizerSection, RunFacts, check_optimizer


class _Dumper(yaml.SafeDumper):
    """Quotes text that might be read as a number: PyYAML writes YAML 1.1, in which more texts are numbers."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "'" if text[:1] in "-+.0123456789" else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)
_MOST_TOKENS = 10**12  # a step; beyond it sizes of tensors leave 64 bits
_MOST_PROCESSES = 10**6


class TrainConfig(Section):
    """One training run, resolved: every key has its value."""

    model: ModelSection
    data: DataSection
    pipeline: PipelineSection = PipelineSection()
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = AdamWSection()  # by which optimizer, and at what rate
    adapter: AdapterKey = None  # null: all weights are trained
    output: OutputSection = OutputSection()

    @model_validator(mode="before")
    @classmethod
    def weights_as_computed(cls, keys: Any) -> Any:
        """Write the dtype of the weights into `model` if only train.precision gives it."""
        if not isinstance(keys, dict):
            return keys
        model, train = keys.get("model"), keys.get("train")
        if isinstance(model, dict) and isinstance(train, dict) and train.get("precision") == "bfloat16":
            return {**keys, "model": {"dtype": "bfloat16", **model}}
        return keys

    @property
    def kept_best(self) -> int:
        """The number of best evaluations whose checkpoints stay."""
        best = self.output.keep.best
        return int(self.train.early_stop is not None) if best is None else best

    def _check_precision(self) -> None:
        dtype, precision = self.model.dtype, self.train.precision
        wanted = "float32" if precision == "mixed" else precision
        if wanted not in (None, dtype):
            raise ValueError(
                f"train.precision={precision} keeps weights in {wanted}, and model.dtype={dtype}; leave "
                "model.dtype out"
            )
        if precision == "mixed" and self.parallel.param_dtype is not None:
            raise ValueError(
                f"train.precision=mixed and parallel.param_dtype={self.parallel.param_dtype} are two ways to "
                "compute in half precision; leave param_dtype out"
            )

    @property
    def computed(self) -> str:
        """The dtype of the products."""
        if self.train.precision == "mixed":
            return "bfloat16"
        return self.parallel.param_dtype or self.model.dtype

    @property
    def counts_labels(self) -> bool:
        """Whether the loss counts the tokens that have a label: not with masks, nor for scores of rows."""
        loss = self.train.loss
        return self.data.masked_share is None and (loss is None or loss.head is None)

    def check_keys(self) -> None:
        self._check_precision()
        parts = max(self.parallel.dp_replicate * self.parallel.dp_shard, 1)  # -1: checked once known
        with as_finding():
            run = RunFacts(self.model.dtype, self.parallel.axes)
            check_optimizer(self.optimizer, run)
            check_rows(self.train.batch_size, self.pipeline.microbatches, parts, self.train.accumulate)
        self._check_loss()
        self._check_metric()
        self._check_ramp("train", "batch_size")
        self._check_ramp("data", "sequence_length")
        if self.data.images is not None:
            self._check_images()
        if self.train.steps is not None:  # epochs are counted and checked later
            self.optimizer.check_steps(self.train.steps)
        if self.train.epochs is not None and self.data.streaming is not None:
            raise ValueError(
                f"train.epochs={self.train.epochs:g} with data.streaming: a stream does not know how "
                "many rows it has; give train.steps, or leave data.streaming out"
            )
        every, kept = self.train.checkpoint_every, self.output.keep.every
        if every is not None and kept is not None and kept % every:
            raise ValueError(
                f"output.keep.every={kept} is no multiple of train.checkpoint_every={every}, so it keeps few "
                "checkpoints, or none; take a multiple"
            )
        self._check_sizes()
        if self.data.tokenizer is None and self.model.path is None:
            rule = "data.tokenizer is missing, and model.config has none"
            raise ValueError(f"{rule}; give the word bytes, or a folder with a tokenizer")

    def _check_sizes(self) -> None:
        """Raise ValueError for rows, steps or meshes of a size that does not fit, or that no run has."""
        padding, sequence = self.pipeline.padding, self.data.sequence_length
        if padding is not None and padding.length is not None and padding.length < sequence:
            rule = f"pipeline.padding.length={padding.length} is below data.sequence_length={sequence}"
            raise ValueError(f"{rule}; give no less than the longest row")
        tokens = self.train.batch_size * sequence
        if tokens > _MOST_TOKENS:
            rule = f"train.batch_size={self.train.batch_size} rows of data.sequence_length={sequence} tokens"
            raise ValueError(f"{rule} are more than {_MOST_TOKENS:,} tokens a step; give fewer")
        sizes = [self.pipeline.ranks, *self.parallel.axes.sizes.values()]
        processes = math.prod(max(size, 1) for size in sizes)  # -1: by the number of started processes
        if processes > _MOST_PROCESSES:
            rule = f"pipeline.ranks and the sizes of parallel make {processes:,} processes"
            raise ValueError(f"{rule}, and a run has {_MOST_PROCESSES:,} at most; give smaller ones")

    def _check_loss(self) -> None:
        """Raise ValueError for a loss that does not fit the data, or the settings."""
        loss, kind, labels = self.train.loss, self.data.compared, self.data.labels
        if loss is None:
            if kind is not None:
                fitting = next(name for name, keys in LOSSES.items() if keys.reads == kind)
                raise ValueError(f"data.kind={kind} without train.loss; set train.loss={fitting}, say")
            if labels != "next tokens":
                self._check_off(f"labels of {labels} (data.kind={self.data.kind})", samples=False)
            return
        named = f"train.loss={loss.kind}"
        if loss.reads != kind or labels != "next tokens":
            remedy = "leave train.loss out" + (f", or set data.kind={loss.reads}" if loss.reads else "")
            rule = f"{named} compares {loss.rows}, and data.kind={self.data.kind} has none"
            raise ValueError(f"{rule}; {remedy}")
        rows = self.train.batch_size
        fewest = min([rows, *(phase.batch_size or rows for phase in self.train.ramp)])
        if fewest < loss.least_rows:
            remedy = f"give train.batch_size and the phases of train.ramp {loss.least_rows} or more"
            raise ValueError(f"{named} with steps of {fewest} row: {loss.few} of the step; {remedy}")
        self._check_off(named, samples=loss.head is None)
        for wanted, message in loss.limits:
            only(self, wanted, message, loss=named)

    def _check_off(self, other: str, *, samples: bool) -> None:
        """Raise ValueError for settings that only the loss of next tokens has.

        other: the other loss, in words; samples: whether its model can write text
        """
        wanted: dict[str, tuple[object, ...]] = {"train.label_smoothing": (0,), "train.z_loss": (0,)}
        wanted |= {} if samples else {"output.sample_prompt": (None,)}
        only(self, wanted, "{key}={value} is not for {other}; leave it out", other=other)
        if any(phase.sequence_length for phase in self.train.ramp):
            raise ValueError(f"train.ramp with sequence_length is not for {other}; leave it out")

    def _check_metric(self) -> None:
        """Raise ValueError for a metric of output.keep that no evaluation has, or that nothing reads."""
        metric, loss = self.output.keep.metric, self.train.loss
        if metric == "held_out_loss":
            return
        own = [f"held_out_{name}" for name in ((self.data.accuracy,) if loss is None else loss.metrics)]
        if metric not in own:
            has = f"the loss of {self.data.labels}" if loss is None else f"train.loss={loss.kind}"
            has += f" has {' and '.join(own) or 'held_out_loss'}"
            raise ValueError(f"output.keep.metric={metric} is of another loss: {has}; take one of these")
        if not self.kept_best:
            raise ValueError(f"output.keep.metric={metric} without output.keep.best; set best to 1 or more")

    def _check_images(self) -> None:
        """Raise ValueError for settings that would cut rows, and with them images."""
        if any(phase.sequence_length for phase in self.train.ramp):
            rule = "train.ramp with sequence_length cuts rows, and data.images has images in them"
            raise ValueError(f"{rule}; give a ramp of batch_size alone")
        rule = "{key}={value} splits rows or matrices, and towers need whole images"
        remedy = "take parallel.dp_shard, or leave data.images out"
        only(self, {"parallel.cp": (1,), "parallel.tp": (1,)}, f"{rule}; {remedy}")

    def _check_ramp(self, section: str, key: str) -> None:
        """Raise ValueError if the sizes of the phases do not grow up to the full one, in `section`."""
        full: int = getattr(getattr(self, section), key)
        for size, following in pairwise([*(getattr(phase, key) or full for phase in self.train.ramp), full]):
            if size > following:
                reached = f"and {section}.{key}={full} is reached last"
                rule = f"train.ramp has {key}={size} before {following}, {reached}"
                raise ValueError(f"{rule}; give sizes that grow up to it")

    def to_yaml(self) -> str:
        """The whole config as YAML, with every default."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def check_rows(rows: int, microbatches: int, parts: int, calls: int = 1) -> None:
    """Raise ConfigError unless each of `parts` pipelines has a row for each microbatch of its calls."""
    needed = microbatches * calls * parts
    if rows >= needed:
        return
    rule = f"its rows cannot be split into pipeline.microbatches={microbatches}"
    rule += f" in each of train.accumulate={calls} calls" if calls > 1 else ""
    remedy = "Give each microbatch at least one row"
    if parts > 1:
        rule += f" for each of {parts} parts (parallel.dp_replicate x parallel.dp_shard)"
        remedy = f"Give {needed} rows or more"
        if rows >= parts * calls:
            remedy += f", or pipeline.microbatches={rows // parts // calls} or fewer"
    raise ConfigError(f"train.batch_size={rows}", rule, remedy)
