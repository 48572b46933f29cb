"""What the product remembers of a model within a process, shared by all processes of a test run.

The product finds the chain of a model and its loss, counts its multiply-adds, and measures it for a plan,
once a process. The suite builds the same few tiny models in a dozen processes. The keys are the product's
own. Only models of transformers and PEFT are shared: the name of a class that a test defines does not say
what it does.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

FOLDER = "PENSTOCK_TESTS_REMEMBERED"  # in the environment, for the processes that tests start
PATIENCE = 2.0  # seconds: what another process has begun may end in an error, which leaves no entry


class Remembered(dict[Any, Any]):
    """A dictionary whose entries other processes of the run may have made."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._begun = folder, set[Path]()
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        file = self._file(key)
        if file is None or not self._is_made(file):
            return False
        super().__setitem__(key, pickle.loads(file.read_bytes()))
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        file = self._file(key)
        if file is not None:
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pickle.dumps(value))
            partial.rename(file)  # whole or not at all

    def _is_made(self, file: Path) -> bool:
        """Whether another process has made the entry. The ranks of a job ask together: the first makes it."""
        begun = file.with_suffix(".begun")
        while not file.exists():
            try:
                begun.touch(exist_ok=file in self._begun)
                self._begun.add(file)
                return False
            except FileExistsError:
                if time.time() - begun.stat().st_mtime > PATIENCE:
                    return False
            time.sleep(0.005)
        return True

    def _file(self, key: object) -> Path | None:
        if any(not part.__module__.startswith(("transformers.", "torch.", "peft.")) for part in _named(key)):
            return None
        text = _ADDRESS.sub(r"\1", repr(key))
        return None if " at 0x" in text else self._folder / hashlib.sha256(text.encode()).hexdigest()


_ADDRESS = re.compile(r"(<function [\w.]+) at 0x[0-9a-f]+")  # another one in each process


def _named(key: object) -> Iterator[type | FunctionType]:
    if isinstance(key, type | FunctionType):
        yield key
    elif isinstance(key, tuple):
        for part in key:
            yield from _named(part)


# _known, _find, _runs: what one process has found out, all know
def share(folder: Path) -> None:
    """Let this process, and those that it starts and that call `share_again`, remember in `folder`."""
    from penstock.models.huggingface import masks, own_loss
    from penstock.models.split import multiply_adds
    from penstock.models.tracing import chain
    from penstock.planner import workload

    os.environ[FOLDER] = str(folder)
    chain.find_chain.known = Remembered(folder / "chains")
    own_loss._find.known = Remembered(folder / "losses")
    masks.shape_questions.known = Remembered(folder / "questions")
    multiply_adds._known = Remembered(folder / "multiply-adds")
    workload._runs = Remembered(folder / "runs")


def share_again() -> None:
    """In a process that a test started."""
    if folder := os.environ.get(FOLDER):
        share(Path(folder))
