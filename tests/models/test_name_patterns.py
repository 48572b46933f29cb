"""Patterns of adapters: those that never end are refused in time, and PEFT's own go through."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from typing import Any

import pytest
from peft import LoraConfig

from penstock.errors import ConfigError
from penstock.models import name_patterns
from penstock.models.adapters import add_adapter
from penstock.models.name_patterns import check_patterns
from support.covering import every
from support.families import tiny_model
from support.refusals import refuses

NAMES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(40) for name in "qkvo"]
ENDLESS = r"(.*)*(.*)*(.*)*z"


EACH_SETTING: list[dict[str, Any]] = [
    {"target_modules": ENDLESS}, {"exclude_modules": ENDLESS}, {"modules_to_save": [ENDLESS]},
    {"layers_pattern": ENDLESS}, {"rank_pattern": {ENDLESS: 2}}, {"alpha_pattern": {ENDLESS: 2}},
]  # fmt: skip


# the kernel counts whole seconds: each takes one of a processor
@pytest.mark.parametrize("settings", every(len(EACH_SETTING), EACH_SETTING))
def test_a_pattern_that_never_ends_is_refused_in_time(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: a dry run of such an adapter ran until somebody ended it."""
    monkeypatch.setattr(name_patterns, "SECONDS", 1)
    began = time.monotonic()
    with refuses(
        ConfigError, f"the adapter's {next(iter(settings))}", "more than 1 s of a processor", "list"
    ):
        check_patterns(settings, NAMES)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("setting", "pattern"),
    [("target_modules", "model.*q_proj"), ("exclude_modules", "model.*q_proj"),
     ("modules_to_save", "sel+f_attn"), ("layers_pattern", "lay+ers"), ("rank_pattern", "q_pro+j"),
     ("alpha_pattern", "q_pro+j")],
)  # fmt: skip
def test_each_setting_is_tried_as_peft_matches_it(
    setting: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each name, and refused if the process is ended. The patterns match a part of the first name."""
    tried: list[Any] = []

    def ended(command: list[str], *, input: bytes, **_: Any) -> subprocess.CompletedProcess[bytes]:
        tried.append(json.loads(input))
        return subprocess.CompletedProcess(command, -signal.SIGXCPU)

    monkeypatch.setattr(subprocess, "run", ended)
    with refuses(ConfigError, f"the adapter's {setting}", "2 s of a processor", "list"):
        check_patterns({setting: pattern}, NAMES)
    ((seconds, ((method, form),), names),) = tried
    assert (seconds, names) == (name_patterns.SECONDS, NAMES)
    assert getattr(re.compile(form), method)(NAMES[0])


# in the form that trainers of large models write
LONG = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|v_proj)))"
)


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": LONG}, {"target_modules": r".*\.(q|v)_proj$", "rank_pattern": {r"^model\..*": 4}},
     {"target_modules": "("}, {"target_modules": "*", "modules_to_save": None}],
    ids=["long", "short", "plain", "no pattern"],
)  # fmt: skip
def test_other_patterns_pass(settings: dict[str, Any]) -> None:
    check_patterns(settings, NAMES)


def test_plain_names_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    check_patterns({"target_modules": {"q_proj", "v_proj"}, "rank_pattern": {"q_proj": 4}}, NAMES)


def test_an_adapter_with_such_a_pattern_is_refused_before_peft_tries_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(name_patterns, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)")
    with refuses(ConfigError, "the adapter's target_modules", "2 s of a processor", "list"):
        add_adapter(tiny_model("llama"), LoraConfig(target_modules=ENDLESS))
