"""Chats that show images: a processor of transformers in place of the tokenizer.

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "red.png"},
                                               {"type": "text", "text": "Which colour?"}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "Red."}]}]}

The processor writes as many image tokens for an image as the model's tower makes of it. It runs twice: once
for the ids, which are stored as those of any chat, and again for each microbatch, to make the pixel entries
of its images. The second run must give the same ids, from files with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel

from penstock.errors import DataError
from penstock.models.model_folder import OTHERS, TOKENIZER
from penstock.models.tracing.towers import encodes
from penstock.reading import MIB, read_bytes, size
from penstock.train.data.rows import Piece
from penstock.train.data.sources import RecordError, blaming, need
from penstock.train.encoding.templates import TemplateProcess
from penstock.train.encoding.tokenizer import ChatMessages, HuggingFace, read_folder

_LARGEST = 64 * MIB  # of an image's file
_PATHS = ("path", "image", "url")  # the names under which a message gives an image's file
_REMEDY = "Give a local folder with a processor, or leave data.images out"
_OURS = ("input_ids", "attention_mask", "labels")  # entries that the rows have already


class Processor(HuggingFace):
    """The processor in a local folder. `own` is its tokenizer.

    Args:
        template: a chat template in place of the folder's
        images: the folder that paths of images are relative to
        trusted: whether Python code of the folder may run

    Raises: DataError for a folder without a processor of images, and if Pillow is missing.
    """

    sees = True
    _files = (*TOKENIZER, *OTHERS)

    def __init__(self, name: str, template: str | None, images: str, trusted: bool = False) -> None:
        self._name, self._template, self._trusted = name, template, trusted
        self._images, self._templates = str(Path(images).expanduser()), TemplateProcess.of_this_process()
        need("PIL.Image", "data.images", "images are read with Pillow", "images")
        self.processor = self._writer = read_folder(AutoProcessor, name, trusted, "processor", _REMEDY)
        if not hasattr(self.processor, "tokenizer") or not hasattr(self.processor, "image_processor"):
            kind = type(self.processor).__name__
            rule = f"data.images needs a processor of images and text, and here is a {kind}"
            raise DataError(f"data.tokenizer={name}", rule, _REMEDY)
        self.own = self.processor.tokenizer
        token = getattr(self.processor, "image_token", None)
        self._token = None if token is None else str(token)
        # the id of image tokens
        self.image_token: int | None = self.own.convert_tokens_to_ids(self._token) if self._token else None
        if template is not None:
            self.processor.chat_template = self.own.chat_template = template

    def __reduce__(self) -> Any:
        return Processor, (self._name, self._template, self._images, self._trusted)

    @cached_property
    def digest(self) -> str:
        """The tokenizer's digest with the folder of the images, to which their paths are relative."""
        return f"{super().digest} {Path(self._images).absolute()}"

    def check_fits(self, model: PreTrainedModel) -> None:
        """Raise DataError if the model takes no images, or has another id for image tokens."""
        value = f"data.tokenizer={self._name}"
        theirs = getattr(model.config, "image_token_id", None) if "image" in encodes(model) else None
        if theirs is None:
            rule = f"it makes images for a model, and {type(model).__name__} takes none"
            raise DataError(value, rule, "Take a vision-language model, or leave data.images out")
        ours = self.image_token
        if ours != theirs:
            rule = f"its token of images, {self._token!r}, is {ours}, and the model's is {theirs}"
            raise DataError(value, rule, "Take the processor in the model's own folder")

    # ---- Chats

    def template(self, tools: Any = None) -> str:
        return str(self.processor.chat_template)

    def resolved(self, row: Mapping[str, Any], messages: ChatMessages) -> ChatMessages:
        """The messages, in which each image has the path of its file and a digest of its bytes."""
        listed = row.get("images") or []
        if not isinstance(listed, list):
            rule = f"images lists files, and here is a {type(listed).__name__}"
            raise RecordError(rule, 'Write ["NAME.png"]')
        left = [*listed]
        resolved = [{**message, "content": self._content(message.get("content"), left)}
                    for message in messages]  # fmt: skip
        if left:
            rule = f"{len(left)} of its images stand in no message, first {left[0]!r}"
            raise RecordError(rule, 'Write {"type": "image"} where each is to stand')
        return resolved

    def _content(self, content: Any, left: list[Any]) -> Any:
        if not isinstance(content, list):
            self._check_text(content)
            return content
        parts: list[Any] = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image", "image_url"):
                parts.append(self._image(part, left))
            elif kind == "text" and isinstance(part.get("text"), str):
                self._check_text(part["text"])
                parts.append(part)
            elif kind in (None, "text"):  # templates differ here, and some leave such a part out
                rule = f"a message has a part {str(part)[:60]} that does not say what it is"
                remedy = 'Write {"type": "text", "text": ...} or {"type": "image", "path": ...}'
                raise RecordError(rule, remedy)
            else:
                rule = f"a message has a part of the type {kind!r}, and text and images are read"
                raise RecordError(rule, "Leave it out")
        return parts

    def _check_text(self, text: Any) -> None:
        if self._token and isinstance(text, str) and self._token in text:
            rule = f"a text holds {self._token!r}, for which the model expects an image, and there is none"
            raise RecordError(rule, 'Write {"type": "image", "path": ...} as a part of the content')

    def _image(self, part: Mapping[str, Any], left: list[Any]) -> dict[str, str]:
        given = next((part[key] for key in _PATHS if part.get(key)), None)
        if isinstance(url := part.get("image_url"), dict | str):
            given = url.get("url") if isinstance(url, dict) else url
        if given is None and left:
            given = left.pop(0)
        if given is None:
            rule = "an image of a message names no file, and its record lists none in images"
            raise RecordError(rule, 'Write {"type": "image", "path": "NAME.png"}')
        if not isinstance(given, str) or "://" in given or given.startswith("data:"):
            rule = f"an image is a file on this machine, and here is {str(given)[:60]!r}"
            raise RecordError(rule, "Save it, and give its path, relative to data.images")
        _, digest = _read_image(str(Path(self._images) / given))
        return {"type": "image", "path": given, "digest": digest}

    def _applied(self, chats: list[list[dict[str, Any]]], **options: Any) -> Any:
        return self.processor.apply_chat_template(
            [self._with_pixels(messages) for messages in chats], tokenize=True, return_dict=True, **options
        )

    # ---- The images of a microbatch

    def entries(self, rows: Sequence[Piece]) -> dict[str, Tensor]:
        """The processor's entries for the chats of a microbatch, without their ids: pixels, grids and types.

        Raises: DataError for an image that has changed since it was tokenised.
        """
        chats = [json.loads(piece.shown or b"[]") for piece in rows]
        try:
            encoded = self._encoded(
                chats,
                {},
                return_tensors="pt",
                processor_kwargs={"padding": True, "padding_side": "right"},
            )
        except DataError:
            raise
        except Exception as error:  # a processor may refuse together images that it accepts one by one
            rule = f"its processor refuses the chats of a microbatch ({' '.join(str(error).split())})"
            remedy = "Give images that fit together, or one row a microbatch"
            raise DataError(f"data.tokenizer={self._name}", rule, remedy) from error
        for piece, ids in zip(rows, encoded["input_ids"].numpy(), strict=True):
            if not np.array_equal(ids[: len(piece.ids)], piece.ids):
                rule = "its processor gives other ids for a chat than it gave when the data was tokenised"
                raise DataError(f"data.tokenizer={self._name}", rule, _AGAIN)
        return {name: value for name, value in encoded.items() if name not in _OURS}

    def _with_pixels(self, messages: ChatMessages) -> list[dict[str, Any]]:
        """The messages, with opened images in place of their files."""

        def opened(part: Any) -> Any:
            if not isinstance(part, dict) or part.get("type") != "image":
                return part
            path = str(Path(self._images) / part["path"])
            return {"type": "image", "image": _image_at(path, part["digest"])}

        return [
            {**message, "content": [opened(part) for part in message["content"]]}
            if isinstance(message["content"], list)
            else dict(message)
            for message in messages
        ]


_AGAIN = "Put it back, or tokenise again: give another folder as data.cache"


@lru_cache(maxsize=32)  # a chat's images are read once for all of its turns
def _image_at(path: str, digest: str) -> Any:
    with blaming(f"image {path}"):
        return _read_image(path, digest)[0]


def _read_image(path: str, wanted: str = "") -> tuple[Any, str]:
    """An image in RGB, and the digest of its file. Raises RecordError if that differs from `wanted`."""
    from PIL import Image

    try:
        content = read_bytes(path, _LARGEST)
    except OSError as error:
        rule = f"its image {path} cannot be read ({error.strerror or error})"
        remedy = f"Give the path of a file of at most {size(_LARGEST)}, relative to data.images"
        raise RecordError(rule, remedy) from None
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    if wanted not in ("", digest):
        raise RecordError("it has changed since the data was tokenised", _AGAIN)
    try:
        image = Image.open(BytesIO(content)).convert("RGB")
    except Exception as error:  # Pillow has an error for each format
        rule = f"Pillow reads no image in {path} ({type(error).__name__})"
        raise RecordError(rule, "Give a PNG, JPEG or another image that it reads") from None
    return image, digest
