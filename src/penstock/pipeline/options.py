"""The options of every pipeline, for all kinds of stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial, update_wrapper
from inspect import Parameter, currentframe, signature
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.batch.loss import Loss, LossLike, MeanOverRows, NextToken, as_loss, rows_per_group
from penstock.batch.microbatches import Sharding
from penstock.batch.padding import Padding
from penstock.batch.row_loss import RowLoss
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.models.activation_checkpointing import Checkpointing, checkpointing
from penstock.models.activation_offloading import Offloading, check_schedule, offloading, refusal
from penstock.models.stage import Provider
from penstock.options import LayerOptions, MeshOptions, RunOptions, described
from penstock.parallel.axes import Axes
from penstock.parallel.fsdp import Sharded
from penstock.parallel.mesh_plan import MeshPlan, ParallelOptions
from penstock.parallel.world import World, WorldOptions, remaining_ranks
from penstock.pipeline.building.compiling import (
    CompileLike,
    as_compile,
    check_compiler,
    compile_layers,
    compiled_loss,
)
from penstock.pipeline.steps.split_batch import BatchSplitter
from penstock.runtime.health.agreement import flat, named
from penstock.schedule import Schedule, verify
from penstock.schedule.choose import chosen_schedule, with_microbatches
from penstock.schedule.frozen import without_weight_gradients
from penstock.schedule.order import exchanges

Shapes = str | Padding
Parallelize = Callable[[nn.Module], nn.Module]


@described
@dataclass(frozen=True)
class Options(LayerOptions, MeshOptions, RunOptions):
    """The options of AutoPipeline and Pipeline.from_provider.

    Args:
        loss_fn: None for a transformers model's own loss, `model(**batch).loss`, if that is one over next
            tokens, tokens or rows; else next-token cross-entropy over labels (unshifted, -100
            ignored); a function of (output, microbatch), or of these and the microbatch's number in the step,
            that returns the mean over the microbatch's rows; or an object with `weight` and `total`
            (penstock.batch.loss.Loss). The output is that of the last stage: for a transformers model, its
            logits. Where rows are padded, function and object get output and microbatch without padding.
        mesh: a DeviceMesh; None takes all processes
        pipeline_axis: name of the pipeline's axis in `mesh`
        device: None takes the GPU of this process, or the CPU
        timeout: seconds that a rank waits for another before it raises an error
        autocast: torch.bfloat16 runs every forward and its loss under `torch.autocast`: products compute in
            it, weights and gradients keep their dtype. None leaves that to the caller's own region.
        network: deprecated, without an effect: slower networks are no longer emulated
        sharding: by entry of a batch, how it is split into microbatches: along a dimension (0 if not
            named), not at all (None), or by a function of (entry, number of microbatches)
        parallelize_fn: function of a stage's module, which has its values and is on its device; returns the
            module to run: the same one, changed in place (fully_shard, layer.compile(), LoRA, frozen
            weights), or one that wraps it
        trace_folder: folder in which each process writes a Perfetto trace of a step that fails; None writes
            no trace
        axes: sizes of the mesh's other axes (penstock.Axes). The build then makes the mesh, unless `mesh` has
            these axes. None: the pipeline is the only axis, or the caller handles the other axes of `mesh`.
        sharded: how FSDP2 shards weights over dp_shard x cp (penstock.Sharded)
        overlap: deprecated, without an effect: the ops of a pair run one after the other
        common: other values that must be equal on every rank, such as learning rates, by name, nested
            freely; compared as text in the handshake
    """

    wire_dtype: torch.dtype | None = None
    shapes: Shapes = "inferred"
    activation_checkpointing: bool | str | Checkpointing | None = False
    compile: CompileLike = False
    activation_offloading: bool | Offloading | None = False
    loss_fn: LossLike = None
    mesh: DeviceMesh | None = None
    pipeline_axis: str = "pp"
    device: torch.device | str | None = None
    timeout: float = 300.0
    autocast: torch.dtype | None = None
    network: object = None
    sharding: Sharding | None = None
    parallelize_fn: Parallelize | None = None
    trace_folder: str | Path | None = None
    axes: Axes | None = None
    sharded: Sharded = field(default_factory=Sharded)
    overlap: bool | Literal["auto"] | None = None
    common: Mapping[str, Any] | None = None

    @property
    def own_loss(self) -> bool:
        """Whether the loss is penstock's own, with token ids as labels."""
        return self.loss_fn is None or type(self.loss_fn) is NextToken

    def chosen_schedule(self) -> Schedule:
        """The schedule to run.

        Raises ConfigError for an unknown name, a size that the schedule does not take, an exchange that it
        cannot have, and options that do not fit the axes.
        """
        for name, kind in (("mesh", DeviceMesh), ("axes", Axes)):
            if not isinstance(value := getattr(self, name), kind | None):
                rule = f"it is a {kind.__name__}, or left out"
                raise ConfigError(f"{name}={value!r}", rule, "Give axes=penstock.Axes(dp_shard=2), say")
        if self.overlap is not None:
            rule = "AutoPipeline(overlap=) is deprecated: the ops of a pair run one after the other"
            warnings.warn(rule, DeprecationWarning, stacklevel=_level_of_user())
        if self.network is not None:
            rule = "AutoPipeline(network=) is deprecated: it emulates nothing. simulate() takes the costs"
            warnings.warn(rule, DeprecationWarning, stacklevel=_level_of_user())
        options = self.world_options()
        options.check()
        self.padding()
        self._check_chunked_loss()
        as_compile(self.compile)
        self._check_axes(self.axes or Axes())
        self._check_autocast()
        ranks = remaining_ranks(options) if self.ranks == -1 else self.ranks
        schedule = chosen_schedule(self.schedule, ranks, self.microbatches)
        if self.exchange == "batched":
            if self.shapes == "exchanged":
                raise ConfigError(
                    "exchange='batched' with shapes='exchanged'",
                    "a batched exchange starts at once, and a message that carries its shapes has two parts",
                    "Take exchange='channels', or shapes='inferred' where they do not depend on values",
                )
            exchanges(verify(schedule))
        if (offloading := self.offloading()) is not None:
            check_schedule(offloading, schedule, self.checkpointing())
            compile_options = as_compile(self.compile)
            if offloading.modules and compile_options is not None and compile_options.layers != "none":
                rule = (
                    "compile compiles whole layers, and hides the modules inside: its compiler saves tensors"
                )
                remedy = "Leave modules out, or compile the loss alone: Compile(layers='none')"
                raise refusal("modules", offloading.modules, rule, remedy)
        return schedule

    def schedules(self, chosen: Schedule, frozen: Collection[int] = ()) -> Callable[[int], Schedule]:
        """A function that makes the schedule for another number of microbatches, or raises ConfigError.

        frozen: the stages that train nothing
        """

        def make(count: int) -> Schedule:
            return without_weight_gradients(with_microbatches(self.schedule, chosen, count), frozen)

        return make

    def world_options(self) -> WorldOptions:
        """How the ranks communicate. Raises ConfigError for a mesh without `pipeline_axis`."""
        return WorldOptions(
            mesh=None if self.mesh is None else with_pipeline_axis(self.mesh, self.pipeline_axis),
            device=self.device,
            timeout=self.timeout,
            transport=self.transport,
            wire=self.wire_dtype,
            checksums=self.checksums,
            exchange="channels" if self.exchange == "auto" and self.shapes == "exchanged" else self.exchange,
            axes=self.axes,
        )

    def padding(self) -> Padding | None:
        """The padding that the option `shapes` sets. Raises ConfigError."""
        if isinstance(self.shapes, Padding):
            return self.shapes
        if self.shapes not in ("inferred", "exchanged", "padded"):
            raise ConfigError(
                f"shapes={self.shapes!r}",
                "the shapes that cross an edge are 'inferred', 'exchanged' or 'padded'",
                "Take 'inferred', unless shapes depend on the data's values ('exchanged')",
            )
        return Padding() if self.shapes == "padded" else None

    def checkpointing(self) -> Checkpointing | None:
        return checkpointing(self.activation_checkpointing)

    def offloading(self) -> Offloading | None:
        return offloading(self.activation_offloading)

    def parallel_options(self) -> ParallelOptions:
        return ParallelOptions(
            self.sharded, self.context, self.sequence_parallel, self.autocast, self.own_loss
        )

    def mesh_plan(self, world: World) -> MeshPlan | None:
        """How the other axes change stages and microbatches; None without them. Collective.

        Raises WorldSizeError, and ConfigError for axes in one process and options that do not fit the axes.
        """
        if self.axes is None:
            return None
        if world.mesh is None:
            self.axes.resolve_in_one_process(len(world.ranks))
            return None
        axes = self.axes.resolve(world.mesh["pp"].size(), world.mesh.size())
        self._check_axes(axes)
        if axes.ranks_per_stage == 1:
            return None
        return MeshPlan(world.mesh, axes, self.parallel_options(), self.timeout)

    def _check_axes(self, axes: Axes) -> None:
        """Raise ConfigError for options that do not fit; an axis of -1 passes until it is known."""
        if self.sharded != Sharded() and (axes.dp_replicate, axes.dp_shard, axes.cp) == (1, 1, 1):
            raise ConfigError(
                f"sharded={self.sharded} with the axes {axes}",
                "`sharded` needs dp_shard, dp_replicate or cp above 1; here no weight is sharded",
                "Set dp_shard to 2 or more, or leave sharded out",
            )
        if self.chunked_loss == "liger" and abs(axes.ranks_per_stage) > 1:
            rule = "Liger takes whole weights and rows, and these axes shard the head or its input"
            raise ConfigError(f"chunked_loss='liger' with the axes {axes}", rule, "Take chunked_loss=True")
        if axes.cp > 1 and isinstance(self.loss(), MeanOverRows):
            raise ConfigError(
                f"a loss_fn that is a function, with cp={axes.cp}",
                "it returns the mean over whole rows, and each rank of cp has a part of each row",
                "Give an object with `weight`, of the whole microbatch, and `total`, the sum over this "
                "rank's part (penstock.batch.loss.Loss), or leave out cp",
            )
        if axes.cp > 1 and isinstance(self.loss_fn, RowLoss):
            raise ConfigError(
                f"{self.loss_fn} with cp={axes.cp}",
                "it reads whole rows, and each rank of cp has a part of each row",
                "Leave out cp, and take dp_shard or tp",
            )

    def _check_chunked_loss(self) -> None:
        if self.chunked_loss not in (True, False, "liger"):
            rule = "large logits are computed in blocks, whole, or by Liger's kernel"
            raise ConfigError(f"chunked_loss={self.chunked_loss!r}", rule, "Take True, False or 'liger'")
        if self.chunked_loss == "liger" and not self.own_loss:
            rule = "Liger's kernel computes the next-token loss only"
            raise ConfigError("chunked_loss='liger' with a loss_fn", rule, "Leave one of them out")

    def _check_autocast(self) -> None:
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigError(
                f"autocast={self.autocast}",
                "float16 needs loss scaling, which penstock lacks, and other dtypes are not narrower",
                "Give torch.bfloat16, or None",
            )
        if self.autocast is not None and self.sharded.param_dtype is not None:
            raise ConfigError(
                f"autocast={self.autocast} with {self.sharded}",
                "both are mixed precision: autocast casts products, and FSDP2's param_dtype casts all ops",
                "Leave param_dtype out, or autocast",
            )

    def batch_splitter(
        self,
        complete: Callable[[Microbatch], Microbatch] = dict,
        check: Callable[[Microbatch], None] = lambda batch: None,
        **known: Any,
    ) -> BatchSplitter:
        """How a step's batch becomes microbatches. Raises ConfigError.

        complete: adds the entries that the model needs and a microbatch implies
        check: raises for a batch that the model does not accept
        known: fields of Padding that follow from the model
        """
        padding = self.padding()
        if padding is not None:
            padding = replace(padding, **{"unpads": not self.own_loss, **known})
        return BatchSplitter(self.sharding or {}, padding, complete, check, rows_per_group(self.loss()))

    def layer_compiler(
        self, schedule: Schedule, device: torch.device
    ) -> Callable[[Sequence[nn.Module]], None] | None:
        """A function that compiles a stage's layers; None if they are not compiled. Raises ConfigError."""
        compile_options = as_compile(self.compile)
        if compile_options is None:
            return None
        check_compiler(compile_options, device)
        return partial(compile_layers, option=compile_options, splits=bool(schedule.split))

    def loss(self) -> Loss:
        return compiled_loss(as_loss(self.loss_fn, self.sharding or {}), as_compile(self.compile))

    def facts(self) -> dict[str, str]:
        """The options that must be equal on every rank, besides schedule and model."""
        sharding = [f"{n}: {named(s) if callable(s) else s}" for n, s in (self.sharding or {}).items()]
        return {
            "loss": named(self.loss_fn) + str(getattr(self.loss_fn, "facts", "")),
            "chunked_loss": str(self.chunked_loss),
            "shapes": str(self.shapes),
            "wire_dtype": str(self.wire_dtype),
            "activation_checkpointing": str(self.activation_checkpointing),
            "compile": str(as_compile(self.compile)),
            "activation_offloading": str(self.activation_offloading),
            "parallelize_fn": named(self.parallelize_fn),
            "parallel options": str(self.parallel_options()),
            "sharding": ", ".join(sharding) or "by rows",
            **flat("common", self.common or {}),
        }


def _level_of_user() -> int:
    """The `stacklevel` of a warning that names the line of the user who called penstock.

    Python shows a DeprecationWarning only if that line is in `__main__`.
    """
    level, frame = 0, currentframe()
    while frame is not None and frame.f_globals["__name__"].split(".")[0] in ("penstock", "contextlib"):
        level, frame = level + 1, frame.f_back
    return level


def with_pipeline_axis(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The same mesh and process groups, with `axis` named `pp`. Raises ConfigError."""
    names = mesh.mesh_dim_names or ()
    if axis == "pp":  # `open_world` checks that the mesh has it
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


P = ParamSpec("P")
T = TypeVar("T")


def takes_options(
    make: Callable[P, Options],
) -> Callable[
    [Callable[[type[T], Provider, Options], T]],
    Callable[Concatenate[type[T], Provider, P], T],
]:
    """Make a method of (provider, options) take the keywords of `make` in place of `options`.

    So the options are stated once, but signature and types still name all of them. For any other keyword the
    method raises TypeError, which names a similar one, or all.
    """
    keywords = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in signature(make).parameters.values()]
    known = [option.name for option in keywords]

    def decorate(
        method: Callable[[type[T], Provider, Options], T],
    ) -> Callable[Concatenate[type[T], Provider, P], T]:
        def with_keywords(cls: type[T], provider: Provider, /, *args: P.args, **kwargs: P.kwargs) -> T:
            name = f"{cls.__name__}.{method.__name__}()"
            if args:
                raise TypeError(f"{name} takes its options by keyword, such as {known[0]}={args[0]!r}")
            for key in kwargs.keys() - set(known):
                near = get_close_matches(key, known, n=1)
                remedy = f"Did you mean {near[0]!r}?" if near else f"Its options are {', '.join(known)}"
                raise TypeError(f"{name} has no option {key!r}. {remedy}")
            return method(cls, provider, make(*args, **kwargs))

        update_wrapper(with_keywords, method)
        *leading, _ = signature(method).parameters.values()
        shown = signature(method).replace(parameters=[*leading, *keywords])
        with_keywords.__signature__ = shown  # type: ignore[attr-defined]
        return with_keywords

    return decorate
