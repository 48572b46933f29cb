"""Every key and role of a chat is read as the formats that have it mean it, or is refused by its name."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from penstock.errors import DataError
from penstock.train.encoding.chat import ChatEncoder
from support.chats import (
    CALL,
    CHATML_TOOLS,
    MISTRAL,
    TOOLS,
    ZEPHYR,
    encoder,
    labels,
    outcome,
    template,
    text_of,
)
from support.mutations import CASES, ODD_VALUES, mutated_json, seeded

ASK, SAY = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is 5."}
MORE = [{"role": "user", "content": "And ä 😀?"}, {"role": "assistant", "content": "No\n\nnumber."}]
RESULT = {"role": "tool", "content": '{"temp": 21}'}
CALLED = [ASK, CALL, RESULT, SAY]


def refused(row: Mapping[str, Any], own: str | None = None, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        encoder(own, **options).encode("a.jsonl line 7", row)
    assert caught.value.value == "data file a.jsonl line 7"
    return f"{caught.value.rule}. {caught.value.remedy}"


# ---- Formats


@pytest.mark.parametrize("own", ["qwen3_training", "qwen2_5", "glm4moe_training", "gptoss_training"])
def test_calls_of_tools_in_sharegpts_words_are_calls(own: str) -> None:
    """0.5.0: function_call and observation kept their names, which a template passes over: the call and its
    result were lost. LLaMA-Factory makes of them a turn that calls, which it trains, and a tool's result."""
    calls = json.dumps({"name": "weather", "arguments": CALL["tool_calls"][0]["function"]["arguments"]})
    turns = [("human", "2 + 3?"), ("function_call", calls), ("observation", '{"temp": 21}'),
             ("gpt", "It is 5.")]  # fmt: skip
    told = [{"from": who, "value": text} for who, text in turns]
    row: dict[str, Any] = {"conversations": told, "tools": json.dumps(TOOLS)}
    made = encoder(template(own))
    expected = labels(made, {"messages": [ASK, CALL, RESULT, SAY], "tools": TOOLS})
    assert labels(made, row) == expected
    assert "weather" in text_of(expected[1])  # it is trained
    two = copy.deepcopy(row)
    two["conversations"][1]["value"] = f"<think>hm</think>[{calls}]"
    if own != "gptoss_training":  # it takes no content beside a call
        assert "hm" in text_of(labels(made, two)[0])
    for text, rule in (("weather(", "of the role function_call, is not JSON"), ("[]", "calls nothing"),
                       ("3", "is a list of calls"), ('{"name": 3}', "is a list of calls")):  # fmt: skip
        row["conversations"][1]["value"] = text
        assert rule in refused(row, template(own))


def test_a_name_that_the_template_passes_over_is_refused() -> None:
    """A template that reads no message.name loses who spoke; of a tool's result, the call says it."""
    chosen = template("qwen3_training")
    assert "nothing reads 'name'" in refused({"messages": [{**ASK, "name": "Ada"}, SAY]}, chosen)
    row: dict[str, Any] = {"messages": [ASK, CALL, {**RESULT, "name": "weather"}, SAY], "tools": TOOLS}
    assert "weather" in text_of(labels(encoder(chosen), row)[1])


@pytest.mark.parametrize("name", ["gpt", "chatgpt", "bing", "bard", "model", "assistant"])
def test_every_name_of_the_assistant_is_trained(name: str) -> None:
    """0.5.0: bing, chatgpt and bard stayed roles of their own, whose turns no loss counted."""
    own = template("qwen2_5_training")
    expected = labels(encoder(own), {"messages": [ASK, SAY, *MORE]})
    for key, text in (("from", "value"), ("role", "content"), ("role", "value")):
        told = [{key: name if of["role"] == "assistant" else "human", text: of["content"]}
                for of in (ASK, SAY, *MORE)]  # fmt: skip
        assert labels(encoder(own), {"conversations": told}) == expected


def test_a_system_message_beside_the_conversation_is_its_first() -> None:
    """0.5.0: a top-level system was read of alpaca's form alone, and lost beside conversations."""
    system = {"role": "system", "content": "Be short."}
    expected = labels(encoder(), {"messages": [system, ASK, SAY]})
    assert labels(encoder(), {"messages": [ASK, SAY], "system": "Be short."}) == expected
    assert labels(encoder(), {"messages": [system, ASK, SAY], "system": ""}) == expected
    said = refused({"messages": [system, ASK, SAY], "system": "Be long."})
    assert "it has a field system, and its first message is a system message too" in said
    assert "data.ignored_fields" in said


def test_alpacas_history_is_turns() -> None:
    """0.5.0: history was lost. LLaMA-Factory trains its answers too."""
    row = {"instruction": "And", "input": "ä 😀?", "output": "No\n\nnumber.", "system": "Be short.",
           "history": [["2 + 3?", "It is 5."]]}  # fmt: skip
    more = [{"role": "user", "content": "And\nä 😀?"}, MORE[1]]
    expected = labels(encoder(), {"system": "Be short.", "messages": [ASK, SAY, *more]})
    assert labels(encoder(), row) == expected
    assert labels(encoder(), row | {"history": []}) != expected
    for history in ("x", [["a"]], [["a", "b", "c"]], ["ab"], [None], {"a": "b"}):
        assert "history is a list of pairs" in refused(row | {"history": history})
    assert "content of turn 1 of its history is a text, and here is a int" in refused(
        row | {"history": [["a", 3]]}
    )
    assert "input is a text, and here is a int" in refused(row | {"input": 3})


@pytest.mark.parametrize("own", ["qwen3_training", "llama3_1", "gptoss_training", None])
def test_arguments_in_json_are_an_object(own: str | None) -> None:
    """0.5.0: OpenAI's arguments are a text in JSON, which a template's `| tojson` wrote as a quoted text."""
    chosen = CHATML_TOOLS if own is None else template(own)
    arguments = CALL["tool_calls"][0]["function"]["arguments"]
    rows: list[dict[str, Any]] = []
    for given in (arguments, json.dumps(arguments), json.dumps(arguments, indent=2)):
        call = copy.deepcopy(CALL)
        call["tool_calls"][0]["function"]["arguments"] = given
        rows.append({"messages": [ASK, call, RESULT, SAY], "tools": TOOLS})
    found = [labels(encoder(chosen, loss_on="last"), row) for row in rows]
    assert found[0] == found[1] == found[2]
    assert '{"city": "' in text_of(found[1][0])
    for given, rule in (("{city:", "is not JSON"), ("5", "are an object, and here is a int"),
                        ([1], "are an object, and here is a list")):  # fmt: skip
        rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = given
        assert f"the arguments of a call in message 2 of messages {rule}" in refused(rows[0], chosen)


def test_a_template_that_writes_arguments_as_they_are_gets_text() -> None:
    """DeepSeek's adds them to a text: an object is no text, and Python's way to write one is no JSON."""
    own = template("deepseekv3")
    found = []
    for arguments in ({"city": "Köln"}, '{"city": "Köln"}'):
        calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        found.append(labels(encoder(own, loss_on="all"), {"messages": [ASK, call, RESULT, SAY]}))
    assert found[0] == found[1]
    assert '{"city": "Köln"}' in text_of(found[0][0])


def test_parts_of_text_are_one_text() -> None:
    """0.5.0: a template of texts wrote a list of parts as Python does: [{'type': 'text', 'text': ..."""
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?", "image": None}]
    row = {"messages": [{"role": "user", "content": parts}, SAY]}
    for own in (None, template("llama3"), template("qwen3_training")):
        assert labels(encoder(own), row) == labels(encoder(own), {"messages": [ASK, SAY]})
    for part in ({"type": "image", "path": "a.png"}, {"text": "x"}, {"type": "text"}, "x", None,
                 {"type": "text", "text": 3}, {"type": "text", "text": "x", "weight": 0}):  # fmt: skip
        said = refused({"messages": [{"role": "user", "content": [part]}, SAY]})
        assert "the content of message 1 of messages has a part that is no text" in said
        assert "data.images" in said


# ---- Keys that nothing reads


def test_unknown_keys_are_all_named_and_may_be_listed() -> None:
    """0.5.0: keys without a meaning here were passed over, whatever they said of the chat."""
    row = {"id": 3, "source": None, "score": 0.5, "messages": [{**ASK, "mood": "sad"}, {**SAY, "id": "x"}]}
    said = refused(row, ignored=("url",))
    assert "nothing reads 'id', 'score' of the record and 'id', 'mood' of its messages" in said
    line = said.rpartition("data.")[2]
    keys = yaml.safe_load(line)  # as it is printed, so it is written
    assert keys == {"ignored_fields": ["url", "id", "score", "mood"]}
    made = encoder(ignored=tuple(keys["ignored_fields"]))
    assert labels(made, row) == labels(encoder(), {"messages": [ASK, SAY]})
    extras: list[dict[str, Any]] = [{"conversations": [ASK]}, {"instruction": "x"}, {"images": ["a.png"]}]
    for extra in (*extras, {"functions": []}):
        assert f"nothing reads {next(iter(extra))!r} of the record" in refused(
            {"messages": [ASK, SAY], **extra}
        )
    texts = {"prompt": "a", "completion": "b"}
    assert "nothing reads 'tools' of the record" in refused({**texts, "tools": TOOLS})
    assert "nothing reads 'response'" in refused({"instruction": "a", "output": "b", "response": "c"})


def test_what_the_template_reads_has_a_meaning() -> None:
    judged = "{% if m.role == 'judge' %}!{% endif %}"
    own = "{% for m in messages %}{{ m.role }}{{ m['mood'] }}{{ m.content }}" + judged + "{% endfor %}"
    row = {"messages": [{**ASK, "mood": "sad"}, {"role": "judge", "content": "hm"}, SAY]}
    assert text_of(labels(encoder(own), row)[0]) == "usersad2 + 3?judgehm!assistantIt is 5."
    assert "'mood' of its messages" in refused(row, own.replace("m['mood']", "mood"))
    assert "has the role 'judge', which neither we nor" in refused(row, own.replace("judge", "jury"))


# ---- Weights


@pytest.mark.parametrize("own", [None, "qwen3_training", "llama3", "gemma_training", "gptoss_training"])
@pytest.mark.parametrize("said", [{"weight": 0}, {"train": False}, {"weight": 0, "train": False}])
def test_a_turn_of_weight_0_does_not_count(own: str | None, said: dict[str, Any]) -> None:
    """0.5.0: OpenAI's weight and axolotl's train were passed over, and the turn was trained."""
    own = own and template(own)
    both = labels(encoder(own), {"messages": [ASK, SAY, *MORE]})
    (ids, first), (_, second) = (
        labels(encoder(own), {"messages": [ASK, SAY | a, MORE[0], MORE[1] | b]})
        for a, b in (({}, said), (said, {"weight": 1}))
    )
    assert ids == both[0]
    assert text_of(first).startswith(("It is 5.", "<think>", "<|start|>assistant"))
    assert "number" not in text_of(first)
    assert "number" in text_of(second)
    assert [a if b == -100 else b for a, b in zip(first, second, strict=True)] == both[1]
    assert all(-100 in pair for pair in zip(first, second, strict=True))


def test_weights_hold_for_every_way_to_count() -> None:
    quiet = SAY | {"weight": 0}
    whole = text_of(labels(encoder(loss_on="all"), {"messages": [ASK, quiet, *MORE]})[1])
    assert "2 + 3?" in whole
    assert "number" in whole
    assert "It is 5." not in whole
    asked = text_of(labels(encoder(loss_on="all"), {"messages": [ASK | {"train": False}, SAY]})[1])
    assert "2 + 3?" not in asked
    assert "It is 5." in asked
    completion = {"prompt": [ASK, quiet, MORE[0]], "completion": [MORE[1], ASK, quiet]}
    counted = text_of(labels(encoder(), completion)[1])
    assert counted.startswith("No\n\nnumber.")
    assert "2 + 3?" in counted  # TRL's rule: all of the completion
    assert "It is 5." not in counted
    nothing = refused({"messages": [ASK, quiet]})
    assert "its turns of the assistant have weight 0 or train false" in nothing
    assert encoder(drop=True).encode("a", {"messages": [ASK, quiet]}) is None
    assert "weight 0" in refused({"messages": [ASK, SAY, MORE[0], MORE[1] | {"weight": 0}]}, loss_on="last")


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ({"weight": 0.5}, "weight of message 2 of messages is 0 or 1, and here is '0.5'"),
        ({"weight": "0"}, "weight of message 2 of messages is 0 or 1"),
        ({"weight": 2}, "is 0 or 1, and here is '2'"),
        ({"weight": float("nan")}, "is 0 or 1, and here is 'nan'"),
        ({"train": "false"}, "train of message 2 of messages is true or false"),
        ({"train": []}, "train of message 2 of messages is true or false"),
        ({"train": True, "weight": 0}, "weight and train of message 2 of messages contradict each other"),
    ],
)
def test_other_weights_are_refused(said: dict[str, Any], rule: str) -> None:
    assert rule in refused({"messages": [ASK, SAY | said]})


def test_a_turn_that_is_to_be_trained_and_does_not_count_is_refused() -> None:
    """axolotl's `train: true` on a user's turn trains it."""
    row = {"messages": [ASK | {"train": True}, SAY]}
    assert "says to train message 1 of messages, of the role user, which the loss does not" in refused(row)
    assert "2 + 3?" in text_of(labels(encoder(loss_on="all"), row)[1])
    prompt = {"prompt": [ASK, SAY | {"weight": 1}, MORE[0]], "completion": [MORE[1]]}
    assert "says to train message 2 of prompt" in refused(prompt)


def test_marks_that_are_not_one_a_turn_do_not_say_whose_they_are() -> None:
    own = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    said = refused({"messages": [ASK, SAY | {"weight": 0}, *MORE]}, own)
    assert "some of its 2 turns of the assistant must not count, and the template marks 4 parts" in said


# ---- What the template leaves out


LEFT_OUT: list[tuple[str | None, dict[str, Any], str]] = [
    ("llama3", {"messages": CALLED}, "the name of a call of message 2 of messages: 'weather'"),
    ("phi3", {"messages": [ASK, SAY, RESULT, *MORE]}, "the content of message 3 of messages: '{\"temp\":"),
    ("llama3_1", {"messages": [ASK, {**CALL, "content": "So?"}, RESULT, SAY]}, "the content of message 2"),
    ("deepseek_r1_distill", {"messages": [ASK, {**SAY, "content": "<think>2 and 3</think>It is 5."}]},
     "a thought in the content of message 2 of messages: '2 and 3'"),
    ("qwen2_5", {"messages": [ASK, {**SAY, "reasoning_content": "hm"}]}, "reasoning_content of message 2"),
    ("smolvlm", {"messages": [ASK, SAY]}, "the content of message 1"),
    ("phi3", {"messages": [ASK, SAY], "tools": TOOLS}, "the same without its tools, and so leaves them out"),
    (None, {"messages": [ASK, {"role": "user", "content": "lost"}, SAY]}, "the content of message 2"),
]  # fmt: skip


@pytest.mark.parametrize(("own", "row", "what"), LEFT_OUT)
def test_what_the_template_leaves_out_is_refused(own: str | None, row: dict[str, Any], what: str) -> None:
    """0.5.0: a template that does not know a role, calls or thoughts left them out, and nothing was said."""
    chosen = template(own) if own else "{% for m in messages %}{{ m.content if loop.index != 2 }}{% endfor %}"
    assert what in refused(row, chosen, loss_on="all")


def test_texts_are_looked_for_in_the_order_of_the_messages() -> None:
    """A text that is lost may stand in another turn, and that turn is looked for behind it."""
    own = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}|{% endif %}{% endfor %}"
    text = "the sum of 2 and 3 is 5"
    said = {"role": "assistant", "content": f"I see that {text}."}
    row = {"messages": [ASK, {"role": "tool", "content": text}, said]}
    assert "the content of message 3" in refused(row, own, loss_on="all")


@pytest.mark.parametrize("text", ["a", "s", "im", "5", "user", "<|im_end|>"])
def test_a_short_text_is_not_taken_for_a_part_of_another(text: str) -> None:
    """The words of the template have it: <|im_start|>assistant."""
    written = "message.content + '<|im_end|>'"
    own = CHATML_TOOLS.replace(written, f"('' if message.role == 'tool' else {written})")
    row = {"messages": [ASK, {"role": "tool", "content": text}, SAY]}
    assert labels(encoder(CHATML_TOOLS), row)
    assert f"leaves out the content of message 2 of messages: {text!r}" in refused(row, own, loss_on="all")


THOUGHT = "<think>\nsecond thought\n</think>\n\nNo."
KEPT: list[tuple[str, str | None, list[dict[str, Any]]]] = [
    ("zephyr", ZEPHYR, [ASK, {**SAY, "content": "  It is 5.\n\n"}]),
    ("mistral moves the system message to the last question", MISTRAL,
     [{"role": "system", "content": "Be short."}, ASK, SAY, *MORE]),
    ("deepseek moves the system message to the front", template("deepseekv3"),
     [ASK, SAY, {"role": "system", "content": "Be short."}, *MORE]),
    ("gemma trims, and has another role", template("gemma"), [ASK, {"role": "model", "content": " 5 \n"}]),
    ("qwen3 leaves out the first thought", template("qwen3"),
     [ASK, {**SAY, "content": "<think>\nfirst\n</think>\n\nIt is 5."}, ASK, {**SAY, "content": THOUGHT}]),
    ("and of the other key", template("qwen3"),
     [ASK, {**SAY, "reasoning_content": "first"}, ASK, {**SAY, "reasoning_content": "second"}]),
    ("gpt-oss leaves out the thought before a call", template("gptoss"),
     [ASK, {**CALL, "thinking": "first"}, RESULT, {**SAY, "thinking": "second"}]),
    ("llama quotes results", template("llama3_1"), [ASK, CALL, {"role": "tool", "content": 'ä "x"\n'}, SAY]),
    ("lfm2 writes calls as Python", template("lfm2_v2"), CALLED),
    ("nothing is found anywhere", None, [ASK, SAY, {"role": "user", "content": ""}, SAY]),
]  # fmt: skip


@pytest.mark.parametrize(("own", "messages"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT])
def test_what_templates_do_by_design_is_taken(own: str | None, messages: list[dict[str, Any]]) -> None:
    made = encoder(own, loss_on="all")
    as_said = [{**of, "role": "assistant" if of["role"] == "model" else of["role"]} for of in messages]
    assert labels(made, {"messages": messages})[0] == made.tokenizer.chat_ids(as_said, {})


# ---- Texts that are none


@pytest.mark.parametrize(
    ("row", "at"),
    [
        ({"messages": [ASK, {**SAY, "content": "ab\ud800"}]},
         "content of entry 2 of messages is not Unicode text: its character 2 is U+D800"),
        ({"messages": [ASK, {**SAY, "\udfff": 1}]}, "a key of entry 2 of messages is not Unicode"),
        ({"\udc00": 1}, "a key is not Unicode text: its character 0 is U+DC00"),
        ({"prompt": "\ud83d", "completion": "x"}, "prompt is not Unicode text"),
        ({"messages": [ASK, SAY], "tools": [{"name": "\ud800"}]}, "name of entry 1 of tools is not Unicode"),
    ],
)  # fmt: skip
def test_half_of_a_character_is_named(row: dict[str, Any], at: str) -> None:
    """0.5.0: 'the chat template refuses it', as the tokenizer fails on it and the template was blamed."""
    assert refused(row).startswith(at)
    assert "template" not in refused(row)


def test_chat_template_kwargs_are_variables_of_the_template() -> None:
    """0.5.0: a record could set `truncation` and others of transformers' own; a list was a traceback."""
    row = {"messages": [ASK, SAY]}
    wrong: list[Any] = [[], "x", {"truncation": True}, {"tools": []}, {"tokenize": False}]
    for value in wrong:
        assert refused(row | {"chat_template_kwargs": value}).startswith("chat_template_kwargs")
    no_tools: list[Any] = [{"a": 1}, [3], "5", "{}"]
    for tools in no_tools:
        assert refused(row | {"tools": tools}).startswith("tools is a list of objects")
    none: list[Any] = ["", "[]", [], None]
    for tools in none:
        assert labels(encoder(), row | {"tools": tools}) == labels(encoder(), row)


# ---- Fuzzers

WORDS = ("hm", "2 + 3?", "Köln", "a\nb", ' "q" ', "<think>x</think>y", "😀", "It's", "5", "\\n", "{}", "")
NAMES = {"user": ("user", "human"), "tool": ("tool", "observation"),
         "assistant": ("assistant", "gpt", "bing", "chatgpt", "bard", "model")}  # fmt: skip
FUZZED: dict[str, str | None] = {
    name: template(f"{name}_training") for name in ("qwen3", "qwen2_5", "llama3", "phi3")
}
FUZZED |= {"chatml": None, "tools": CHATML_TOOLS}


def drawn_messages(choices: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    role_key, text_key = choices.choice((("role", "content"), ("from", "value")))
    for _ in range(choices.randint(1, 3)):
        turns = ["user", "assistant"] if choices.random() < 0.7 else ["user", "call", "tool", "assistant"]
        for turn in turns:
            text: Any = choices.choice(WORDS) + choices.choice(WORDS)
            if turn == "call":
                arguments = {"city": choices.choice(WORDS), "days": choices.choice(ODD_VALUES[:12])}
                given: Any = arguments if choices.random() < 0.5 else json.dumps(arguments)
                call = {"name": "weather", "arguments": given}
                if choices.random() < 0.3:
                    messages.append({role_key: "function_call", text_key: json.dumps(call)})
                else:
                    calls = [choices.choice((call, {"type": "function", "function": call}))]
                    messages.append({role_key: "assistant", text_key: "", "tool_calls": calls})
                continue
            if choices.random() < 0.1:
                text = [{"type": "text", "text": text}, {"type": "text", "text": "!"}]
            message = {role_key: choices.choice(NAMES[turn]), text_key: text}
            if choices.random() < 0.15:
                message[choices.choice(("weight", "train"))] = choices.choice((0, 1, True, False, 0.5))
            if choices.random() < 0.04:
                message[choices.choice(("mood", "reasoning_content", "name"))] = choices.choice(WORDS)
            messages.append(message)
    return messages


def drawn_row(choices: random.Random) -> dict[str, Any]:
    form = choices.randrange(5)
    if form == 0:
        row: dict[str, Any] = {"prompt": choices.choice(WORDS), "completion": choices.choice(WORDS)}
    elif form == 1:
        cut = drawn_messages(choices)
        row = {"prompt": cut[:1], "completion": cut[1:]}
    elif form == 2:
        row = {key: choices.choice(WORDS) for key in ("instruction", "input", "output")}
        row["history"] = [[choices.choice(WORDS), choices.choice(WORDS)]]
    else:
        row = {choices.choice(("messages", "conversations")): drawn_messages(choices)}
    if choices.random() < 0.2:
        row["system"] = choices.choice(WORDS)
    if choices.random() < 0.2:
        row["tools"] = TOOLS if choices.random() < 0.5 else json.dumps(TOOLS)
    if choices.random() < 0.05:
        row[choices.choice(("id", "source", "score"))] = choices.choice(ODD_VALUES)
    if choices.random() < 0.35:
        changed = mutated_json(choices, row)
        row = changed if isinstance(changed, dict) else row
    return row


def in_plain_words(message: dict[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """A message as transformers takes it, and its weight."""
    message = {key: value for key, value in message.items() if value is not None}
    role, content = message.pop("from", None), message.pop("value", None)
    role = message.pop("role", role)
    content = message.pop("content", content)
    weight = message.pop("weight", message.pop("train", None))
    names = {other: known for known, others in NAMES.items() for other in others}
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if role == "function_call" and "tool_calls" not in message:
        thought, mark, content = content.rpartition("</think>")
        calls = json.loads(content)
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        role, content = "assistant", thought + mark
    elif role == "function_call":
        role = "assistant"
    if calls := message.get("tool_calls"):
        for call in message["tool_calls"]:
            function = call.get("function") or call
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
    else:
        message.pop("tool_calls", None)
    plain = {"role": names.get(role, role), **message}
    trained = None if weight is None else bool(weight)
    return (plain if content is None else {**plain, "content": content}), trained


def expected(row: dict[str, Any], tokenizer: Any, marked: bool) -> tuple[list[int], list[int]]:
    """ids and labels by TRL's rules, of a record whose names are brought to transformers' by the test."""
    row = {key: value for key, value in copy.deepcopy(row).items() if value is not None}
    tools = row.pop("tools", None)
    options = {"tools": (json.loads(tools) if isinstance(tools, str) and tools else tools) or None}
    options |= row.pop("chat_template_kwargs", {})
    prompt = None
    if "prompt" in row:
        if isinstance(row["prompt"], str):
            end = tokenizer.eos_token
            whole = row["prompt"] + row["completion"] + (end if not row["completion"].endswith(end) else "")
            ids, before = tokenizer(whole)["input_ids"], tokenizer(row["prompt"])["input_ids"]
            return ids, [-100] * len(before) + ids[len(before) :]
        prompt, given = len(row["prompt"]), row["prompt"] + row["completion"]
    elif "instruction" in row:
        pairs = [*row.get("history", []), [None, row["output"]]]
        pairs[-1][0] = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        given = [{"role": role, "content": text} for pair in pairs
                 for role, text in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip
    else:
        given = row.get("messages") or row["conversations"]
    if row.get("system"):
        given = [{"role": "system", "content": row["system"]}, *given]
    pairs = [in_plain_words(message) for message in given]
    messages = [message for message, _ in pairs]

    def ids_of(count: int, **more: Any) -> list[int]:
        if not count:
            return []
        return list(
            tokenizer.apply_chat_template(messages[:count], return_dict=True, **options, **more)["input_ids"]
        )

    found = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=marked and prompt is None, **options
    )
    ids = list(found["input_ids"])
    if prompt is not None:
        counted = [at >= len(ids_of(prompt, add_generation_prompt=True)) for at in range(len(ids))]
    else:
        assert marked
        counted = [bool(each) for each in found["assistant_masks"]]
    for number, (_, weight) in enumerate(pairs):
        if weight is False and number >= (prompt or 0):
            for at in range(len(ids_of(number)), len(ids_of(number + 1))):
                counted[at] = False
    return ids, [token if of else -100 for token, of in zip(ids, counted, strict=True)]


@pytest.mark.parametrize("numbers", CASES)
def test_a_random_chat_is_as_in_trl_or_refused(numbers: range) -> None:
    """Every mutation of a chat in any form gives TRL's ids and labels, or a DataError with its record."""
    made: dict[str, ChatEncoder] = {name: encoder(own) for name, own in FUZZED.items()}
    taken = 0
    for number in numbers:
        with seeded(number) as choices:
            row, name = drawn_row(choices), choices.choice(list(FUZZED))
            before = repr(row)
            found = outcome(lambda: labels(made[name], row))  # noqa: B023
            assert repr(row) == before
            if isinstance(found, DataError):
                continue
            tokenizer = made[name].tokenizer.own
            ids, wanted = expected(row, tokenizer, "{%- generation" in tokenizer.chat_template)
            assert found[0] == ids
            assert found[1][1:] == wanted[1:]
            taken += 1
    assert taken > len(numbers) // 8  # most are refused, and some must not be
