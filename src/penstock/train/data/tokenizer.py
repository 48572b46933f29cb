"""From text to token ids: a Hugging Face tokenizer, or plain bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode  # GPT-2's printable character for each byte

from penstock.errors import DataError

Ids = npt.NDArray[np.unsignedinteger[Any]]


class Bytes:
    """A token is a byte, its id the byte's value. separator: the id put between two documents, here byte 0"""

    separator = 0

    def encode(self, names: Sequence[str], documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def prompt(self, text: str) -> list[int]:
        """The ids of a text to continue, with the special tokens that the tokenizer adds."""
        return list(text.encode())

    def save(self, folder: Path) -> None:
        """Write files from which AutoTokenizer.from_pretrained encodes and decodes the same ids."""
        byte_level_tokenizer().save_pretrained(folder)


class HuggingFace:
    """The tokenizer in a local folder, used as Bytes is. separator: None where it has no such token"""

    def __init__(self, folder: str) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises a dozen kinds for a folder without a tokenizer
            raise DataError(
                f"data.tokenizer={folder}",
                f"transformers reads no tokenizer there ({type(error).__name__})",
                "Give a local folder with a tokenizer, or the word bytes",
            ) from error
        eos, bos = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        self.separator: int | None = bos if eos is None else eos

    def encode(self, names: Sequence[str], documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without special tokens. Raises DataError that names a wrong one."""
        texts = [_text(name, document) for name, document in zip(names, documents, strict=True)]
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, dtype=np.uint32) for ids in encoded["input_ids"]]

    def prompt(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


Tokenizer = Bytes | HuggingFace


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that data.tokenizer names: the word ``bytes``, or a local folder. Raises DataError."""
    return Bytes() if name == "bytes" else HuggingFace(name)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A transformers tokenizer of 256 tokens, the bytes of UTF-8 text in the order of their values."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _text(name: str, document: bytes) -> str:
    try:
        return document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data file {name}",
            f"it is not UTF-8 text (byte {error.start} is 0x{document[error.start]:02x})",
            "Convert or exclude it, or set data.tokenizer=bytes, which reads any bytes",
        ) from None
