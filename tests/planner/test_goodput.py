"""Goodput, against the figures of Daly's paper and against runs drawn at random."""

from __future__ import annotations

from math import e, exp, inf, nan

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.planner.goodput import Goodput, best_interval, daly_interval, goodput
from support.refusals import refuses

MINUTE, HOUR, YEAR = 60.0, 3600.0, 365 * 86_400.0


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_papers_intervals(mtbf: float, minutes: float) -> None:
    """Figures 3 to 5 of Daly's paper, for a checkpoint of 5 minutes. The estimate errs by less than 0.5 %."""
    digits = 1 if minutes < 10 else 0
    assert round(daly_interval(5 * MINUTE, mtbf) / MINUTE, digits) == minutes
    assert best_interval(5 * MINUTE, mtbf) == pytest.approx(daly_interval(5 * MINUTE, mtbf), rel=0.005)


def test_a_checkpoint_longer_than_two_failures_apart() -> None:
    """Daly gives M. The best is a little less: x = 1 - exp(-(x + d))."""
    assert daly_interval(20, 10) == 10
    assert best_interval(20, 10) == pytest.approx(10, rel=0.06)
    assert best_interval(1e6, 10) == pytest.approx(10)


@pytest.mark.parametrize(
    ("checkpoint", "mtbf"), [(0.01, 1e6), (5, 1800), (60, 3600), (600, 600), (5000, 600)]
)
def test_no_other_interval_keeps_more(checkpoint: float, mtbf: float) -> None:
    def kept(interval: float) -> float:
        times = {"device_mtbf": mtbf, "checkpoint": checkpoint, "restart": 120.0}
        return goodput(devices=1, interval=interval, **times).training

    best = best_interval(checkpoint, mtbf)
    assert all(kept(best) >= kept(best * factor) for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2))
    assert kept(best) > kept(best * 1.01)


def drawn(mtbf: float, interval: float, checkpoint: float, restart: float, background: float) -> Goodput:
    """A run of 400,000 lives, each from a restart to the next failure."""
    random, lives = np.random.default_rng(5), 400_000
    lasted = random.exponential(mtbf, lives)
    kept = np.maximum(0, np.floor((lasted - background) / (interval + checkpoint)))
    restarts = np.zeros(lives)
    starting = np.ones(lives, bool)
    failures = lives
    while starting.any():  # a restart may fail
        until_failure = random.exponential(mtbf, lives)
        restarts += np.where(starting, np.minimum(until_failure, restart), 0)
        starting &= until_failure < restart
        failures += int(starting.sum())
    took = lasted.sum() + restarts.sum()
    training, saving = (kept.sum() * seconds / took for seconds in (interval, checkpoint))
    restarting = restarts.sum() / took
    lost = 1 - training - saving - restarting
    return Goodput(interval, training, saving, restarting, lost, failures / took * 86_400)


@pytest.mark.parametrize(
    ("mtbf", "interval", "checkpoint", "restart", "background"),
    [(3600, 600, 60, 300, 0), (3600, 600, 10, 300, 400), (1800, 1200, 120, 1500, 0), (900, 100, 30, 90, 60)],
)
def test_runs_drawn_at_random(
    mtbf: float, interval: float, checkpoint: float, restart: float, background: float
) -> None:
    times = {"checkpoint": checkpoint, "restart": restart, "background": background, "interval": interval}
    expected = goodput(devices=1, device_mtbf=mtbf, **times)
    run = drawn(mtbf, interval, checkpoint, restart, background)
    for share in ("training", "saving", "restarting", "lost"):
        assert getattr(expected, share) == pytest.approx(getattr(run, share), abs=0.002)
    assert expected.failures == pytest.approx(run.failures, rel=0.005)


def test_sixteen_thousand_devices() -> None:
    """One failure in five years a device is one every 2.7 hours for all; half as often, far less is lost."""
    times = {"checkpoint": 30.0, "restart": 600.0}
    many = goodput(devices=16_384, device_mtbf=5 * YEAR, **times)
    few = goodput(devices=8_192, device_mtbf=5 * YEAR, **times)
    assert many.failures == pytest.approx(8.98, abs=0.01)
    assert many.training < few.training < 1
    assert many.training + many.saving + many.restarting + many.lost == pytest.approx(1, abs=1e-12)
    assert many.interval < few.interval
    assert many.interval == pytest.approx(daly_interval(30, 5 * YEAR / 16_384), rel=1e-4)


def test_checkpoints_that_cost_nothing() -> None:
    found = goodput(devices=1, device_mtbf=100, checkpoint=0, restart=100)
    assert (found.interval, found.training) == (0, 1 / e)
    assert found.lost == pytest.approx(0)
    written = goodput(devices=1, device_mtbf=100, checkpoint=0, restart=0, background=50)
    assert written.training == exp(-0.5)


def test_a_run_that_never_comes_to_a_checkpoint() -> None:
    found = goodput(devices=10**6, device_mtbf=HOUR, checkpoint=HOUR, restart=HOUR)
    assert (found.training, found.lost) == (0, 0)
    assert found.restarting == 1


@pytest.mark.parametrize(
    ("changed", "value", "rule"),
    [
        ({"devices": 0}, "devices=0", "whole number"),
        ({"devices": 1.5}, "devices=1.5", "whole number"),
        ({"device_mtbf": 0}, "device_mtbf=0", "a time above 0"),
        ({"device_mtbf": nan}, "device_mtbf=nan", "a time in seconds"),
        ({"checkpoint": -1}, "checkpoint=-1", "a time in seconds"),
        ({"restart": inf}, "restart=inf", "a time in seconds"),
        ({"background": "1"}, "background='1'", "a time in seconds"),
        ({"interval": 0}, "interval=0", "a time above 0"),
        ({"interval": -2}, "interval=-2", "a time in seconds"),
    ],
)
def test_refusals(changed: dict[str, object], value: str, rule: str) -> None:
    usual: dict[str, object] = {"devices": 8, "device_mtbf": YEAR, "checkpoint": 30, "restart": 60}
    with refuses(ConfigError, value, rule):
        goodput(**{**usual, **changed})  # type: ignore[arg-type]


def test_no_time_between_failures() -> None:
    with refuses(ConfigError, "mtbf=0"):
        best_interval(1, 0)
