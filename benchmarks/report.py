"""What a benchmark found: as a table on the terminal, and as JSON in benchmarks/results/.

`benchmarks.page` makes docs/benchmarks.md from those files.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import penstock
from benchmarks.rounds import Interval

RESULTS = Path(__file__).parent / "results"
_SHOWN = 0.0005  # a smaller difference is none in a table of three decimals
HEADER = ("case", "quantity", "penstock", "other", "penstock / other", "bar", "")


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        torch: the other's number: torch's, or what the notes name
        met: whether `bar` holds; None without a bar, and where it is not resolved
        paired: the ratio to the other's number, where it was measured in rounds
        low, high: quartiles of the number that is judged: of the ratio to the other's, else of `ours`
        rival: whom `ours`, a ratio, is a comparison with, where the other's own number is not in the row
        better: "low" or "high", which of two numbers is the better one
        resolved: False where the quartiles include the bar, or the machine was not quiet
        why: why a bar was not tried, or by what it was missed
    """

    case: str
    what: str
    ours: float
    unit: str = ""
    torch: float | None = None
    bar: str = ""
    met: bool | None = None
    paired: float | None = None
    low: float | None = None
    high: float | None = None
    rival: str = ""
    better: str = "low"
    resolved: bool = True
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """To the other's number."""
        if self.rival or self.paired is not None:
            return self.ours if self.paired is None else self.paired
        return self.ours / self.torch if self.torch else None

    @property
    def lost(self) -> bool:
        """Whether the other's number is the better one, over the whole interval, by more than rounding."""
        if self.ratio is None or not self.resolved:
            return False
        if self.better == "high":
            return (self.ratio if self.high is None else self.high) < 1 - _SHOWN
        return (self.ratio if self.low is None else self.low) > 1 + _SHOWN

    @property
    def verdict(self) -> str:
        if not self.resolved:
            return "not resolved"
        if self.met is None:
            return self.why
        return "met" if self.met else ": ".join(filter(None, ("MISSED", self.why)))

    def cells(self) -> tuple[str, ...]:
        ours, ratio = _number(self.ours, self.unit), "" if self.rival else _number(self.ratio, "")
        if self.low is not None and self.high is not None:
            spread = f" [{_number(self.low, '')}, {_number(self.high, '')}]"
            ratio, ours = (ratio + spread, ours) if ratio else (ratio, ours + spread)
        return (
            self.case, self.what, ours, _number(self.torch, self.unit), ratio, self.bar, self.verdict,
        )  # fmt: skip


def measured(
    case: str, what: str, found: Interval, unit: str = "", *, torch: float | None = None,
    ours: float | None = None, rival: str = "", at_most: float | None = None, at_least: float | None = None,
    quiet: bool = True,
) -> Row:  # fmt: skip
    """A row of something measured in rounds: with its quartiles, and judged where there is a bar.

    Args:
        found: what is judged: the ratio, where `torch` gives the other's number, and `ours` ours
        quiet: whether the rounds were, without which no bar is resolved
    """
    bar = at_least if at_most is None else at_most
    words = "" if bar is None else f"at {'least' if at_most is None else 'most'} {bar:g}"
    met, resolved = None, True
    if bar is not None:
        resolved = quiet and not found.low < bar < found.high
        if resolved:
            met = found.middle >= bar if at_most is None else found.middle <= bar
    better = "high" if at_least is not None else "low"
    number = found.middle if ours is None else ours
    paired = None if torch is None else found.middle
    return Row(
        case, what, number, unit, torch, words, met, paired, found.low, found.high, rival, better, resolved
    )


@dataclass(frozen=True)
class Found:
    """name: of the benchmark; notes: how it was measured, and what the numbers are; raw: every measurement"""

    name: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missed(self) -> int:
        return sum(row.met is False for row in self.rows)


def losses_first(rows: Sequence[Row]) -> list[Row]:
    """What is lost to someone, what misses its bar, what is not resolved, and the rest, each in its order."""
    return sorted(rows, key=lambda row: (not row.lost, row.met is not False, row.resolved))


def show(found: Found, console: Console) -> None:
    table = Table(title=found.title, title_justify="left")
    for column in HEADER:
        table.add_column(column, justify="left" if column in ("case", "quantity", "bar", "") else "right")
    for row in losses_first(found.rows):
        style = {True: "green", False: "bold red", None: None}[row.met]
        table.add_row(*row.cells(), style=style)
    console.print(table)
    for note in found.notes:
        console.print(f"  {note}", highlight=False)


def write(
    found: Found, command: str, took: float, folder: Path = RESULTS, where: Mapping[str, str] | None = None,
    commit: str | None = None,
) -> None:  # fmt: skip
    """Write `found` with what a reader needs to repeat it: machine, version, commit and command.

    took: seconds; where, commit: if they are known
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "name": found.name, "title": found.title, "version": penstock.__version__,
        "commit": commit_of_code() if commit is None else commit,
        "command": command, "machine": dict(where or machine()), "took": took,
        "rows": [finite(vars(row)) for row in found.rows], "notes": list(found.notes), "raw": dict(found.raw),
    }  # fmt: skip
    file = folder / f"{found.name}.json"
    unfinished = file.with_suffix(".writing")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(file)  # whoever ends this process finds a whole file


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """With None for numbers that JSON has no form for."""
    lost = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in lost else value for name, value in values.items()}


def machine() -> dict[str, str]:
    import torch  # here, as the page is made without it

    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}",
    }


def commit_of_code() -> str:
    """The commit that last changed what is measured or measures, "-dirty" with changes since; "" without git.

    Results themselves do not count: those of one run are of one commit, also where some are committed
    between.
    """
    code = ("--", "src", "benchmarks", ":(exclude)benchmarks/results")
    try:
        commit = _git("log", "-1", "--format=%h", *code)
        return f"{commit}-dirty" if _git("status", "--porcelain", *code) else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    command = ["git", *words]
    ran = subprocess.run(command, cwd=RESULTS.parents[1], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _number(value: float | None, unit: str) -> str:
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "infinite"
    digits = 0 if value == int(value) and value >= 1 else 3 if abs(value) < 10 else 1
    return f"{value:.{digits}f} {unit}".strip()
