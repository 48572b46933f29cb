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


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
def test_every_file_and_folder_of_a_run_has_the_rights_that_the_umask_leaves(
    tmp_path: Path, mask: int
) -> None:
    """Also what is written anew by a resume, and by a rename."""
    keys = {"output.trackers": ["tensorboard"], "output.keep.last": 1}
    with umask(mask):
        for steps, resume in ((2, None), (4, "newest")):
            run(preflight(config(tmp_path, keys=keys, steps=steps, checkpoint_every=1), resume))
    entries = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert {"run.json", "state.json", "metrics.jsonl"} <= {path.name for path in entries}
    assert any(path.suffix == ".safetensors" for path in entries)
    wrong = {
        str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in entries
        if stat.S_IMODE(path.stat().st_mode) != (0o777 if path.is_dir() else 0o666) & ~mask
    }
    assert wrong == {}


def test_no_secret_of_the_environment_is_in_a_file_of_a_run_or_in_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(tmp_path, output={"trackers": ["tensorboard"]}, train={"steps": 2})
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    code, out, err = finish(start("train", file))
    assert code == 0, err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "state.json", "metrics.jsonl"} <= {path.name for path in written}
    told = {path.name: path.read_bytes() for path in written} | {"out": out.encode(), "err": err.encode()}
    assert [(place, name) for place, text in told.items() for name, value in SECRETS.items()
            if value.encode() in text] == []  # fmt: skip
