"""The process of a tracker: names that every library takes, and rows that it cannot read."""

from __future__ import annotations

import pytest

# one line of a file, without a process
from penstock.train.records.tracker_process import _row, numbers

ROW = {
    "loss": 2.5, "grad_norm": None, "learning_rates": {"adamw": 1e-3, "head|norm": 1e-4},
    "peak_resident": [7, 9], "skipped": "loss=nan", "tokens": 64,
}  # fmt: skip


def test_numbers_have_flat_names_that_every_library_takes() -> None:
    assert numbers({"step": 3, **ROW}) == {
        "loss": 2.5, "learning_rates/adamw": 1e-3, "learning_rates/head_norm": 1e-4, "peak_resident/0": 7.0,
        "peak_resident/1": 9.0, "tokens": 64.0,
    }  # fmt: skip
    held_out = {"step": 0, "held_out_loss": 5.5, "seconds": 0.5, "tokens": 3}
    assert set(numbers(held_out)) == {"held_out_loss", "evaluation/seconds", "evaluation/tokens"}
    assert set(numbers({"step": 4, "checkpoint": "step-4", "seconds": 0.5})) == {"checkpoint/seconds"}


@pytest.mark.parametrize("bad", [b"\x00\xff", b"[" * 100_000, b"[1]", b'{"loss": 1}', b""])
def test_a_bad_line_costs_its_own_row(bad: bytes) -> None:
    """0.5.0: it ended the tracker, with all rows after it: each line was read as our own."""
    assert _row(bad) is None
    assert _row(b'{"step": 1}') == {"step": 1}
