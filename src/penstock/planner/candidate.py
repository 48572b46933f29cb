"""A candidate: one way to run a model on a cluster, everything that the planner chooses about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

from penstock.batch.liger import Chunked
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.activation_offloading import Offloading
from penstock.parallel.axes import Axes
from penstock.parallel.context.attention import Method
from penstock.parallel.fsdp import Sharded
from penstock.parallel.mesh_plan import ParallelOptions
from penstock.planner.practice import Practice
from penstock.schedule import Schedule
from penstock.schedule.choose import build

Precision = Literal["mixed", "bfloat16", "float32"]
Recomputed = Literal["none", "selective", "full"]
GROUPS = ("matmul", "attention")  # whose outputs selective recomputation keeps

DTYPES = {"mixed": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}  # of the weights
COMPUTED = {"mixed": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}  # of products


@dataclass(frozen=True)
class Candidate:
    """One way to run a model.

    Args:
        ranks: of the pipeline
        axes: of the mesh around it, without -1
        schedule: its name; options: of the schedule, in the order of their names
        rows: of a microbatch, before cp splits them; length: tokens of a row
        microbatches: of each pipeline and step
        recomputed: what layers run again in the backward, in the microbatches of `in_flight`
        in_flight: how many microbatches in flight are recomputed, for each rank; None: all of them
        offload_ahead: activations wait in host memory, and so many ops may run during a copy; 0: they stay
        chunked_loss: as in Options: whether large logits are computed in chunks
        split: number of layers of each stage; empty: the slowest rank is as fast as possible
        precision: as train.precision
        context: attention over a sequence that cp splits
        sequence_parallel: whether tp shards activations between its matrices, too
        reshard: whether FSDP frees gathered weights after each forward
        practice: how another framework's run communicates
    """

    ranks: int = 1
    axes: Axes = field(default_factory=Axes)
    schedule: str = "1f1b"
    options: tuple[tuple[str, Any], ...] = ()
    rows: int = 1
    length: int = 4096
    microbatches: int = 1
    recomputed: Recomputed = "none"
    in_flight: tuple[int, ...] | None = None
    offload_ahead: int = 0
    chunked_loss: Chunked = True
    split: tuple[int, ...] = ()
    precision: Precision = "mixed"
    context: Method = "ulysses"
    sequence_parallel: bool = False
    reshard: bool = False
    practice: Practice = field(default_factory=Practice)

    @property
    def devices(self) -> int:
        return self.ranks * self.axes.ranks_per_stage

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.rows * self.microbatches * self.axes.batch_parts

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of a microbatch."""
        return self.rows, self.length

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 stands around the stages."""
        return max(self.axes.dp_replicate, self.axes.dp_shard, self.axes.cp) > 1

    @property
    def computed(self) -> torch.dtype:
        """The dtype of products and hidden states."""
        return COMPUTED[self.precision]

    def parallel_options(self) -> ParallelOptions:
        autocast = torch.bfloat16 if self.precision == "mixed" else None
        sharded = Sharded(reshard_after_forward=self.reshard)
        return ParallelOptions(sharded, self.context, self.sequence_parallel, autocast)

    def checkpointing(self) -> Checkpointing | None:
        if self.recomputed == "none":
            return None
        return Checkpointing(save=GROUPS if self.recomputed == "selective" else (), in_flight=self.in_flight)

    def offloading(self) -> Offloading | None:
        return Offloading(ahead=self.offload_ahead) if self.offload_ahead else None

    @property
    def saves(self) -> bool:
        """Whether anything runs again or leaves the device to save memory."""
        return self.recomputed != "none" or self.offload_ahead > 0

    @property
    def chunks(self) -> Chunked:
        """How logits are chunked: FSDP has them whole."""
        return not self.axes.uses_fsdp and self.chunked_loss

    def built(self, **more: Any) -> Schedule:
        """The schedule. more: options beside its own, such as costs. Raises ConfigError."""
        options = {**dict(self.options), **more}
        return build(self.schedule, ranks=self.ranks, microbatches=self.microbatches, **options)

    @property
    def label(self) -> str:
        """Schedule and options in a line: 1f1b stages_per_rank=2."""
        return " ".join([self.schedule, *(f"{name}={value}" for name, value in self.options)])

    @property
    def recomputation(self) -> str:
        """What runs again in the backward, and what else saves memory, in words."""
        what: str = self.recomputed
        if self.in_flight is not None:
            counts = sorted(set(self.in_flight))
            what += f", {'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} in flight"
        if self.offload_ahead:
            what += f"; offloaded, {self.offload_ahead} ahead"
        if self.reshard:
            what += "; weights gathered by layer"
        return what if self.chunked_loss else f"{what}; whole logits"

    @property
    def split_in_words(self) -> str:
        """10 x 4, 9 for stages with 10 layers four times, then 9."""
        alike = [(count, len(list(group))) for count, group in groupby(self.split)]
        return ", ".join(f"{count} x {times}" if times > 1 else str(count) for count, times in alike)

    @property
    def mesh(self) -> str:
        """pp=8 x dp_shard=2 x tp=4."""
        others = "" if self.axes == Axes() else f" x {self.axes}"
        return f"pp={self.ranks}{others}"
