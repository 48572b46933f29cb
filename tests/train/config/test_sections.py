"""The keys of a config: defaults and limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.configs import MINIMAL, loaded, refused, same_as_yaml


def test_what_is_left_out_has_defaults_and_all_of_it_is_shown(tmp_path: Path) -> None:
    config = same_as_yaml(loaded(tmp_path))
    assert config.pipeline.ranks == 1
    assert config.train.clip_norm == 1.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "train: {batch_size: 1000000000000}",
            "are more than 1,000,000,000,000 tokens a step; give fewer",
        ),
        ("parallel: {dp_shard: 100000000}\ntrain: {batch_size: 400000000}", "make 100,000,000 processes"),
    ],
)
def test_sizes_that_nobody_has_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    """0.5.0: a RuntimeError of torch, and gigabytes for the groups of a mesh: both had no upper end."""
    assert message.partition(";")[0] in refused(tmp_path, MINIMAL + keys + "\n")


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
