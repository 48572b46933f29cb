"""Schedules as files: PyTorch's CSV, read and written, and a JSON format of our own.

A CSV file has a row per rank and an op per cell. Empty cells are bubbles and mean nothing. The schedule is
named after its file, and its placement follows from the rows of the ops. Communication in PyTorch's files is
skipped: what a rank sends and receives follows from what it computes.

JSON has all of a schedule, one line per rank:

    {
      "format": "penstock schedule",
      "version": 1,
      "name": "gpipe",
      "microbatches": 2,
      "rank_of": [0, 1],
      "replicas": 1,
      "programs": [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"]
      ]
    }

Reading checks the form; `verify` checks the schedule.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.reading import open_regular, parse_json
from penstock.schedule.ops import MAX_STAGES, Op, Pair, Placement, Schedule

# ---- Cells: ops as text, each at a place that an error can name

CellPosition = tuple[int, int]  # row and column, counted from 0; the row is the rank

# what PyTorch adds for its executor
_COMMUNICATION = re.compile(r"\d+(SEND|RECV)_[FB]\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_SHOWN = 10


class Cells:
    """Reads the cells of all ranks and collects complaints.

    name_place: formats a position in this file for errors
    communication: whether to skip PyTorch's ops that send, receive, gather and release
    """

    def __init__(self, path: Path, name_place: Callable[[CellPosition], str], *, communication: bool) -> None:
        self._path, self.name_place, self._communication = path, name_place, communication
        self.places: dict[Op, CellPosition] = {}
        self.overlaps: set[Pair] = set()
        self.complaints: list[str] = []

    def program(self, rank: int, cells: Sequence[str]) -> tuple[Op, ...]:
        """The ops of a row."""
        ops: list[Op] = []
        for column, cell in enumerate(cells):
            if text := cell.strip():
                ops += self._read(text, (rank, column))
        return tuple(ops)

    def _read(self, text: str, position: CellPosition) -> tuple[Op, ...]:
        if self._communication and _COMMUNICATION.fullmatch(text):
            return ()
        ops = _parsed(text)
        if not ops:
            self.complain(position, f"{_short(text)} is no op{_likely_cause(text)}")
        elif isinstance(ops, Pair):
            if ops.forward.kind != "F" or ops.backward.kind not in ("B", "I"):
                self.complain(position, f"{ops} overlaps other kinds than a forward and then a backward")
            self.overlaps.add(ops)
        for op in ops:
            first = self.places.setdefault(op, position)
            if first is not position:
                self.complain(position, f"{op} is already at {self.name_place(first)}")
        return ops

    def complain(self, position: CellPosition, complaint: str) -> None:
        self.complaints.append(f"{self.name_place(position)}: {complaint}")

    def check(self) -> None:
        """Raise ConfigError with all complaints, if there are any."""
        if not self.complaints:
            return
        rule = self.complaints[0]
        if len(self.complaints) > 1:
            shown = "".join(f"\n  {complaint}" for complaint in self.complaints[:_SHOWN])
            more = len(self.complaints) - _SHOWN
            rule = f"{len(self.complaints)} cells are wrong:{shown}"
            rule += f"\n  and {more} more" if more > 0 else ""
        remedy = "Write an op like 2F0 (stage 2, forward, microbatch 0) and each op once, a row for each rank"
        raise _wrong(self._path, rule, remedy)


def placed(programs: Sequence[Sequence[Op]], cells: Cells) -> Placement:
    """The placement that puts each stage on the rank of its ops. Raises ConfigError if there is none."""
    rank_of: dict[int, int] = {}
    first: dict[int, Op] = {}
    on_two_ranks: set[int] = set()
    for rank, program in enumerate(programs):
        if not program:
            cells.complain((rank, 0), "the row holds no op that computes; each rank hosts at least one stage")
        for op in program:
            if rank_of.setdefault(op.stage, rank) != rank and op.stage not in on_two_ranks:
                on_two_ranks.add(op.stage)
                there = cells.name_place(cells.places[first[op.stage]])
                conflict = f"{op} is of stage {op.stage}, which is at {there} on rank {rank_of[op.stage]}"
                cells.complain(cells.places[op], f"{conflict}; a stage is on one rank")
            first.setdefault(op.stage, op)
    for stage in sorted(rank_of):
        if stage and stage - 1 not in rank_of:
            gap = f"{first[stage]} is of stage {stage}, and no op is of stage {stage - 1}"
            cells.complain(cells.places[first[stage]], f"{gap}; stages are numbered from 0 without a gap")
    cells.check()
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))


def _parsed(text: str) -> Pair | tuple[Op, ...]:
    """The ops of a cell; none if it is no op."""
    try:
        return Pair.parse(text) or (Op.parse(text),)
    except ConfigError:
        return ()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 42 else f"{text[:38]}..."


def _likely_cause(text: str) -> str:
    """The usual mistakes of people and spreadsheets."""
    if "(" not in text and (";" in text or "\t" in text):
        return "; cells are separated by commas"
    if _parsed(text.upper()):
        return f"; {text.upper()} is"
    if re.fullmatch(r"\d+[FBIW]", text, re.ASCII):
        return "; the microbatch is missing"
    return ""


_FORMAT, _VERSION = "penstock schedule", 1
_KEYS = {"format": str, "version": int, "name": str, "microbatches": int, "rank_of": list, "replicas": int,
         "programs": list}  # fmt: skip
_LARGEST = 32 * 2**20  # bytes
_MOST_OPS = 1_000_000  # 64 ranks with 2 stages each and 1024 microbatches have 400,000 of three kinds


def dump(schedule: Schedule, path: str | Path) -> None:
    """Write `schedule` to `path`, whose ending chooses the format: ``.json`` or ``.csv``.

    The file loads as the same schedule, in CSV under the file's name. Raises ConfigError for another ending,
    a path that cannot be written, and a schedule that the format cannot represent.
    """
    path = Path(path)
    write, read = _format(path)
    text = write(schedule)
    rule, remedy = "", "See what penstock.schedule.verify says"
    if write is _to_csv and schedule.placement.replicas > 1:
        rule, remedy = "CSV cannot say that there are several copies of the model", "Write it as .json"
    else:
        try:
            if replace(read(text, path, None), name=schedule.name) != schedule:
                rule = "its programs, overlapped pairs or microbatches do not come back as they are"
        except ConfigError as error:
            rule = error.rule
    if rule:
        raise ConfigError(f"schedule {schedule.name!r} as {path.name!r}", rule, remedy)
    write_text(path, text, "schedule file")


def write_text(path: Path, text: str, noun: str) -> None:
    """Write a file. Raises ConfigError, which calls it `noun`, if that is impossible."""
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{noun} {str(path)!r}",
            f"it cannot be written: {getattr(error, 'strerror', None) or error}",
            "Give a path in a folder that exists and may be written to",
        ) from error


def check_path(path: str | Path) -> None:
    """Raise ConfigError if the ending or the folder of `path` do not fit `dump`."""
    path = Path(path)
    _format(path)
    if not path.parent.is_dir():
        raise _wrong(path, f"there is no folder {str(path.parent)!r}", "Make it first")


def load(path: str | Path, *, placement: Placement | None = None) -> Schedule:
    """Read a schedule from a ``.json`` or ``.csv`` file, without verifying it.

    placement: of the stages; needed for a CSV file with several copies of the model

    Raises ConfigError for a file that cannot be read, with the row and column (JSON: index) of every bad
    cell.
    """
    path = Path(path)
    _, read = _format(path)
    return read(_text(path), path, placement)


ScheduleReader = Callable[[str, Path, Placement | None], Schedule]


def _format(path: Path) -> tuple[Callable[[Schedule], str], ScheduleReader]:
    match path.suffix.lower():
        case ".json":
            return _to_json, _from_json
        case ".csv":
            return _to_csv, _from_csv
        case other:
            rule = f"its ending chooses the format, and {other or 'no ending'} chooses none"
            raise _wrong(path, rule, "End the path in .json or in .csv")


def _wrong(path: Path, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"schedule file {str(path)!r}", rule, remedy)


def _text(path: Path) -> str:
    """The text of the file. UTF-8 only: in practice, the only other encoding is Excel's UTF-16."""
    wrong, remedy = "", "Give a .json or .csv file that penstock or PyTorch has written"
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"it is no UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}"
    except (OSError, ValueError) as error:
        wrong = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        remedy = "Give the path of a schedule's file"
    else:
        if len(content) > _LARGEST:
            wrong = f"it is larger than {_LARGEST // 2**20} MiB, and no schedule that can be run is"
        elif "\0" in text:
            wrong = f"it is no text: there is a zero byte at {text.index(chr(0))}"
        elif not text.strip():
            wrong = "it is empty"
    if wrong:
        raise _wrong(path, wrong, remedy)
    return text


def _to_csv(schedule: Schedule) -> str:
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows(map(str, schedule.entries(rank)) for rank in range(len(schedule.programs)))
    return out.getvalue()


def _from_csv(text: str, path: Path, placement: Placement | None) -> Schedule:
    _check_counts(path, rows=text.count("\n"), cells=text.count(","))
    rows = _rows(text, path)
    cells = Cells(path, lambda at: f"row {at[0] + 1}, column {at[1] + 1}", communication=True)
    programs = tuple(cells.program(rank, row) for rank, row in enumerate(rows))
    cells.check()
    if not cells.places:
        raise _wrong(path, "it holds no op that computes", "Write ops like 2F0, a row for each rank")
    where = placement or placed(programs, cells)
    microbatches = 1 + max(op.microbatch for op in cells.places)
    return Schedule(path.stem, where, microbatches, programs, frozenset(cells.overlaps))


def _check_counts(path: Path, *, rows: int, cells: int) -> None:
    """Raise ConfigError for more than any schedule has, before something is made of them."""
    if rows > MAX_STAGES:
        rule = f"it has more than {MAX_STAGES:,} rows or stages, and a row is a rank"
        raise _wrong(path, rule, "Write the ops of a rank into one row")
    if cells > _MOST_OPS:
        raise _wrong(path, f"it has more than {_MOST_OPS:,} ops", "Take fewer microbatches or ranks")


def _rows(text: str, path: Path) -> list[list[str]]:
    """The cells, without empty rows at the end."""
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        rule = f"line {reader.line_num} is no CSV: {error}"
        raise _wrong(path, rule, "Separate ops by commas, and leave quotes out") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    _check_counts(path, rows=len(rows), cells=0)  # a line may end in \r alone
    return rows


def _to_json(schedule: Schedule) -> str:
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "rank_of": schedule.placement.rank_of,
        "replicas": schedule.placement.replicas,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    ranks = range(len(schedule.programs))
    programs = ",\n".join(f"    {json.dumps([*map(str, schedule.entries(rank))])}" for rank in ranks)
    return "\n".join(["{", *lines, f'  "programs": [\n{programs}\n  ]', "}"]) + "\n"


def _from_json(text: str, path: Path, placement: Placement | None) -> Schedule:
    _check_counts(path, rows=0, cells=text.count(","))
    data = _fields(text, path)
    _check_counts(path, rows=max(len(data["rank_of"]), len(data["programs"])), cells=0)
    stored = _placement(data["rank_of"], data["replicas"], path)
    if placement is not None and placement != stored:
        raise _malformed(path, f"its placement {stored} is another one than the {placement} given")
    cells = Cells(path, lambda at: f"programs[{at[0]}][{at[1]}]", communication=False)
    for rank, row in enumerate(data["programs"]):
        if not isinstance(row, list) or not all(isinstance(cell, str) for cell in row):
            raise _malformed(path, f'programs[{rank}] is no list of ops, such as ["0F0", "0B0"]')
    programs = tuple(cells.program(rank, row) for rank, row in enumerate(data["programs"]))
    cells.check()
    return Schedule(data["name"], stored, data["microbatches"], programs, frozenset(cells.overlaps))


def _fields(text: str, path: Path) -> dict[str, Any]:
    """The keys of the file, each checked for its type."""
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        raise _malformed(path, f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number of thousands of digits, or a thousand brackets
        raise _malformed(path, f"it cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise _malformed(path, f'it does not say "format": "{_FORMAT}"')
    if data.get("version") != _VERSION:
        rule = f"its version is {data.get('version')!r}, and this penstock reads {_VERSION}"
        raise _wrong(path, rule, "Write it with this version, or update penstock")
    for key in data:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            raise _malformed(path, f"the key {key!r} is unknown" + (f"; {near[0]!r}?" if near else ""))
    for key, kind in _KEYS.items():
        if key not in data:
            raise _malformed(path, f"the key {key!r} is missing")
        if type(data[key]) is not kind:  # a bool is no int here
            raise _malformed(path, f"{key} is {_short(data[key])}; it is to be of type {kind.__name__}")
    return data


def _placement(rank_of: list[Any], replicas: int, path: Path) -> Placement:
    for stage, rank in enumerate(rank_of):
        if type(rank) is not int or not 0 <= rank < len(rank_of):  # each rank hosts at least one stage
            raise _malformed(path, f"rank_of[{stage}] is {_short(rank)}; it is to be a rank, numbered from 0")
    return Placement(tuple(rank_of), replicas)


def _malformed(path: Path, rule: str) -> ConfigError:
    return _wrong(path, rule, "Fix it, or write it again with penstock.schedule.dump")
