"""The sections `model`, `pipeline` and `parallel`: which model, and which processes hold its parts."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from penstock.findings import as_finding
from penstock.models.split.partition import check_one_description
from penstock.options import (
    AxisSizes,
    Count,
    MeshOptions,
    ModelOptions,
    RunOptions,
    ShardingOptions,
    SplitOptions,
)
from penstock.parallel.axes import Axes
from penstock.schedule.choose import schedule_config
from penstock.train.config.values import Dtype, PaddingSection, PathText, RankCount, Seconds, Section

if TYPE_CHECKING:
    from penstock.parallel.fsdp import Sharded

PLANNED = "planned"  # in place of a schedule: penstock.train.planned


class ModelSection(Section, ModelOptions):
    """Which model. Exactly one of `path` and `config`."""

    # a local Hugging Face folder: config.json, perhaps with weights; or a name of the Hub, Qwen/Qwen3-8B
    path: PathText | None = None
    # of a Hub name: the commit of the revision when the run began. The run records it, and a resume reads it
    # there; leave it out
    commit: str | None = None
    config: dict[str, Any] | None = None  # the same keys as config.json, model_type among them
    weights: Literal["auto", "random"] = "auto"  # auto: those of `path`, if it has some
    # of the weights; if left out, that of train.precision: bfloat16, or float32
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"

    def check_keys(self) -> None:
        if (self.path is None) == (self.config is None):
            given = "neither is" if self.path is None else "both are"
            raise ValueError(f"exactly one of model.path and model.config is needed, and here {given}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config names its model_type, e.g. model_type: qwen3")
        if self.config is not None and (self.revision or self.commit) is not None:
            raise ValueError(
                "model.revision and model.commit are of a Hub name, and model.config is none; leave them out"
            )


class PipelineSection(Section, SplitOptions, RunOptions):
    """Over how many ranks the model is split, and where, and in which order its microbatches run.

    One key at most describes which layers each stage holds, or both weights do, or both first and last.
    By default, the split makes the slowest rank as fast as possible, by multiply-adds.
    """

    ranks: RankCount = 1
    # a name, such as 1f1b, or a mapping of the name and its options, as {schedule: 1f1b, stages_per_rank: 2};
    # planned: when the run starts, the planner chooses schedule, split and recomputation for the mesh
    schedule: str | dict[str, Any] = "1f1b"
    microbatches: Count = 4
    # measured: layers go to stages by their measured times, over a few steps before the run
    balance: Literal["measured"] | None = None
    timeout_seconds: Seconds = 300  # how long a rank waits for a silent peer
    shapes: Literal["inferred", "exchanged", "padded"] = "inferred"
    padding: PaddingSection | None = None  # only with shapes: padded
    transport: Literal["auto", "gloo", "nccl", "local"] = "auto"
    wire_dtype: Dtype | None = None

    @field_validator("schedule", mode="before")
    @classmethod
    def known(cls, schedule: object) -> object:
        if not isinstance(schedule, str | dict):
            raise ValueError(
                f"a schedule is a name or a mapping, and {schedule!r} is neither; write a name such as 1f1b"
            )
        if schedule != PLANNED:
            with as_finding():
                schedule_config(schedule)
        return schedule

    def check_keys(self) -> None:
        with as_finding():
            check_one_description(self, balance=self.balance)
        if self.padding is not None and self.shapes != "padded":
            raise ValueError(
                f"pipeline.padding is set with pipeline.shapes={self.shapes}; set pipeline.shapes=padded"
            )


class ParallelSection(Section, ShardingOptions, MeshOptions, AxisSizes):
    """How many processes each axis has. Under torchrun one, or pipeline.ranks, may be -1: all the rest."""

    param_dtype: Dtype | None = None  # deprecated, see train.precision: the dtype of all computation
    reduce_dtype: Dtype | None = None

    def check_keys(self) -> None:
        with as_finding():
            axes = self.axes
        names = [key.name for key in fields(ShardingOptions)]
        options = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        if options and (axes.dp_replicate, axes.dp_shard, axes.cp) == (1, 1, 1):
            rule = "configures the weights that FSDP2 shards, and here no weight is sharded"
            raise ValueError(f"{' and '.join(options)} {rule}; set dp_shard to 2 or more, or leave it out")

    @property
    def axes(self) -> Axes:
        """Raises ConfigError."""
        return Axes(**{name: getattr(self, name) for name in Axes().sizes})

    @property
    def sharded(self) -> Sharded:
        import torch  # a config with an error is refused without it

        from penstock.parallel.fsdp import Sharded

        param, reduce = (name and getattr(torch, name) for name in (self.param_dtype, self.reduce_dtype))
        return Sharded(param, reduce, self.reshard_after_forward, self.cpu_offload)
