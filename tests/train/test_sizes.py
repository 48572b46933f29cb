"""How large each step is, where its rows begin, and what its pipeline calls take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.parallel.axes import Axes
from penstock.train.config.load import load_config
from penstock.train.preflight import preflight
from penstock.train.settings import largest_microbatch
from penstock.train.sizes import Size, StepSizes, calls_of
from support.refusals import refuses
from support.tiny import QWEN3, config, config_file

RAMP = [{"until": 2, "batch_size": 4, "sequence_length": 8}, {"until": 3, "batch_size": 8}]


def sizes(folder: Path, parts: int = 1, microbatches: int = 4, **train: Any) -> StepSizes:
    return StepSizes.of(config(folder, keys={"pipeline.microbatches": microbatches}, **train), parts)


def test_a_ramp_as_its_module_draws_it(tmp_path: Path) -> None:
    found = sizes(tmp_path, batch_size=16, ramp=RAMP)
    first, second, full = Size(4, 8, (1,)), Size(8, 16, (2,)), Size(16, 16, (4,))
    assert [found.at(step) for step in range(1, 6)] == [first, first, second, full, full]
    assert [found.rows_before(step) for step in range(1, 7)] == [0, 4, 8, 16, 32, 48]


def test_calls_share_the_microbatches_of_a_step(tmp_path: Path) -> None:
    ramp = [{"until": 1, "batch_size": 4}, {"until": 2, "batch_size": 20}, {"until": 3, "batch_size": 28}]
    found = sizes(tmp_path, batch_size=32, accumulate=2, microbatches=4, ramp=ramp)
    assert [found.at(step).calls for step in (1, 2, 3, 4)] == [(1,), (3, 2), (4, 3), (4, 4)]
    made = config(tmp_path, keys={"pipeline.microbatches": 4}, batch_size=32, accumulate=2)
    assert largest_microbatch(made) == (4, 16)


@given(
    full=st.integers(1, 6),
    smaller=st.lists(st.integers(1, 40), max_size=3),
    microbatches=st.integers(1, 5),
    calls=st.integers(1, 3),
    parts=st.integers(1, 3),
)
def test_no_microbatch_is_larger_than_in_a_full_batch(
    tmp_path_factory: pytest.TempPathFactory,
    full: int,
    smaller: list[int],
    microbatches: int,
    calls: int,
    parts: int,
) -> None:
    rows = full * microbatches * calls * parts
    phases = sorted({parts * each for each in smaller if parts * each <= rows})
    ramp = [{"until": at + 1, "batch_size": each} for at, each in enumerate(phases)]
    folder = tmp_path_factory.getbasetemp()
    found = sizes(folder, parts, microbatches, batch_size=rows, accumulate=calls, ramp=ramp)
    begins = 0
    for step in range(1, len(phases) + 3):
        size = found.at(step)
        assert found.rows_before(step) == begins
        begins += size.rows
        of_part = size.rows // parts
        assert 1 <= size.microbatches <= of_part
        assert -(-of_part // size.microbatches) <= full
        assert max(size.calls) <= microbatches
        assert len(size.calls) <= calls
    assert found.at(len(phases) + 1) == found.full == Size(rows, 16, (microbatches,) * calls)


def test_what_the_calls_take() -> None:
    batch = {"input_ids": torch.arange(20).view(10, 2)}
    assert calls_of(batch, (4,), 4) == [batch]
    first, second = calls_of(batch, (2, 1), 4)
    assert [part["input_ids"][:, 0].tolist() for part in first] == [[0, 2, 4, 6], [8, 10, 12]]
    assert [part["input_ids"][:, 0].tolist() for part in second] == [[14, 16, 18]]
    parts = [{"number": number} for number in range(3)]
    assert calls_of(parts, (2, 1), 4) == [parts[:2], parts[2:]]
    assert calls_of(parts, (3,), 4) == [parts]


@pytest.mark.parametrize(
    ("train", "value", "rule"),
    [
        ({"ramp": [{"until": 3}, {"until": 3}]}, "train", "until step 3 after one until step 3"),
        (
            {"ramp": [{"until": 3, "batch_size": 9}]},
            "config",
            "batch_size=9 before 4, and train.batch_size=4",
        ),
        ({"ramp": [{"until": 3}, {"until": 4, "batch_size": 2}]}, "config", "batch_size=4 before 2"),
        ({"ramp": [{"until": 3, "sequence_length": 17}]}, "config", "sequence_length=17 before 16"),
        ({"ramp": [{"until": 0, "batch_size": 2}]}, "train.ramp.0.until=0", "equal to 1"),
        ({"accumulate": 3}, "config", "pipeline.microbatches=2 in each of train.accumulate=3"),
        ({"early_stop": {"min_delta": 0.1}}, "train.early_stop.patience is missing", "needs it"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, train: dict[str, Any], value: str, rule: str
) -> None:
    with refuses(ConfigError, value, rule):
        load_config(config_file(tmp_path, train=train))


@pytest.mark.parametrize(
    ("pipeline", "axes", "value", "rule"),
    [
        ({"schedule": "dualpipe", "microbatches": 4}, {},
         "a phase of train.ramp", "6 rows make 3 microbatches, and microbatches=3: "),
        ({}, {"dp_shard": 4}, "train.ramp with batch_size=6", "with dp_shard=4 it is divided into 4"),
        ({}, {"cp": 2}, "train.ramp with sequence_length=10", "with cp=2 it is divided into 4"),
    ],
)  # fmt: skip
def test_a_phase_that_schedule_or_axes_do_not_take_is_refused_before_the_run(
    tmp_path: Path, pipeline: dict[str, Any], axes: dict[str, Any], value: str, rule: str
) -> None:
    keys = {f"pipeline.{name}": value for name, value in pipeline.items()}
    keys |= {f"parallel.{name}": value for name, value in axes.items()}
    ramp = [{"until": 3, "batch_size": 6, "sequence_length": 10}]
    made = config(tmp_path, {**QWEN3, "num_key_value_heads": 2}, keys, batch_size=8, ramp=ramp)
    with refuses(ConfigError, value, rule):
        preflight(made)
    assert Axes(**axes) == made.parallel.axes
