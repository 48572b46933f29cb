"""metrics.jsonl: one JSON object a line, written as it happens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Metrics:
    """Appends rows to `path`.

    resumed_at: the step that a resumed run goes on from; rows after it, which that run repeats, are dropped.
    None starts the file anew.
    """

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        kept = [] if resumed_at is None or not path.exists() else _rows_until(path, resumed_at)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text("".join(kept), encoding="utf-8")
        os.replace(fresh, path)
        self._path = path

    def write(self, row: Row) -> None:
        # a NaN would not be JSON; the loop writes none of it
        line = json.dumps(row, allow_nan=False) + "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)


def _rows_until(path: Path, step: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # a line that a crash cut short
            continue
    return kept
