"""The sections `model`, `pipeline` and `parallel`: which of their keys do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.configs import MINIMAL, loaded, refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=there", "exactly one of model.path and model.config is needed, and here both are"),
        ("model.config=null", "exactly one of model.path and model.config is needed, and here neither is"),
        ("model.config={hidden_size: 3}", "model.config names its model_type, e.g. model_type: qwen3"),
        ("model.commit=abc", "model.commit are of a Hub name, and model.config is none. Leave them out"),
        (
            "pipeline.schedule=3",
            "a schedule is a name or a mapping, and 3 is neither. Write a name such as 1f1b",
        ),
        ("pipeline.padding={multiple: 8}", "pipeline.shapes=inferred. Set pipeline.shapes=padded"),
        (
            "parallel.param_dtype=bfloat16",
            "param_dtype=bfloat16 configures the weights that FSDP2 shards, and here no weight is sharded",
        ),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in refused(tmp_path, MINIMAL, override)


def test_planned_stands_in_place_of_a_schedule(tmp_path: Path) -> None:
    assert loaded(tmp_path, MINIMAL, "pipeline.schedule=planned").pipeline.schedule == "planned"


def test_sizes_become_the_axes_of_a_mesh(tmp_path: Path) -> None:
    parallel = loaded(tmp_path, MINIMAL, "parallel={dp_shard: 2, tp: 2}").parallel
    assert (parallel.axes.dp_shard, parallel.axes.tp, parallel.axes.cp) == (2, 2, 1)
