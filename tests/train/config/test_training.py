"""The section `train`: its length, and which of its keys do not fit together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.configs import MINIMAL, loaded, refused


def test_a_run_has_steps_or_epochs(tmp_path: Path) -> None:
    assert loaded(tmp_path).train.steps == 100
    by_epochs = loaded(tmp_path, MINIMAL, "train.epochs=0.5").train
    assert (by_epochs.steps, by_epochs.epochs) == (None, 0.5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{steps: 5, epochs: 2}", "train.steps=5 and train.epochs=2 are two lengths of the run. Leave one"),
        ("{spike: {then: rewind}}", "goes back to the last checkpoint, and checkpoint_every is not set"),
        (
            "{ramp: [{until: 5, batch_size: 4}, {until: 5, batch_size: 6}]}",
            "ramp has a phase until step 5 after one until step 5. Give the phases in their order",
        ),
        (
            "{check: always, memory_checkpoint_every: 2}",
            "check=always compares a resumed run with the files of its checkpoint",
        ),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    assert message in refused(tmp_path, MINIMAL + f"train: {keys}\n")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("[12, 10]", r"steps=\[12, 10\]: the first step to profile comes after the last. Write \[10, 12\]"),
        ("[0, 2]", "train.profile.steps"),
        ("[10]", "train.profile.steps"),
        ("[90, 101]", r"profile.steps=\[90, 101\] goes beyond steps=100.* Profile steps up to 100"),
    ],
)
def test_steps_to_profile_are_a_range_of_the_run(tmp_path: Path, steps: str, message: str) -> None:
    assert re.search(message, refused(tmp_path, MINIMAL, f"train.profile={{steps: {steps}}}"))
    profile = loaded(tmp_path, MINIMAL, "train.profile={steps: [10, 12]}").train.profile
    assert profile is not None
    assert profile.steps == (10, 12)
