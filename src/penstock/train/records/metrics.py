"""The numbers of a run: written to metrics.jsonl, and shown as a progress bar or as lines of a log."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from penstock.errors import RunError
from penstock.reading import open_regular, parse_json

MetricsRow = dict[str, Any]
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
T = TypeVar("T")
_LONGEST = 1e12  # seconds that a row can have taken


def leaves(tree: Any, dot: str = ".", name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in mappings and lists, such as a row or a config, each by the keys that lead to it."""
    if isinstance(tree, Mapping | list) and tree:
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, dot, f"{name}{dot}{key}" if name else str(key))
    else:
        yield name, tree


def kind_of(row: MetricsRow) -> str:
    """What a row is of: an evaluation, a checkpoint, a sample or a step."""
    of_key = {"held_out_loss": "evaluation", "checkpoint": "checkpoint", "sample": "sample"}
    return next((kind for key, kind in of_key.items() if key in row), "step")


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Raise RunError if the block cannot write `path`, as on a full disk."""
    try:
        yield
    except OSError as error:
        rule = f"it cannot be written ({error.strerror or error})"
        first = "Make room on that disk" if error.errno in _FULL else "See that it exists and can be written"
        remedy = f"{first}; --resume goes on from the newest checkpoint, if there is one"
        raise RunError(f"{path}", rule, remedy) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write in the block, which then replaces `path`: a reader sees the old one or the new one.

    Raises RunError if it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    with writable(path):
        yield fresh
        os.replace(fresh, path)


class EarlierRows(NamedTuple):
    """What a metrics.jsonl had when a run was resumed.

    again: seconds of the rows that are dropped, as their steps are done again
    at: when its last row was written, in seconds of time.time()
    """

    again: float
    at: float


class Metrics:
    """metrics.jsonl: one JSON object a line, written as it happens.

    Args:
        path: the file
        run: the identity of the run, which each row has
        resumed_at: the step that a resumed run goes on from; rows of later steps, which it repeats, and rows
            of other runs are dropped. None starts the file anew.

    Attributes:
        earlier: None where the file is a new one

    Raises RunError if the file cannot be written, as on a full disk.
    """

    def __init__(self, path: Path, run: str, resumed_at: int | None = None) -> None:
        with replacing(path) as fresh:
            kept = list[bytes]()
            self.earlier: EarlierRows | None = None
            if resumed_at is not None and path.exists():
                kept, again = _rows_until(path, run, resumed_at)
                self.earlier = EarlierRows(again, path.stat().st_mtime)
            fresh.write_bytes(b"".join(kept))
        self._path, self._run = path, run

    def write(self, row: MetricsRow) -> None:
        """Append a row. Raises RunError; ValueError for a NaN, which JSON does not have."""
        line = json.dumps({**row, "run": self._run}, allow_nan=False) + "\n"
        with writable(self._path), open(self._path, "a", encoding="utf-8", opener=_existing) as file:
            file.write(line)


def _existing(path: str, flags: int) -> int:
    """Open a file, and make none: the rows of one that somebody removed would be missing without a word."""
    return os.open(path, flags & ~os.O_CREAT)


def without_replaced_rows(rows: Iterable[tuple[MetricsRow, T]]) -> list[tuple[MetricsRow, T]]:
    """The rows that no later row replaces: a run that goes back to a checkpoint repeats the steps after it.

    rows: each with anything
    """
    kept: list[tuple[MetricsRow, T]] = []
    for row, more in rows:
        while "loss" in row and kept and kept[-1][0]["step"] >= row["step"]:
            kept.pop()
        kept.append((row, more))
    return kept


def seconds_of(rows: Iterable[MetricsRow]) -> float:
    """The seconds of all rows, as far as they have some."""
    values = (row.get("seconds") for row in rows)
    return sum(value for value in values if isinstance(value, int | float) and 0 <= value < _LONGEST)


def _rows_until(path: Path, run: str, step: int) -> tuple[list[bytes], float]:
    """The lines to keep, up to `step`, and the seconds of the others.

    Rows of versions up to 0.5.0 name no run.
    """
    with open_regular(path) as file:
        lines = file.read().split(b"\n")
    settled = _settled(lines, run, step)
    lines, before = lines[settled:], [line + b"\n" for line in lines[:settled]]
    rows = [
        (row, line + b"\n")
        for row, line in zip(_parsed(lines), lines, strict=True)
        if _is_row(row) and row.get("run", run) == run
    ]
    kept = [(row, line) for row, line in without_replaced_rows(rows) if row["step"] <= step]
    again = seconds_of(row for row, _ in rows) - seconds_of(row for row, _ in kept)
    return [*before, *(line for _, line in kept)], again


def _settled(lines: list[bytes], run: str, step: int) -> int:
    """How many lines an earlier start of the run has settled: they stay, as no later row can change that.

    So a restart reads the last rows alone, however long the run is. The lines end before the newest step but
    one that is done.
    """
    below = step + 1
    for index in reversed(range(len(lines))):
        row = _value(lines[index])
        if _is_row(row) and row.get("run") == run and "loss" in row and row["step"] < below:
            if below <= step:
                return index
            below = row["step"]
    return 0


def _parsed(lines: list[bytes]) -> list[Any]:
    """What each line holds; None for one that a crash has cut short, or that the disk has changed.

    All lines at once, as far as they are whole: one by one they take four times as long.
    """
    *whole, last = lines  # empty where the file ends with a whole line
    with suppress(ValueError):
        rows = parse_json(b"[" + b",".join(whole) + b"]")
        if len(rows) == len(whole):
            return [*rows, _value(last)]
    return [_value(line) for line in lines]


def _value(line: bytes) -> Any:
    with suppress(ValueError):
        return parse_json(line)
    return None


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("step"), int) and value["step"] >= 0


class Display:
    """Shows nothing: for every process except the first. Live displays run between enter and exit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, row: MetricsRow) -> None:
        """Show one training step's metrics."""

    def say(self, text: str) -> None:
        """Show a line that stays."""


class Lines(Display):
    """For a log: a line every `every` steps."""

    def __init__(self, steps: int, every: int) -> None:
        self._steps, self._every = steps, every

    def step(self, row: MetricsRow) -> None:
        if "skipped" in row:
            self.say(f"step {row['step']}/{self._steps}  skipped: {row['skipped']}")
        elif row["step"] % self._every == 0 or row["step"] in (1, self._steps):
            self.say(f"step {row['step']}/{self._steps}  {_numbers(row)}  lr {row['learning_rate']:.2e}")

    def say(self, text: str) -> None:
        print(text, flush=True)


class Bar(Display):
    """For a terminal: a progress bar."""

    def __init__(self, steps: int, done: int) -> None:
        self._progress = Progress(
            BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn(),
            # what does not fit is cut, so that the bar and the time left stay
            TextColumn("{task.fields[numbers]}", table_column=Column(ratio=1, no_wrap=True)),
            console=Console(), refresh_per_second=4, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=steps, completed=done, numbers="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, row: MetricsRow) -> None:
        if "skipped" in row:
            self.say(f"step {row['step']}  skipped: {row['skipped']}")
            self._progress.update(self._task, completed=row["step"])
        else:
            self._progress.update(self._task, completed=row["step"], numbers=_numbers(row))

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


def make_display(first: bool, steps: int, done: int, every: int) -> Display:
    """The display of this process. first: whether it is the process that shows anything"""
    if not first:
        return Display()
    return Bar(steps, done) if sys.stdout.isatty() else Lines(steps, every)


class Log:
    """Shows and writes the rows of steps in a thread, so that no step waits for a disk or a terminal.

    As a context manager it ends when every row is written, after an error as well.

    Args:
        metrics: None on a process that shows and writes nothing
    """

    def __init__(self, display: Display, metrics: Metrics | None) -> None:
        self._display, self._metrics = display, metrics
        self._thread = ThreadPoolExecutor(1, "penstock-log")
        self._row: Future[None] | None = None  # the last one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self.flush()

    def step(self, row: MetricsRow) -> None:
        """Show and write the row of a step, in the thread. Raises the error of the row before."""
        self.flush()
        if self._metrics is not None:
            self._row = self._thread.submit(self._write, row, self._metrics)

    def write(self, row: MetricsRow) -> None:
        """Write a row between two steps, after all rows before it. Raises RunError, also of those rows."""
        self.flush()
        if self._metrics is not None:
            self._metrics.write(row)

    @property
    def earlier(self) -> EarlierRows | None:
        """What its file had when the run was resumed; None for a new file."""
        return None if self._metrics is None else self._metrics.earlier

    @property
    def under_way(self) -> Future[None] | None:
        """The row that is being written, if any."""
        return self._row

    def flush(self) -> None:
        """Return when every row is written. Raises RunError if one was not."""
        row, self._row = self._row, None
        if row is not None:
            row.result()

    def _write(self, row: MetricsRow, metrics: Metrics) -> None:
        metrics.write(row)
        self._display.step(row)


def _numbers(row: MetricsRow) -> str:
    padding = f"  padding {row['padding']:.1%}" if row["padding"] else ""
    skipped = f"  skipped {row['skipped_steps']}" if "skipped_steps" in row else ""
    speed = f"{row['tokens_per_second']:,.0f} tokens/s  {row['tflops_per_device']:.3g} TFLOP/s"
    used = f" (MFU {row['mfu']:.1%})" if "mfu" in row else ""
    memory = f"  {max(row['peak_allocated']) / 2**30:.1f} GiB" if "peak_allocated" in row else ""
    host = f"  host {row['host_share']:.1%}" if "host_share" in row else ""
    return (
        f"loss {row['loss']:.3f}  {speed}{used}{memory}  bubble {row['bubble']:.1%}{host}{padding}{skipped}"
    )
