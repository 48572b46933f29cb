"""The command `penstock plan`, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from penstock.cli.plan import show
from penstock.errors import InputError
from penstock.planner.hardware import read_cluster
from penstock.train.config.load import load_config
from support.command import Command
from support.planning import LENGTH, small_config

CLUSTER = "hosts: 1\nhost: DGX H100\ndevices: 4\ndevice: {memory: 1 GB}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_config().save_pretrained(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def test_it_ranks_runs_and_writes_the_first_as_a_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = folder / "plan.yaml", folder / "plan.html"
    show(str(folder), str(folder / "cluster.yaml"), 16, LENGTH, "0.5GB", out, page)
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM, 6 layers" in printed
    assert "4 devices (H100), 0.5 GiB of 0.9 GiB" in printed
    assert "a step of 1 is" in printed
    assert "2 loses" in printed
    assert f"wrote {out}" in printed
    config = load_config(out)
    assert config.train.batch_size == 16
    assert config.data.sequence_length == LENGTH
    assert page.read_text().startswith("<!doctype html>")
    first = next(line for line in printed.splitlines() if line.lstrip().startswith("1  pp"))
    assert f"pp={config.pipeline.ranks}" in first


def test_a_models_config_may_be_named_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(str(folder / "config.json"), str(folder / "cluster.yaml"), 16, LENGTH, out=folder / "plan.yaml")
    assert yaml.safe_load((folder / "plan.yaml").read_text())["model"] == {"path": str(folder)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "--batch 0"),
        ({"batch": 10**9}, "--batch 1000000000"),
        ({"length": 1}, "--length 1"),
        ({"length": 512}, "the model takes 256 positions"),
        ({"memory": "much"}, "--memory 'much'"),
        ({"memory": "80GB"}, "H100 has 0.9 GiB"),
        ({"model": "nowhere/at/all"}, "there is no such folder"),
        ({"cluster": "8 x DGX H1000"}, "H1000"),
    ],
)
def test_wrong_input_is_one_message(folder: Path, change: dict[str, object], message: str) -> None:
    given = {"model": str(folder), "cluster": str(folder / "cluster.yaml"), "batch": 16, "length": LENGTH}
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        show(**given | change)  # type: ignore[arg-type]


def test_calibration_writes_a_cluster_that_a_plan_takes(
    folder: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.plan._SECONDS", 2.0)  # what is measured does not matter here
    file = folder / "measured.yaml"
    code, out, err = penstock("plan", "--calibrate", "--out", file)
    assert (code, err) == (0, "")
    assert f"wrote {file}" in out
    assert "start it with torchrun" in out
    assert read_cluster(file).devices == 1
    sizes = ("--batch", "4", "--length", str(LENGTH))
    assert "6 layers" in penstock("plan", folder, "--cluster", file, *sizes).out
    code, out, _ = penstock("plan", folder, "--calibrate", *sizes)
    assert code == 0
    assert "threads of a CPU" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "penstock plan without MODEL, --batch, --length, --cluster"),
        (("--calibrate", "--batch", "8"), "penstock plan without MODEL, --length"),
        (("--calibrate", "--cluster", "CPU host"), "--calibrate with --cluster 'CPU host'"),
        (("--calibrate", "--out", "measured"), "a cluster is a YAML file"),
    ],
)
def test_arguments_that_are_missing_or_exclude_each_other_are_one_message(
    penstock: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = penstock("plan", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_million_layers_are_refused_at_once(folder: Path) -> None:
    keys = json.loads((folder / "config.json").read_text())
    for layers, rule in ((10**6, "at most 10,000 layers"), (5000, "takes 4,096 of them")):
        (folder / "config.json").write_text(json.dumps(keys | {"num_hidden_layers": layers}))
        with pytest.raises(InputError, match=rule):
            show(str(folder), str(folder / "cluster.yaml"), 16, LENGTH)
