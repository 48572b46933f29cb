"""The collector of garbage stands still while many objects are made."""

from __future__ import annotations

import gc

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
