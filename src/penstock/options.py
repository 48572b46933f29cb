"""The options that AutoPipeline and a config share, each once: its name, type, default and meaning.

    class AutoPipeline(SplitOptions, ...)              a dataclass takes them as keywords
    class PipelineSection(Section, SplitOptions)       a section of a config takes them as keys, and pydantic
                                                       checks their types

A section may narrow a type or have another default; docs/config.py takes a key's meaning from here. "Left
out" is None in Python and null in YAML. Nothing here imports torch: a config is read before torch is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from inspect import getdoc
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from penstock.findings import as_finding, shown
from penstock.reading import parse_size
from penstock.schedule.choose import ScheduleLike
from penstock.schedule.layout import read_layout

T = TypeVar("T")

# ---- types of values: Python takes what the type says, a config also what the validator says


def at_most(most: float) -> AfterValidator:
    """Refuse values that would overflow clocks, seeds and loops. The docs need not show this limit."""

    def check(value: float) -> float:
        if value > most:
            raise ValueError(f"{shown(value)} is more than any run has; give {most:,} or less")
        return value

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1), at_most(10**12)]
Natural = Annotated[int, Field(ge=0), at_most(2**63 - 1)]
SmallNatural = Annotated[int, Field(ge=0), at_most(10**4)]
NotNegative = Annotated[float, Field(ge=0)]
Patterns = Annotated[tuple[str, ...], Field(strict=False)]  # YAML knows lists only


def says(complaint: str) -> WrapValidator:
    """Refuse any other value with one complaint; pydantic gives one for each member of a union."""

    def check(value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(f"{value!r} {complaint}") from None

    return WrapValidator(check)


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, so that a value from YAML equals the same value from Python."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _readable(layout: str | Sequence[Sequence[str]] | None) -> Any:
    if layout is not None:
        with as_finding():
            read_layout(layout)
    return _frozen(layout)


def _bytes(value: object) -> object:
    """Bytes from a number, or from text with a unit, such as 8 GiB."""
    size = parse_size(value) if isinstance(value, str) else value
    if value is None:
        return None
    if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < float("inf"):
        return float(size)
    raise ValueError(f"{value!r} is no number of bytes; write 8 GiB, or 8589934592")


NamePatterns = Annotated[
    Sequence[str], says("is no list of names; write [mlp, score.*]"), AfterValidator(_frozen)
]
LayoutLike = Annotated[
    str | Sequence[Sequence[str]] | None,
    says("is no layout; write Ett|ttL, or a list of names for each stage"),
    AfterValidator(_readable),
]
LayersPerStage = Annotated[
    Count | Annotated[Sequence[Natural], Field(min_length=1)] | None,
    says("is neither a number of layers nor a list of one for each stage; write 4, or [4, 4, 3]"),
    AfterValidator(_frozen),
]
ModulesPerStage = Annotated[
    Sequence[Sequence[str]] | None,
    says("lists no names for each stage; write [[embed, layers.0], [layers.1]]"),
    AfterValidator(_frozen),
]
InFlight = Annotated[
    Natural | Annotated[tuple[Natural, ...], Field(min_length=1, strict=False)] | None,
    says("is neither a number of microbatches nor a list of one for each rank; write 2, or [2, 1, 0, 0]"),
]
CompiledLayers = Literal["auto", "whole", "products", "none"]
Bytes = Annotated[float | None, BeforeValidator(_bytes, json_schema_input_type=float | str | None)]


# ---- what an option means


def sentences(group: type) -> dict[str, str]:
    """Each option that the docstring of a class of options describes, with its meaning."""
    return dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", getdoc(group) or "", re.MULTILINE))


def described(kind: type[T]) -> type[T]:
    """Decorate a class of options: its docstring describes those that it inherits, too."""
    groups = [sentences(group) for group in reversed(kind.__mro__) if is_dataclass(group)]
    meanings = {name: meaning for group in groups for name, meaning in group.items()}
    about, _, _ = (getdoc(kind) or "").partition("\n\nArgs:")
    kind.__doc__ = "\n    ".join([f"{about}\n\nArgs:", *map(": ".join, meanings.items())])
    return kind


# ---- the options of a pipeline


@dataclass(frozen=True)
class RunOptions:
    """How many ranks a pipeline runs on, its schedule, and how it sends messages.

    Args:
        ranks: number of pipeline ranks. -1 takes all processes that the other axes leave, or all of the pp
            axis of a `mesh`
        schedule: a name, such as 1f1b, or a mapping of the name and its options, as {schedule: 1f1b,
            stages_per_rank: 2}; in Python also a Schedule, which sets `ranks` and `microbatches` itself
        microbatches: number of microbatches in a step, for each data-parallel part of its batch
        transport: gloo, nccl, or local in one process. Left out, or auto: NCCL between GPUs, shared memory
            between CPUs of one host (Linux on x86-64), else gloo
        exchange: how messages are sent. channels: one by one. batched, over NCCL only: all messages between
            two ops in one batch_isend_irecv of torch. auto: batched on NCCL where the schedule and its
            messages allow it, else channels
        wire_dtype: dtype in which floating-point tensors travel; left out, their own. A dtype narrower than
            the model's changes the gradients
        checksums: whether each tensor that goes to another stage has an xxh3 checksum, which its receiver
            compares: a bit that flips on the way is an error that names both ranks, the op and the tensor.
            Between CPUs, and in one process; tensors of a GPU are refused
        shapes: how a rank knows the shapes that cross an edge. inferred: by arithmetic. exchanged: from the
            message, for models where they depend on values. padded: as inferred, with all microbatches of a
            step padded to one length; in Python also a Padding
    """

    ranks: int | None = None
    schedule: ScheduleLike = "1f1b"
    microbatches: int | None = None
    transport: str | None = None
    exchange: Literal["auto", "channels", "batched"] = "auto"
    wire_dtype: Any = None
    checksums: bool = False
    shapes: Any = "inferred"


@dataclass(frozen=True)
class PaddingOptions:
    """The length to which rows are padded; left out, that of the longest row in the step.

    Args:
        length: always this length, and no row may be longer
        multiple: lengths are rounded up to a multiple of it, as some attention kernels want
        buckets: lengths, ascending; a step's length is rounded up to the next one, so that a run has few
            lengths. A longer row is rounded to `multiple` only
    """

    length: Count | None = None
    multiple: Count = 1
    buckets: Annotated[tuple[Count, ...], Field(strict=False)] = ()


@dataclass(frozen=True)
class SplitOptions:
    """Which layers each stage holds. Give at most one of these descriptions.

    `first_stage_layers` and `last_stage_layers` count as one, and so do `embedding_weight` and `head_weight`.
    Without any, the split makes the slowest rank as fast as possible, in multiply-adds.

    Args:
        embedding_weight: number of layers that the embedding counts as, in an even division of layers
        head_weight: number of layers that the head counts as, in an even division of layers
        layout: such as Ett|(ttt|)*2tL, or a list of Megatron's names for each stage
            (penstock.schedule.layout)
        layers_per_stage: a list of the number of layers of each stage. A single number is the maximum for
            every stage, and sets how many stages a rank has where the schedule leaves that open
        first_stage_layers: number of layers of the first stage; the others share the rest evenly
        last_stage_layers: number of layers of the last stage; the others share the rest evenly
        modules_per_stage: for each stage, a list of the names of its modules
    """

    embedding_weight: SmallNatural | None = None
    head_weight: SmallNatural | None = None
    layout: LayoutLike = None
    layers_per_stage: LayersPerStage = None
    first_stage_layers: Natural | None = None
    last_stage_layers: Natural | None = None
    modules_per_stage: ModulesPerStage = None


@dataclass(frozen=True)
class ModelOptions:
    """How a model is made of a folder, a Hub name or a config.

    Args:
        revision: branch, tag or commit of a Hub name; left out, the main branch
        load: which ranks read a folder's weights. each: every rank reads those of its stages. broadcast: of
            the ranks that host the same stages, one reads and sends to the others, for a file system that is
            slower than the network
        dtype: dtype of the weights
        attention: attention implementation, as transformers names it: eager, sdpa, ...; left out, the
            config's
        experts: how a mixture's experts are computed, as transformers names it: eager, batched_mm,
            grouped_mm, ...; left out, the config's, or grouped_mm. A model object keeps its own
        seed: seed of the initial values of weights that no file gives
        new_weights: patterns of names, such as score.*, of weights that the files lack: they get initial
            values from the seed. A missing weight that no pattern matches is an error, and so is a pattern
            that matches no missing weight
        mtp_loss_scaling_factor: builds the prediction layers (MTP) of a folder or a config, as many as its
            num_nextn_predict_layers, and multiplies the mean of their losses: 0.1 in Megatron. They are the
            last layers, and the m of a layout. A model object gets them from its class (penstock.with_mtp).
            Not with cp and tp
        trust_remote_code: whether Python code in the folders of model and tokenizer may run
    """

    revision: str | None = None
    load: Literal["each", "broadcast"] = "each"
    dtype: Any = None
    attention: str | None = None
    experts: str | None = None
    seed: Natural = 0
    new_weights: NamePatterns = ()
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class RoutingOptions:
    """What routers choose when a layer runs again.

    Args:
        replay_routing: whether a layer that runs again uses the experts that its router chose the first
            time, also where other experts nearly tie with them. Steps then also take `routed_experts`, the
            experts to use for each token, and `Pipeline.routed_experts` returns those that were used
    """

    replay_routing: bool = False


@dataclass(frozen=True)
class LayerOptions:
    """How layers and head compute, and what of their activations is kept for the backward.

    Args:
        chunked_loss: whether the next-token loss computes large logits (more than 256 MiB a microbatch in
            float32) one block of the vocabulary at a time, in the forward and again in the backward, so that
            they never exist whole; with tp, a rank's share of the logits counts. Heads that are no plain
            linear layer, and those with dp_shard, dp_replicate or cp, are not affected. liger: Liger's fused
            kernel, for logits of any size, which runs the head once; a live microbatch then holds the
            gradient of the head's weight. It needs a GPU, a plain linear head whose logits the model leaves
            as they are, and no other axes
        activation_checkpointing: keep less of each layer's forward and run it again in the backward. true or
            full: keep its input alone. selective: also keep what costs most to compute. Or a mapping; in
            Python a Checkpointing
        compile: whether torch.compile compiles each layer, and the next-token loss. layers or loss: these
            alone. Or a mapping; in Python a penstock.pipeline.Compile. Compiled code rounds in another order
            than plain code does. Not with replay_routing and quantize
        activation_offloading: keep activations in host memory between forward and backward: true, or a
            mapping that says which; in Python an Offloading
    """

    chunked_loss: Literal[True, False, "liger"] = True
    activation_checkpointing: Any = False
    compile: Any = False
    activation_offloading: Any = False


@dataclass(frozen=True)
class CheckpointingOptions:
    """Which activations are computed again in the backward: all but `save` of every `every`-th layer.

    Args:
        every: layers 0, k, 2k, ... run again, counted over the whole model, whatever the split
        save: ops whose outputs are kept all the same: the groups matmul and attention, or names of torch's
            ops such as aten.mm
        in_flight: recompute only for the first n of a rank's microbatches in flight: one number for all
            ranks, or one for each; left out, for all microbatches
        memory_limit: memory of a rank in bytes, from which the plan chooses `in_flight`; a config also takes
            text such as 8 GiB
    """

    every: Count = 1
    save: Patterns = ()
    in_flight: InFlight = None
    memory_limit: Bytes = None


@dataclass(frozen=True)
class OffloadingOptions:
    """Which activations are kept in host memory between forward and backward.

    Args:
        modules: names of modules within a layer, with * and ? for any characters: mlp, self_attn, *norm*.
            Empty: whole layers
        layers: offload only the first n layers of each stage, whose backward comes last; left out, all
        ahead: number of ops during which a copy may run. A higher number makes a rank wait less for a slow
            link, and keeps more microbatches on the device
        min_bytes: smaller tensors stay on the device
    """

    modules: NamePatterns = ()
    layers: Count | None = None
    ahead: Count = 1
    min_bytes: Natural = 2**20


@dataclass(frozen=True)
class CompileOptions:
    """What torch.compile compiles, and how.

    Args:
        layers: whole: each layer as one graph. products: around its products, so that split backwards defer
            their weight gradients. auto: around products where the schedule splits backwards and the layer
            allows it, else whole. none: no layer
        loss: whether the next-token loss of whole logits is compiled. A loss_fn of your own stays as it is,
            and so do large logits, which `chunked_loss` never makes whole, and logits that tp shards
        backend: as torch.compile takes it: inductor, aot_eager, cudagraphs, ...
        mode: as torch.compile takes it: default, reduce-overhead, max-autotune, ...
        dynamic: whether lengths are dynamic; left out, from the second length on
    """

    layers: CompiledLayers = "auto"
    loss: bool = True
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None


# ---- the options of a mesh


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of the mesh's axes other than `pp`. One may be -1: all processes that remain.

    Args:
        dp_replicate: copies of everything below, each with its own part of the batch, whose gradients are
            summed
        dp_shard: processes that FSDP2 shards the weights of a stage over, each with its own part of the batch
        cp: processes that a sequence is split over
        ep: processes that experts are distributed over, folded onto those of dp_shard x cp
        tp: processes that single matrices are sharded over
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1


@dataclass(frozen=True)
class MeshOptions:
    """How cp and tp work.

    Args:
        context: attention over a sequence that is split over cp. ulysses: each process computes some of the
            heads. ring: processes pass keys and values on in a ring
        sequence_parallel: whether tp also shards, along the sequence, the activations between its matrices
    """

    context: Literal["ulysses", "ring"] = "ulysses"
    sequence_parallel: bool = False


@dataclass(frozen=True)
class ShardingOptions:
    """How FSDP2 shards weights.

    Args:
        param_dtype: dtype that weights are gathered and computed in; left out, their own
        reduce_dtype: dtype that gradients are summed in; left out, their own
        reshard_after_forward: free the gathered weights after each forward, and gather them again for its
            backward: less memory, one gathering per microbatch
        cpu_offload: keep shards, their gradients and the optimizer's state in host memory
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    reshard_after_forward: bool = False
    cpu_offload: bool = False
