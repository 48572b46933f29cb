"""Folders that someone made to do harm: each is read or refused, and does nothing else.

`support/hostile.py` makes and reads them in a process of its own. A case that takes more than 10 s of a
processor hangs, and so does one that waits: it is ended after a minute, as the machine may be busy.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from models.weights.test_fuzz_folders import CONFIG
from penstock.train.encoding.templates import SECONDS
from penstock.train.encoding.tokenizer import byte_level_tokenizer
from support import hostile

LIMIT = 10.0  # seconds of a processor for a case
WAIT = 60.0 + 3 * SECONDS  # seconds by the clock; a chat template has a limit of its own
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model and a good adapter, and a tokenizer outside that a folder may try to have read."""
    folder = tmp_path_factory.mktemp("hostile")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.save_pretrained(folder / "model", max_shard_size="2KB")
    byte_level_tokenizer(chat=True).save_pretrained(folder / "model")
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.json").write_bytes((folder / "model" / "tokenizer.json").read_bytes())
    return folder


class Child:
    """The process that reads, from case `first` on."""

    def __init__(self, folder: Path, numbers: range) -> None:
        command = [
            sys.executable,
            "-m",
            "support.hostile",
            str(folder),
            *map(str, (numbers.start, numbers.stop)),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "HF_HOME": str(folder / "home")}
        with (folder / "said").open("a") as said:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
            )

    def line(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None where it takes too long, or the process has ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        said = self._process.stdout.readline()
        return json.loads(said) if said else None

    def end(self) -> int:
        self._process.kill()
        self._process.communicate()
        return self._process.returncode


def harm(folder: Path, numbers: range) -> tuple[list[str], Counter[str]]:
    """What hostile folders did that they must not; and how many were read and refused, by kind."""
    faults, ended, at = list[str](), Counter[str](), numbers.start
    while at < numbers.stop:
        child = Child(folder, range(at, numbers.stop))
        while (line := child.line(WAIT)) is not None:
            ended[f"{line['kind']}: {line['ended']}"] += 1
            faults += [f"case {at}: {each}" for each in line["seen"]]
            if line["seconds"] > LIMIT:
                faults.append(f"case {at}: {line['kind']} took {line['seconds']:.0f} s")
            if line["ended"] not in ("read", "refused"):
                faults.append(f"case {at}: {line['kind']}: {line['ended']}")
            at += 1
        code = child.end()
        if at < numbers.stop:
            faults.append(f"case {at}: it hung, or ended its process with {code}")
            at += 1
    return faults, ended


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(40), id="first"),
        pytest.param(range(40, 2000), id="more", marks=[pytest.mark.sweep, pytest.mark.timeout(3000)]),
    ],
)
def test_a_hostile_folder_is_read_or_refused_and_does_nothing_else(folder: Path, numbers: range) -> None:
    faults, ended = harm(folder, numbers)
    assert not faults, "\n".join(faults)
    assert sum(ended.values()) == len(numbers)
    readers = {f"{name} {read.__name__}" for name, _, read in hostile.KINDS}
    assert {each.partition(": ")[0] for each in ended} == readers
    assert {each.partition(": ")[2] for each in ended} == {"read", "refused"}
