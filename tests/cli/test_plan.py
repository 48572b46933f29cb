"""The command `penstock plan`, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli import measured
from penstock.cli.plan import show
from penstock.errors import ConfigError, InputError, ModelError
from penstock.planner.corrections import MeasuredRun
from penstock.planner.estimate import Estimate
from penstock.planner.hardware import read_cluster
from penstock.train.config.load import load_config
from support.command import Command
from support.planning import LENGTH, small_config
from support.refusals import refuses

CLUSTER = "hosts: 1\nhost: DGX H100\ndevices: 2\ndevice: {memory: 1 GB}\n"


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
    assert "2 devices (H100), 0.5 GiB of 0.9 GiB" in printed
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
    ("change", "kind", "value", "rule"),
    [
        ({"batch": 0}, ConfigError, "--batch 0", "rows of a step"),
        ({"batch": 10**9}, ConfigError, "--batch 1000000000", "rows of a step"),
        ({"length": 1}, ConfigError, "--length 1", "tokens of a row"),
        ({"length": 512}, ConfigError, "--length 512", "256 positions"),
        ({"memory": "much"}, ConfigError, "--memory 'much'", "amount of memory"),
        ({"memory": "80GB"}, ConfigError, "memory=74.5 GiB", "H100 has 0.9 GiB"),
        ({"model": "nowhere/at/all"}, ModelError, "nowhere/at/all", "no such folder"),
        ({"cluster": "8 x DGX H1000"}, ConfigError, "DGX H1000", "no such host"),
    ],
)
def test_wrong_input_is_one_message(
    folder: Path, change: dict[str, object], kind: type[InputError], value: str, rule: str
) -> None:
    given = {"model": str(folder), "cluster": str(folder / "cluster.yaml"), "batch": 16, "length": LENGTH}
    with refuses(kind, value, rule):
        show(**given | change)  # type: ignore[arg-type]


def test_calibration_writes_a_cluster_that_a_plan_takes(
    folder: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.plan._SECONDS", 2.0)  # what is measured does not matter here
    shares = dict.fromkeys(("matmul", "attention", "memory", "links", "disk"), 0.01)
    monkeypatch.setattr("penstock.planner.calibrate._SHARES", shares)
    file = folder / "measured.yaml"
    code, out, err = penstock("plan", "--calibrate", "--out", file)
    assert (code, err) == (0, "")
    assert f"wrote {file}" in out
    assert "start it with torchrun" in out
    assert read_cluster(file).devices == 1
    sizes = ("--batch", "4", "--length", str(LENGTH))
    assert "6 layers" in penstock("plan", folder, "--cluster", file, *sizes).out
    monkeypatch.setattr("penstock.cli.plan.calibrate", lambda _: read_cluster(file))  # not once more
    code, out, _ = penstock("plan", folder, "--calibrate", *sizes)
    assert code == 0
    assert "threads of a CPU" in out


def test_the_fastest_measured_is_written_and_the_corrected_cluster(
    folder: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three runs is the fastest; ops take three times as long as predicted."""

    def pretended(_: Any, run: Estimate, *__: Any, on_cpu: bool) -> MeasuredRun:
        ops = sum(span.end - span.start for span in run.timeline.spans) / run.timeline.ranks
        seconds = 3 * run.seconds if taken else 4 * run.seconds
        taken.append(run)
        return MeasuredRun(run, (seconds,), 3 * ops / seconds, 1, 1)

    taken: list[Estimate] = []
    monkeypatch.setattr(measured, "measured_run", pretended)
    small_config(num_attention_heads=1, num_key_value_heads=1).save_pretrained(folder)  # no tp to measure
    (folder / "cpu.yaml").write_text("host: CPU host\ndevices: 2\n")
    out, better = folder / "plan.yaml", folder / "better.yaml"
    sizes = ("--batch", "16", "--length", str(LENGTH), "--measure", "3", "--precision", "float32")
    code, printed, err = penstock(
        "plan", folder, "--cluster", folder / "cpu.yaml", *sizes, "--out", out, "--cluster-out", better
    )
    assert (code, err) == (0, "")
    assert f"wrote {better}" in printed
    best = min(taken[1:], key=lambda run: run.seconds)
    config = load_config(out)
    assert config.pipeline.ranks == best.candidate.ranks
    assert config.pipeline.microbatches == best.candidate.microbatches
    assert f"# Measured: {3 * best.seconds:.3g} s a step" in out.read_text()
    usual = read_cluster(folder / "cpu.yaml").device
    shares = read_cluster(better).device.efficiencies
    assert shares.matmul == pytest.approx(usual.efficiencies.matmul / 3, rel=1e-3)


def test_measuring_needs_the_cluster_itself_and_says_so_at_once(folder: Path, penstock: Command) -> None:
    sizes = ("--batch", "64", "--length", str(LENGTH), "--measure", "2")
    code, out, err = penstock("plan", folder, "--cluster", "8 x DGX H100", *sizes)
    assert (code, out) == (2, "")
    assert "it has 64 devices (H100), and this machine has" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "penstock plan without MODEL, --batch, --length, --cluster"),
        (("--calibrate", "--batch", "8"), "penstock plan without MODEL, --length"),
        (("--calibrate", "--cluster", "CPU host"), "--calibrate with --cluster 'CPU host'"),
        (("--calibrate", "--out", "measured"), "a cluster is a YAML file"),
        (("--calibrate", "--cluster-out", "some.yaml"), "--cluster-out some.yaml"),
        (("models/some", "--cluster", "CPU host", "--batch", "8", "--length", "8", "--cluster-out", "a.yaml"),
         "--cluster-out a.yaml"),
    ],
)  # fmt: skip
def test_arguments_that_are_missing_or_exclude_each_other_are_one_message(
    penstock: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = penstock("plan", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_million_layers_are_refused_at_once(folder: Path) -> None:
    keys = json.loads((folder / "config.json").read_text())
    for layers, kind, value, rule in (
        (10**6, ModelError, "num_hidden_layers=1000000", "at most 10,000"),
        (5000, ConfigError, "num_hidden_layers=5,000", "takes 4,096"),
    ):
        (folder / "config.json").write_text(json.dumps(keys | {"num_hidden_layers": layers}))
        with refuses(kind, value, rule):
            show(str(folder), str(folder / "cluster.yaml"), 16, LENGTH)
