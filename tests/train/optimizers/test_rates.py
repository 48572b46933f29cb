"""The learning rate of each step, against transformers' schedules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from transformers.optimization import get_scheduler

from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.train.optimizers.optimizer import AdamWSection, MuonSection
from penstock.train.optimizers.rates import RateKeys, learning_rate
from support.refusals import refuses
from support.tiny import config_file

FULL, WARMUP, STEPS = 2.0, 4, 17


def rates(keys: RateKeys, steps: int = STEPS) -> list[float]:
    return [learning_rate(keys, FULL, steps, step) for step in range(1, steps + 1)]


def rates_of_transformers(name: str, **options: Any) -> list[float]:
    """Those that each of STEPS steps takes, in the order of the Trainer: the optimizer's step comes first."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=FULL)
    scheduler = get_scheduler(name, optimizer, WARMUP, STEPS, scheduler_specific_kwargs=options)
    taken = []
    for _ in range(STEPS):
        taken.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return taken


CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"schedule": "cosine", "final_fraction": 0}, "cosine", {}),
    ({"schedule": "cosine", "final_fraction": 0.3}, "cosine_with_min_lr", {"min_lr_rate": 0.3}),
    ({"schedule": "linear", "final_fraction": 0}, "linear", {}),
    ({"schedule": "constant"}, "constant_with_warmup", {}),
    (
        {"schedule": "cosine_with_restarts", "cycles": 3, "final_fraction": 0},
        "cosine_with_restarts",
        {"num_cycles": 3},
    ),
    *(
        (
            {"schedule": "warmup_stable_decay", "decay_steps": 5, "decay_type": kind, "final_fraction": 0},
            "warmup_stable_decay",
            {"num_decay_steps": 5, "decay_type": kind},
        )
        for kind in ("cosine", "linear", "1-sqrt")
    ),
]


@pytest.mark.parametrize(("keys", "name", "options"), CASES, ids=str)
def test_each_schedule_is_transformers(keys: dict[str, Any], name: str, options: dict[str, Any]) -> None:
    found = rates(AdamWSection(warmup_steps=WARMUP, **keys))
    assert found == pytest.approx(rates_of_transformers(name, **options), abs=1e-12)


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": "linear"},
        {"schedule": "cosine_with_restarts", "cycles": 2},
        {"schedule": "warmup_stable_decay", "decay_steps": 3},
        {"schedule": "warmup_stable_decay", "decay_steps": STEPS - WARMUP, "decay_type": "1-sqrt"},
    ],
    ids=str,
)
def test_a_step_after_the_last_would_take_the_final_fraction(keys: dict[str, Any]) -> None:
    section = MuonSection(warmup_steps=WARMUP, final_fraction=0.25, **keys)
    taken = rates(section)
    assert taken[WARMUP] == FULL
    assert min(taken[WARMUP:]) > 0.25 * FULL
    assert learning_rate(section, FULL, STEPS, STEPS + 1) == pytest.approx(0.25 * FULL)


def test_a_decay_of_no_given_type_is_a_cosine() -> None:
    keys: dict[str, Any] = {"schedule": "warmup_stable_decay", "decay_steps": 5}
    assert rates(AdamWSection(**keys)) == rates(AdamWSection(**keys, decay_type="cosine"))


def test_the_default_rises_in_a_line_and_falls_along_a_cosine_to_its_floor() -> None:
    found = rates(AdamWSection(warmup_steps=4, final_fraction=0.1), 12)
    assert found[:5] == [0, 0.5, 1.0, 1.5, 2.0]
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[8] == pytest.approx(2.0 * 0.55)  # half-way down
    assert found[-1] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2))


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (0, 3), (3, 3)])
@pytest.mark.parametrize("keys", [{}, {"schedule": "linear"}, {"schedule": "constant"}], ids=str)
def test_short_runs_have_a_rate_at_every_step(keys: dict[str, Any], warmup: int, steps: int) -> None:
    taken = rates(AdamWSection(warmup_steps=warmup, **keys), steps)
    assert all(0 < rate <= FULL for rate in taken[1:])
    assert taken[0] == (0 if warmup else FULL)


@pytest.mark.parametrize(("ratio", "steps"), [(0.03, 100), (0.07, 100), (0.1, 17), (0.001, 5), (1.0, 4)])
def test_a_ratio_makes_as_many_steps_of_warm_up_as_in_transformers(
    tmp_path: Path, ratio: float, steps: int
) -> None:
    theirs = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, warmup_steps=ratio if ratio < 1 else steps
    )
    count = theirs.get_warmup_steps(steps)
    by_ratio, by_count = (AdamWSection(warmup_ratio=ratio), AdamWSection(warmup_steps=count))
    assert rates(by_ratio, steps) == rates(by_count, steps)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"schedule": "cosine_with_restarts"}, "optimizer", "no default of cycles"),
    ({"schedule": "warmup_stable_decay"}, "optimizer", "no default of decay_steps"),
    ({"cycles": 2}, "optimizer", "cycles=2 belongs to schedule=cosine_with_restarts"),
    (
        {"schedule": "linear", "decay_type": "1-sqrt"},
        "optimizer",
        "decay_type=1-sqrt belongs to schedule=warmup_stable_decay",
    ),
    (
        {"schedule": "warmup_stable_decay", "warmup_steps": 2, "decay_steps": 3},
        "config",
        "optimizer.warmup_steps=2 and optimizer.decay_steps=3 are more",
    ),
    ({"schedule": "wsd"}, "optimizer.schedule='wsd'", "'cosine', "),
    (
        {"warmup_ratio": 0.5, "warmup_steps": 3},
        "optimizer",
        "warmup_ratio=0.5 and warmup_steps=3",
    ),
    (
        {"schedule": "warmup_stable_decay", "warmup_ratio": 0.5, "decay_steps": 3, "warmup_steps": 0},
        "config",
        "optimizer.warmup_ratio=0.5, of 2 steps, and optimizer.decay_steps=3 are more",
    ),
    ({"warmup_ratio": 1.5}, "optimizer.warmup_ratio=1.5", "equal to 1"),
]


@pytest.mark.parametrize(("keys", "value", "rule"), WRONG, ids=str)
def test_keys_that_do_not_fit_are_refused(
    tmp_path: Path, keys: dict[str, Any], value: str, rule: str
) -> None:
    with refuses(ConfigError, value, rule):
        load_config(config_file(tmp_path, optimizer=keys))


def test_a_written_config_is_read_again(tmp_path: Path) -> None:
    keys = {"schedule": "warmup_stable_decay", "warmup_steps": 1, "decay_steps": 2, "decay_type": "linear"}
    config = load_config(config_file(tmp_path, optimizer=keys))
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
