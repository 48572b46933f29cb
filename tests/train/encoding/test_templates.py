"""Chat templates in a process of their own: what transformers writes, within time, memory and length."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import DataError
from penstock.train.encoding import templates
from penstock.train.encoding.templates import OverLimitError, Rendered, TemplateProcess
from support.chats import encoder, template
from support.refusals import refuses

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5", "tool_calls": None},
]
# each takes a moment to write down, and would take the machine: on Unreleased all of them did
HOSTILE = {
    "takes more than": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "needs more than 1 GiB": "{{ 'x' * 9999999999 }}",
    "and 67,108,864 are the most": "{{ 'x' * 69999999 }}",
}


@pytest.fixture(name="process", scope="module")  # it starts again where a test ends it
def _process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=1)
    yield process
    process.close()


@pytest.mark.parametrize("said", HOSTILE)
def test_a_template_that_takes_too_much_is_ended(process: TemplateProcess, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(OverLimitError, match=said):
        process.render(HOSTILE[said], CHAT, {})
    assert time.monotonic() - began < 10 * templates.SECONDS  # much more than it takes: the machine is shared
    assert process.render("{{ messages[0].content }}", CHAT, {}).text == "2 + 3?"


def test_an_encoder_blames_the_record_and_the_template() -> None:
    """Unreleased: out of memory it said "the chat template refuses it ()"."""
    made = encoder(HOSTILE["needs more than 1 GiB"])
    with refuses(DataError, "data file a", "the chat template needs more than 1 GiB", "data.chat_template"):
        made.encode("a", {"messages": CHAT})


def test_what_a_template_raises_is_raised_here(process: TemplateProcess) -> None:
    with pytest.raises(TemplateSyntaxError, match="unknown tag") as caught:
        process.render("\n{% nothing %}", CHAT, {})
    assert caught.value.lineno == 2
    with pytest.raises(TemplateError, match="no such role"):
        process.render("{{ raise_exception('no such role') }}", CHAT, {})
    with pytest.raises(TemplateError, match="TypeError: can only concatenate str"):
        process.render("{{ 'a' + 1 }}", CHAT, {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('') }}", "TemplateError"),
        ("{{ {}['role'].strip() }}", "'dict object' has no attribute 'role'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ [].pop() }}", "access to attribute 'pop' of 'list' object is unsafe"),
    ],
)
def test_an_error_of_a_template_says_its_kind(template: str, words: str) -> None:
    """0.5.0: "the chat template refuses it ()", or a bare message of Python."""
    with refuses(DataError, "data file a", f"the chat template refuses it ({words}"):
        encoder(template).encode("a", {"messages": CHAT})


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training"])
def test_the_text_and_the_marks_are_those_of_transformers(process: TemplateProcess, name: str) -> None:
    marked = name.endswith("_training")
    options = {"add_generation_prompt": not marked, "tools": [{"name": "add"}]}
    chat = [{key: value for key, value in message.items() if value is not None} for message in CHAT]
    texts, marks = render_jinja_template(
        conversations=[chat], chat_template=template(name), return_assistant_tokens_mask=marked, **options
    )
    made = process.render(template(name), CHAT, options)
    assert made == Rendered(texts[0], tuple(marks[0]) if marked else ())
    assert "".join(text for text, _ in made.parts) == texts[0]
    assert any(is_marked for _, is_marked in made.parts) is marked


def test_a_template_sees_the_name_of_what_is_no_json(process: TemplateProcess) -> None:
    """As transformers shows it: no object with methods."""
    messages = [{"content": [{"image": object(), "count": np.int64(3), "half": "\ud83d"}]}]
    text = process.render(
        "{{ messages[0].content[0].image }} {{ messages[0].content[0].count + 1 }}", messages, {}
    ).text
    assert text == "<object> 4"


def test_a_process_that_was_killed_is_named_and_another_one_starts(process: TemplateProcess) -> None:
    assert process.render("{{ 1 }}", CHAT, {}).text == "1"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(OverLimitError, match=r"ended its process \(exit code -9\)"):
        process.render("{{ 3 }}", CHAT, {})
    assert process.render("{{ 2 }}", CHAT, {}).text == "2"


def test_one_process_renders_every_chat_and_ends_with_its_owner() -> None:
    process = TemplateProcess()
    for count in range(3):
        assert process.render(f"{{{{ {count} }}}}", CHAT, {}).text == str(count)
    pid = process.pid
    assert pid is not None
    del process
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_ends_without_a_word_if_its_owner_is_killed_before_it_has_read_an_answer() -> None:
    """Unreleased: the connection is reset then, and its traceback was the last that a run printed."""
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", templates.__name__, str(theirs.fileno()), "10"]
    request = {"chat_template": "a", "conversations": [CHAT]}
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    ours.send_bytes(json.dumps(request).encode())
    assert ours.poll(60)
    ours.close()
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_all_encoders_share_one() -> None:
    assert TemplateProcess.of_this_process() is TemplateProcess.of_this_process()
