"""From text to token ids: a Hugging Face tokenizer, or plain bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode  # GPT-2's printable character for each byte

from penstock.errors import DataError
from penstock.models.model_folder import TOKENIZER, check_folder, code_refused, names_code, other_files
from penstock.reading import MIB, read_text
from penstock.train.data.sources import wrong
from penstock.train.encoding.templates import Rendered, TemplateProcess

Ids = npt.NDArray[np.unsignedinteger[Any]]
ChatMessages = Sequence[Mapping[str, Any]]

# ChatML, with the marks of generation around the assistant's text
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message['role'] not in ('system', 'user', 'assistant') %}
        {{- raise_exception('it knows system, user and assistant, and here is ' + message['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# a template that writes what another one has written, which ran in a process of its own
_PARTS = "penstock_parts"
_WRITTEN = (
    "{%for part in messages[0].penstock_parts%}{%if part[1]%}{%generation%}{{part[0]}}{%endgeneration%}"
    "{%else%}{{part[0]}}{%endif%}{%endfor%}"
)
_MARKERS = ("<|im_start|>", "<|im_end|>")
_LARGEST_TEMPLATE = MIB
_REMEDY = "Give a local folder with a tokenizer, or the word bytes"


class ByteTokenizer:
    """A token is a byte, its id the byte's value. separator: the id put between two documents, here byte 0"""

    separator = 0
    count = 256
    digest = "bytes"

    def encode(
        self,
        names: Sequence[str],
        documents: Sequence[bytes],
        *,
        special: bool = False,
        longest: int | None = None,
    ) -> list[Ids]:
        """The ids of each document. special: with the special tokens; longest: as for `prompt`"""
        return [np.frombuffer(document, dtype=np.uint8)[:longest] for document in documents]

    def prompt(self, text: str, longest: int | None = None) -> list[int]:
        """The ids of a text alone, with the special tokens that the tokenizer adds.

        longest: the most tokens; the text is cut to it, and the special tokens stay
        """
        return list(text.encode())[:longest]

    def words(self, words: Sequence[str], longest: int | None = None) -> tuple[list[int], list[int | None]]:
        """The ids of words as `prompt`, and the index of each token's word; None for a token of none."""
        owners: list[int | None] = []
        for index, word in enumerate(words):
            owners += [*([None] if index else []), *[index] * len(word.encode())]
        return self.prompt(" ".join(words), longest), owners[:longest]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return bytes(ids).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write files from which AutoTokenizer.from_pretrained encodes and decodes the same ids."""
        byte_level_tokenizer().save_pretrained(folder)


class HuggingFace:
    """The tokenizer in a local folder, with the interface of ByteTokenizer.

    For chats the name "bytes" is a tokenizer too: 256 bytes and the two markers of its template.

    Attributes:
        own: the transformers tokenizer
        _writer: writes chats, and is saved: the tokenizer itself, or the processor that has it
    """

    sees = False  # whether chats may show images
    _files: tuple[str, ...] = TOKENIZER

    def __init__(self, name: str, template: str | None = None, trusted: bool = False) -> None:
        self._name, self._template, self._trusted = name, template, trusted
        self.own: Any = (
            byte_level_tokenizer(chat=True)
            if name == "bytes"
            else read_folder(AutoTokenizer, name, trusted, "tokenizer", _REMEDY)
        )
        self._writer = self.own
        self._templates = TemplateProcess.of_this_process()
        if template is not None:
            self.own.chat_template = template

    def __reduce__(self) -> tuple[type[HuggingFace], tuple[str, str | None, bool]]:
        return HuggingFace, (self._name, self._template, self._trusted)

    @property
    def separator(self) -> int | None:
        """The id between two documents; None without such a token."""
        eos: int | None = self.own.eos_token_id
        return self.own.bos_token_id if eos is None else eos

    @property
    def count(self) -> int:
        """One more than the highest id; a vocabulary may have holes."""
        return 1 + int(max(self.own.get_vocab().values()))

    @cached_property
    def digest(self) -> str:
        """The digest of everything that determines its ids."""
        whole = hashlib.blake2b(str(self.own.chat_template).encode(), digest_size=16)
        if self._name != "bytes":
            folder = Path(self._name).expanduser()
            files = other_files(folder, (*self._files, "config.json"), trusted=self._trusted)
            for name, file in sorted(files.items()):
                whole.update(name.encode() + file.read_bytes())
        return whole.hexdigest()

    def encode(
        self,
        names: Sequence[str],
        documents: Sequence[bytes],
        *,
        special: bool = False,
        longest: int | None = None,
    ) -> list[Ids]:
        """The ids of each document. Raises DataError that names a wrong document.

        special: with the special tokens; longest: as for `prompt`
        """
        texts = [_text(name, document) for name, document in zip(names, documents, strict=True)]
        encoded = self.own(
            texts,
            add_special_tokens=special,
            truncation=longest is not None,
            max_length=longest,
            return_attention_mask=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.uint32) for ids in encoded["input_ids"]]

    def prompt(self, text: str, longest: int | None = None) -> list[int]:
        return list(self._cut(text, longest)["input_ids"])

    def words(self, words: Sequence[str], longest: int | None = None) -> tuple[list[int], list[int | None]]:
        cut = self._cut(list(words), longest, is_split_into_words=True)
        return list(cut["input_ids"]), list(cut.word_ids())

    def _cut(self, text: str | list[str], longest: int | None, **options: Any) -> Any:
        return self.own(text, truncation=longest is not None, max_length=longest, verbose=False, **options)

    # ---- Chats

    def resolved(self, row: Mapping[str, Any], messages: ChatMessages) -> ChatMessages:
        """The messages of a record, with their images resolved, if it may have any. Raises RecordError."""
        return messages

    @property
    def has_template(self) -> bool:
        return bool(self._writer.chat_template)

    def template(self, tools: Any = None) -> str:
        """The chat template."""
        return str(self.own.get_chat_template(None, tools))

    def chat_text(self, messages: ChatMessages, options: Mapping[str, Any]) -> str:
        """The text that the template writes. options: of the template"""
        if self._trusted:
            return str(self._writer.apply_chat_template(messages, tokenize=False, **options))
        return self._rendered(messages, options).text

    def chat_ids(self, messages: ChatMessages, options: Mapping[str, Any]) -> list[int]:
        """The ids of the text that the template writes."""
        return list(self._encoded([messages], options)["input_ids"][0])

    def chat_marked(self, messages: ChatMessages, options: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """The ids, and for each 1 if it is between the template's marks of generation, else 0."""
        encoded = self._encoded([messages], options, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"][0]), list(encoded["assistant_masks"][0])

    def _rendered(self, messages: ChatMessages, options: Mapping[str, Any]) -> Rendered:
        template = self.template(options.get("tools"))
        return self._templates.render(template, messages, {**self.own.special_tokens_map, **options})

    def _encoded(self, chats: Sequence[ChatMessages], options: Mapping[str, Any], **more: Any) -> Any:
        """The entries that the tokenizer or processor makes of chats, a list of each. more: for its call"""
        if self._trusted:  # code of the folder may run, and may be what writes its chats
            return self._applied([[*map(dict, messages)] for messages in chats], **options, **more)
        written = [
            [{**messages[0], _PARTS: self._rendered(messages, options).parts}, *map(dict, messages[1:])]
            for messages in chats
        ]
        return self._applied(written, chat_template=_WRITTEN, **more)

    def _applied(self, chats: list[list[dict[str, Any]]], **options: Any) -> Any:
        return self.own.apply_chat_template(
            chats, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.own.decode(ids))

    def save(self, folder: Path) -> None:
        self._writer.save_pretrained(folder)


Tokenizer = ByteTokenizer | HuggingFace


def open_tokenizer(
    name: str, chat: bool = False, template: str | None = None, *, trusted: bool = False
) -> Tokenizer:
    """The tokenizer that data.tokenizer names: the word ``bytes``, or a local folder.

    Args:
        chat: whether it must write chats
        template: the path of a Jinja file that replaces its chat template
        trusted: whether Python code of the folder may run

    Raises: DataError.
    """
    if name == "bytes" and not chat:
        return ByteTokenizer()
    return HuggingFace(name, read_template(template), trusted)


def read_template(template: str | None) -> str | None:
    """The chat template in this file, if one is named. Raises DataError."""
    if template is None:
        return None
    try:
        return read_text(Path(template).expanduser(), _LARGEST_TEMPLATE)
    except (OSError, UnicodeDecodeError) as error:
        rule = f"the file cannot be read ({getattr(error, 'strerror', error)})"
        raise DataError(f"data.chat_template={template}", rule, "Give a Jinja file") from None


def byte_level_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """A transformers tokenizer of 256 tokens, the bytes of UTF-8 text in the order of their values.

    chat: with the markers <|im_start|> and <|im_end|>, ids 256 and 257, and a chat template
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    if chat:
        made.add_tokens(list(_MARKERS), special_tokens=True)
        made.eos_token = _MARKERS[1]
        made.chat_template = CHAT_TEMPLATE
    return made


def read_folder(auto: Any, folder: str, trusted: bool, kind: str, remedy: str) -> Any:
    """The tokenizer or processor in a local folder. Raises DataError. auto: its Auto class; kind: in words"""
    check_folder(Path(folder), DataError)
    try:
        made = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
        getattr(made, "tokenizer", made)("a", verbose=False)  # some settings are only read now
        return made
    except Exception as error:  # transformers raises a dozen kinds for a folder without one
        if not trusted and names_code(Path(folder), auto.__name__):
            raise code_refused(f"data.tokenizer={folder}", DataError) from None
        said = next(iter(str(error).strip().splitlines()), "")
        rule = f"transformers reads no {kind} there ({type(error).__name__}: {said[:200]})"
        raise DataError(f"data.tokenizer={folder}", rule, remedy) from error


def _text(name: str, document: bytes) -> str:
    try:
        return document.decode("utf-8")
    except UnicodeDecodeError as error:
        rule = f"it is not UTF-8 text (byte {error.start} is 0x{document[error.start]:02x})"
        remedy = "Convert or exclude it, or set data.tokenizer=bytes, which reads any bytes"
        raise wrong(name, rule, remedy) from None
