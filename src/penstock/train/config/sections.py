"""The sections of a `penstock train` config: the meaning of every key, its default and its limits.

docs/config.md is written from the comments next to the keys (docs/config.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.errors import ConfigError
from penstock.models.split.partition import check_one_description
from penstock.options import (
    AxisSizes,
    Count,
    LayerOptions,
    MeshOptions,
    ModelOptions,
    Natural,
    NotNegative,
    Patterns,
    RoutingOptions,
    RunOptions,
    ShardingOptions,
    SmallNatural,
    SplitOptions,
    as_finding,
    at_most,
)
from penstock.parallel.axes import Axes
from penstock.schedule.choose import schedule_config
from penstock.train.adapter import AdapterKey
from penstock.train.config.loss import LossValue
from penstock.train.config.values import (
    CheckpointingValue,
    CompileValue,
    Dtype,
    Length,
    OffloadingValue,
    PaddingSection,
    PathText,
    Positive,
    RankCount,
    Seconds,
    Section,
)
from penstock.train.optimizers.optimizer import AdamWSection, OptimizerSection, RunFacts, check_optimizer
from penstock.train.records.trackers import TrackerSection

if TYPE_CHECKING:
    from penstock.parallel.fsdp import Sharded


class _Dumper(yaml.SafeDumper):
    """Quotes text that might be read as a number: PyYAML writes YAML 1.1, in which more texts are numbers."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "'" if text[:1] in "-+.0123456789" else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)
_MOST_TOKENS = 10**12  # a step; beyond it sizes of tensors leave 64 bits
_MOST_PROCESSES = 10**6
LabelsOf = Literal["next tokens", "tokens", "rows", "masked tokens"]
# by the kind of the data, for a model's own head
_OWN_LABELS: dict[str, LabelsOf] = {
    "classification": "rows",
    "token_classification": "tokens",
    "masked": "masked tokens",
}
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


def _split(name: str) -> str:
    if not name or set(name) & set("[]+:% "):
        raise ValueError(f"{name!r} is no split's name, such as train; for a part of one use data.held_out")
    return name


class DummySection(Section):
    """Made-up tokens, to measure with: no file is read, and no tokenizer is needed."""

    documents: Count = 1000  # how many there are
    tokens: Length | None = None  # of each; null: as long as one may be
    value: Natural | None = None  # the id of every token; null: random ids
    vocabulary: Count = 256  # of random ids: from 0 to this, which is left out
    seed: Natural = 0  # of random ids


class ColumnsSection(Section):
    """The fields of a prompt and of the completion that the loss counts, both texts without a template."""

    prompt: str  # the field of the prompt
    completion: str  # of the completion; with `choice`, of a list of them
    choice: str | None = None  # of the number of the right completion, from 0 on, also as text
    between: str = " "  # what stands between the two; it belongs to the completion


class RecordSection(Section):
    """What files hold: text, chats or tokens."""

    # auto: by the file: text, jsonl, parquet, dataset (save_to_disk, .arrow) or megatron (.bin and .idx), and
    # tokens if a record has input_ids. chat: messages, prompts with completions, or instructions, and
    # tokens: input_ids, perhaps labels; both from JSON, JSONL, Parquet or a dataset. preference: chosen and
    # rejected, perhaps prompt, from such files, for train.loss; a row of the data is a pair. unpaired: a
    # prompt, a completion and label (true or false), or such pairs, for train.loss=kto. classification: a
    # text and its label, token_classification: words and their labels, from such files, for a model with
    # such a head. masked: texts by the file as auto, for a masked language model. dummy: made up
    kind: Literal[
        "auto", "text", "jsonl", "parquet", "dataset", "chat", "tokens", "preference", "unpaired",
        "classification", "token_classification", "masked", "megatron", "dummy",
    ] = "auto"  # fmt: skip
    dummy: DummySection | None = None  # only with kind: dummy
    # of a JSONL line or a dataset's row; words with kind: token_classification
    text_field: str = "text"
    # of the label, with kind: classification or unpaired; labels with token_classification
    label_field: str = "label"
    # How a record holds a chat. messages: a list of roles and contents; prompt: prompt and completion, texts
    # or messages; instruction: instruction, input and output; auto: by the fields it has
    chat_form: Literal["auto", "messages", "prompt", "instruction"] = "auto"
    messages_field: str | None = None  # that holds the messages; null: messages or conversations
    # Of chats and tokens: fields of a record, or of a message, that are not to be read, as [id, source]. Any
    # other field that has no meaning here is refused
    ignored_fields: Patterns = ()
    columns: ColumnsSection | None = None  # with kind: chat: the fields of prompt and completion
    include: Patterns = ("*",)  # of a folder: files whose names match one of these patterns
    exclude: Patterns = ()  # of a folder: names of files and folders to leave out

    def check_keys(self) -> None:
        super().check_keys()
        if self.columns is None:
            return
        for key, wanted in (("kind", "chat"), ("chat_form", "auto"), ("messages_field", None)):
            if (value := getattr(self, key)) != wanted:
                rule = (
                    f"columns name the fields of a prompt and its completion, and {key}={value} another form"
                )
                remedy = "set kind=chat" if key == "kind" else f"leave {key} out"
                raise ValueError(f"{rule} of a record; {remedy}, or leave columns out")


class NamedSection(Section):
    """Which part of a data set that the package datasets loads by name."""

    # with a split, `path` is a name of the Hub, owner/name, or a folder that datasets can load: the split's
    # name, such as train, without a slice; null: `path` is read as it is
    split: Annotated[str, AfterValidator(_split)] | None = None
    config: str | None = None  # of a data set that has several, such as a language; only with split
    revision: str | None = None  # of the Hub: a branch, tag or commit; null: main; only with split

    def check_keys(self) -> None:
        super().check_keys()
        for key in ("config", "revision"):
            if (value := getattr(self, key)) is not None and self.split is None:
                raise ValueError(
                    f"{key}={value} is of a data set by name, which needs its split; give split, such as "
                    f"train, or leave {key} out"
                )


class SourceSection(RecordSection, NamedSection):
    """Files. Keys that are left out are those of `data`, but for split, config and revision."""

    path: PathText  # a local file or folder; with split also a name of the Hub


class MixtureSection(SourceSection):
    """Files, and how much of the batches comes from them."""

    weight: NotNegative = 1.0  # share of the rows, over the sum of all weights
    epochs: Count | None = None  # how often its rows are trained on at most; null: no limit


class StreamingSection(Section):
    """Read and tokenise while training, in the order of the files, mixed by a buffer."""

    buffer: Count = 1000  # records, from which the next one is drawn at random; 1: in the files' order


class DataSection(RecordSection, NamedSection):
    """Which text, chats or tokens, and how they become rows. One of `path` and `mixture`."""

    path: PathText | None = None  # a local file or folder; with split also a name of the Hub
    mixture: Annotated[tuple[MixtureSection, ...], Field(strict=False)] = ()  # several, by weights
    validation: SourceSection | None = None  # what to evaluate on; null: the end of the data, see held_out
    # "bytes", a tokenizer's folder or Hub name, or none: that of model.path
    tokenizer: PathText | None = None
    chat_template: PathText | None = None  # a Jinja file; null: the tokenizer's own
    # Chats show images: the folder that their paths are relative to. A processor replaces the tokenizer
    images: PathText | None = None
    # Which tokens of a chat the loss counts. assistant: those of its turns, or of the completion; last: of
    # the last turn; all: every one
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    unanswered: Literal["refuse", "drop"] = "refuse"  # chats in which no token counts
    # with kind: masked: of the tokens of a text, but for special ones; null: 0.15. Of these 80% become the
    # mask token, 10% a random token, and 10% stay
    mask_probability: Annotated[float, Field(gt=0, lt=1)] | None = None
    sequence_length: Length = 128  # tokens a row; the first one predicts nothing
    # tokens of a document, at most, if rows hold several documents and may be longer than the model's
    # positions: each document begins at position 0; null: sequence_length
    document_length: Length | None = None
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.01  # share of the text that is never trained on
    # Which documents are held out: random ones, by train.seed, or those at the end. null: random, and with
    # packing: stream, where a random row would share its documents with rows that are trained on, the end
    held_out_from: Literal["random", "end"] | None = None
    # How documents become rows. stream: end to end, cut every sequence_length tokens. The others keep
    # documents apart. none: a row for each document (the default of chats); sequential: in order, as many as
    # fit; best_fit: the longest first, each into the row where it leaves the least room
    packing: Literal["stream", "none", "sequential", "best_fit"] = "stream"
    # A document that is too long, unless packing is stream. cut: into pieces; truncate: its end is left out
    # (the default of chats); drop: all of it is (the default of chats that show images)
    overlong: Literal["cut", "truncate", "drop"] = "cut"
    streaming: StreamingSection | None = None  # null: tokenise all before training, once, into the cache
    # If the data of a resumed run is not that of its checkpoint. refuse: the run does not start; accept: its
    # steps take their rows from the data as it is now: some rows may come twice, and some never
    changed: Literal["refuse", "accept"] = "refuse"
    cache: PathText | None = None  # a folder for tokens; null: $PENSTOCK_CACHE, or ~/.cache/penstock
    workers: SmallNatural | None = None  # processes that tokenise; null: one a core if the files are large

    @model_validator(mode="before")
    @classmethod
    def with_defaults(cls, keys: Any) -> Any:
        """Fill in the defaults of a source's kind, and in each source the keys of the section."""
        if not isinstance(keys, dict):
            return keys
        mixture = keys["mixture"] if isinstance(keys.get("mixture"), list | tuple) else ()
        kinds = [source.get("kind") for source in (keys, *mixture) if isinstance(source, dict)]
        length = keys.get("document_length") or keys.get("sequence_length", 128)
        of_kind: dict[str, dict[str, object]] = {
            "chat": {"packing": "none", "overlong": "drop" if keys.get("images") else "truncate"},
            "preference": {"packing": "none", "overlong": "truncate"},
            "unpaired": {"packing": "none", "overlong": "truncate"},
            "classification": {"packing": "none", "overlong": "truncate"},
            "token_classification": {
                "packing": "none",
                "overlong": "truncate",
                "text_field": "words",
                "label_field": "labels",
            },
            "dummy": {"tokenizer": "bytes", "path": None if keys.get("mixture") else "dummy"},
        }
        for kind, defaults in of_kind.items():
            keys = defaults | keys if kind in kinds else keys
        if "dummy" in kinds and isinstance(keys.get("dummy"), dict | None):
            keys = keys | {"dummy": {"tokens": length, **(keys.get("dummy") or {})}}

        def completed(source: Any) -> Any:
            if not isinstance(source, dict):
                return source
            is_chat = source.get("kind", keys.get("kind")) == "chat"
            shared = (key for key in RecordSection.model_fields if key in keys)
            return {key: keys[key] for key in shared if is_chat or key != "columns"} | source

        of_sources = {"mixture": [completed(source) for source in mixture]} if mixture else {}
        return keys | of_sources | {"validation": completed(keys.get("validation"))}

    def check_keys(self) -> None:
        super().check_keys()
        if (self.path is None) == (not self.mixture):
            given = "neither is" if self.path is None else "both are"
            raise ValueError(
                f"one of data.path and data.mixture is needed, and here {given}; "
                "write path: FILE, or mixture: [{path: FILE, weight: 1}, ...]"
            )
        if self.mixture and not sum(source.weight for source in self.mixture):
            raise ValueError(
                "the weights of data.mixture sum to 0, so that no source gives a row; "
                "give one of them a weight above 0"
            )
        length = self.document_length
        if length is not None and self.packing not in ("sequential", "best_fit"):
            raise ValueError(
                f"data.document_length={length} is for rows of several documents, and data.packing="
                f"{self.packing} makes no such rows; take sequential or best_fit, or leave it out"
            )
        if self.held_out_from is not None and self.validation is not None:
            raise ValueError(
                f"data.held_out_from={self.held_out_from} with data.validation, which is what is held out; "
                "leave one of them out"
            )
        if length is not None and length > self.sequence_length:
            raise ValueError(
                f"data.document_length={length} is above data.sequence_length={self.sequence_length}, the "
                "length of a row; give that or less"
            )
        if self.dummy is not None and all(source.kind != "dummy" for source in self.sources):
            raise ValueError(f"data.dummy with data.kind={self.kind} reads files; set data.kind=dummy")
        if self.images is not None:
            self._check_images()
        if self.streaming is not None:
            self._check_streaming()
        if self.completions is not None:
            self._check_completions(self.completions)
        if self.labels != "next tokens":
            self._check_labels()
        if self.mask_probability is not None and self.masked_share is None:
            rule = f"data.mask_probability={self.mask_probability} masks tokens, and data.kind={self.kind}"
            raise ValueError(f"{rule} none; set data.kind=masked, or leave it out")

    @property
    def masked_share(self) -> float | None:
        """The probability with which each token of a text is masked; None where none is."""
        return (self.mask_probability or 0.15) if self.labels == "masked tokens" else None

    @property
    def has_pairs(self) -> bool:
        """Whether rows of the data are pairs, of a chosen and a rejected completion."""
        return self.completions == "preference"

    @property
    def completions(self) -> Literal["preference", "unpaired"] | None:
        """The kind of rows of whole completions that losses of preferences read; None for other rows."""
        kinds = {source.kind for source in self.sources}
        return "preference" if "preference" in kinds else "unpaired" if "unpaired" in kinds else None

    @property
    def labels(self) -> LabelsOf:
        """What labels are of, and so which loss reads them."""
        kinds = {source.kind for source in self.sources}
        return next((labels for kind, labels in _OWN_LABELS.items() if kind in kinds), "next tokens")

    @property
    def first_label(self) -> int:
        """The first token of a document whose label may count: nothing predicts the one at 0."""
        return int(self.labels == "next tokens")

    @property
    def accuracy(self) -> str:
        """The name of the accuracy in metrics."""
        return "accuracy" if self.labels == "rows" else "token_accuracy"

    def _check_labels(self) -> None:
        kind = next(kind for kind, labels in _OWN_LABELS.items() if labels == self.labels)
        self._check_alone(kind, "all rows of a batch have labels of one kind")
        masked = kind == "masked"
        packings = ("none", "stream") if masked else ("none",)
        for name, wanted in (("packing", packings), ("streaming", (None,)), ("images", (None,))):
            if (value := getattr(self, name)) not in wanted:
                row = "row has no bounds of documents" if masked else "row is one text with its labels"
                raise ValueError(f"data.kind={kind} with data.{name}={value}: a {row}; leave {name} out")
        if self.overlong == "cut" and not masked:
            raise ValueError(
                f"data.kind={kind} with data.overlong=cut would part a text from its label; take truncate or "
                "drop"
            )

    def _check_alone(self, kind: str, reason: str) -> None:
        """Raise ValueError unless all sources are of this kind."""
        everything = [*self.sources, *([self.validation] if self.validation else [])]
        if odd := next((source.kind for source in everything if source.kind != kind), None):
            raise ValueError(f"data.kind={kind} next to kind={odd}: {reason}; give one kind alone")

    def _check_completions(self, kind: Literal["preference", "unpaired"]) -> None:
        pairs = kind == "preference"
        what = "a pair is two whole completions" if pairs else "a row is one whole completion"
        self._check_alone(kind, f"a loss compares whole completions, and {what}")
        for name, wanted in (
            ("packing", "none"), ("loss_on", "assistant"), ("streaming", None), ("chat_form", "auto"),
            ("messages_field", None), *((("held_out_from", None),) if pairs else ()),
        ):  # fmt: skip
            if (value := getattr(self, name)) != wanted:
                raise ValueError(f"data.kind={kind} with data.{name}={value}: {what}; leave {name} out")
        if self.overlong == "cut":
            raise ValueError(
                f"data.kind={kind} with data.overlong=cut would compare pieces; take truncate or drop"
            )

    @property
    def holds_out_at_random(self) -> bool:
        """Whether the rows to evaluate on are random ones of the data."""
        if self.validation is not None or self.has_pairs:
            return False
        return (self.held_out_from or ("end" if self.packing == "stream" else "random")) == "random"

    @property
    def longest_document(self) -> int:
        """Tokens of a document, or of a piece of one, at most."""
        return self.document_length or self.sequence_length

    def _check_images(self) -> None:
        """An image and its tokens stay together: no row is cut, and none has two documents."""
        for name, wanted in (("packing", "none"), ("overlong", "drop")):
            if (value := getattr(self, name)) != wanted:
                rule = f"data.images with data.{name}={value} would cut images apart"
                raise ValueError(f"{rule}; set data.{name}={wanted}")
        if self.streaming is not None:
            raise ValueError("data.images with data.streaming=on would cut images apart; leave it out")
        everything = [*self.sources, *([self.validation] if self.validation else [])]
        if odd := next((source.kind for source in everything if source.kind != "chat"), None):
            raise ValueError(f"data.images needs chats, and here data.kind={odd}; set data.kind=chat")
        if self.tokenizer == "bytes":
            raise ValueError(
                "data.images with data.tokenizer=bytes, which reads no image; give a processor's folder"
            )

    def _check_streaming(self) -> None:
        if self.validation is None:
            raise ValueError("data.streaming has no end to hold out; give data.validation")
        if self.packing == "best_fit":
            raise ValueError(
                "data.packing=best_fit sorts all documents, and a stream never has all; take sequential"
            )
        if any(source.epochs for source in self.mixture):
            raise ValueError("epochs of data.mixture need the number of rows, which a stream does not know; "
                             "leave epochs out")  # fmt: skip
        if self.changed == "accept":
            raise ValueError(
                "data.changed=accept with data.streaming: a stream goes on from numbers of records, which "
                "mean nothing in other files; leave one of them out"
            )
        if any(source.kind == "megatron" for source in self.sources):
            raise ValueError("Megatron's files are tokens that are read in place; leave data.streaming out")

    @property
    def sources(self) -> tuple[MixtureSection, ...]:
        """The files to train on, `path` as a mixture of one."""
        if self.path is None:
            return self.mixture
        names = (*RecordSection.model_fields, *NamedSection.model_fields)
        keys = {name: getattr(self, name) for name in names}
        return (MixtureSection(path=self.path, **keys),)


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

    patience: Count  # so many evaluations in a row
    min_delta: NotNegative = 0.0  # nats a token; a smaller fall of the loss counts as none


class SpikeSection(Section):
    """What happens if the loss of a step rises far above those before it. All ranks do the same."""

    factor: Annotated[float, Field(gt=1)] = 3.0  # a loss above so many times the median of the last ones
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
    loss: LossValue = None  # of preferences, with data.kind=preference or unpaired; null: of next tokens
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


KeptMetric = Literal[
    "held_out_loss", "held_out_token_accuracy", "held_out_accuracy", "held_out_rewards/accuracies",
    "held_out_rewards/margins",
]  # fmt: skip


class KeepSection(Section):
    """Which checkpoints stay when a newer one has been written; the newest always does."""

    # so many of the newest; null: all of train.checkpoint_every, and without `best` all
    last: Count | None = None
    # and so many with the best evaluations: an evaluation that is one of these is saved, and the link
    # checkpoints/best names the best one; null: 1 with train.early_stop, else 0
    best: SmallNatural | None = None
    # what is best: the lowest held_out_loss, or the highest other metric of evaluations; needs `best`
    metric: KeptMetric = "held_out_loss"
    every: Count | None = None  # and for ever those whose step is a multiple of this

    def check_keys(self) -> None:
        if self.every is not None and self.last is None:
            raise ValueError("every is set and last is not, which keeps all; set last to 1 or more, too")

    def score(self, row: Mapping[str, Any]) -> float:
        """Of an evaluation, by its row of metrics.jsonl; less is better. Raises ConfigError."""
        if self.metric not in row:
            rule = "the held-out rows give no such number: margins need rows of both kinds, accuracy classes"
            remedy = "Take held_out_loss, or hold out other rows"
            raise ConfigError(f"output.keep.metric={self.metric}", rule, remedy)
        value = float(row[self.metric])
        return value if self.metric == "held_out_loss" else -value


class OutputSection(Section):
    """Where the run writes, and which of its checkpoints stay."""

    folder: PathText = "runs/train"  # of checkpoints, metrics.jsonl, run.json and timeline.svg
    keep: KeepSection = KeepSection()
    # Where else the numbers of metrics.jsonl go; a tracker that fails is dropped with a warning
    trackers: Annotated[tuple[TrackerSection, ...], Field(strict=False)] = ()
    sample_prompt: str | None = None  # the trained model continues it at the end; null: no sample
    sample_every: Count | None = None  # and after every so many steps; null: only at the end
    sample_tokens: Count = 128  # of the continuation, at most

    def check_keys(self) -> None:
        if self.sample_every is not None and self.sample_prompt is None:
            raise ValueError("sample_every is set and sample_prompt is not, which it continues; set both")

    @field_validator("trackers")
    @classmethod
    def each_once(cls, trackers: tuple[TrackerSection, ...]) -> tuple[TrackerSection, ...]:
        names = [tracker.name for tracker in trackers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{twice.pop()} is listed twice, and a run has one of each; leave one out")
        return trackers

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser()


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
        if self.data.tokenizer is None and self.model.path is None:
            rule = "data.tokenizer is missing, and model.config has none"
            raise ValueError(f"{rule}; give the word bytes, or a folder with a tokenizer")

    def _check_loss(self) -> None:
        """Raise ValueError for a loss that does not fit the data, or the settings."""
        loss, kind = self.train.loss, self.data.completions
        if loss is None:
            if kind is not None:
                fitting = "dpo" if kind == "preference" else "kto"
                raise ValueError(f"data.kind={kind} without train.loss; set train.loss={fitting}, say")
            if self.data.labels != "next tokens":
                self._check_off(f"labels of {self.data.labels} (data.kind={self.data.kind})", samples=False)
            return
        if loss.reads != kind:
            rule = f"train.loss={loss.kind} compares {loss.rows}"
            remedy = f"leave train.loss out, or set data.kind={loss.reads}"
            raise ValueError(f"{rule}, and data.kind={self.data.kind} has none; {remedy}")
        sizes = [self.train.batch_size, *(phase.batch_size or 2 for phase in self.train.ramp)]
        if loss.kind == "kto" and min(sizes) == 1:
            rule = "train.loss=kto with train.batch_size=1: its KL term pairs each prompt with the completion"
            raise ValueError(f"{rule} of another row of the step; give 2 or more")
        self._check_off(f"train.loss={loss.kind}", samples=loss.kind != "reward")
        if self.pipeline.balance == "measured" and loss.refers:
            rule = f"pipeline.balance=measured runs steps before train.loss={loss.kind} has its reference"
            raise ValueError(f"{rule}; leave balance out, or write layers_per_stage")

    def _check_off(self, other: str, *, samples: bool) -> None:
        """Raise ValueError for settings that only the loss of next tokens has.

        other: the other loss, in words; samples: whether its model can write text
        """
        for value, off in (
            (f"train.label_smoothing={self.train.label_smoothing}", not self.train.label_smoothing),
            (f"train.z_loss={self.train.z_loss}", not self.train.z_loss),
            ("train.ramp with sequence_length", not any(of.sequence_length for of in self.train.ramp)),
            ("output.sample_prompt", samples or self.output.sample_prompt is None),
        ):
            if not off:
                raise ValueError(f"{value} is not for {other}; leave it out")

    def _check_metric(self) -> None:
        """Raise ValueError for a metric of output.keep that no evaluation has, or that nothing reads."""
        metric, loss = self.output.keep.metric, self.train.loss
        if metric == "held_out_loss":
            return
        own = [f"held_out_{name}" for name in ((self.data.accuracy,) if loss is None else loss.metrics)]
        if metric not in own:
            has = f"the loss of {self.data.labels}" if loss is None else f"train.loss={loss.kind}"
            has += f" has {' and '.join(own)}"
            raise ValueError(f"output.keep.metric={metric} is of another loss: {has}; take one of these")
        if not self.kept_best:
            raise ValueError(f"output.keep.metric={metric} without output.keep.best; set best to 1 or more")

    def _check_images(self) -> None:
        """Raise ValueError for settings that would cut rows, and with them images."""
        if any(phase.sequence_length for phase in self.train.ramp):
            rule = "train.ramp with sequence_length cuts rows, and data.images has images in them"
            raise ValueError(f"{rule}; give a ramp of batch_size alone")
        for axis in ("cp", "tp"):
            if (size := getattr(self.parallel, axis)) > 1:
                rule = f"parallel.{axis}={size} splits rows or matrices, and towers need whole images"
                raise ValueError(f"{rule}; take parallel.dp_shard, or leave data.images out")

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
