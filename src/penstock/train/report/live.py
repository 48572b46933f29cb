"""A run while it goes on, in a terminal or a notebook: read from its folder, so the run does nothing for it.

rows of metrics.jsonl   loss, tokens a second, memory of each process
timeline.json           the bubble of each rank, in the last step before an evaluation
run.json, owner.json    whether the run goes on
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin
from rich.live import Live

from penstock.errors import ConfigError, PenstockError
from penstock.reading import read_json
from penstock.schedule import Timeline
from penstock.train.owner import OWNER, OwnerWatch
from penstock.train.report.page import state
from penstock.train.report.recorded import WRONG, GrowingRun, RecordedRun
from penstock.train.report.terminal import Bubbles, view

EVERY = 1.0  # seconds between two looks


class LiveRun(JupyterMixin):
    """The run in `folder`, as of the last `look`. rich prints it; a notebook shows it.

    step: the last one so far; ended: whether the run has ended, or was killed

    Raises ConfigError for a folder without a run.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._run, self._owner = GrowingRun(self._folder), OwnerWatch(self._folder)
        self._bubbles, self._read = Bubbles(0), 0
        self.look()

    def look(self) -> None:
        """Read what has come since."""
        goes_on = self._owner.goes_on()  # before the rows: if it has ended, they are all there
        run = self._run.read()
        self.step, self.ended = run.done, not goes_on or _has_ended(run)
        self._look_at_timeline()
        self._view = view(run, *self._state(run), self._bubbles)

    def __rich__(self) -> RenderableType:
        return self._view

    def _state(self, run: RecordedRun) -> tuple[str, str]:
        word, sentence = state(run)
        if _has_ended(run) or word == "finished":
            return word, sentence
        where = sentence.partition(";")[0]
        return ("killed", f"{where}; it has recorded no end") if self.ended else ("running", where)

    def _look_at_timeline(self) -> None:
        """Read the bubbles again if the file is a new one; it may be large."""
        file = self._folder / "timeline.json"
        try:
            if (written := file.stat().st_mtime_ns) == self._read:
                return
            data: dict[str, Any] = read_json(file)
            self._bubbles = Bubbles(int(data["step"]), Timeline.from_data(data["measured"]).rank_bubble)
            self._read = written
        except (OSError, PenstockError, *WRONG):
            pass


def watch(folder: Path | str, every: float = EVERY) -> None:
    """Show the run until it ends, in a terminal or in the cell of a notebook. Wait for it to begin.

    every: seconds between two looks

    Raises ConfigError for a folder that holds something else than a run.
    """
    run, console = _begun(Path(folder), every), Console()
    shown = _Cell(run) if console.is_jupyter else Live(run, console=console, auto_refresh=False)
    with shown:
        while not run.ended:
            time.sleep(every)
            run.look()
            shown.update(run, refresh=True)


def _begun(folder: Path, every: float) -> LiveRun:
    """The run in `folder`, once it has begun. Raises ConfigError where none is about to begin."""
    owner, said = OwnerWatch(folder), False
    while True:
        try:
            return LiveRun(folder)
        except ConfigError:
            starts = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
            if not starts and not ((folder / OWNER).exists() and owner.goes_on()):
                raise
        if not said:
            print(f"waiting for a run to begin in {folder}; Ctrl-C ends this", flush=True)
            said = True
        time.sleep(every)


class _Cell:
    """The output of a notebook's cell, which is replaced; rich's `Live` would need ipywidgets for it."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        from IPython.display import display

        shown: Any = display
        self._handle = shown(self._run, display_id=True)

    def update(self, run: LiveRun, refresh: bool) -> None:
        self._handle.update(run)

    def __exit__(self, *_: object) -> None:
        return None


def _has_ended(run: RecordedRun) -> bool:
    return bool(run.starts) and isinstance(run.starts[-1].get("end"), dict)
