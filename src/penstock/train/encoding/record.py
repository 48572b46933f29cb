"""From a record to a chat: every key and every role has a meaning here, or the record is refused.

    {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5", "weight": 0}]}

    Chat(messages=[{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}],
         trained=[None, False], ...)

Forms and names are those of OpenAI, TRL, ShareGPT, LLaMA-Factory and axolotl. The content of a key that is
not read would be lost in silence, so an error names such a key, unless the user lists it in
data.ignored_fields.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from penstock.reading import parse_json
from penstock.train.config.data import ColumnsSection
from penstock.train.data.sources import MEND, RecordError
from penstock.train.encoding.tokenizer import ChatMessages, HuggingFace

ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
_CALLS = "function_call"  # LLaMA-Factory's role of a turn whose text is calls of tools, in JSON
SYSTEMS = ("system", "developer")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # as in transformers
_OF_MESSAGES = {"role", "content", "from", "value", "weight", "train", "tool_calls", *THOUGHTS}
# of a message of the role tool: the call that it answers; many templates ignore them
_OF_RESULTS = {"tool_call_id", "name"}
_OF_TEMPLATES = ("tools", "chat_template_kwargs")  # keys of a record
# names that chat_template_kwargs may not set: the parameters with which transformers calls the template
_RESERVED = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}
_ANSWERS = ("output", "response")
_ALPACAS = ("instruction", "input", "system", "history")
_DIGITS = 9  # of the number of a completion, if it is text
_FORMS = "messages, conversations, prompt and completion, or instruction and output"
_HALF = re.compile("[\ud800-\udfff]")
_NAME_FIELDS = "Name its fields in data.columns, or mend the record"


class Chat(NamedTuple):
    """Messages.

    options: the record's arguments for the template: its tools, and more
    names: of the messages, for errors
    trained: for each message, whether the record wants the loss to count it; None if it does not say
    prompt: the number of messages that are a prompt, with a completion after it; None without a prompt
    """

    messages: ChatMessages
    options: Mapping[str, Any]
    names: Sequence[str]
    trained: Sequence[bool | None]
    prompt: int | None = None

    @property
    def turns(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def left_out(self) -> set[int]:
        """The indices of the messages that the loss must not count."""
        return {index for index, trained in enumerate(self.trained) if trained is False}


class Texts(NamedTuple):
    """A prompt and its completion, for which no template is used."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatReader:
    """Reads records as the keys of the section data say, see there. ignored: data.ignored_fields"""

    tokenizer: HuggingFace
    form: str = "auto"
    field: str | None = None
    columns: ColumnsSection | None = None
    ignored: tuple[str, ...] = ()

    def read(self, row: Mapping[str, Any]) -> Chat | Texts:
        """The chat in a record. Raises RecordError that says what is wrong with it."""
        if self.columns is not None:
            return _columns(row, self.columns)
        row = self._kept(row)
        check_unicode("", row)
        tools = _tools(row.pop("tools", None) or [])
        row |= {"tools": tools} if tools else {}
        field = self.field or next((key for key in ("messages", "conversations") if key in row), "messages")
        if self.form in ("auto", "messages") and field in row:
            return self._chat(row, [*_system(row), *_listed(field, row[field])], known=(field, "system"))
        if self.form in ("auto", "prompt") and {"prompt", "completion"} <= row.keys():
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                refuse_keys(row.keys() - {"prompt", "completion"}, (), self.ignored)
                return Texts(prompt, completion)
            before = _listed("prompt", prompt)
            listed = [*before, *_listed("completion", completion)]
            return self._chat(row, listed, known=("prompt", "completion"))._replace(prompt=len(before))
        answer = next((key for key in _ANSWERS if key in row), None)
        if self.form in ("auto", "instruction") and "instruction" in row and answer:
            return self._chat(row, _instruction(row, answer), known=(*_ALPACAS, answer))
        wanted = {
            "messages": f"a list in {field}", "prompt": "prompt and completion",
            "instruction": "instruction and output",
        }.get(self.form, _FORMS)  # fmt: skip
        rule = f"a chat has {wanted}, and its fields are {_names(row)}"
        raise RecordError(rule, "Name the field of the messages with data.messages_field, or mend the record")

    def _kept(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields to read. None is left out: a table has it for each field that a row lacks."""
        return {key: value for key, value in fields.items() if value is not None and key not in self.ignored}

    def _chat(self, row: dict[str, Any], listed: Sequence[tuple[str, Any]], known: Collection[str]) -> Chat:
        """Read a chat. Raises RecordError for all keys of a record, and of its messages, that nothing reads.

        listed: messages as the record has them, each with its name for errors
        """
        seen = ("images",) if self.tokenizer.sees else ()
        template = self.tokenizer.template(row.get("tools"))
        of_messages = {
            key
            for _, message in listed if isinstance(message, dict)
            for key in self._kept(message).keys() - _OF_MESSAGES
            if not (_reads(template, key) or (key in _OF_RESULTS and _answers_call(message)))
        }  # fmt: skip
        refuse_keys(row.keys() - {*known, *seen, *_OF_TEMPLATES}, of_messages, self.ignored)
        options, messages, trained = _options(row), [], []
        for at, fields in listed:
            message = self._message(at, fields, template)
            trained.append(_trained(at, message))
            self._check_contents(at, message)
            messages.append(message)
        if "system" in row and sum(message["role"] in SYSTEMS for message in messages[:2]) > 1:
            rule = "it has a field system, and its first message is a system message too"
            raise RecordError(rule, "Remove one of them, or list system in data.ignored_fields")
        return Chat(self.tokenizer.resolved(row, messages), options, [at for at, _ in listed], trained)

    def _message(self, at: str, fields: object, template: str) -> dict[str, Any]:
        """A message under our names for its keys and its role."""
        if not isinstance(fields, dict):
            raise RecordError(f"{at} is {_kind(fields)}", 'Write {"role": "user", "content": "..."}')
        message = self._kept(fields)
        for other, key in (("from", "role"), ("value", "content")):
            if other in message:
                if key in message:
                    raise RecordError(f"{at} has both {key} and {other}", "Remove one of them")
                message[key] = message.pop(other)
        role = message.get("role")
        if not isinstance(role, str):
            rule = f"{at} has no role, only {_names(fields)}"
            raise RecordError(rule, "Give it one: system, user or assistant")
        message["role"] = _OTHER_NAMES.get(role, role)
        if message["role"] not in ROLES and not re.search(rf"(['\"]){re.escape(role)}\1", template):
            rule = f"{at} has the role {role!r}, which neither we nor the template know"
            raise RecordError(rule, f"Write one of {', '.join(ROLES)}")
        if role == _CALLS and "tool_calls" not in message:
            _split_calls(at, message)
        return message

    def _check_contents(self, at: str, message: dict[str, Any]) -> None:
        """Convert calls to the template's form, and the content to a text, or to parts that may be images."""
        if message.get("tool_calls") in ([], ""):
            del message["tool_calls"]
        if "tool_calls" in message:
            message["tool_calls"] = self._calls(at, message["tool_calls"])
        elif "content" not in message:
            rule = f"{at}, of the role {message['role']}, has no content"
            raise RecordError(rule, "Give it some, or remove it")
        if isinstance(message.get("content"), list) and not self.tokenizer.sees:
            parts = [self._kept(part) if isinstance(part, dict) else {} for part in message["content"]]
            for part in parts:
                if part.keys() != {"type", "text"} or part["type"] != "text" or type(part["text"]) is not str:
                    rule = f"the content of {at} has a part that is no text: {str(part)[:60]}"
                    remedy = 'Write {"type": "text", "text": "..."}; of pictures set data.images'
                    raise RecordError(rule, remedy)
            message["content"] = "".join(part["text"] for part in parts)
        for key in ("content", "tool_call_id", "name", *THOUGHTS):
            wanted = (str, list) if key == "content" and self.tokenizer.sees else str
            if not isinstance(message.get(key, ""), wanted):
                raise RecordError(f"{key} of {at} is a text, and here is {_kind(message[key])}")

    def _calls(self, at: str, calls: object) -> list[dict[str, Any]]:
        """Calls of tools, with arguments in the form that the template needs."""
        rule = f"tool_calls of {at} is a list of calls, each with a name and an object of arguments"
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RecordError(f"{rule}, and here is {_kind(calls)}")
        made = []
        for call in map(self._kept, calls):
            function = call.get("function", call)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RecordError(f"{rule}, and here is {str(call)[:80]}")
            function = self._kept(function)
            if "arguments" in function:
                function["arguments"] = self._arguments(at, function["arguments"])
            made.append({**call, "function": function} if "function" in call else function)
        return made

    def _arguments(self, at: str, given: object) -> Any:
        """An object, which OpenAI writes as a text in JSON."""
        arguments = parsed(f"the arguments of a call in {at}", given) if isinstance(given, str) else given
        if not isinstance(arguments, dict):
            rule = f"the arguments of a call in {at} are an object, and here is {_kind(arguments)}"
            raise RecordError(rule, 'Write {"NAME": VALUE}')
        if not self._text_arguments:
            return arguments
        return given if isinstance(given, str) else json.dumps(arguments, ensure_ascii=False)

    @cached_property
    def _text_arguments(self) -> bool:
        """Whether arguments must be a text, as the template writes them verbatim. DeepSeek's does."""
        probe = {"city": "Bonn"}

        def written(arguments: object) -> bool:
            call = {"name": "weather", "arguments": arguments}
            calls = [{"id": "weather00", "type": "function", "function": call}]
            said = {"role": "assistant", "content": "", "tool_calls": calls}
            messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}, said]
            try:
                text = self.tokenizer.chat_text(messages, {})
            except Exception:  # a template may raise any error for values of another type
                return False
            return probe["city"] in text and repr(probe) not in text

        return not written(probe) and written(json.dumps(probe))


# ---- Parts of a record


def _columns(row: Mapping[str, Any], columns: ColumnsSection) -> Texts:
    """A prompt and its completion in fields of other names.

        {"ctx": "A rank waits. It", "endings": ["sings.", "computes."], "label": "1"}

    With `prompt` ctx, `completion` endings and `choice` label: "A rank waits. It" and " computes.".
    """
    said, remedy = field_of(row, columns.completion, _NAME_FIELDS), "Mend it"
    if columns.choice is None:
        remedy = "Mend it; of a list of texts name data.columns.choice"
    else:
        said = _chosen(said, field_of(row, columns.choice, _NAME_FIELDS), columns)
    prompt = field_of(row, columns.prompt, _NAME_FIELDS)
    for field, text in ((columns.prompt, prompt), (columns.completion, said)):
        check_unicode(field, _text(field, text, remedy))
    return Texts(prompt, columns.between + said)


def _chosen(said: object, choice: object, columns: ColumnsSection) -> object:
    if not isinstance(said, list) or not said:
        rule = f"{columns.completion} is a list of completions, and here is {_kind(said)}"
        raise RecordError(rule, "Mend it, or leave data.columns.choice out")
    index = choice
    if isinstance(choice, str) and choice.isdecimal() and len(choice) <= _DIGITS:
        index = int(choice)
    if type(index) is not int or not 0 <= index < len(said):
        rule = f"{columns.choice} is a number from 0 to {len(said) - 1}, and here is {choice!r}"
        remedy = "Mend it, or leave the record out: the parts for tests of some data sets have no answers"
        raise RecordError(rule, remedy)
    return said[index]


def _listed(field: str, value: object) -> list[tuple[str, Any]]:
    """Messages, each with its name for errors."""
    if not isinstance(value, list) or not value:
        rule = f"{field} is a list of messages, and here is {_kind(value)}"
        raise RecordError(rule, "Mend it, or name another field with data.messages_field")
    return [(f"message {index} of {field}", message) for index, message in enumerate(value, start=1)]


def _system(row: Mapping[str, Any]) -> list[tuple[str, Any]]:
    text = _text("system", row.get("system", ""))
    return [("system", {"role": "system", "content": text})] if text else []


def _instruction(row: Mapping[str, Any], answer: str) -> list[tuple[str, Any]]:
    """Alpaca's turns: those of its history, each a question and an answer, and then its own."""
    history = row.get("history", [])
    for pair in history if isinstance(history, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RecordError("history is a list of pairs, each a question and its answer")
    *asked, said = [_text(key, row.get(key, "")) for key in ("instruction", "input", answer)]
    last = ["\n".join(text for text in asked if text), said]
    return [
        *_system(row),
        *(
            (f"turn {index} of its history", {"role": role, "content": text})
            for index, pair in enumerate([*history, last], start=1)
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ),
    ]


def _text(at: str, value: object, remedy: str = MEND) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{at} is a text, and here is {_kind(value)}", remedy)
    return value


def _trained(at: str, message: dict[str, Any]) -> bool | None:
    """The value of OpenAI's weight or axolotl's train, which are removed from the message; None without."""
    said = {key: message.pop(key) for key in ("weight", "train") if key in message}
    for key, value in said.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            wanted = "0 or 1" if key == "weight" else "true or false"
            raise RecordError(f"{key} of {at} is {wanted}, and here is {str(value)[:60]!r}")
    if len(answers := {bool(value) for value in said.values()}) > 1:
        raise RecordError(f"weight and train of {at} contradict each other", "Remove one of them")
    return answers.pop() if answers else None


def _split_calls(at: str, message: dict[str, Any]) -> None:
    """Make tool_calls of LLaMA-Factory's text: a call or a list of them, perhaps after a thought."""
    text = message.get("content")
    if not isinstance(text, str):
        raise RecordError(f"{at}, of the role {_CALLS}, is a text in JSON, and here is {_kind(text)}")
    thought, mark, calls = text.rpartition("</think>")
    listed = parsed(f"{at}, of the role {_CALLS},", calls)
    listed = listed if isinstance(listed, list) else [listed]
    if not listed:
        raise RecordError(f"{at}, of the role {_CALLS}, calls nothing")
    message["content"] = thought + mark
    # every template reads `call.function.name`
    message["tool_calls"] = [
        {"type": "function", "function": call} if isinstance(call, dict) else call for call in listed
    ]


def _tools(given: object) -> list[dict[str, Any]]:
    """The tools of a record, which may be a text in JSON."""
    tools = parsed("tools", given) if isinstance(given, str) else given
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"tools is a list of objects, and here is {_kind(tools)}")
    return tools


def _options(row: Mapping[str, Any]) -> dict[str, Any]:
    """The record's arguments for the template, as in TRL: tools, and chat_template_kwargs."""
    more = row.get("chat_template_kwargs", {})
    if not isinstance(more, dict):
        rule = f"chat_template_kwargs names variables of the template, and here is {_kind(more)}"
        raise RecordError(rule, 'Write {"NAME": VALUE}')
    if reserved := more.keys() & _RESERVED:
        rule = f"chat_template_kwargs sets {_names(sorted(reserved))}, which are no variables of a template"
        raise RecordError(rule, "Leave them out")
    return ({"tools": row["tools"]} if "tools" in row else {}) | more


# ---- What is wrong


def refuse_keys(of_row: Iterable[str], of_messages: Iterable[str], ignored: Sequence[str]) -> None:
    """Raise RecordError for keys that nothing reads, with the config line that ignores them."""
    unread = {"the record": sorted(of_row), "its messages": sorted(of_messages)}
    if parts := [f"{_names(keys)} of {owner}" for owner, keys in unread.items() if keys]:
        line = json.dumps(list(dict.fromkeys([*ignored, *unread["the record"], *unread["its messages"]])))
        rule = f"nothing reads {' and '.join(parts)}, so their content would be lost"
        raise RecordError(rule, f"Mend it, or leave these out with data.ignored_fields: {line}")


def check_unicode(at: str, value: object) -> None:
    """Raise RecordError for half of a surrogate pair in any text of a JSON value.

    at: the value's name; of a record, which has none, an empty text
    """
    if isinstance(value, str) and (half := _HALF.search(value)):
        rule = (
            f"{at} is not Unicode text: its character {half.start()} is U+{ord(half[0]):04X}, half of a "
            "surrogate pair"
        )
        raise RecordError(rule, f"{MEND}: a text may have been cut within a character")
    where = f" of {at}" if at else ""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_unicode(f"a key{where}", key)
            check_unicode(f"{key}{where}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value, start=1):
            check_unicode(f"entry {index}{where}", inner)


def parsed(at: str, text: str | bytes) -> Any:
    """The value of a text in JSON. Raises RecordError. at: the text's name"""
    try:
        return parse_json(text)
    except ValueError as error:  # json's own, and Unicode's
        raise RecordError(f"{at} is not JSON: {error}") from None


def _answers_call(message: Mapping[str, Any]) -> bool:
    role = message.get("role", message.get("from"))
    return isinstance(role, str) and _OTHER_NAMES.get(role, role) == "tool"


def _reads(template: str, key: str) -> bool:
    """Whether a chat template reads this key of a message: m.key, message['key'], messages[0].get('key')."""
    message, named = r"\bm(?:sg|essages?)?(?:\[[^]]*\])?", re.escape(key)
    return bool(re.search(rf"{message}(?:\.{named}\b|(?:\[|\.get\()['\"]{named}['\"])", template))


def field_of(row: Mapping[str, Any], field: str, remedy: str) -> Any:
    """A field that a record must have. Raises RecordError."""
    if field not in row:
        raise RecordError(f"it has no field {field!r}, only {_names(row)}", remedy)
    return row[field]


def _names(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys)) or "none"


def _kind(value: object) -> str:
    return "nothing" if value in (None, "", [], {}) else f"a {type(value).__name__}"
