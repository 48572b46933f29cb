"""Chats: from a record to messages, to token ids, and to the tokens that the loss counts.

    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}

    <|im_start|>user
    2 + 3?<|im_end|>
    <|im_start|>assistant
    5<|im_end|>
    ^^^^^^^^^^^             the assistant's tokens, which count

Which tokens count is TRL's rule. Of messages: what the template has between {% generation %} and {%
endgeneration %}. Where it has no such marks: what the template adds to the prompt of a turn, found by
comparing the ids of the messages before the turn, with the generation prompt, to those of all messages. Of
a prompt and its completion: what comes after the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateSyntaxError

from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.reading import parse_json
from penstock.train.encoding.tokenizer import HuggingFace, Ids, Messages

Labels = npt.NDArray[np.int32]
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# the names in what ShareGPT and its heirs write
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_ANSWERS = ("output", "response")
_DIGITS = 9  # of a number of a completion, given as text
_FORMS = "messages, conversations, prompt and completion, or instruction and output"


class Encoded(NamedTuple):
    """A document's ids, and its label at each: the id, or -100 where the loss does not count it.

    labels: None where all count
    shown: the chat once more, in JSON, where it may show images; see penstock.train.encoding.images
    """

    ids: Ids
    labels: Labels | None = None
    shown: bytes | None = None


class Chat(NamedTuple):
    """Messages. prompt: how many of them are a prompt, with a completion after it; None: no such thing"""

    messages: Messages
    prompt: int | None = None


class Texts(NamedTuple):
    """A prompt and its completion that no template is to touch."""

    prompt: str
    completion: str


class Columns(NamedTuple):
    """The fields of a prompt and its completion, see the keys of the section data.columns.

        {"ctx": "A rank waits. It", "endings": ["sings.", "computes."], "label": "1"}

    With `prompt` ctx, `completion` endings and `choice` label: "A rank waits. It" and " computes.".
    """

    prompt: str
    completion: str
    choice: str | None = None
    between: str = " "

    def read(self, name: str, row: Mapping[str, Any]) -> Texts:
        """Raises DataError that names the record and the field."""
        said = _field(name, row, self.completion)
        if self.choice is not None:
            said = self._chosen(name, said, _field(name, row, self.choice))
        prompt = _field(name, row, self.prompt)
        for field, text in ((self.prompt, prompt), (self.completion, said)):
            if not isinstance(text, str):
                rule = f"{field} is a text, and here is {_kind(text)}"
                remedy = "Mend it" if self.choice else "Mend it; of a list of texts name data.columns.choice"
                raise DataError(f"data file {name}", rule, remedy)
        return Texts(prompt, self.between + said)

    def _chosen(self, name: str, said: object, number: object) -> object:
        if not isinstance(said, list) or not said:
            rule = f"{self.completion} is a list of completions, and here is {_kind(said)}"
            raise DataError(f"data file {name}", rule, "Mend it, or leave data.columns.choice out")
        place = number
        if isinstance(number, str) and number.isdecimal() and len(number) <= _DIGITS:
            place = int(number)
        if type(place) is not int or not 0 <= place < len(said):
            rule = f"{self.choice} is a number from 0 to {len(said) - 1}, and here is {number!r}"
            remedy = "Mend it, or leave the record out: the parts for tests of some data sets have no answers"
            raise DataError(f"data file {name}", rule, remedy)
        return said[place]


@dataclass(frozen=True)
class ChatEncoder:
    """Reads chats as the keys of the section data say, see there.

    Raises: DataError for a tokenizer without a chat template.
    """

    tokenizer: HuggingFace
    form: str = "auto"
    field: str | None = None
    loss_on: str = "assistant"
    drop: bool = False
    columns: Columns | None = None

    def __post_init__(self) -> None:
        if self.columns is None and not self.tokenizer.has_template:
            raise DataError(
                "data.kind=chat",
                "the tokenizer has no chat template, which says how messages become text",
                "Give one, a Jinja file: data.chat_template=template.jinja",
            )

    def encode(self, name: str, row: Mapping[str, Any]) -> Encoded | None:
        """The chat's ids and labels; None for one without a counted token that is to be dropped.

        Raises: DataError that names what is wrong with it.
        """
        found = self._read(name, row)
        if isinstance(found, Chat):
            found = found._replace(messages=self.tokenizer.resolved(name, row, found.messages))
        try:
            if isinstance(found, Texts):
                ids, counted = self._texts(*found)
            else:
                ids, counted = self._chat(name, found, _options(name, row))
        except DataError:
            raise
        except TemplateSyntaxError as error:  # of the template itself: no record is to blame
            said, where = str(error.message).rstrip("."), f"the chat template, line {error.lineno}"
            remedy = "Mend it there, or give another one (data.chat_template)"
            raise DataError(where, f"it is not Jinja ({said})", remedy) from None
        except Exception as error:  # Jinja's, and whatever a template meets in values of another type
            rule = f"the chat template refuses it ({' '.join(str(error).split())})"
            remedy = "Mend it, or give a template that takes it (data.chat_template)"
            raise DataError(f"data file {name}", rule, remedy) from None
        if self.loss_on == "all":
            counted[:] = True
        if not counted[1:].any():  # nothing predicts the first token
            if self.drop:
                return None
            raise DataError(
                f"data file {name}",
                "it has no token that the loss counts: no turn of the assistant, or an empty one",
                "Mend it, or leave such chats out with data.unanswered=drop",
            )
        labels = np.where(counted, ids.astype(np.int32), np.int32(IGNORED))
        return Encoded(ids, labels, self._shown(name, row, found))

    def _shown(self, name: str, row: Mapping[str, Any], found: Chat | Texts) -> bytes | None:
        """What images are read from again, in JSON; None where the chats show none."""
        if not self.tokenizer.sees:
            return None
        if isinstance(found, Texts):
            rule = "it has a prompt and a completion without a template, and data.images reads messages"
            raise DataError(f"data file {name}", rule, "Write them as messages, or leave data.images out")
        if options := _options(name, row):
            rule = f"it has {' and '.join(options)} for the template, and data.images reads messages alone"
            raise DataError(f"data file {name}", rule, "Leave them out, or leave data.images out")
        return json.dumps(found.messages).encode()

    # ---- From a record to messages

    def _read(self, name: str, row: Mapping[str, Any]) -> Chat | Texts:
        if self.columns is not None:
            return self.columns.read(name, row)
        field = self.field or next(
            (each for each in ("messages", "conversations") if row.get(each)), "messages"
        )
        answer = next((each for each in _ANSWERS if isinstance(row.get(each), str)), None)
        if self.form in ("auto", "messages") and row.get(field) is not None:
            return Chat(messages_of(name, field, row[field]))
        if self.form in ("auto", "prompt") and {"prompt", "completion"} <= row.keys():
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return Texts(prompt, completion)
            before = messages_of(name, "prompt", prompt)
            return Chat([*before, *messages_of(name, "completion", completion)], len(before))
        if self.form in ("auto", "instruction") and isinstance(row.get("instruction"), str) and answer:
            asked = "\n".join(each for each in (row["instruction"], row.get("input")) if each)
            system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row[answer]}]
            return Chat([*system, *turns])
        wanted = {
            "messages": f"a list in {field}", "prompt": "prompt and completion",
            "instruction": "instruction and output",
        }.get(self.form, _FORMS)  # fmt: skip
        raise DataError(
            f"data file {name}",
            f"a chat has {wanted}, and its fields are {', '.join(map(repr, row)) or 'none'}",
            "Name the field of the messages with data.messages_field, or mend the record",
        )

    # ---- From messages to tokens

    def _texts(self, prompt: str, completion: str) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Texts, without a template: the end-of-text token after the completion, unless it is there."""
        end = self.tokenizer.own.eos_token or ""
        whole = prompt + completion + (end if not completion.endswith(end) else "")
        ids, before = (self.tokenizer.own(text, verbose=False)["input_ids"] for text in (whole, prompt))
        return _after(ids, [(_common(before, ids), len(ids))])

    def _chat(self, name: str, chat: Chat, options: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        messages = chat.messages
        if chat.prompt is not None:
            ids = self.tokenizer.chat_ids(messages, options)
            return _after(ids, [(self._start(name, messages, chat.prompt, ids, options), len(ids))])
        if self.loss_on != "all" and _MARK.search(self.tokenizer.template(options.get("tools"))):
            ids, marks = self.tokenizer.chat_marked(messages, options)
            counted = np.array(marks, dtype=np.bool_)
            if self.loss_on == "last":
                counted[: _last_run(counted)] = False
            return np.asarray(ids, dtype=np.uint32), counted
        ids = self.tokenizer.chat_ids(messages, options)
        if self.loss_on == "all":
            return _after(ids, [])
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for number in turns[-1:] if self.loss_on == "last" else turns:
            end = len(ids)
            if number + 1 < len(messages):
                end = self._prefix(name, messages, number + 1, ids, options, prompt=False)
            spans.append((self._start(name, messages, number, ids, options), end))
        return _after(ids, spans)

    def _start(
        self, name: str, messages: Sequence[Any], count: int, ids: Sequence[int], options: Mapping[str, Any]
    ) -> int:
        """Where the turn after the first `count` messages begins."""
        return self._prefix(name, messages, count, ids, options, prompt=True) if count else 0

    def _prefix(
        self, name: str, messages: Sequence[Any], count: int, ids: Sequence[int], options: Mapping[str, Any],
        *, prompt: bool,
    ) -> int:  # fmt: skip
        """How many of `ids` are those of the first `count` messages.

        prompt: with the generation prompt
        """
        first, more = messages[:count], {**options, "add_generation_prompt": prompt}
        texts = [self.tokenizer.chat_text(*each) for each in ((first, more), (messages, options))]
        if not texts[1].startswith(texts[0]):
            some = "message" if count == 1 else f"{count} messages"
            at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), len(texts[1]))
            raise DataError(
                f"data file {name}",
                f"the template writes its first {some} in another way where more follow (from "
                f"{texts[0][at : at + 20]!r} on), so that comparing does not find the assistant's tokens",
                "Give a template with {% generation %} marks around them (data.chat_template), or set "
                "data.loss_on=all",
            )
        return _common(self.tokenizer.chat_ids(first, more), ids)


def messages_of(name: str, field: str, value: object) -> list[dict[str, Any]]:
    """The list in `field` as messages with roles; ShareGPT's from and value are role and content.

    Raises: DataError.
    """
    value_name = f"data file {name}"
    if not isinstance(value, list) or not value:
        rule = f"{field} is a list of messages, and here is {_kind(value)}"
        raise DataError(value_name, rule, "Mend it, or name another field with data.messages_field")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            rule = f"message {number} of {field} is {_kind(message)}"
            raise DataError(value_name, rule, 'Write {"role": "user", "content": "..."}')
        if "from" in message and "value" in message:
            role = _SHAREGPT.get(message["from"], message["from"])
            message = {"role": role, "content": message["value"]}
        if not isinstance(message.get("role"), str):
            rule = (
                f"message {number} of {field} has no role, only {', '.join(map(repr, message)) or 'nothing'}"
            )
            raise DataError(value_name, rule, "Give it one: system, user or assistant")
        if message.get("content") is None and not message.get("tool_calls"):
            rule = f"message {number} of {field}, of the role {message['role']}, has no content"
            raise DataError(value_name, rule, "Give it some, or remove it")
        messages.append(message)
    return messages


def _options(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says to the template, as in TRL: tools, and chat_template_kwargs."""
    tools = row.get("tools")
    try:
        tools = parse_json(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise DataError(f"data file {name}", f"tools is not JSON: {error}", "Mend it, or remove it") from None
    return ({"tools": tools} if tools else {}) | (row.get("chat_template_kwargs") or {})


def _field(name: str, row: Mapping[str, Any], field: str) -> Any:
    if field not in row:
        rule = f"it has no field {field!r}, only {', '.join(map(repr, row)) or 'none'}"
        raise DataError(f"data file {name}", rule, "Name its fields in data.columns, or mend the record")
    return row[field]


def _kind(value: object) -> str:
    return "nothing" if value in (None, "", [], {}) else f"a {type(value).__name__}"


def _after(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """The ids, and whether each lies within one of the spans."""
    counted = np.zeros(len(ids), dtype=np.bool_)
    for start, end in spans:
        counted[start:end] = True
    return np.asarray(ids, dtype=np.uint32), counted


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with: the last of a prompt may have merged with what follows it."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def _last_run(counted: npt.NDArray[np.bool_]) -> int:
    """Where the last run of counted tokens begins."""
    places = np.flatnonzero(counted)
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1]) if len(breaks) else 0
