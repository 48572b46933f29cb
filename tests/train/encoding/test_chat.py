"""Which tokens of a chat count, token by token as in TRL's preprocessing; and which chats are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.train.encoding.chat import ChatEncoder
from penstock.train.encoding.tokenizer import HuggingFace, byte_level_tokenizer, open_tokenizer
from support.chats import BOS, CALL, TOOLS, encoder, labels, template
from support.refusals import refuses

SYSTEM = {"role": "system", "content": "Be short."}
ASK, SAY = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is 5."}
MORE = [{"role": "user", "content": "And ä 😀?"}, {"role": "assistant", "content": "No\n\nnumber."}]
CHATS: list[dict[str, Any]] = [
    {"messages": [ASK, SAY]},
    {"messages": [SYSTEM, ASK, SAY, *MORE]},
    {"messages": [ASK, SAY, *MORE, *MORE]},
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": [ASK], "completion": [SAY]},
    {"prompt": [SYSTEM, ASK, SAY, MORE[0]], "completion": [MORE[1]]},
    {"prompt": [ASK], "completion": [SAY, *MORE]},
]
TEXTS: list[dict[str, Any]] = [
    {"prompt": "2 + 3 = ", "completion": "5"},
    {"prompt": "ä", "completion": " 😀<|im_end|>"},
]
MARKED = ("qwen2_5_training", "qwen3_training", "llama3_training", "phi3_training", "gemma_training")
PLAIN = ("qwen2_5", "llama3", "phi3", "gemma", "qwen3")


def trl_labels(
    rows: list[dict[str, Any]], own: str | None, completion: bool = False, length: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """input_ids and labels as SFTTrainer prepares them, by assistant_only_loss or completion_only_loss."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = byte_level_tokenizer(chat=True)
    tokenizer.bos_token = BOS
    if own is not None:
        tokenizer.chat_template = own
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss=completion,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # SFTConfig uses what transformers deprecates
        arguments = SFTConfig(output_dir="none", assistant_only_loss=not completion, max_length=length,
                              use_cpu=True, bf16=False, report_to="none")  # fmt: skip
    made = SFTTrainer._prepare_dataset(
        trainer, Dataset.from_list(rows), tokenizer, arguments, False, None, "train"
    )
    return [(row["input_ids"], row["labels"]) for row in made]


@pytest.mark.long
@pytest.mark.parametrize("name", [None, *MARKED])
def test_marks_say_what_counts_as_in_trl(name: str | None) -> None:
    own = name and template(name)
    rows = [row for row in CHATS if name != "gemma_training" or row["messages"][0]["role"] != "system"]
    assert [labels(encoder(own), row) for row in rows] == trl_labels(rows, own)


THOUGHT = {"role": "assistant", "content": "It is 5.", "reasoning_content": "Add them."}
RESULT = {"role": "tool", "name": "weather", "content": '{"temp": 21}'}
WITH_TOOLS = ("qwen3", "qwen2_5", "qwen3_5_think", "qwen3_instruct_2507", "gptoss", "glm4moe", "lfm2_v2",
              "nemotron_3_nano")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_of_tools_and_thoughts_count_as_in_trl(name: str) -> None:
    """Several turns, a call after another's result, and thoughts where the template has any."""
    rows: list[dict[str, Any]] = [
        {"messages": [ASK, CALL, RESULT, SAY], "tools": TOOLS},
        {"messages": [SYSTEM, ASK, CALL, RESULT, CALL, RESULT, SAY, *MORE], "tools": TOOLS},
        {"messages": [ASK, SAY, MORE[0], CALL, RESULT, SAY]},
    ]
    if name in ("qwen3", "qwen3_5_think", "gptoss", "glm4moe"):
        rows.append({"messages": [ASK, THOUGHT, MORE[0], THOUGHT]})
    own = template(f"{name}_training")
    for row in rows:  # each alone: a table would give every message the keys of all
        assert [labels(encoder(own), row)] == trl_labels([row], own)


@pytest.mark.long
@pytest.mark.parametrize("name", [None, *PLAIN])
def test_completions_count_as_in_trl(name: str | None) -> None:
    own = name and template(name)
    rows = [row for row in PROMPTS if name != "gemma" or row["prompt"][0]["role"] != "system"]
    if name == "qwen3":  # it writes an empty thought into the last turn alone
        rows = PROMPTS[:2]
    assert [labels(encoder(own), row) for row in rows] == trl_labels(rows, own, completion=True)


@pytest.mark.long
def test_completions_that_are_texts_end_as_in_trl() -> None:
    assert [labels(encoder(), row) for row in TEXTS] == trl_labels(TEXTS, None, completion=True)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_comparing_prefixes_finds_what_marks_would(name: str) -> None:
    """Where the training template of TRL marks the whole of what a turn adds to its prompt."""
    rows = [row for row in CHATS if row["messages"][0]["role"] != "system"]
    plain, marked = encoder(template(name)), encoder(template(f"{name}_training"))
    assert [labels(plain, row) for row in rows] == [labels(marked, row) for row in rows]


@pytest.mark.parametrize("name", [None, "llama3", "llama3_training"])
def test_the_last_turn_or_all_of_it_may_count(name: str | None) -> None:
    own = name and template(name)
    ids, every = labels(encoder(own), CHATS[1])
    _, last = labels(encoder(own, loss_on="last"), CHATS[1])
    _, whole = labels(encoder(own, loss_on="all"), CHATS[1])
    assert whole == ids
    own_tokenizer = encoder(own).tokenizer
    text = own_tokenizer.decode([each for each in last if each != -100])
    assert text.startswith("No\n\nnumber.")
    both = own_tokenizer.decode([each for each in every if each != -100])
    assert both.startswith("It is 5.")
    assert both.endswith(text)


def test_every_form_of_a_chat_is_the_same_chat() -> None:
    expected = labels(encoder(), CHATS[0])
    sharegpt = [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": SAY["content"]}]
    forms: list[dict[str, Any]] = [
        {"conversations": sharegpt},
        {"instruction": ASK["content"], "input": "", "output": SAY["content"]},
        {"instruction": ASK["content"], "response": SAY["content"]},
    ]
    assert [labels(encoder(), form) for form in forms] == [expected] * 3
    assert labels(encoder(field="turns"), {"turns": [ASK, SAY], "messages": None}) == expected
    both = {**CHATS[0], "instruction": "What?", "output": "This."}
    assert labels(encoder(ignored=("instruction", "output")), both) == expected
    assert labels(encoder(form="instruction", ignored=("messages",)), both) != expected
    with_input = {"instruction": "Add.", "input": "2, 3", "output": "5"}
    assert "Add.\n2, 3<|im_end|>" in encoder().tokenizer.decode(labels(encoder(), with_input)[0])


def test_tools_and_options_of_the_template_reach_it() -> None:
    own = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{{ mode }}"
    row = {
        "messages": [ASK, SAY],
        "tools": json.dumps([{"name": "add"}]),
        "chat_template_kwargs": {"mode": "x"},
    }
    ids, _ = labels(encoder(own, loss_on="all"), row)
    assert encoder().tokenizer.decode(ids) == "2 + 3?It is 5.[{'name': 'add'}]x"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"content": "x"}]}, "message 1 of messages has no role, only 'content'"),
    (
        {"messages": [ASK, {"role": "assistant"}]},
        "message 2 of messages, of the role assistant, has no content",
    ),
    ({"messages": [ASK, "x"]}, "message 2 of messages is a str"),
    ({"messages": "x"}, "messages is a list of messages, and here is a str"),
    ({"messages": []}, "messages is a list of messages, and here is nothing"),
    (
        {"messages": [{"role": "robot", "content": "x"}, SAY]},
        "message 1 of messages has the role 'robot', which neither we nor the template know",
    ),
    (
        {"messages": [ASK, {"role": "tool", "content": "x"}]},
        "the chat template refuses it (it knows system, user",
    ),
    (
        {"messages": [SYSTEM, ASK, ASK]},
        "it has no token that the loss counts: its messages are of the roles system, user, and none of",
    ),
    ({"text": "x"}, "a chat has messages, conversations, prompt and completion, or instruction and output"),
    ({"messages": [ASK, SAY], "tools": "["}, "tools is not JSON"),
]


@pytest.mark.parametrize(("row", "rule"), REFUSED)
def test_a_wrong_chat_is_refused_with_its_line(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError) as caught:
        encoder().encode("a.jsonl line 7", row)
    assert caught.value.value == "data file a.jsonl line 7"
    assert caught.value.rule.startswith(rule)
    assert caught.value.remedy


def test_a_chat_without_an_answer_may_be_dropped() -> None:
    assert encoder(drop=True).encode("a", {"messages": [ASK]}) is None
    with refuses(DataError, rule="no role"):
        encoder(drop=True).encode("a", {"messages": [{"content": "x"}]})


def test_a_template_without_marks_that_writes_a_turn_in_two_ways_is_refused() -> None:
    """Qwen3 writes an empty thought into the last turn, and not into those before."""
    made = encoder(template("qwen3"))
    assert labels(made, CHATS[0])
    with refuses(DataError, "data file a.jsonl line 3", "first 2 messages") as caught:
        made.encode("a.jsonl line 3", CHATS[2])
    assert "{% generation %} marks" in caught.value.remedy
    assert labels(encoder(template("qwen3"), loss_on="last"), CHATS[2])


def test_a_template_that_is_not_jinja_is_refused_by_its_line() -> None:
    """Unreleased: the error named the first chat, with which nothing is wrong."""
    with pytest.raises(DataError) as caught:
        encoder("{% for m in messages %}\n{{ m.content ").encode("a.jsonl line 1", CHATS[0])
    assert caught.value.value == "the chat template, line 2"
    assert "a.jsonl" not in str(caught.value)


def test_the_first_message_is_named_in_the_singular() -> None:
    own = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}"
    with refuses(DataError, "data file a", "template writes"):
        encoder(own).encode("a", CHATS[0])


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path), chat=True)
    assert isinstance(tokenizer, HuggingFace)
    with refuses(DataError, "data.kind=chat", "chat template") as caught:
        ChatEncoder(tokenizer)
    assert "data.chat_template=" in caught.value.remedy
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    given = open_tokenizer(str(tmp_path), chat=True, template=str(tmp_path / "own.jinja"))
    assert isinstance(given, HuggingFace)
    assert bytes(labels(ChatEncoder(given), CHATS[0])[0]) == b"2 + 3?It is 5."
    with refuses(DataError, "data.chat_template=nowhere", "the file cannot be read"):
        open_tokenizer(str(tmp_path), chat=True, template="nowhere")


def test_where_code_of_the_folder_may_run_its_tokenizer_writes_chats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have an `apply_chat_template` of its own. The ids and marks are the same where it has none."""
    own = template("qwen3_training")
    plain, trusted = HuggingFace("bytes", own), HuggingFace("bytes", own, trusted=True)
    messages = CHATS[0]["messages"]
    assert trusted.chat_text(messages, {}) == plain.chat_text(messages, {})
    assert trusted.chat_ids(messages, {}) == plain.chat_ids(messages, {})
    assert trusted.chat_marked(messages, {}) == plain.chat_marked(messages, {})
    monkeypatch.setattr(trusted.own, "apply_chat_template", lambda *_, **__: "written by its code")
    assert trusted.chat_text(messages, {}) == "written by its code"
