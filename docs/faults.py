"""Write docs/faults.md from what `make faults` found: ``python docs/faults.py``.

tests/faults/results.json has the rows; tests/test_docs.py checks that the page is what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("faults.md")
RESULTS = PAGE.parents[1] / "tests" / "faults" / "results.json"
HEAD = """# Faults that a run survives

`make faults` strikes runs at set places, and writes this page. Each row is a fault. A run *survives* it in
one of two ways. All ranks end, the error names the cause, and `--resume` or a restart trains the weights of
an undisturbed run bit for bit. Or the run goes on as if nothing had happened.

*Seconds* are those until the last rank that was not struck had ended, the most of all tries; of a command
those that all of it took, of a file those until it was refused. *Steps again* are the steps whose work was
lost. Where the cause is empty, a test checks it and does not quote it.

"""
LIMITS = """
## What is not survived

A bit of a weight that flips in memory and leaves a finite number is noticed by nobody. Nor is one of a
message without `pipeline.checksums`, or before it is sent and after it is received. Files have hashes: a
changed byte of a checkpoint is always noticed.
"""
COLUMNS = ("where", "tried", "survived", "seconds", "named cause", "steps again")


def page() -> str:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    survived, tried = (sum(row[name] for row in rows) for name in ("survived", "tried"))
    about = (
        f"{survived:,} of {tried:,} faults were survived, in {found['seconds']:.0f} s: {found['machine']}, "
        f"penstock {found['penstock']}, torch {found['torch']}, {found['date']}. "
        "A run that hangs is not survived.\n"
    )
    return HEAD + about + "".join(_sections(rows)) + LIMITS


def _sections(rows: list[dict[str, Any]]) -> Iterator[str]:
    for kind, of_kind in groupby(sorted(rows, key=lambda row: rows.index(_first(rows, row))), _kind):
        yield f"\n## {kind[0].upper()}{kind[1:]}\n\n"
        yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
        for row in of_kind:
            seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
            cells = (row["where"], row["tried"], row["survived"], seconds, _cell(row["cause"]), row["lost"])
            yield f"| {' | '.join(map(str, cells))} |\n"


def _first(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """The first row of the same kind."""
    return next(each for each in rows if each["kind"] == row["kind"])


def _kind(row: dict[str, Any]) -> str:
    return str(row["kind"])


def _cell(cause: str) -> str:
    return f"`{cause}`".replace("|", "/") if cause else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
