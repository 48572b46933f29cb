"""`pipeline.schedule: planned`: what it takes, that the run's bits are those of the keys written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.launch.start import Ended, Launcher
from penstock.planner.hardware import read_cluster
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.planned import as_overrides, chosen
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.planning import small_config
from support.refusals import refuses
from support.tiny import assert_same_tensors, checkpoint, config, config_file, metrics

# of `support.planning`, which tests of the planner measure too
MODEL = {key: value for key, value in small_config().to_diff_dict().items() if key != "transformers_version"}
LENGTH = 32


def planned(folder: Path, keys: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    open_keys = {"pipeline.schedule": "planned", "pipeline.head_weight": None, "data.sequence_length": LENGTH}
    return config(folder, MODEL, open_keys | (keys or {}), **train)


def test_the_bits_are_those_of_the_chosen_keys_written_out(tmp_path: Path) -> None:
    made = planned(tmp_path / "planned", steps=2)
    choice = chosen(made, None)
    assert choice.line.startswith("planned: ")
    written = choice.config.model_dump(mode="json")["pipeline"]
    assert sum(written["layers_per_stage"]) == MODEL["num_hidden_layers"]
    prepared = preflight(made)
    assert prepared.notes[0] == prepared.choice == choice.line
    run(prepared)
    (tmp_path / "named").mkdir()
    keys = {f"pipeline.{name}": written[name] for name in ("schedule", "layers_per_stage", "head_weight")}
    keys["data.sequence_length"] = LENGTH
    run(preflight(config(tmp_path / "named", MODEL, keys, steps=2)))
    assert_same_tensors(checkpoint(tmp_path / "planned", 2), checkpoint(tmp_path / "named", 2))
    losses = [[row.get("loss") for row in metrics(tmp_path / name)] for name in ("planned", "named")]
    assert losses[0] == losses[1]


def test_a_device_with_little_memory_recomputes(tmp_path: Path) -> None:
    made = planned(tmp_path, {"pipeline.microbatches": 4}, batch_size=1024)
    device = {"memory": "100 MB"}
    choice = chosen(made, None, read_cluster({"host": "CPU host", "device": device}))
    assert choice.config.train.activation_checkpointing is not None
    assert "recomputed none" not in choice.line


def test_a_resumed_run_takes_what_its_checkpoint_says(tmp_path: Path) -> None:
    first = planned(tmp_path, {"pipeline.schedule": "gpipe"}, steps=2)
    run(preflight(first))
    again = preflight(planned(tmp_path, steps=4), "newest")
    assert again.plan.schedule.name == "gpipe"
    assert "of the checkpoint" in again.choice
    assert not any("changed since then: pipeline" in note for note in again.notes)
    fewer = planned(tmp_path, {"pipeline.microbatches": 4}, steps=4)
    assert "predicted" in preflight(fewer, "newest").choice  # another step: planned anew


def test_ranks_get_the_choice_as_arguments(tmp_path: Path) -> None:
    choice = chosen(planned(tmp_path), None).config
    sections: dict[str, dict[str, Any]] = {}
    for override in as_overrides(choice):
        name, _, text = override.partition("=")
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = json.loads(text)
    assert TrainConfig.model_validate(_merged(planned(tmp_path), sections)) == choice


def _merged(made: TrainConfig, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    tree = made.model_dump(mode="json")
    return {name: section | sections.get(name, {}) if section else section for name, section in tree.items()}


def test_a_schedule_that_a_ramp_refuses_is_not_taken(tmp_path: Path) -> None:
    """Three microbatches in groups of two ranks: no interleaved 1F1B."""
    ramp = [{"until": 2, "batch_size": 3}]
    keys = {"pipeline.microbatches": 4}
    assert preflight(planned(tmp_path, keys, ramp=ramp)).plan.schedule.microbatches == 4


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [
        ({"pipeline.head_weight": 1}, "pipeline.head_weight=1", "splits the layers"),
        ({"pipeline.balance": "measured"}, "pipeline.balance=measured", "splits the layers"),
        ({"train.activation_checkpointing": True}, "train.activation_checkpointing", "what is recomputed"),
        ({"adapter": {"r": 4}}, "with adapter", "weights are all trained"),
        ({"train.activation_offloading": True}, "train.activation_offloading", "on the device"),
        ({"model.dtype": "float64"}, "products in float64", "mixed, bfloat16, float32"),
    ],
)
def test_what_the_planner_does_not_choose_or_predict_is_refused(
    tmp_path: Path, keys: dict[str, Any], value: str, rule: str
) -> None:
    with refuses(ConfigError, value, rule):
        chosen(planned(tmp_path, keys), None)


def command(folder: Path) -> tuple[Path, int | str | None]:
    """Run the command; its config, and the code with which it exits."""
    open_keys = {"schedule": "planned", "head_weight": None}
    data = {"sequence_length": LENGTH}
    file = config_file(folder, model={"config": MODEL}, data=data, pipeline=open_keys)
    with pytest.raises(SystemExit) as ended:
        app(["train", str(file), "train.steps=1"])
    return file, ended.value.code


def test_the_command_plans_once_and_gives_its_ranks_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def attempt(_: Launcher, ranks: int, command: list[str]) -> Ended:
        assert ranks == 2
        started.append(command)
        return Ended(0)

    monkeypatch.setattr(Launcher, "attempt", attempt)
    file, code = command(tmp_path)
    assert code == 0
    assert capsys.readouterr().out.count("planned: ") == 1
    (arguments,) = started
    assert arguments[3:6] == ["penstock", "train", str(file)]
    config = load_config(file, arguments[6:])
    assert config == chosen(load_config(file, ["train.steps=1"]), None).config
    assert config.pipeline.schedule != "planned"
    assert isinstance(config.pipeline.layers_per_stage, tuple | list)
    assert len(config.pipeline.layers_per_stage) >= 2


@pytest.mark.sweep
def test_the_ranks_of_a_command_take_the_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path)[1] == 0
    assert capfd.readouterr().out.count("planned: ") == 1
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())["config"]["pipeline"]
    assert recorded["schedule"] != "planned"
    assert len(recorded["layers_per_stage"]) >= 2
