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

RESULTS = Path(__file__).parent / "results"
HEADER = ("case", "quantity", "penstock", "torch", "penstock / torch", "bar", "")


@dataclass(frozen=True)
class Row:
    """One number. torch: its own, where there is one; met: whether `bar` holds, None without one."""

    case: str
    what: str
    ours: float
    unit: str = ""
    torch: float | None = None
    bar: str = ""
    met: bool | None = None

    def cells(self) -> tuple[str, ...]:
        ratio = self.ours / self.torch if self.torch else None
        verdict = "" if self.met is None else ("met" if self.met else "MISSED")
        return (
            self.case, self.what, _number(self.ours, self.unit), _number(self.torch, self.unit),
            _number(ratio, ""), self.bar, verdict,
        )  # fmt: skip


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


def show(found: Found, console: Console) -> None:
    table = Table(title=found.title, title_justify="left")
    for column in HEADER:
        table.add_column(column, justify="left" if column in ("case", "quantity", "bar", "") else "right")
    for row in found.rows:
        style = {True: "green", False: "bold red", None: None}[row.met]
        table.add_row(*row.cells(), style=style)
    console.print(table)
    for note in found.notes:
        console.print(f"  {note}", highlight=False)


def write(found: Found, repeats: int, folder: Path = RESULTS) -> None:
    """Write `found` with what a reader needs to repeat it: machine, version, commit and command."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "name": found.name, "title": found.title, "version": penstock.__version__, "commit": _commit(),
        "command": f"python -m benchmarks --only {found.name} --repeats {repeats}", "machine": machine(),
        "rows": [vars(row) for row in found.rows], "notes": list(found.notes), "raw": dict(found.raw),
    }  # fmt: skip
    (folder / f"{found.name}.json").write_text(json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, str]:
    import torch  # here, as the page is made without it

    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str:
    """The commit that is checked out, with "-dirty" where files differ from it; "" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        ran = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
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
    digits = 0 if value == int(value) and value >= 1 else 3 if abs(value) < 10 else 1
    return f"{value:.{digits}f} {unit}".strip()
