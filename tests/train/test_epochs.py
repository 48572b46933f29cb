"""train.epochs: as many steps as the rows need, counted in rows as they are packed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.train.checkpoints import NEWEST
from penstock.train.config.load import load_config
from penstock.train.preflight import preflight
from penstock.train.run import run
from penstock.train.sizes import Size, StepSizes
from support.refusals import refuses
from support.tiny import QWEN3, assert_same_tensors, checkpoint, config, config_file, metrics, write_documents


def by_epochs(folder: Path, epochs: float, keys: dict[str, Any] | None = None, **train: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return config(folder, QWEN3, keys, steps=None, epochs=epochs, **train)


@pytest.mark.parametrize("epochs", [1, 0.5, 2.3])
def test_an_epoch_takes_each_row_once_and_packed_rows_count_as_one(tmp_path: Path, epochs: float) -> None:
    keys = write_documents(tmp_path)
    data = preflight(config(tmp_path, QWEN3, keys, steps=1)).data
    rows = len(data.rows)
    assert 4 < rows < 80  # documents share rows
    prepared = preflight(by_epochs(tmp_path, epochs, keys))
    steps = prepared.config.train.last
    assert (steps, prepared.config.train.epochs) == (math.ceil(epochs * rows / 4), None)
    assert (
        f"train.epochs={epochs:g}, which is {steps} steps of 4 rows: an epoch has {rows} rows"
        in prepared.notes
    )
    _, taken, _ = prepared.data.take(0, 4 * steps)
    assert set(taken[:rows]) <= set(range(rows))
    assert len(set(taken[:rows])) == min(len(taken), rows)


def test_a_run_by_epochs_is_that_of_as_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(preflight(by_epochs(tmp_path / "epochs", 0.5)))
    said = capsys.readouterr().out
    steps = preflight(by_epochs(tmp_path / "epochs", 0.5)).config.train.last
    rows = preflight(by_epochs(tmp_path / "epochs", 0.5)).data.epoch
    assert f"train.epochs=0.5, which is {steps} steps of 4 rows: an epoch has {rows} rows" in said
    assert f"epochs      {4 * steps / rows:.3g} in {steps} steps: an epoch has {rows} rows" in said
    (tmp_path / "steps").mkdir()
    run(preflight(config(tmp_path / "steps", steps=steps)))
    assert_same_tensors(checkpoint(tmp_path / "epochs", steps), checkpoint(tmp_path / "steps", steps))
    of_steps = [row for row in metrics(tmp_path / "epochs") if "loss" in row]
    assert [row["epoch"] for row in of_steps] == [4 * step / rows for step in range(1, steps + 1)]


def test_a_resumed_run_by_epochs_goes_on_and_more_epochs_make_it_longer(tmp_path: Path) -> None:
    run(preflight(by_epochs(tmp_path, 0.5)))
    with refuses(
        ConfigError,
        "train.epochs=0.5, which is",
        "nothing is left to do",
        "Set train.epochs higher, or start",
    ):
        preflight(by_epochs(tmp_path, 0.5), NEWEST)
    longer = preflight(by_epochs(tmp_path, 1), NEWEST)
    assert 0 < longer.start.done < longer.config.train.last


def test_the_steps_of_rows_are_the_inverse_of_the_rows_before_a_step() -> None:
    sizes = StepSizes(((2, Size(4, 16, (1,))), (3, Size(8, 16, (2,)))), Size(16, 16, (4,)))
    for rows in range(1, 100):
        steps = sizes.steps_of(rows)
        assert sizes.rows_before(steps) < rows <= sizes.rows_before(steps + 1)


def test_a_warm_up_by_ratio_is_of_the_counted_steps(tmp_path: Path) -> None:
    keys = {"optimizer.warmup_steps": 0, "optimizer.warmup_ratio": 0.5}
    prepared = preflight(by_epochs(tmp_path, 1, keys))
    steps = prepared.config.train.last
    assert prepared.config.optimizer.warmup(steps) == math.ceil(steps / 2)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"epochs": 2}, "train", "train.steps=4 and train.epochs=2"),
    ({"epochs": 0, "steps": None}, "train.epochs=0", "greater than 0"),
    ({"epochs": -1.0, "steps": None}, "train.epochs=-1.0", "greater than 0"),
    ({"epochs": 1e9, "steps": None}, "train.epochs", "is more than any run has"),
]


@pytest.mark.parametrize(("train", "value", "rule"), WRONG, ids=str)
def test_wrong_epochs_are_refused(tmp_path: Path, train: dict[str, Any], value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        load_config(config_file(tmp_path, train=train))


def test_a_stream_has_no_epochs(tmp_path: Path) -> None:
    stream = {"streaming": {}, "validation": {"path": str(tmp_path / "text")}}
    with refuses(ConfigError, rule="a stream does not know how many rows it has", remedy="Give train.steps"):
        load_config(config_file(tmp_path, data=stream, train={"steps": None, "epochs": 1}))


def test_keys_that_do_not_fit_to_the_counted_steps_are_refused(tmp_path: Path) -> None:
    with refuses(
        ConfigError, "train.epochs=0.1, which is", "is more than train.steps=", "The warm-up must end"
    ):
        preflight(by_epochs(tmp_path, 0.1, {"optimizer.warmup_steps": 50}))


def test_a_written_config_is_read_again(tmp_path: Path) -> None:
    made = by_epochs(tmp_path, 1.5)
    again = tmp_path / "again.yaml"
    again.write_text(made.to_yaml())
    assert load_config(again) == made
