"""The collector of garbage stands still while many objects are made."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from penstock.schedule.collector import collector_paused


def test_it_stands_still_within_and_goes_on_after_an_error() -> None:
    seen = []

    def fail() -> None:
        with collector_paused():
            seen.append(gc.isenabled())
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert seen == [False]
    assert gc.isenabled()


def test_where_it_stood_still_before_it_does_so_after() -> None:
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()


# in a process that holds little: a walk through all objects takes seconds where torch is imported
VERY_MANY = """
import gc
from penstock.schedule.collector import collector_paused

gc.collect()
with collector_paused(all_stay=True):
    few = [[] for _ in range(1000)]
assert gc.get_count()[0] >= 1000 or gc.get_count()[1] > 0
with collector_paused(all_stay=True):
    many = [[] for _ in range(150_000)]
assert gc.get_count()[0] < 1000
assert all(map(gc.is_tracked, many[:10]))
assert not gc.get_freeze_count()
oldest = set(map(id, gc.get_objects(generation=2)))
assert {*map(id, many)} <= oldest
assert len(few) == 1000
"""
FROZEN = """
import gc
from penstock.schedule.collector import collector_paused

gc.freeze()
frozen = gc.get_freeze_count()
with collector_paused(all_stay=True):
    many = [[] for _ in range(150_000)]
assert frozen / 2 < gc.get_freeze_count() <= frozen  # a frozen object may die
assert len(many) == 150_000
"""


def test_very_many_objects_that_stay_count_as_old() -> None:
    """A collection of young objects then has little to walk; of few objects, the usual ones come in time."""
    subprocess.run([sys.executable, "-c", VERY_MANY], check=True)


def test_what_is_frozen_stays_frozen() -> None:
    subprocess.run([sys.executable, "-c", FROZEN], check=True)
