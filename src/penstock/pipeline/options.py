"""The options that every pipeline has, whatever its stages are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.batch.loss import Loss, LossLike, as_loss
from penstock.batch.microbatches import Sharding, Split
from penstock.batch.padding import Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.models.activation_checkpointing import Checkpointing, checkpointing
from penstock.parallel.context.attention import Method
from penstock.parallel.expert.dispatch import Directions
from penstock.parallel.fsdp import Sharded
from penstock.parallel.mesh import Axes
from penstock.parallel.mesh_plan import MeshPlan, ParallelOptions
from penstock.parallel.world import World, WorldOptions, remaining_ranks
from penstock.pipeline.split_batch import BatchSplitter, MeshBatchSplitter
from penstock.runtime.health.agreement import flat, named
from penstock.runtime.transport.emulated import Network
from penstock.runtime.transport.groups import limit_waits
from penstock.schedule import Schedule
from penstock.schedule.choose import ScheduleLike, chosen_schedule
from penstock.schedule.order import exchanges
from penstock.schedule.recompute import Places, first_in_flight

# "inferred": from the stages themselves, before anything is sent; "exchanged": told ahead of the tensors;
# "padded", or a Padding: all microbatches of a step are made equal in length, and then inferred
Shapes = str | Padding

Parallelize = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Options:
    """What AutoPipeline and Pipeline.from_provider both take.

    ranks: -1 for all processes that are left beside the other axes, or that axis of `mesh`
    schedule: a name (then `ranks` and `microbatches` are needed), or a Schedule
    loss_fn: None for next-token cross-entropy over labels as transformers takes them (unshifted, -100
        ignored); a function of (output, microbatch) that returns the mean over the microbatch's rows; or an
        object with `weight` and `total` (penstock.batch.loss.Loss). The output is the last stage's: logits
        of a transformers model.
    mesh: a DeviceMesh whose axis `pipeline_axis` the ranks come from; None takes all processes
    device: None takes the GPU of this process, or the CPU
    timeout: seconds that a rank waits for another before it gives up
    transport: "nccl", "gloo", "local", or None for what fits; exchange: "channels", or "batched" (see
        penstock.parallel.world.WorldOptions)
    wire_dtype: what floating-point tensors travel as; None leaves them as they are. Anything narrower than
        the model's dtype changes the gradients
    network: a penstock.runtime.transport.emulated.Network to emulate, slower than what there is; for
    experiments
    sharding: how entries of a batch are cut, by name: along a dimension (0 for those not named), not at all
        (None), or by a function of (entry, number of microbatches)
    shapes: how a rank knows what comes over an edge. "inferred": by arithmetic, before anything is sent;
        "exchanged": each message tells itself, for models whose shapes hang on the data's values; "padded",
        or a Padding: all microbatches of a step are made equal in length
    activation_checkpointing: hold less of each layer, and run it again in the backward. False or True,
        "full", "selective", or a Checkpointing: every k-th layer, by op, the first n microbatches in flight,
        or as many as a memory limit asks for
    parallelize_fn: called with each stage's module, which has its values and is on its device; returns the
        module to run: the same one, altered in place (fully_shard, layer.compile(), LoRA, frozen weights),
        or one around it
    trace_folder: where each process writes a trace for Perfetto of the step so far when one fails; None
        writes none
    axes: how many ranks the mesh has beside the pipeline's (penstock.Axes); `mesh` is made then, unless it is
        given with these axes. None: the pipeline is all there is, or `mesh` has other axes that are the
        caller's own business
    sharded: how weights are spread over dp_shard x cp (penstock.Sharded)
    context: how attention goes over a sequence that is cut over cp: "ulysses", where each rank has some of
        the heads, or "ring", where keys and values go round
    sequence_parallel: whether tp shares out what lies between its matrices along the sequence as well
    overlap: whether the forward and the backward of a pair that the schedule marks (dualpipe, dualpipe_v,
        1f1b with `paired`) run side by side, in two threads, so that what one of them spends waiting for
        other ranks hides behind the other; "auto": where they hold such waits, with ep > 1. Not on a GPU, and
        not where cp or tp exchange within ops too: those exchanges have one process group for both. A pair
        runs one after the other all the same where a stage draws random numbers, is compiled, or is wrapped
        by the caller's own fully_shard, and where FSDP2 gathers weights anew or casts them. A module of one's
        own must not exchange in forwards and in backwards over one process group.
    common: whatever else has to be the same on every rank, such as learning rates, by name and nested as one
        likes; compared, as text, with all else when the ranks shake hands
    """

    ranks: int | None = None
    schedule: ScheduleLike = "1f1b"
    microbatches: int | None = None
    loss_fn: LossLike = None
    mesh: DeviceMesh | None = None
    pipeline_axis: str = "pp"
    device: torch.device | str | None = None
    timeout: float = 300.0
    transport: str | None = None
    exchange: str = "channels"
    wire_dtype: torch.dtype | None = None
    network: Network | None = None
    sharding: Sharding | None = None
    shapes: Shapes = "inferred"
    activation_checkpointing: bool | str | Checkpointing = False
    parallelize_fn: Parallelize | None = None
    trace_folder: str | Path | None = None
    axes: Axes | None = None
    sharded: Sharded = field(default_factory=Sharded)
    context: Method = "ulysses"
    sequence_parallel: bool = False
    overlap: bool | Literal["auto"] = "auto"
    common: Mapping[str, Any] | None = None

    def chosen_schedule(self) -> Schedule:
        """Raises ConfigError for a name that is none, a size that it does not take, and messages that cannot
        go as `exchange` says.
        """
        link = self.link()
        link.check()
        self.padding()
        ranks = remaining_ranks(link) if self.ranks == -1 else self.ranks
        schedule = chosen_schedule(self.schedule, ranks, self.microbatches)
        if self.exchange == "batched":
            self._check_batched(schedule)
        if self.overlap is True and not schedule.overlaps:
            raise ConfigError(
                f"overlap=True with schedule {schedule.name!r}",
                "it marks no pairs of ops to run side by side",
                "Take dualpipe_v, dualpipe or 1f1b with paired=True, or overlap='auto'",
            )
        return schedule

    def link(self) -> WorldOptions:
        """Raises ConfigError for a mesh without `pipeline_axis`."""
        mesh = None if self.mesh is None else with_pipeline_axis(self.mesh, self.pipeline_axis)
        return WorldOptions(
            mesh,
            self.device,
            self.timeout,
            self.transport,
            self.wire_dtype,
            self.exchange,
            self.network,
            self.axes,
            self.overlaps,
        )

    @property
    def overlaps(self) -> bool:
        """Whether pairs run side by side where they can. Raises ConfigError."""
        if self.overlap not in (True, False, "auto"):
            rule = "pairs run side by side or one after the other, or as fits"
            raise ConfigError(f"overlap={self.overlap!r}", rule, "Take True, False or 'auto'")
        against = self._against_overlap()
        if self.overlap is True and against is not None:
            raise ConfigError(f"overlap=True with {against[0]}", against[1], "Take overlap='auto'")
        if self.overlap == "auto":
            return against is None and self.axes is not None and self.axes.ep not in (0, 1)
        return self.overlap is True

    def _against_overlap(self) -> tuple[str, str] | None:
        """An option that leaves no pair that could run side by side, and why."""
        if self.exchange == "batched":
            rule = "what a rank exchanges between two ops is fixed for ops one after the other"
            return "exchange='batched'", rule
        if self.axes is not None and (self.axes.cp != 1 or self.axes.tp != 1):
            rule = "cp and tp exchange over one process group in forwards and in backwards"
            return str(self.axes), rule
        if self.sharded.reshard_after_forward:
            rule = "weights are gathered over one process group in forwards and in backwards"
            return "reshard_after_forward", rule
        return None

    def padding(self) -> Padding | None:
        """What `shapes` says of padding. Raises ConfigError."""
        if isinstance(self.shapes, Padding):
            return self.shapes
        if self.shapes not in ("inferred", "exchanged", "padded"):
            raise ConfigError(
                f"shapes={self.shapes!r}",
                "what comes over an edge is 'inferred', 'exchanged' or 'padded'",
                "Take 'inferred', unless shapes depend on the data's values ('exchanged')",
            )
        return Padding() if self.shapes == "padded" else None

    def checkpointing(self) -> Checkpointing | None:
        """Raises ConfigError."""
        return checkpointing(self.activation_checkpointing)

    def ways(self) -> ParallelOptions:
        """Raises ConfigError."""
        return ParallelOptions(self.sharded, self.context, self.sequence_parallel)

    def beside(self, world: World) -> MeshPlan | None:
        """What the axes make of stages; None where there are none. Collective.

        Raises WorldSizeError, ConfigError for axes in one process.
        """
        if self.axes is None:
            return None
        if world.mesh is None:
            self.axes.resolve_in_one_process(len(world.ranks))
            return None
        axes = self.axes.resolve(world.mesh["pp"].size(), world.mesh.size())

        def directions(experts: DeviceMesh) -> Directions:
            # separate groups where two threads exchange tokens at once
            made = Directions.of(experts, separate=world.transport.overlap)
            limit_waits({made.forward, made.backward}, self.timeout)
            return made

        beside = MeshPlan(world.mesh, axes, self.ways(), directions)
        limit_waits(beside.groups, self.timeout)
        return beside

    def splitter(
        self,
        beside: MeshPlan | None,
        complete: Callable[[Microbatch], Microbatch] = dict,
        counts_tokens: bool = False,
    ) -> BatchSplitter:
        """complete: adds what the model needs and can be told from a microbatch
        counts_tokens: whether the model counts each token that no mask hides, padding too
        Raises ConfigError.
        """
        padding = self.padding()
        if padding is not None and counts_tokens:
            padding = replace(padding, needs_mask=True)
        alone = BatchSplitter(self.sharding or {}, padding, complete)
        return alone if beside is None else MeshBatchSplitter.around(alone, beside)

    def loss(self) -> Loss:
        return as_loss(self.loss_fn, self.sharding or {})

    def facts(self) -> dict[str, str]:
        """What has to be the same on every rank beside schedule and model."""
        return {
            "loss": named(self.loss_fn),
            "shapes": str(self.shapes),
            "wire_dtype": str(self.wire_dtype),
            "activation_checkpointing": str(self.activation_checkpointing),
            "parallelize_fn": named(self.parallelize_fn),
            "axes' ways": str(self.ways()),
            "sharding": ", ".join(f"{name}: {_cut(how)}" for name, how in (self.sharding or {}).items())
            or "by rows",
            **flat("common", self.common or {}),
        }

    def _check_batched(self, schedule: Schedule) -> None:
        if self.shapes == "exchanged":
            raise ConfigError(
                "exchange='batched' with shapes='exchanged'",
                "what is exchanged begins at once, and a message that tells itself comes in two parts",
                "Take exchange='channels', or shapes='inferred' where they do not depend on values",
            )
        exchanges(schedule)


def _cut(how: Split) -> str:
    return named(how) if callable(how) else str(how)


def with_pipeline_axis(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The mesh, its process groups too, with `axis` under the name `pp`. Raises ConfigError."""
    names = mesh.mesh_dim_names or ()
    if axis == "pp":  # whether there is one is looked at where the ranks are
        return mesh
    if axis not in names:
        raise ConfigError(
            f"pipeline_axis={axis!r} of a mesh with the axes {names}",
            "the pipeline's ranks come from that axis",
            "Give one of its names, or name it in init_device_mesh(..., mesh_dim_names=...)",
        )
    renamed = tuple("pp" if name == axis else f"{name}_" if name == "pp" else name for name in names)
    groups = [mesh.get_group(name) for name in names]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=renamed)


def recomputed_places(schedule: Schedule, how: Checkpointing | None) -> Places:
    """The (stage, microbatch) that activation checkpointing applies to."""
    if how is None or not schedule.trains:
        return frozenset()
    return first_in_flight(schedule, how.in_flight)
