"""Chats, small templates of families, and encoders of both, for the tests of chats."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.train.encoding.chat import ChatEncoder
from penstock.train.encoding.tokenizer import HuggingFace, byte_level_tokenizer

BOS = "<|im_start|>"  # some templates begin with it
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "days": {"type": "integer", "description": "how many"},
                },
                "required": ["city"],
            },
        },
    }
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": 'Köln "Süd"', "days": 3}}}
    ],
}

# ChatML that takes any role, with calls of tools, their results and the tools themselves in JSON
CHATML_TOOLS = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}{{- (call.function or call) | tojson }}{%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{% endfor %}"""
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if system_message is defined and loop.index >= turns | length - 1 %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
    {%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}
{%- endfor %}"""


def template(name: str) -> str:
    """One of those that come with TRL."""
    spec = importlib.util.find_spec("trl")  # importing it takes a second of each test process
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def encoder(own: str | None = None, **options: Any) -> ChatEncoder:
    tokenizer = HuggingFace("bytes", own)
    tokenizer.own.bos_token = BOS
    return ChatEncoder(tokenizer, **options)


def labels(made: ChatEncoder, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    found = made.encode("a.jsonl line 1", row)
    assert found is not None
    assert found.labels is not None
    return found.ids.tolist(), found.labels.tolist()


def text_of(ids: Sequence[int]) -> str:
    """The text of ids, or of the labels that count."""
    return str(byte_level_tokenizer(chat=True).decode([each for each in ids if each != IGNORED]))


def outcome(encode: Callable[[], Any]) -> Any:
    """What this returns, or the DataError that it raises, which names the record and can be printed."""
    try:
        return encode()
    except DataError as error:
        problem = error
    assert problem.value == "data file a.jsonl line 1"
    assert problem.rule
    assert problem.remedy
    str(problem).encode()
    return problem
