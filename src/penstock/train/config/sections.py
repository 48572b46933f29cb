"""The config file of `penstock train`: what every key means, its default and its limits.

Everything that can be wrong with a config is found here or in `preflight`, before any weight is loaded.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import yaml
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.errors import ConfigError
from penstock.parallel.fsdp import Sharded
from penstock.parallel.mesh import Axes
from penstock.schedule.choose import schedule_config
from penstock.train.config.complaints import complain
from penstock.train.config.values import (
    Beta,
    Checkpointing,
    Count,
    Fraction,
    LayersPerStage,
    Patterns,
    Positive,
    Ranks,
    Section,
)
from penstock.train.config.yaml import parse

# ---- The section `optimizer` of a config: by which optimizer the parameters are trained, and at what rate.


NotNegative = Annotated[float, Field(ge=0)]


class AdamWKeys(Section):
    """What AdamW takes, of all parameters or of those that Muon leaves."""

    learning_rate: Positive = 3e-4  # once warmed up
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # of gradients, of their squares
    eps: Positive = 1e-8  # added to the divisor, lest it be zero
    weight_decay: NotNegative = 0.1  # not on norms and biases


class AdamWSection(AdamWKeys):
    """AdamW of all parameters. Every rate rises in a line and falls along a cosine to a floor."""

    name: Literal["adamw"] = "adamw"  # it may be left out
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # in which the rate rises
    final_fraction: Fraction = 0.1  # of the learning rate, at the last step

    @model_validator(mode="before")
    @classmethod
    def without_muons(cls, given: Any) -> Any:
        return _without(given, MuonSection, cls, "are Muon's; set optimizer.name=muon, or leave them out")


class MuonSection(Section):
    """Muon of the matrices inside of layers (penstock.parallel.muon.matrices), AdamW of the rest:
    embeddings, head, norms, biases and routers. All rates rise and fall together.
    """

    name: Literal["muon"] = "muon"  # it has to be given
    learning_rate: Positive = 0.02  # of the matrices; with adjust: match_rms_adamw one such as AdamW's
    weight_decay: NotNegative = 0.1  # of the matrices
    momentum: Beta = 0.95  # of the gradients' running mean
    nesterov: bool = True  # step along the gradient and the mean together, not the mean alone
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5  # of the iteration that makes a matrix orthogonal
    # By what a matrix's rate is multiplied for its shape of (rows, columns): original: the root of
    # rows / columns where that is more than 1; match_rms_adamw: 0.2 times the root of the larger one
    adjust: Literal["original", "match_rms_adamw"] = "original"
    adamw: AdamWKeys = AdamWKeys()  # of the rest
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # in which the rates rise
    final_fraction: Fraction = 0.1  # of each learning rate, at the last step

    @model_validator(mode="before")
    @classmethod
    def without_adamws(cls, given: Any) -> Any:
        return _without(given, AdamWSection, cls, "are AdamW's; write them into optimizer.adamw")


def _without(given: Any, other: type[Section], own: type[Section], rule: str) -> Any:
    """Raises ValueError for keys that only the other optimizer's section has."""
    keys = given if isinstance(given, dict) else ()
    foreign = [key for key in keys if key in other.model_fields and key not in own.model_fields]
    if foreign:
        raise ValueError(f"with name={own.model_fields['name'].default} {' and '.join(foreign)} {rule}")
    return given


def _named(given: object) -> object:
    """Checked here, so that a wrong name is told of by name."""
    if isinstance(given, AdamWSection | MuonSection):
        return given
    if not isinstance(given, dict):
        raise ValueError(f"{given!r} is no section; write keys such as {{name: muon, learning_rate: 0.02}}")
    name = given.get("name", "adamw")
    if name not in ("adamw", "muon"):
        raise ValueError(f"name={name!r} is no optimizer of the trainer; write adamw or muon")
    return given


def _tag(given: Any) -> str:
    return "of " + str(given.get("name", "adamw") if isinstance(given, dict) else given.name)


OptimizerSection = Annotated[
    # tagged, so that what is wrong is told of the one that is named
    Annotated[AdamWSection, Tag("of adamw")] | Annotated[MuonSection, Tag("of muon")],
    Discriminator(_tag),
    BeforeValidator(_named),
]


# ---- The section `parallel` of a config: the mesh's axes beside the pipeline's own.


Dtype = Literal["float32", "bfloat16", "float16"]


class ParallelSection(Section):
    """How many processes each axis has. Under torchrun one, or pipeline.ranks, may be -1: all the rest."""

    dp_replicate: int = 1  # copies of everything below, each with its part of the batch
    dp_shard: int = 1  # processes that FSDP2 spreads a stage's weights over, each with its part of the batch
    cp: int = 1  # processes that a row is cut over
    ep: int = 1  # processes that experts are spread over, of those of dp_shard x cp
    tp: int = 1  # processes that single matrices are spread over
    context: Literal["ulysses", "ring"] = (
        "ulysses"  # cp: each process some heads; or keys and values go round
    )
    sequence_parallel: bool = False  # tp: what lies between its matrices is shared out along the row as well
    # The rest is of spread weights, as FSDP2 has it:
    param_dtype: Dtype | None = None  # what weights are gathered and computed in; null: their own
    reduce_dtype: Dtype | None = None  # what gradients are summed in; null: their own
    reshard_after_forward: bool = False  # gather weights for each backward anew: less memory, more traffic
    cpu_offload: bool = False  # weights, gradients and the optimizer's state wait in host memory

    @model_validator(mode="before")
    @classmethod
    def pipeline_is_elsewhere(cls, given: Any) -> Any:
        if isinstance(given, dict) and "pp" in given:
            raise ValueError(
                f"pp={given['pp']} is the pipeline's own axis, which has a section of its own; "
                f"write pipeline.ranks={given['pp']}"
            )
        return given

    @model_validator(mode="after")
    def sizes_are_right(self) -> Self:
        try:
            axes = self.axes
        except ConfigError as error:
            raise ValueError(f"{error.value}: {error.rule}; {error.remedy}") from error
        spread = (axes.dp_replicate, axes.dp_shard, axes.cp) != (1, 1, 1)
        given = [f"{name}={value}" for name, value in self._of_sharding.items() if value]
        if given and not spread:
            raise ValueError(
                f"{' and '.join(given)} with whole weights: it is of weights that FSDP2 holds; "
                "set dp_shard to 2 or more, or leave it out"
            )
        return self

    @property
    def axes(self) -> Axes:
        """Raises ConfigError."""
        return Axes(self.dp_replicate, self.dp_shard, self.cp, self.ep, self.tp)

    @property
    def sharded(self) -> Sharded:
        param, reduce = (name and getattr(torch, name) for name in (self.param_dtype, self.reduce_dtype))
        return Sharded(param, reduce, self.reshard_after_forward, self.cpu_offload)

    @property
    def _of_sharding(self) -> dict[str, str | bool | None]:
        return {
            "param_dtype": self.param_dtype,
            "reduce_dtype": self.reduce_dtype,
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
        }


def too_few_rows(rows: int, microbatches: int, parts: int) -> tuple[str, str] | None:
    """What is wrong with a batch of so many rows, and what to do; None where there are enough."""
    needed = microbatches * parts
    if rows >= needed:
        return None
    rule = f"train.batch_size={rows} rows cannot be split into pipeline.microbatches={microbatches}"
    if parts == 1:
        return rule, "give each microbatch at least one row"
    fewer = f", or pipeline.microbatches={rows // parts} or fewer" if rows >= parts else ""
    return (
        f"{rule} for each of {parts} parts (parallel.dp_replicate x parallel.dp_shard)",
        f"give {needed} rows or more{fewer}",
    )


class ModelSection(Section):
    """Which model. Exactly one of `path` and `config`."""

    path: str | None = None  # a local Hugging Face folder: config.json, perhaps with weights
    config: dict[str, Any] | None = None  # the same keys as config.json, model_type among them
    weights: Literal["auto", "random"] = "auto"  # auto: those of `path` where it has some
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of the weights, and computed in
    attention: str | None = None  # as in transformers: eager, sdpa, ...
    seed: Annotated[int, Field(ge=0)] = 0  # of random weights

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(f"exactly one of model.path and model.config is given, and here {given} is")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config names its model_type, e.g. model_type: qwen3")
        return self


class DataSection(Section):
    """Which text, as which tokens."""

    path: str  # a local file or folder
    kind: Literal["auto", "text", "jsonl", "dataset"] = "auto"  # text: a file, or a folder of files
    text_field: str = "text"  # of a JSONL line or a dataset's row
    include: Patterns = ("*",)  # of a folder: files whose names match one of these patterns
    exclude: Patterns = ()  # of a folder: no file below, or of, one of these names
    tokenizer: str | None = None  # "bytes", a local tokenizer's folder, or none: the one in model.path
    sequence_length: Annotated[int, Field(ge=2)] = 128  # tokens a row; the first one predicts nothing
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.01  # share of the text, its end, never trained on
    # How documents become rows. stream: end to end, cut every sequence_length tokens. The others keep
    # documents apart, and cut only those longer than a row (penstock.train.data.packing). none: a row for
    # each;
    # sequential: in order, as many as fit; best_fit: the longest first, each where it leaves the least room
    packing: Literal["stream", "none", "sequential", "best_fit"] = "stream"


class PaddingSection(Section):
    """How long rows become with pipeline.shapes=padded: as the longest of each step, if left out."""

    length: Count | None = None  # always this one
    multiple: Count = 1  # rounded up to a multiple of it
    buckets: Annotated[tuple[Count, ...], Field(strict=False)] = ()  # rounded up to one of these, ascending

    @model_validator(mode="after")
    def one_target(self) -> Self:
        if any(a >= b for a, b in pairwise(self.buckets)):
            raise ValueError(f"buckets={list(self.buckets)} are not ascending; sort them")
        if self.length is not None and self.buckets:
            raise ValueError("length is fixed, which leaves nothing to buckets; give one of the two")
        return self


class PipelineSection(Section):
    """Over how many ranks the model is cut, and where, and in which order its microbatches run."""

    ranks: Ranks = 1  # -1 under torchrun: all processes that the axes of parallel leave
    schedule: str | dict[str, Any] = "1f1b"  # a name, or {schedule: 1f1b, stages_per_rank: 2, ...}
    microbatches: Count = 4  # of a step, or of each part of its batch (section parallel)
    embedding_weight: Annotated[int, Field(ge=0)] = 1  # counts as so many layers when dealing them out
    head_weight: Annotated[int, Field(ge=0)] = 1  # the same of the head
    # Which layers go to which stage: evenly, or by one of the next five keys, or by both first and last:
    layout: str | None = None  # such as Ett|(ttt|)*2tL, see penstock.schedule.layout
    layers_per_stage: LayersPerStage = None  # a number for each stage, or one that is the most for all
    first_stage_layers: Annotated[int, Field(ge=0)] | None = None  # the rest evenly; 0: the embedding alone
    last_stage_layers: Annotated[int, Field(ge=0)] | None = None  # 0: the head alone
    modules_per_stage: Annotated[tuple[Patterns, ...], Field(strict=False)] | None = None  # by their names
    timeout_seconds: Positive = 300  # how long a rank waits for a silent peer
    # How a rank learns what comes in. inferred: from its own copy of the batch; exchanged: the sender tells
    # it; padded: as inferred, with all microbatches of a step padded to one length
    shapes: Literal["inferred", "exchanged", "padded"] = "inferred"
    padding: PaddingSection | None = None  # only with shapes: padded
    transport: Literal["auto", "gloo", "nccl", "local"] = "auto"  # auto: nccl on GPUs, local in one process
    exchange: Literal["channels", "batched"] = "channels"  # batched: torch's batch_isend_irecv
    wire_dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of floats sent; null: their own

    @field_validator("schedule", mode="before")
    @classmethod
    def known(cls, given: object) -> object:
        if not isinstance(given, str | dict):
            raise ValueError(f"a schedule is a name or a mapping, and {given!r} is neither; write 1f1b, say")
        try:
            schedule_config(given)
        except ConfigError as error:
            raise ValueError(f"{error.value}: {error.rule}; {error.remedy}") from error
        return given

    @model_validator(mode="after")
    def padding_is_asked_for(self) -> Self:
        if self.padding is not None and self.shapes != "padded":
            raise ValueError(
                f"pipeline.padding is given with pipeline.shapes={self.shapes}; set pipeline.shapes=padded"
            )
        return self


class TrainSection(Section):
    """How many steps, of how many rows, and what is done beside them."""

    steps: Count = 100  # all in all: those before a --resume count
    batch_size: Count = 8  # rows a step, over all microbatches
    seed: Annotated[int, Field(ge=0)] = 0  # order of the rows, and dropout
    clip_norm: Positive | None = 1.0  # the most that the gradients' norm may be; null: any
    # Where loss or gradient norm is not finite (the norm is known at every step, clipped or not): stop, or
    # leave the step out and go on, unless that befalls ten in a row. All ranks do the same
    nonfinite: Literal["stop", "skip"] = "stop"
    evaluate_every: Count = 100  # and before the first step and after the last
    evaluate_batches: Count = 4  # at most, of batch_size rows, spread evenly over what is held out
    checkpoint_every: Count | None = None  # and at the last step; null: only then
    checkpoint_background: bool = True  # written while training goes on, from copies in host memory
    log_every: Count = 10  # steps to a line of a log; a terminal has a bar instead
    # true or full: hold only each layer's input and run it again in the backward; selective: hold what
    # costs most to make besides; or a mapping of the keys of
    # penstock.train.config.values.CheckpointingSection
    activation_checkpointing: Checkpointing = False
    # What is run again chooses the experts that were chosen before, however nearly others are tied with them;
    # refused for a model without experts, or whose routers choose in a way that is not known
    replay_routing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where torch sees a GPU
    # Before the first step, compare loss and gradients of a short batch with the whole model's. auto: not on
    # resume, and where half of process 0's free memory holds the model; always: else the run is refused
    check: Literal["auto", "always", "off"] = "auto"

    @field_validator("check", mode="before")
    @classmethod
    def off_is_a_word(cls, given: object) -> object:
        return "off" if given is False else given  # YAML 1.1 reads the bare word as false


class KeepSection(Section):
    """Which checkpoints stay when a newer one has been written; the newest always does."""

    last: Count | None = None  # so many of the newest; null: all
    every: Count | None = None  # and for ever those of steps that it divides

    @model_validator(mode="after")
    def of_some(self) -> Self:
        if self.every is not None and self.last is None:
            raise ValueError("every is given and last is not, which keeps all; give last, 1 or more, too")
        return self


class OutputSection(Section):
    """Where the run is written, and what of it stays."""

    folder: str = "runs/train"  # of checkpoints, metrics.jsonl and timeline.svg
    keep: KeepSection = KeepSection()
    sample_prompt: str | None = None  # where given, the trained model continues it at the end
    sample_tokens: Count = 128  # by so many at most


class TrainConfig(Section):
    """One training run, resolved: every key has its value."""

    model: ModelSection
    data: DataSection
    pipeline: PipelineSection = PipelineSection()
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = AdamWSection()  # by which optimizer, and at what rate
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def fits_together(self) -> Self:
        parts = max(self.parallel.dp_replicate * self.parallel.dp_shard, 1)  # with -1: once that is known
        if few := too_few_rows(self.train.batch_size, self.pipeline.microbatches, parts):
            raise ValueError("; ".join(few))
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        if warmup > steps:
            raise ValueError(
                f"optimizer.warmup_steps={warmup} is more than train.steps={steps}; "
                "the warm-up must end within the run"
            )
        every, kept = self.train.checkpoint_every, self.output.keep.every
        if every is not None and kept is not None and kept % every:
            raise ValueError(
                f"output.keep.every={kept} is no multiple of train.checkpoint_every={every}, so that few "
                "checkpoints, or none, would be kept by it; take a multiple"
            )
        padded, sequence = self.pipeline.padding, self.data.sequence_length
        if padded is not None and padded.length is not None and padded.length < sequence:
            raise ValueError(
                f"pipeline.padding.length={padded.length} is below data.sequence_length={sequence}; "
                "give no less than the longest row"
            )
        if self.data.tokenizer is None and self.model.path is None:
            raise ValueError(
                "data.tokenizer is missing and model.config brings none; "
                "give the word bytes, or a folder with a tokenizer"
            )
        return self

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> TrainConfig:
    """The config in the YAML file `path`, with each override ``section.key=value`` put over it.

    Values of overrides are YAML. Raises ConfigError that lists everything wrong at once.
    """
    tree = _read(Path(path))
    for override in overrides:
        _apply(tree, override)
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise complain(error, TrainConfig, str(path)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"the config file cannot be read ({error.strerror})"
        raise ConfigError(f"config {path}", rule, "Give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        rule = f"it is not YAML: {' '.join(str(error).split())}"
        raise ConfigError(f"config {path}", rule, "Mend that line") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config {path}",
            f"it holds sections of keys, and here is {_kind(tree)}",
            f"Write sections like model: and data: ({', '.join(TrainConfig.model_fields)})",
        )
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(
            f"argument {override!r}",
            "what follows the config file is section.key=value",
            "Write it like train.steps=200",
        )
    try:
        value = parse(text)
    except yaml.YAMLError as error:
        rule = f"its value is not YAML: {' '.join(str(error).split())}"
        raise ConfigError(f"argument {override!r}", rule, "Quote it") from None
    for key in keys[:-1]:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            raise ConfigError(
                f"argument {override!r}", f"{key} holds {_kind(tree)} and no keys", "Name a key of a section"
            )
    tree[keys[-1]] = value


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
