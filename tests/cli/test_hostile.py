"""Files that nobody has vouched for, handed to the command: one error each, code 2, in little memory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.command import Command
from support.faults import Row, named_cause
from support.tiny import QWEN3, config_file

MORE = 500 * 2**20  # bytes that a refusal may take beyond what a dry run of a small model takes


def model(folder: Path, name: str = "config.json", **keys: Any) -> list[str]:
    """A dry run of a model's folder in which one file has these keys, or what `text` says."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3))
    text = keys.pop("text", None) or json.dumps({**QWEN3, **keys})
    (folder / "model" / name).write_text(text)
    path = f"model.path={folder / 'model'}"
    return ["train", str(config_file(folder)), "model.config=null", path, "--dry-run"]


def with_code(folder: Path) -> list[str]:
    arguments = model(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "model" / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return arguments


def data(folder: Path, name: str, text: str | None = None) -> list[str]:
    """Look at a data file, or at a pipe where there is no text."""
    os.mkfifo(folder / name) if text is None else (folder / name).write_text(text)
    return ["data", "show", str(config_file(folder)), f"data.path={folder / name}", "data.kind=jsonl"]


def config(folder: Path, text: str) -> list[str]:
    file = config_file(folder)
    file.write_text(file.read_text() + text)
    return ["train", str(file), "--dry-run"]


def schedule(folder: Path) -> list[str]:
    (folder / "s.csv").write_text("".join(f"{rank}F0,{rank}B0\n" for rank in range(100_000)))
    return ["schedule", "verify", str(folder / "s.csv")]


HOSTILE = "hostile input, with y on stdin and 6 GiB of addresses"  # in the table of faults
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a model's code": (with_code, "model.trust_remote_code=true"),
    "a million layers": (lambda folder: model(folder, num_hidden_layers=10**6), "at most 10,000 layers"),
    "deep JSON": (lambda folder: model(folder, "generation_config.json", text="[" * 10**5), "nest deeper"),
    "many lists": (lambda folder: model(folder, text=f"[{'[],' * 10**7}[]]"), "1,048,576 lists and objects"),
    "an alias bomb": (lambda folder: config(folder, BOMB), "with its aliases expanded"),
    "a large config": (lambda folder: config(folder, "#" * 10**8), "it has more than 256 KiB"),
    "a device": (lambda folder: ["train", "/dev/zero", "--dry-run"], "it is a device"),
    "a pipe": (lambda folder: data(folder, "pipe"), "it is a pipe"),
    "deep data": (lambda folder: data(folder, "a.jsonl", "[" * 10**5), "nest deeper"),
    "a list of lists": (lambda folder: data(folder, "a.json", f"[{'[],' * 10**7}"), "is a list"),
    "many ranks": (schedule, "more than 4,096 rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_with_one_error(tmp_path: Path, penstock: Command, case: str) -> None:
    """0.5.0: a traceback, a hang or gigabytes: each file was read as if its writer meant well."""
    make, message = CASES[case]
    code, out, err = penstock(*make(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("penstock: error: ")
    assert err.count("penstock: error") == 1
    assert message in err
    assert not (tmp_path / "ran").exists()


class Ended(NamedTuple):
    """code: the exit code; error: stderr; peak: bytes of memory"""

    code: int
    error: str
    peak: int


def in_its_own_process(folder: Path, *arguments: str) -> Ended:
    """The command with y on its stdin, in at most 6 GiB of addresses."""
    (folder / "yes").write_text("y\n" * 10)
    limited = f"ulimit -v {6 << 20}; exec {shlex.join([sys.executable, '-P', '-m', 'penstock', *arguments])}"
    with (folder / "yes").open() as yes, (folder / "error").open("w") as error:
        process = subprocess.Popen(
            ["bash", "-c", limited], stdin=yes, stdout=subprocess.DEVNULL, stderr=error
        )
        _, status, used = os.wait4(process.pid, 0)  # of this process alone
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, (folder / "error").read_text(), used.ru_maxrss << 10)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Peak memory of a dry run of a small model."""
    folder = tmp_path_factory.mktemp("usual")
    ended = in_its_own_process(folder, "train", str(config_file(folder)), "--dry-run")
    assert ended.code == 0
    return ended.peak


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.fault(HOSTILE, case)) for case in CASES],
)
def test_a_process_that_refuses_it_stays_small(tmp_path: Path, usual: int, row: Row, case: str) -> None:
    make, message = CASES[case]
    ended = in_its_own_process(tmp_path, *make(tmp_path))
    assert ended.code == 2
    assert message in ended.error
    assert "Traceback" not in ended.error
    assert ended.peak < usual + MORE
    assert not (tmp_path / "ran").exists()
    row.note(cause=named_cause(ended.error.removeprefix("penstock: error: ")))
