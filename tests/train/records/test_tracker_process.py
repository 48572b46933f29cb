"""The process of a tracker: names that every library takes, and rows that it cannot read."""

from __future__ import annotations

import pytest
from transformers.integrations.integration_utils import rewrite_logs

# one line of a file, without a process
from penstock.train.records.tracker_process import _row, numbers

ROW = {
    "loss": 2.5, "grad_norm": None, "learning_rates": {"adamw": 1e-3, "head|norm": 1e-4},
    "peak_resident": [7, 9], "skipped": "loss=nan", "tokens": 64,
}  # fmt: skip


def test_the_names_are_those_of_transformers_trainer() -> None:
    """Its callbacks put these prefixes before the keys that it logs."""
    logged = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": 0.5}
    assert numbers({"step": 3, **logged}) == rewrite_logs(logged)
    assert numbers({"step": 3, "held_out_loss": 2.5}) == rewrite_logs({"eval_loss": 2.5})


def test_numbers_have_flat_names_that_every_library_takes() -> None:
    assert numbers({"step": 3, **ROW}) == {
        "train/loss": 2.5, "train/learning_rates/adamw": 1e-3, "train/learning_rates/head_norm": 1e-4,
        "train/peak_resident/0": 7.0, "train/peak_resident/1": 9.0, "train/tokens": 64.0,
    }  # fmt: skip
    held_out = {"step": 0, "held_out_loss": 5.5, "perplexity": 244.7, "epoch": 0.5, "seconds": 0.5}
    assert numbers(held_out) == {
        "eval/loss": 5.5, "eval/perplexity": 244.7, "eval/epoch": 0.5, "eval/seconds": 0.5,
    }  # fmt: skip
    assert set(numbers({"step": 4, "checkpoint": "step-4", "seconds": 0.5})) == {"checkpoint/seconds"}


@pytest.mark.parametrize("bad", [b"\x00\xff", b"[" * 100_000, b"[1]", b'{"loss": 1}', b""])
def test_a_bad_line_costs_its_own_row(bad: bytes) -> None:
    """0.5.0: it ended the tracker, with all rows after it: each line was read as our own."""
    assert _row(bad) is None
    assert _row(b'{"step": 1}') == {"step": 1}
