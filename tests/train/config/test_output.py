"""The section `output`: which checkpoints stay, and which of its keys do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.config.output import KeepSection
from support.configs import MINIMAL, refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("output.keep.every=10", "output.keep: every is set and last is not, which keeps all. Set last"),
        ("output.sample_every=5", "sample_every is set and sample_prompt is not, which it continues"),
        ("output.trackers=[mlflow, mlflow]", "mlflow is listed twice, and a run has one of each"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in refused(tmp_path, MINIMAL, override)


def test_less_is_better_whatever_the_metric_is() -> None:
    """A loss is the better the lower it is, an accuracy the higher."""
    rows = [
        {"held_out_loss": 2.0, "held_out_accuracy": 0.75},
        {"held_out_loss": 1.0, "held_out_accuracy": 0.5},
    ]
    by_loss, by_accuracy = KeepSection(), KeepSection(metric="held_out_accuracy")
    assert min(rows, key=by_loss.score) is rows[1]
    assert min(rows, key=by_accuracy.score) is rows[0]
