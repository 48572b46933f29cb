"""Folders of runs, written by hand, their pages, and what a terminal shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from penstock.schedule import Costs, build, simulate
from penstock.train.records.metrics import MetricsRow
from penstock.train.report.page import page
from penstock.train.report.recorded import read_run

CONFIG = {
    "train": {"steps": 4},
    "pipeline": {"schedule": "1f1b", "ranks": 2, "microbatches": 4},
    "model": {"path": "<script>alert(1)</script>"},
}


def row(step: int, **more: Any) -> MetricsRow:
    return {
        "step": step, "loss": 5.0 - step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 1e4,
        "bubble": 0.1, "padding": 0.0, "seconds": 2.0, "tflops_per_device": 0.5,
        "seconds_by_part": {"data": 0.25, "step": 1.0, "clip": 0.125, "optimizer": 0.5},
        "peak_resident": [2**30, 3 * 2**30], **more,
    }  # fmt: skip


def write(folder: Path, *rows: MetricsRow | str, timeline: bool = True, **about: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    start = {"at": "2026-01-02T03:04:05+0000", "step": 0, "ranks": 2, "processes": 2}
    known = {"id": "x", "config": CONFIG, "environment": {"torch": "2.11"}, "starts": [start], **about}
    (folder / "run.json").write_text(json.dumps(known))
    if timeline:
        schedule = build("1f1b", ranks=2, microbatches=4)
        both = {"measured": simulate(schedule, Costs(0.02, 0.02, 0.03)), "predicted": simulate(schedule)}
        data = {name: each.to_data() for name, each in both.items()}
        (folder / "timeline.json").write_text(json.dumps({"step": 4, **data}))
    return folder


def on_terminal(shown: RenderableType, width: int = 100) -> str:
    """What a terminal of `width` letters shows."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(shown)
        return console.export_text()


def html(*folders: Path) -> str:
    return page([read_run(folder) for folder in folders])
