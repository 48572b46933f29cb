"""`penstock train` with a model of the Hub: what a dry run fetches, which commit a run keeps, exit code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launch import start as launch
from support.command import Command
from support.hub import Hub, files_in, serving, use
from support.tiny import checkpoint, config_file, save_model

NAME = "makers/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub()) as served:
        save_model(tmp_path / "made")
        served.add(NAME, files_in(tmp_path / "made"))
        shutil.rmtree(tmp_path / "made")
        use(monkeypatch, served.url, tmp_path / "cache")
        yield served


def run_of(folder: Path, **model: Any) -> Path:
    """The config of a run of one process."""
    return config_file(
        folder, model={"config": None, "path": NAME, **model}, pipeline={"ranks": 1, "head_weight": None}
    )


def change(hub: Hub, text: bytes) -> str:
    """A later commit of the main branch."""
    files = hub.commits[hub.revisions[NAME]["main"]]
    return hub.add(NAME, {**files, "tokenizer_config.json": text})


def recorded(folder: Path) -> dict[str, Any]:
    """The model in the records of the run, which its last checkpoint has, too."""
    model: dict[str, Any] = json.loads((folder / "out" / "run.json").read_text())["config"]["model"]
    newest = max((folder / "out" / "checkpoints").iterdir())
    assert json.loads((newest / "state.json").read_text())["config"]["model"] == model
    return model


def test_a_dry_run_fetches_the_config_alone(hub: Hub, tmp_path: Path, penstock: Command) -> None:
    code, out, err = penstock("train", run_of(tmp_path), "--dry-run", "data.tokenizer=makers/other")
    assert (code, err) == (0, "")
    assert hub.fetched == ["config.json"]
    commit = hub.revisions[NAME]["main"]
    assert f"{NAME} at commit {commit}: a dry run fetches its config alone" in " ".join(out.split())
    assert "data.tokenizer=makers/other: not on this machine, so not checked" in " ".join(out.split())


def test_a_resumed_run_keeps_its_commit(hub: Hub, tmp_path: Path, penstock: Command) -> None:
    first = hub.revisions[NAME]["main"]
    code, out, err = penstock("train", run_of(tmp_path), "train.checkpoint_every=2", "train.steps=2")
    assert code == 0, err
    assert f"commit {first} of main" in out
    assert recorded(tmp_path) == recorded(tmp_path) | {"path": NAME, "revision": None, "commit": first}
    later = change(hub, b"{}")
    code, out, err = penstock("train", run_of(tmp_path), "--resume", "train.steps=4")
    assert code == 0, err
    assert recorded(tmp_path)["commit"] == first
    assert "model.commit" not in out
    last = str(checkpoint(tmp_path, 4))
    code, out, err = penstock(
        "train", run_of(tmp_path, revision="main"), "--resume", last, "train.steps=6", "--dry-run"
    )
    assert code == 0, err
    assert f"changed since then: model.commit={later} (was {first})" in " ".join(out.split())


def test_an_adapter_names_its_base_by_name_and_commit(hub: Hub, tmp_path: Path, penstock: Command) -> None:
    pytest.importorskip("peft")
    first = hub.revisions[NAME]["main"]
    adapter = ("adapter={r: 2}", "train.steps=1", "train.checkpoint_every=1")
    assert penstock("train", run_of(tmp_path), *adapter, "--dry-run").code == 0
    assert penstock("train", run_of(tmp_path), *adapter).code == 0
    named = json.loads((checkpoint(tmp_path, 1) / "adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == (NAME, first)
    change(hub, b"{}")
    assert penstock("merge", tmp_path / "out", "--out", tmp_path / "merged").code == 0
    assert list((tmp_path / "merged").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=makers/none"], "makers/none: there is no such local folder, and http"),
        (["model.revision=v2"], "makers/tiny at revision v2: http"),
        (["data.tokenizer=makers/none"], "makers/none: there is no such local folder"),
        (["model.path=/nowhere", "model.revision=v2"], "model.revision=v2 for /nowhere: it is no Hub name"),
        (
            ["model={config: {model_type: llama}, revision: v2}"],
            "model.revision and model.commit are of a Hub",
        ),
        (["model.load=once"], "model.load='once'"),
    ],
)
def test_bad_names_end_with_code_2_and_one_error(
    hub: Hub, tmp_path: Path, penstock: Command, arguments: list[str], message: str
) -> None:
    code, out, err = penstock("train", run_of(tmp_path), *arguments)
    assert (code, out) == (2, ""), err
    assert err.count("penstock: error: ") == 1
    assert message in err


def test_ranks_are_given_the_commit_that_the_check_took(
    hub: Hub, tmp_path: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def attempt(_: object, ranks: int, command: list[str]) -> Any:
        commands.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch.Launcher, "attempt", attempt)
    assert penstock("train", run_of(tmp_path), "pipeline.ranks=2").code == 130
    commit = hub.revisions[NAME]["main"]
    assert [each for each in commands[0] if "commit" in each] == [f"model.commit='{commit}'"]
