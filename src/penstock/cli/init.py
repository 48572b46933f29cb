"""`penstock init`: ask what is missing, and write a first config."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import typer

from penstock.cli.shared import check_new
from penstock.errors import ConfigError
from penstock.schedule.files import write_text
from penstock.train.config.starter import GOALS, FirstRun, Goal, starter

T = TypeVar("T")


def init(out: Path, model: str | None, data: str | None, gpus: int | None, goal: Goal | None) -> None:
    """Write a config to `out`. A terminal is asked for what is None. Raises ConfigError."""
    check_new(out)
    goals = ", ".join(f"{name} ({means})" for name, means in GOALS.items())
    asked = cast(Goal, _given("--goal", goal, f"What for? {goals}", str))
    start = FirstRun(
        _given("--model", model, "Model: a Hugging Face folder, or a name of the Hub", str),
        _given("--data", data, "Data: a file or a folder", str),
        _given("--gpus", gpus, "How many GPUs (or processes, without any)", int),
        asked,
        f"runs/{out.stem}",
    )
    write_text(out, starter(start, out.name), "config")
    print(f"wrote {out}; next: penstock train {out} --dry-run")


def _given(option: str, value: T | None, question: str, kind: Callable[[Any], T]) -> T:
    """The value of an option, which a terminal is asked for. Raises ConfigError where there is none."""
    if value is not None:
        return value
    if not sys.stdin.isatty():
        rule = "a first config needs it, and there is no terminal to ask"
        raise ConfigError(f"penstock init without {option}", rule, f"Give {option}")
    answer: T = typer.prompt(question, type=kind)
    return answer
