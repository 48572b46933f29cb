"""A whole config: its defaults, and the rules between its sections."""

from __future__ import annotations

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
    ("overrides", "message"),
    [
        (
            ["train.precision=mixed", "model.dtype=bfloat16"],
            "train.precision=mixed keeps weights in float32, and model.dtype=bfloat16. Leave model.dtype out",
        ),
        (
            ["train.precision=mixed", "parallel={dp_shard: 2, param_dtype: bfloat16}"],
            "are two ways to compute in half precision. Leave param_dtype out",
        ),
        (
            ["train.epochs=2", "data.streaming={}", "data.validation={path: b}"],
            "train.epochs=2 with data.streaming: a stream does not know how many rows it has",
        ),
        (
            ["output.keep={last: 1, every: 10}", "train.checkpoint_every=4"],
            "output.keep.every=10 is no multiple of train.checkpoint_every=4",
        ),
        (
            ["output.keep.metric=held_out_token_accuracy"],
            "output.keep.metric=held_out_token_accuracy without output.keep.best. Set best to 1 or more",
        ),
        (
            ["train.ramp=[{until: 5, batch_size: 16}]"],
            "train.ramp has batch_size=16 before 8, and train.batch_size=8 is reached last",
        ),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert message in refused(tmp_path, MINIMAL, *overrides)


@pytest.mark.parametrize(
    ("precision", "weights", "products"),
    [("null", "float32", "float32"), ("mixed", "float32", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")],
)
def test_the_precision_sets_the_dtypes_of_weights_and_products(
    tmp_path: Path, precision: str, weights: str, products: str
) -> None:
    config = loaded(tmp_path, MINIMAL, f"train.precision={precision}")
    assert (config.model.dtype, config.computed) == (weights, products)
