"""Chat templates, rendered in a process of their own: ``python -m penstock.train.encoding.templates FD``.

    encoder   {"chat_template": ..., "conversations": [...], ...}   the arguments of transformers' renderer
    process   {"text": ..., "marks": [[0, 5]]}                      or {"error": ...}

A template is a program out of a folder that anyone may have written. Its sandbox lets it reach nothing, but
it may run for ever, or write without end, in one call that no exception interrupts. So the kernel limits the
process, and ends it. One process serves all encoders: the first chat starts it, in less than a second.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

SECONDS = 10  # of a processor, for one chat
MEMORY = 1 << 30  # bytes of address space, beyond what the process starts with
LONGEST = 1 << 26  # characters of a chat's text
_MARKS = "return_assistant_tokens_mask"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KEPT = 8  # answers


def has_marks(template: str) -> bool:
    """Whether a template marks what the assistant has generated."""
    return bool(_MARK.search(template))


def in_a_line(error: Exception) -> str:
    """An error of a template in one line: Jinja's message, or of any other error also its kind."""
    message, kind = " ".join(str(error).split()), type(error).__name__
    if isinstance(error, TemplateError) and message:
        return message
    return f"{kind}: {message}" if message else kind


class OverLimitError(Exception):
    """A template needs more than it may have. The message goes on after "the chat template"."""


class Rendered(NamedTuple):
    """The text of a chat, and the ranges of characters between marks of generation."""

    text: str
    marks: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> list[tuple[str, bool]]:
        """The text in parts, each with whether it is marked."""
        parts, at = list[tuple[str, bool]](), 0
        for start, end in self.marks:
            parts += [(self.text[at:start], False), (self.text[start:end], True)]
            at = end
        return [*parts, (self.text[at:], False)]


class TemplateProcess:
    """Renders chat templates, for any thread. It starts with the first chat, and again after it was ended.

    seconds: that a chat may take of a processor
    """

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._answers: dict[bytes, Any] = {}  # the newest: text and ids of a chat are asked for in turn

    @classmethod
    def of_this_process(cls) -> TemplateProcess:
        """The one that all encoders of this process share."""
        return _of(os.getpid())

    @property
    def pid(self) -> int | None:
        """The process; None before the first chat, and after its end."""
        return None if self._process is None else self._process.pid

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Rendered:
        """The text of a chat, and its marks if the template has some. options: of the template

        Raises OverLimitError; TemplateSyntaxError, or TemplateError for all that the template raises.
        """
        # as transformers, which drops these keys, and shows a template a name in place of an image
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        request = {"chat_template": template, "conversations": [chat], **options, _MARKS: has_marks(template)}
        answer = self._ask(json.dumps(request, default=_placeholder).encode())
        if "error" not in answer:
            return Rendered(answer["text"], tuple((start, end) for start, end in answer["marks"]))
        if "line" in answer:
            raise TemplateSyntaxError(answer["error"], answer["line"])
        raise (OverLimitError if answer["over"] else TemplateError)(answer["error"])

    def _ask(self, request: bytes) -> Any:
        with self._lock:
            if request in self._answers:
                return self._answers[request]
            if len(self._answers) == _KEPT:
                self._answers.pop(next(iter(self._answers)))
            answer = self._answers[request] = self._answer(request)
            return answer

    def _answer(self, request: bytes) -> Any:
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(request)
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise OverLimitError(self._end()) from None

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(self._seconds)]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._close = weakref.finalize(self, _close, self._connection, self._process)

    def close(self) -> None:
        """End the process, if it has begun."""
        if self._process is not None:
            self._close()

    def _end(self) -> str:
        """Why the process has ended, in words."""
        assert self._process is not None
        self.close()
        code, self._process = self._process.returncode, None
        if code == -signal.SIGXCPU:
            return f"takes more than {self._seconds} s of a processor for it"
        return f"ended its process (exit code {code}), perhaps for lack of memory"


@functools.cache
def _of(process: int) -> TemplateProcess:
    """A fork has one of its own."""
    return TemplateProcess()


def _close(connection: Connection[Any, Any], process: subprocess.Popen[bytes]) -> None:
    """End a process, which reads the end of its connection when it waits for a chat."""
    connection.close()
    process.wait()


def _placeholder(value: Any) -> object:
    return value.item() if hasattr(value, "dtype") and not value.shape else f"<{type(value).__name__}>"


# ---- The process


def main() -> None:
    """Answer until the connection ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY)
    connection: Connection[bytes, bytes] = Connection(int(sys.argv[1]))
    allowed = int(sys.argv[2])
    with suppress(EOFError, OSError):  # OSError: its owner was killed before it read an answer
        while True:
            request = connection.recv_bytes()
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + allowed)
            answer = json.dumps(_answer(request)).encode()
            connection.send_bytes(answer)


def _answer(request: bytes) -> dict[str, Any]:
    try:
        texts, marks = render_jinja_template(**json.loads(request))
    except TemplateSyntaxError as error:
        return {"error": str(error.message), "line": error.lineno}
    except MemoryError:
        return {"error": f"needs more than {MEMORY >> 30} GiB of memory for it", "over": True}
    except Exception as error:  # Jinja's, or any error of a template for values of another type
        return {"error": in_a_line(error), "over": False}
    if len(texts[0]) > LONGEST:
        return {"error": f"writes {len(texts[0]):,} characters, and {LONGEST:,} are the most", "over": True}
    return {"text": texts[0], "marks": marks[0] if marks else []}


def _limit(kind: int, most: int) -> None:
    """Limit this process, within the limit that it was started with, as by `ulimit`: none may raise that."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
