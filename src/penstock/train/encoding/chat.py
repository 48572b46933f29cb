"""Chats: from messages to token ids, and to the tokens that the loss counts.

    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}

    <|im_start|>user
    2 + 3?<|im_end|>
    <|im_start|>assistant
    5<|im_end|>
    ^^^^^^^^^^^             the assistant's tokens, which count

The loss counts the tokens that TRL counts. In messages: those between the template's {% generation %} and {%
endgeneration %}. If it has no such marks: those that a turn adds to its prompt, which are found by comparing
the ids of the messages before the turn, with the generation prompt, to those of all messages. In a prompt
with its completion: those after the prompt. A turn of weight 0 never counts.

A template may leave out a role, calls of tools, or a thought. So each text of a chat is searched in the text
that the template wrote, and a chat that lost one is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateSyntaxError

from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.private import tree_leaves
from penstock.train.data.sources import RecordError, blaming
from penstock.train.encoding.record import SYSTEMS, THOUGHTS, Chat, ChatReader, Texts
from penstock.train.encoding.templates import OverLimitError, has_marks, in_a_line
from penstock.train.encoding.tokenizer import HuggingFace, Ids

Labels = npt.NDArray[np.int32]
Counted = npt.NDArray[np.bool_]
_SHORT = 16  # characters of a content that may occur in a template's own words by chance
_NOWHERE = "qzjxv"
_THOUGHT = re.compile(r"</?think>")


class Encoded(NamedTuple):
    """A document's ids, and its labels: the id, or -100 for a token that the loss does not count.

    labels: None if all count
    shown: the chat once more, in JSON, if it may show images; see penstock.train.encoding.images
    row_label: the label of the whole document; see penstock.train.encoding.labels
    """

    ids: Ids
    labels: Labels | None = None
    shown: bytes | None = None
    row_label: tuple[float, ...] | None = None


class ChatEncoder:
    """Makes tokens of chats, by the keys of the section data.

    Args:
        drop: whether chats without a token that counts are left out
        texts: whether a tokenizer without a template will do, as records may be texts
        reading: the keywords of ChatReader

    Raises: DataError for a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: HuggingFace,
        loss_on: str = "assistant",
        drop: bool = False,
        texts: bool = False,
        **reading: Any,
    ) -> None:
        self.tokenizer, self.loss_on, self.drop = tokenizer, loss_on, drop
        self._reader = ChatReader(tokenizer, **reading)
        if not texts and self._reader.columns is None and not tokenizer.has_template:
            rule = "the tokenizer has no chat template, which says how messages become text"
            remedy = "Give one, a Jinja file: data.chat_template=template.jinja"
            raise DataError("data.kind=chat", rule, remedy)

    def encode(self, name: str, row: Mapping[str, Any]) -> Encoded | None:
        """The chat's ids and labels; None for a chat without a counted token, if these are dropped.

        Raises: DataError that names the record, and what is wrong with it.
        """
        with blaming(f"data file {name}"):
            chat = self._reader.read(row)
            shown = self._shown(chat)
            ids, counted = self._texts(*chat) if isinstance(chat, Texts) else self._written(chat)
            if not counted[1:].any():  # nothing predicts the first token
                if self.drop:
                    return None
                rule = f"it has no token that the loss counts: {_why_none(chat)}"
                raise RecordError(rule, "Mend it, or leave such chats out with data.unanswered=drop")
        labels = np.where(counted, ids.astype(np.int32), np.int32(IGNORED))
        return Encoded(ids, labels, shown)

    def _written(self, chat: Chat) -> tuple[Ids, Counted]:
        try:
            return self._chat(chat)
        except (DataError, RecordError):
            raise
        except TemplateSyntaxError as error:  # of the template itself, so the record is not the cause
            said, where = str(error.message).rstrip("."), f"the chat template, line {error.lineno}"
            remedy = "Mend it there, or give another one (data.chat_template)"
            raise DataError(where, f"it is not Jinja ({said})", remedy) from None
        except OverLimitError as error:
            rule, remedy = (
                f"the chat template {error}",
                "Read it: a template takes moments, as do its records",
            )
            raise RecordError(rule, f"{remedy}; or give another one (data.chat_template)") from None
        except Exception as error:  # Jinja's, or any error of a template for values of another type
            rule = f"the chat template refuses it ({in_a_line(error)})"
            remedy = "Mend it, or give a template that accepts it (data.chat_template)"
            raise RecordError(rule, remedy) from None

    def _shown(self, chat: Chat | Texts) -> bytes | None:
        """The chat in JSON, from which images are read again; None if the chats show no images."""
        if not self.tokenizer.sees:
            return None
        if isinstance(chat, Texts):
            rule = "it has a prompt and a completion without a template, and data.images reads messages"
            raise RecordError(rule, "Write them as messages, or leave data.images out")
        if chat.options:
            options = " and ".join(chat.options)
            rule = f"it has {options} for the template, and data.images reads messages alone"
            raise RecordError(rule, "Leave them out, or leave data.images out")
        return json.dumps(chat.messages).encode()

    def _texts(self, prompt: str, completion: str) -> tuple[Ids, Counted]:
        """Texts, without a template: the end-of-text token after the completion, unless it is there."""
        end = self.tokenizer.own.eos_token or ""
        whole = prompt + completion + (end if not completion.endswith(end) else "")
        ids, before = (self.tokenizer.own(text, verbose=False)["input_ids"] for text in (whole, prompt))
        start = 0 if self.loss_on == "all" else _common(before, ids)
        return _counted(ids, [(start, len(ids))])

    def _chat(self, chat: Chat) -> tuple[Ids, Counted]:
        text = self.tokenizer.chat_text(chat.messages, chat.options)
        self._check_short(chat)
        _check_written(chat, text)
        if "tools" in chat.options:
            self._check_tools(chat, text)
        if self.loss_on != "all" and chat.prompt is None:
            return self._turns(chat)
        chosen = range(0 if self.loss_on == "all" else chat.prompt or 0, len(chat.messages))
        _check_asked(chat, chosen)
        ids = self.tokenizer.chat_ids(chat.messages, chat.options)
        start = self._prefix(chat, chosen.start, ids, prompt=True)
        made, counted = _counted(ids, [(start, len(ids))])
        for index in chat.left_out.intersection(chosen):  # with the words that the template puts around it
            begin, end = (self._prefix(chat, count, ids) for count in (index, index + 1))
            counted[begin:end] = False
        return made, counted

    def _check_short(self, chat: Chat) -> None:
        """Raise RecordError for a short content that is lost, which other words of the template may contain.

        So the template runs once more, with a word behind such a content that occurs nowhere else.
        """
        marked = {
            index: {**message, "content": f"{message['content'].rstrip()}{_NOWHERE}{index}."}
            for index, message in enumerate(chat.messages)
            if isinstance(message.get("content"), str) and 0 < len(message["content"].strip()) <= _SHORT
        }
        messages = [marked.get(index, message) for index, message in enumerate(chat.messages)]
        text = self.tokenizer.chat_text(messages, chat.options) if marked else ""
        for index in marked:
            if f"{_NOWHERE}{index}." not in text:
                raise _lost(chat, index, "the content", chat.messages[index]["content"])

    def _check_tools(self, chat: Chat, text: str) -> None:
        without = {key: value for key, value in chat.options.items() if key != "tools"}
        if self.tokenizer.chat_text(chat.messages, without) == text:
            rule = "the chat template writes the same without its tools, and so leaves them out"
            remedy = "Give a template that writes them (data.chat_template)"
            raise RecordError(rule, f"{remedy}, or list tools in data.ignored_fields")

    def _turns(self, chat: Chat) -> tuple[Ids, Counted]:
        """Count the turns of the assistant, or the last one."""
        turns = chat.turns
        _check_asked(chat, turns)
        chosen = turns[-1:] if self.loss_on == "last" else turns
        kept = [index for index in chosen if index not in chat.left_out]
        if not has_marks(self.tokenizer.template(chat.options.get("tools"))):
            ids = self.tokenizer.chat_ids(chat.messages, chat.options)
            return _counted(ids, [(self._prefix(chat, index, ids, prompt=True),
                                   self._prefix(chat, index + 1, ids)) for index in kept])  # fmt: skip
        ids, marks = self.tokenizer.chat_marked(chat.messages, chat.options)
        edges = np.flatnonzero(np.diff([0, *marks, 0]))  # where each run of marked tokens begins and ends
        runs = [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
        if kept == chosen:
            return _counted(ids, runs[-1:] if self.loss_on == "last" else runs)
        if len(runs) != len(turns):
            rule = (
                f"some of its {len(turns)} turns of the assistant must not count, and the template marks "
                f"{len(runs)} parts, so that the parts cannot be assigned to turns"
            )
            raise RecordError(rule, "Give a template that marks each turn once (data.chat_template)")
        return _counted(ids, [run for index, run in zip(turns, runs, strict=True) if index in kept])

    def _prefix(self, chat: Chat, count: int, ids: Sequence[int], *, prompt: bool = False) -> int:
        """The number of `ids` that belong to the first `count` messages.

        prompt: with the generation prompt
        """
        messages, options = chat.messages, chat.options
        if count in (0, len(messages)):
            return len(ids) if count else 0
        first, more = messages[:count], {**options, "add_generation_prompt": prompt}
        texts = [self.tokenizer.chat_text(*call) for call in ((first, more), (messages, options))]
        if not texts[1].startswith(texts[0]):
            some = "message" if count == 1 else f"{count} messages"
            at = _common(*texts)
            raise RecordError(
                f"the template writes its first {some} in another way if more follow (from "
                f"{texts[0][at : at + 20]!r} on), so that a comparison does not give the assistant's tokens",
                "Give a template with {% generation %} marks around them (data.chat_template), or set "
                "data.loss_on=all and leave weight and train out",
            )
        return _common(self.tokenizer.chat_ids(first, more), ids)


def _check_asked(chat: Chat, counted: Sequence[int]) -> None:
    """Raise RecordError if the record wants to train a turn that the loss does not count."""
    for index, trained in enumerate(chat.trained):
        if trained and index not in counted:
            rule = (
                f"weight or train says to train {chat.names[index]}, of the role "
                f"{chat.messages[index]['role']}, which the loss does not count"
            )
            raise RecordError(rule, "Remove it there, or set data.loss_on=all")


def _why_none(chat: Chat | Texts) -> str:
    if isinstance(chat, Texts):
        return "its completion is empty"
    if not chat.turns:
        roles = dict.fromkeys(message["role"] for message in chat.messages)
        return f"its messages are of the roles {', '.join(roles)}, and none of the assistant"
    if chat.left_out.intersection(chat.turns):
        return "its turns of the assistant have weight 0 or train false"
    return "the template writes nothing of the assistant's text"


# ---- The text that the template wrote


def _check_written(chat: Chat, text: str) -> None:
    """Raise RecordError for a text of the chat that is not in `text`, in the order of its messages.

    Templates may move the system message, and tools. Those of reasoning models leave out the thoughts of
    earlier turns: these may be missing, but not those of the last turn.
    """
    at = 0
    for index, message in enumerate(chat.messages):
        system = message["role"] in SYSTEMS
        start = 0 if system else at
        for together in _said(message, last=index in chat.turns[-1:]):
            ends = [start]
            for part, said in together:
                ends.append(_end_in(text, said, start))
                if ends[-1] < 0:
                    raise _lost(chat, index, part, said)
            start = max(ends)
        at = at if system else start


def _lost(chat: Chat, index: int, part: str, said: object) -> RecordError:
    shown = str(said).strip()[:60]
    rule = f"the chat template leaves out {part} of {chat.names[index]}: {shown!r}"
    return RecordError(rule, "Give a template that writes it (data.chat_template), or remove it here")


def _said(message: Mapping[str, Any], *, last: bool) -> Iterator[list[tuple[str, object]]]:
    """The texts of a message in order, with their names. Texts that may come in any order are in one list.

    last: whether it is the last turn of the assistant, whose thoughts count too
    """
    content = message.get("content") or ""  # a processor's messages may hold None
    texts = [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]
    if last:
        yield from ([(key, message.get(key))] for key in THOUGHTS)
    for text in texts:
        *thoughts, answer = _THOUGHT.split(text) if message["role"] == "assistant" else [text]
        if last:
            yield from ([("a thought in the content", thought)] for thought in thoughts)
        yield [("the content", answer)]
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        values = tree_leaves(function.get("arguments", {}))
        yield [("the name of a call", function["name"]), *(("an argument of a call", of) for of in values)]


def _end_in(text: str, said: object, start: int) -> int:
    """The end of `said` in `text` from `start` on, verbatim or as a string of JSON or Python; -1: not there.

    It is stripped, as templates do. An empty text is anywhere.
    """
    if isinstance(said, str):
        said = said.strip()
        escaped = said.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        forms = [said, escaped.replace("'", "\\'")]
        forms += (json.dumps(said, ensure_ascii=to_ascii)[1:-1] for to_ascii in (False, True))
    else:
        forms = [""] if said is None else [str(said), json.dumps(said)]
    ends = [begin + len(form) for form in forms if (begin := text.find(form, start)) >= 0]
    return min(ends, default=-1)


# ---- Tokens


def _counted(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[Ids, Counted]:
    """The ids, and whether each lies within one of the spans."""
    counted = np.zeros(len(ids), dtype=np.bool_)
    for start, end in spans:
        counted[start:end] = True
    return np.asarray(ids, dtype=np.uint32), counted


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    """The length of the common prefix: the last token of a prompt may have merged with the text after it."""
    return sum(takewhile(bool, map(eq, first, second)))
