"""What a run writes into its folder: who may read it, and that no secret is in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.train.preflight import preflight
from penstock.train.run import run
from support.covering import some
from support.started import finish, start
from support.tiny import config, config_file

SECRETS = {
    "HF_TOKEN": "hf_madeUpTokenOfTheHub",
    "WANDB_API_KEY": "0123456789abcdefmadeupkeyofwandb",
    "MLFLOW_TRACKING_PASSWORD": "made-up-password-of-mlflow",
    "AWS_SECRET_ACCESS_KEY": "made/up/key/of/a/cloud",
}


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def check_secrets(folder: Path, *told: str) -> None:
    """None of SECRETS is in a file below a run's folder, or in what the run has told."""
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert {"run.json", "state.json", "metrics.jsonl"} <= {path.name for path in written}
    assert any(path.name.startswith("events.out.tfevents") for path in written)
    texts = [(str(path), path.read_bytes()) for path in written]
    texts += [("told", text.encode()) for text in told]
    assert [(place, name) for place, text in texts for name, value in SECRETS.items()
            if value.encode() in text] == []  # fmt: skip


@pytest.mark.usefixtures("_secrets")
@pytest.mark.parametrize("mask", some([0o077, 0o027, 0o022], 0o027))
def test_every_file_and_folder_of_a_run_has_the_rights_that_the_umask_leaves(
    tmp_path: Path, mask: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also what is written anew by a resume, and by a rename. And no secret of the environment is in them."""
    keys = {"output.trackers": ["tensorboard"], "output.keep.last": 1}
    with umask(mask):
        for steps, resume in ((1, None), (2, "newest")):
            run(preflight(config(tmp_path, keys=keys, steps=steps, checkpoint_every=1), resume))
    entries = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert any(path.suffix == ".safetensors" for path in entries)
    wrong = {
        str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in entries
        if stat.S_IMODE(path.stat().st_mode) != (0o777 if path.is_dir() else 0o666) & ~mask
    }
    assert wrong == {}
    check_secrets(tmp_path, *capfd.readouterr())


@pytest.mark.sweep  # the launcher, and the ranks that it starts
@pytest.mark.usefixtures("_secrets")
def test_no_secret_of_the_environment_is_in_a_file_of_a_command_or_in_what_it_prints(tmp_path: Path) -> None:
    file = config_file(tmp_path, output={"trackers": ["tensorboard"]}, train={"steps": 2})
    code, out, err = finish(start("train", file))
    assert code == 0, err
    check_secrets(tmp_path, out, err)
