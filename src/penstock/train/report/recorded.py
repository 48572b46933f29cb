"""Reads the folder of a run, which ended, goes on or was killed. Users may have changed its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock.reading import open_regular, parse_json, read_json
from penstock.schedule import Timeline, simulate
from penstock.schedule.choose import chosen_schedule, open_stages
from penstock.train.records.metrics import MetricsRow, seconds_of, without_replaced_rows

Points = Sequence[tuple[int, float | None]]  # step and value; None where it was not finite
WRONG = (KeyError, TypeError, ValueError, AttributeError, IndexError)
_LARGEST = 1e100  # larger numbers have no meaning, and charts would overflow


@dataclass(frozen=True)
class RecordedRun:
    """A run, as recorded in its folder.

    rows: the readable rows of metrics.jsonl that no later one replaces; unreadable: the number of its other
        lines
    again: seconds of the readable rows that later ones replace
    written: when the last row was written, in seconds of time.time(); 0 without a file
    about: run.json; without it, config and versions of the newest checkpoint; empty without either
    """

    name: str
    folder: Path
    rows: tuple[MetricsRow, ...]
    unreadable: int
    about: Mapping[str, Any]
    again: float = 0.0
    written: float = 0.0

    @cached_property
    def steps(self) -> tuple[MetricsRow, ...]:
        """The rows of training steps."""
        return tuple(row for row in self.rows if "loss" in row)

    @property
    def done(self) -> int:
        """The last step with a row; 0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def asked(self) -> int | None:
        """The last step of the run; None where its config does not say it."""
        section = self.config.get("train")
        steps = section.get("steps") if isinstance(section, dict) else None
        return steps if isinstance(steps, int) else None

    def points(self, key: str, inner: str | int | None = None) -> Points:
        """The value at `key` in each row that has it, by step.

        inner: a key within the row's mapping `key`, or a process, for an entry of the row's list
        """
        points = []
        for row in self.rows:
            value = row.get(key)
            if isinstance(inner, int):
                value = value[inner] if isinstance(value, list) and inner < len(value) else None
            elif inner is not None:
                value = value.get(inner) if isinstance(value, dict) else None
            if key in row and (inner is None or value is not None):
                points.append((row["step"], finite(value)))
        return points

    def keys_of(self, key: str) -> list[str]:
        """The keys of the rows' mappings at `key`, in order."""
        mappings = (row[key] for row in self.rows if isinstance(row.get(key), dict))
        return list(dict.fromkeys(str(inner) for mapping in mappings for inner in mapping))

    def by_process(self, key: str) -> list[float]:
        """The largest value of each process, in the rows' lists at `key`."""
        lists = [row[key] for row in self.rows if isinstance(row.get(key), list)]
        width = max(map(len, lists), default=0)
        return [max((finite(values[at]) or 0.0 for values in lists if at < len(values)), default=0.0)
                for at in range(width)]  # fmt: skip

    @cached_property
    def memory_key(self) -> str:
        """The entry of the rows that says what a process holds: of its GPU, or of the host."""
        return "peak_allocated" if any("peak_allocated" in row for row in self.rows) else "peak_resident"

    @property
    def config(self) -> dict[str, Any]:
        config = self.about.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def starts(self) -> list[dict[str, Any]]:
        return starts_in(self.about)

    @property
    def timelines(self) -> tuple[dict[str, Timeline], str]:
        """The timelines to show, by label, and a sentence on them. Measured ones are in seconds."""
        try:
            data = read_json(self.folder / "timeline.json")
            labels = [label for label in ("predicted", "measured") if label in data]
            timelines = {label: Timeline.from_data(data[label]) for label in labels}
            return timelines, f"Step {int(data['step'])}, as the ranks recorded it."
        except (OSError, PenstockError, *WRONG):
            pass
        try:
            section = self.config["pipeline"]
            ranks = self.starts[-1]["ranks"] if self.starts else section["ranks"]
            if isinstance(section.get("layers_per_stage"), int) and open_stages(section["schedule"]):
                raise ValueError("the number of stages depends on the model's layers, which are unknown here")
            schedule = chosen_schedule(section["schedule"], ranks, section["microbatches"])
            why = "A prediction: the run has recorded no step yet. Every forward takes 1, every backward 2."
            return {"predicted": simulate(schedule)}, why
        except (OSError, PenstockError, *WRONG):
            return {}, "The run has recorded no step, and its config names no schedule that could be drawn."


class RowsFile:
    """A metrics.jsonl, to which a run may append rows meanwhile.

    rows: the readable ones of its lines so far; unreadable: the number of the others
    written: when the last one was, in seconds of time.time()
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._end, self._rest = path, 0, 0, b""
        self.written = 0.0
        self._restart(0)

    def read(self) -> None:
        """Read the complete lines that have come since, or all of a new file. Raises OSError."""
        with open_regular(self._path) as file:
            facts = os.fstat(file.fileno())
            self.written = facts.st_mtime
            if facts.st_ino != self._file or facts.st_size < self._end:
                self._restart(facts.st_ino)
            file.seek(self._end)
            *lines, self._rest = file.read().split(b"\n")
            self._end = file.tell() - len(self._rest)
        self._add(lines)

    def read_all(self) -> None:
        """Read what has come since, with a last line that has no end. Raises OSError."""
        self.read()
        self._add([self._rest] if self._rest else [])

    def _restart(self, file: int) -> None:
        self.rows: list[MetricsRow] = []
        self.unreadable, self._file, self._end, self._rest = 0, file, 0, b""

    def _add(self, lines: list[bytes]) -> None:
        rows = [_row(line) for line in lines]
        self.rows += (row for row in rows if row is not None)
        self.unreadable += rows.count(None)


def read_run(folder: Path) -> RecordedRun:
    """Read a run. Raises ConfigError for a folder without one."""
    known, lines = _json(folder / "run.json"), RowsFile(folder / "metrics.jsonl")
    try:
        lines.read_all()
    except OSError as error:
        if not known:
            raise _no_run(folder, error) from None
    return _recorded(folder, lines, known or _of_checkpoint(folder))


def _no_run(folder: Path, error: OSError) -> ConfigError:
    rule = f"it has no metrics.jsonl that can be read ({error.strerror})"
    return ConfigError(f"run {str(folder)!r}", rule, "Give the output.folder of a run of penstock train")


def _recorded(folder: Path, lines: RowsFile, about: Mapping[str, Any]) -> RecordedRun:
    rows = tuple(row for row, _ in without_replaced_rows((row, None) for row in lines.rows))
    again = seconds_of(lines.rows) - seconds_of(rows)
    return RecordedRun(folder.resolve().name, folder, rows, lines.unreadable, about, again, lines.written)


class GrowingRun:
    """A run that may go on, read again and again: each time only what has come since.

    Raises ConfigError for a folder without a run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lines = folder, RowsFile(folder / "metrics.jsonl")
        read_run(folder)

    def read(self) -> RecordedRun:
        """The run as it is now."""
        about = _json(self._folder / "run.json")  # before the rows: they are all written when it has an end
        with suppress(OSError):
            self._lines.read()
        return _recorded(self._folder, self._lines, about)


def starts_in(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The starts of a run, from its run.json; empty where it has none that can be read."""
    starts = about.get("starts")
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def finite(value: object) -> float | None:
    """A number of a row as a float; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None  # false for NaN


def _row(line: bytes) -> MetricsRow | None:
    try:
        row = parse_json(line)
        return row if type(row["step"]) is int and 0 <= row["step"] < _LARGEST else None
    except WRONG:
        return None


def _json(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _of_checkpoint(folder: Path) -> dict[str, Any]:
    """Config and versions of the newest checkpoint, for runs of penstock 0.5.0 and before."""

    def states() -> Iterator[dict[str, Any]]:
        for path in sorted(folder.glob("checkpoints/step-*/state.json"), reverse=True):
            yield _json(path)

    state = next(filter(None, states()), {})
    return {"config": state.get("config"), "environment": state.get("versions")}
