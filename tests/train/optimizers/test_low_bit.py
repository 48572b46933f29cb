"""AdamW by torchao: its own steps, checkpoints of moments in few bits, and stochastic rounding.

In a process of its own: transformers would import torchao into every process that finds it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import jobs_low_bit
from support.pool import start


def alone(job: Callable[..., Any], *args: Any, compiled: bool = False) -> None:
    """Run `job` in a process that has torchao. Raises AssertionError with its traceback."""
    assert jobs_low_bit.TORCHAO.is_dir(), "make env installs torchao there"
    here, there = multiprocessing.Pipe()
    process = start(jobs_low_bit.answer, there, job, compiled, *args)
    there.close()
    try:
        failure = here.recv() if here.poll(100) else "no answer"
    except EOFError:
        failure = "it ended without an answer"
    finally:
        process.kill()
        process.join()
        here.close()
    assert not failure, failure


@pytest.mark.parametrize(
    ("states", "tolerance"),
    [
        ("8bit", 1e-5),
        pytest.param("4bit", 1e-5, marks=pytest.mark.sweep),
        pytest.param("fp8", 1e-5, marks=pytest.mark.sweep),
    ],
)
def test_moments_in_few_bits_are_torchaos_and_come_back(
    tmp_path: Path, states: str, tolerance: float
) -> None:
    alone(jobs_low_bit.twin, tmp_path, states, tolerance)


@pytest.mark.parametrize(
    "states", [None, *(pytest.param(each, marks=pytest.mark.sweep) for each in ("bfloat16", "8bit"))]
)
def test_stochastic_rounding_is_a_function_of_name_and_step(tmp_path: Path, states: str | None) -> None:
    alone(jobs_low_bit.rounding, tmp_path, states)


def test_steps_below_half_a_rounding_are_not_lost(tmp_path: Path) -> None:
    alone(jobs_low_bit.below_half_a_step, tmp_path)


@pytest.mark.sweep
def test_as_torchao_compiles_it(tmp_path: Path) -> None:
    alone(jobs_low_bit.twin, tmp_path, "8bit", 1e-4, compiled=True)
