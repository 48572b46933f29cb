"""`penstock train` with a model of the Hub: what a dry run fetches, which commit a run keeps, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.launch import start as launch
from penstock.train.encoding.tokenizer import byte_level_tokenizer
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


def test_other_commands_take_a_name(hub: Hub, tmp_path: Path, penstock: Command) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path / "tokenizer")
    hub.add("makers/tokenizer", files_in(tmp_path / "tokenizer"))
    code, out, err = penstock("data", "show", run_of(tmp_path), "data.tokenizer=makers/tokenizer")
    assert code == 0, err
    assert set(hub.fetched) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    code, out, err = penstock("check", NAME, "--ranks", "2", "--microbatches", "2")
    assert code == 0, err
    assert "its weights" in out
    assert penstock("check", "makers/none", "--ranks", "2").code == 2


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


@pytest.mark.sweep
@pytest.mark.parametrize(
    "launcher", [(), ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")]
)
def test_ranks_of_their_own_processes_fetch_once(hub: Hub, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """With nothing but the environment to say where the Hub is."""
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    file = run_of(tmp_path)
    made = yaml.safe_load(file.read_text())
    made["pipeline"]["ranks"] = 2
    file.write_text(yaml.safe_dump(made))

    def trained(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", *launcher, "penstock", "train", str(file), *arguments]
        ended = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=120
        )
        return ended.returncode, ended.stdout + ended.stderr

    code, said = trained()
    assert code == 0, said
    assert recorded(tmp_path)["commit"] == hub.revisions[NAME]["main"]
    assert sum("/revision/main" in path for path in hub.asked) == 1
    assert len(hub.fetched) == len(set(hub.fetched))
    code, said = trained("model.path=makers/none")
    assert code == (1 if launcher else 2)  # torchrun has codes of its own
    assert "makers/none: there is no such local folder" in said  # by rank 0, or by torchrun that has ended it
    assert said.count("penstock: error: ") <= 1, said
