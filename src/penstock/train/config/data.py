"""The section `data`: which texts, chats or tokens a run reads, and how they become rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from penstock.options import Count, Natural, NotNegative, Patterns, SmallNatural
from penstock.train.config.values import Length, PathText, Section, only

LabelsOf = Literal["next tokens", "tokens", "rows", "masked tokens"]


class DataKind(NamedTuple):
    """What a kind of data means for a run.

    row: where a loss compares rows, what one is
    pairs: whether such a row is two rows of a batch
    labels: what labels are of
    several: whether a record has several fields, and not a text alone
    messages: whether they may be messages, which a chat template writes
    defaults: of keys of the section
    """

    row: str = ""
    pairs: bool = False
    labels: LabelsOf = "next tokens"
    several: bool = True
    messages: bool = False
    defaults: Mapping[str, object] = {}


_WHOLE = {"packing": "none", "overlong": "truncate"}
_WORDS = _WHOLE | {"text_field": "words", "label_field": "labels"}
# other kinds say how files are read, and their records are texts or tokens
KINDS = {
    "chat": DataKind(messages=True, defaults=_WHOLE),
    "tokens": DataKind(),
    "preference": DataKind("a pair is two whole completions", pairs=True, messages=True, defaults=_WHOLE),
    "unpaired": DataKind("a row is one whole completion", messages=True, defaults=_WHOLE),
    "pair": DataKind("a pair is two whole texts", pairs=True, defaults=_WHOLE),
    "classification": DataKind(labels="rows", defaults=_WHOLE),
    "token_classification": DataKind(labels="tokens", defaults=_WORDS),
    "masked": DataKind(labels="masked tokens", several=False),
}


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
    # such a head. pair: two texts that belong together, such as anchor and positive, from such files, for
    # train.loss=contrastive. masked: texts by the file as auto, for a masked language model. dummy: made up
    kind: Literal[
        "auto", "text", "jsonl", "parquet", "dataset", "chat", "tokens", "preference", "unpaired",
        "classification", "token_classification", "pair", "masked", "megatron", "dummy",
    ] = "auto"  # fmt: skip
    dummy: DummySection | None = None  # only with kind: dummy
    # the field of the text in a JSONL line or a dataset's row. Its default is words with kind:
    # token_classification
    text_field: str = "text"
    # the field of the label, with kind: classification or unpaired. Its default is labels with
    # token_classification
    label_field: str = "label"
    # How a record holds a chat. messages: a list of roles and contents; prompt: prompt and completion, texts
    # or messages; instruction: instruction, input and output; auto: by the fields it has
    chat_form: Literal["auto", "messages", "prompt", "instruction"] = "auto"
    messages_field: str | None = None  # the field of the messages; null: messages or conversations
    # Of chats and tokens: fields of a record, or of a message, that are not to be read, as [id, source]. Any
    # other field that has no meaning here is refused
    ignored_fields: Patterns = ()
    # with kind: pair: of anchor and positive, as [anchor, positive]; null: by their names, which may also be
    # query or question, and answer or document
    pair_fields: Annotated[tuple[str, str], Field(strict=False)] | None = None
    columns: ColumnsSection | None = None  # with kind: chat: the fields of prompt and completion
    include: Patterns = ("*",)  # of a folder: files whose names match one of these patterns
    exclude: Patterns = ()  # of a folder: names of files and folders to leave out

    def check_keys(self) -> None:
        super().check_keys()
        if self.pair_fields is not None and self.kind != "pair":
            rule = f"pair_fields name an anchor and its positive, and kind={self.kind} has none"
            raise ValueError(f"{rule}; set kind=pair, or leave pair_fields out")
        if self.columns is None:
            return
        rule = "columns name the fields of a prompt and its completion, and {key}={value} another form of a "
        rule += "record"
        only(self, {"kind": ("chat",)}, f"{rule}; set kind=chat, or leave columns out")
        forms = {"chat_form": ("auto",), "messages_field": (None,)}
        only(self, forms, f"{rule}; leave {{key}} out, or leave columns out")


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

    key: ClassVar[str] = "data.path"  # of the path, for errors
    path: PathText  # a local file or folder; with split also a name of the Hub

    @property
    def named(self) -> str:
        """The path with its key, for errors."""
        return f"{self.key}={self.path}"


class ValidationSection(SourceSection):
    """Files to evaluate on."""

    key = "data.validation.path"


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
    validation: ValidationSection | None = (
        None  # what to evaluate on; null: the end of the data, see held_out
    )
    # "bytes", a tokenizer's folder or Hub name, or none: that of model.path
    tokenizer: PathText | None = None
    chat_template: PathText | None = None  # a Jinja file; null: the tokenizer's own
    # Chats show images: the folder that their paths are relative to. A processor replaces the tokenizer
    images: PathText | None = None
    # Which tokens of a chat the loss counts. assistant: those of its turns, or of the completion; last: of
    # the last turn; all: every one
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    unanswered: Literal["refuse", "drop"] = "refuse"  # chats in which no token counts
    # with kind: masked: the probability of each token that is not special to be masked; null: 0.15. Of these
    # 80% become the mask token, 10% a random token, and 10% stay
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
        of_kind = {kind: dict(facts.defaults) for kind, facts in KINDS.items()}
        of_kind["chat"] |= {"overlong": "drop"} if keys.get("images") else {}
        of_kind["dummy"] = {"tokenizer": "bytes", "path": None if keys.get("mixture") else "dummy"}
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
        self._check_sources()
        self._check_document_length()
        if self.held_out_from is not None and self.validation is not None:
            raise ValueError(
                f"data.held_out_from={self.held_out_from} with data.validation, which is what is held out; "
                "leave one of them out"
            )
        if self.dummy is not None and all(source.kind != "dummy" for source in self.sources):
            raise ValueError(f"data.dummy with data.kind={self.kind} reads files; set data.kind=dummy")
        if self.images is not None:
            self._check_images()
        if self.streaming is not None:
            self._check_streaming()
        if self.compared is not None:
            self._check_compared(self.compared)
        if self.labels != "next tokens":
            self._check_labels()
        if self.mask_probability is not None and self.masked_share is None:
            rule = f"data.mask_probability={self.mask_probability} masks tokens, and data.kind={self.kind}"
            raise ValueError(f"{rule} none; set data.kind=masked, or leave it out")

    def _check_sources(self) -> None:
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

    def _check_document_length(self) -> None:
        length = self.document_length
        if length is not None and self.packing not in ("sequential", "best_fit"):
            raise ValueError(
                f"data.document_length={length} is for rows of several documents, and data.packing="
                f"{self.packing} makes no such rows; take sequential or best_fit, or leave it out"
            )
        if length is not None and length > self.sequence_length:
            raise ValueError(
                f"data.document_length={length} is above data.sequence_length={self.sequence_length}, the "
                "length of a row; give that or less"
            )

    @property
    def masked_share(self) -> float | None:
        """The probability with which each token of a text is masked; None where none is."""
        return (self.mask_probability or 0.15) if self.labels == "masked tokens" else None

    @property
    def has_pairs(self) -> bool:
        """Whether a row of the data is two rows of a batch."""
        return self.compared is not None and KINDS[self.compared].pairs

    @property
    def compared(self) -> str | None:
        """The kind of the data, if it is one whose rows a loss compares."""
        return next((kind for kind in self._kinds if KINDS[kind].row), None)

    @property
    def labels(self) -> LabelsOf:
        """What labels are of, and so which loss reads them."""
        own = (KINDS[kind].labels for kind in self._kinds)
        return next((labels for labels in own if labels != "next tokens"), "next tokens")

    @property
    def _kinds(self) -> list[str]:
        """The kinds of its sources that the table has."""
        kinds = {source.kind for source in self.sources}
        return [kind for kind in KINDS if kind in kinds]

    @property
    def first_label(self) -> int:
        """The first token of a document whose label may count: nothing predicts the one at 0."""
        return int(self.labels == "next tokens" and self.compared != "pair")

    @property
    def accuracy(self) -> str:
        """The name of the accuracy in metrics."""
        return "accuracy" if self.labels == "rows" or self.compared == "pair" else "token_accuracy"

    def _check_labels(self) -> None:
        kind = next(kind for kind in self._kinds if KINDS[kind].labels == self.labels)
        self._check_alone(kind, "all rows of a batch have labels of one kind")
        masked = kind == "masked"
        packings = ("none", "stream") if masked else ("none",)
        wanted: dict[str, tuple[object, ...]] = {
            "packing": packings, "streaming": (None,), "images": (None,)
        }  # fmt: skip
        row = "row has no bounds of documents" if masked else "row is one text with its labels"
        only(self, wanted, f"data.kind={kind} with data.{{key}}={{value}}: a {row}; leave {{key}} out")
        if self.overlong == "cut" and not masked:
            raise ValueError(
                f"data.kind={kind} with data.overlong=cut would part a text from its label; take truncate or "
                "drop"
            )

    def _check_alone(self, kind: str, reason: str) -> None:
        """Raise ValueError unless all sources are of this kind."""
        if odd := self._other_than(kind):
            raise ValueError(f"data.kind={kind} next to kind={odd}: {reason}; give one kind alone")

    def _other_than(self, kind: str) -> str | None:
        """The kind of a source that has another one."""
        everything = [*self.sources, *([self.validation] if self.validation else [])]
        return next((source.kind for source in everything if source.kind != kind), None)

    def _check_compared(self, kind: str) -> None:
        what = KINDS[kind].row
        self._check_alone(kind, f"a loss compares rows, and {what}")
        wanted: dict[str, tuple[object, ...]] = {
            "packing": ("none",), "loss_on": ("assistant",), "streaming": (None,), "chat_form": ("auto",),
            "messages_field": (None,),
        }  # fmt: skip
        wanted |= {"held_out_from": (None,)} if self.has_pairs else {}
        only(self, wanted, f"data.kind={kind} with data.{{key}}={{value}}: {what}; leave {{key}} out")
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
        rule = "data.images with data.{key}={value} would cut images apart"
        only(self, {"packing": ("none",)}, f"{rule}; set data.packing=none")
        only(self, {"overlong": ("drop",)}, f"{rule}; set data.overlong=drop")
        if self.streaming is not None:
            raise ValueError("data.images with data.streaming=on would cut images apart; leave it out")
        if odd := self._other_than("chat"):
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
