"""What a benchmark found, as a table, as JSON and in the summary."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
HEADER = ("case", "what", "penstock", "torch", "penstock / torch", "bar", "")


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
        table.add_column(column, justify="left" if column in ("case", "what", "bar", "") else "right")
    for row in found.rows:
        style = {True: "green", False: "bold red", None: None}[row.met]
        table.add_row(*row.cells(), style=style)
    console.print(table)
    for note in found.notes:
        console.print(f"  {note}", highlight=False)


def write(found: Found, folder: Path = RESULTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "name": found.name, "title": found.title, "machine": machine(),
        "rows": [vars(row) for row in found.rows], "notes": list(found.notes), "raw": dict(found.raw),
    }  # fmt: skip
    (folder / f"{found.name}.json").write_text(json.dumps(content, indent=1) + "\n")


def summarise(folder: Path = RESULTS) -> Path:
    """One page over every result in `folder`, also of earlier runs."""
    lines = ["# Benchmark results", "", "Written by `make bench`. Ratios are of medians within one run.", ""]
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        lines += [
            f"## {content['title']}",
            "",
            "; ".join(f"{k} {v}" for k, v in content["machine"].items()),
            "",
        ]
        lines += [f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
        lines += [f"| {' | '.join(Row(**row).cells())} |" for row in content["rows"]]
        lines += ["", *(f"- {note}" for note in content["notes"]), ""]
    path = folder / "summary.md"
    path.write_text("\n".join(lines))
    return path


def machine() -> dict[str, str]:
    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


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
