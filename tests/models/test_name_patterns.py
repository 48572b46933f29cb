"""Patterns of adapters: those that never end are refused in time, and PEFT's own go through."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest
from peft import LoraConfig

from penstock.errors import ConfigError
from penstock.models import name_patterns
from penstock.models.adapters import add_adapter
from penstock.models.name_patterns import check_patterns
from support.families import tiny_model
from support.refusals import refuses

NAMES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(40) for name in "qkvo"]
ENDLESS = r"(.*)*(.*)*(.*)*z"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ENDLESS}, {"exclude_modules": ENDLESS}, {"modules_to_save": [ENDLESS]},
        {"layers_pattern": ENDLESS}, {"rank_pattern": {ENDLESS: 2}}, {"alpha_pattern": {ENDLESS: 2}},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
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


def test_an_adapter_with_such_a_pattern_is_refused_before_peft_tries_it() -> None:
    with refuses(ConfigError, "the adapter's target_modules", "2 s of a processor", "list"):
        add_adapter(tiny_model("llama"), LoraConfig(target_modules=ENDLESS))
