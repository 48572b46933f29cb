"""docs/benchmarks.md from benchmarks/results/*.json: ``python -m benchmarks.page [--check]``.

Every number of the page comes from those files. ``--check`` writes nothing and exits with 1 where the page is
not what the files say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import HEADER, RESULTS, Row

PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
MOST_ROWS = 25  # of a table that stands open

ABOUT = {
    "default_split": "The split of layers over stages that a user gets without asking, against the best of "
    "all splits: by simulation for public configs, and run for two models.",
    "hooks": "A stage of a Hugging Face model is the whole model with placeholders for the layers of other "
    "stages. This benchmark compares its step with the step of a stage that is written by hand.",
    "loading": "Each rank reads only the tensors of its stage. This benchmark measures time and peak host "
    "memory.",
    "memory": "Peak live activations against the proven bound, peak bytes against torch, and against what "
    "`simulate` predicts. The bytes that are counted from outside include what an op needs while it "
    "runs, which `simulate` does not know.",
    "meshes": "Bytes and calls of one step when other parallel axes run beside the pipeline.",
    "networks": "Step time over `simulate` when each message takes a set time, for every schedule.",
    "overhead": "The time that the runtime itself takes for an op. Step times over gloo vary from run to run "
    "more than those in one process.",
    "paired": "Two ops of a marked pair run at the same time: one computes while the other exchanges. This "
    "benchmark compares the step with and without.",
    "ragged": "Three ways to train on documents of different lengths: padded, ragged and packed.",
    "recording": "Every step is recorded, and ranks agree before the first one. This benchmark "
    "measures both.",
    "searched": "The bubble of searched schedules, and of the best published schedule that fits the same "
    "memory. The published order is formed for ops of equal length.",
    "split": "A backward in two halves, the input gradient I and the weight gradient W, against one whole "
    "backward.",
    "startup": "Time to build a pipeline of many layers and to run its first step.",
    "steptime": "Step time when each op sleeps for a set time, over what `simulate` predicts with the "
    "measured latency of the link, and over the ideal without latency. Four ranks share two cores, whose "
    "caches are cold after a sleep: an op takes longer than asked, and so does the time between two "
    "ops. Real compute keeps the cores awake.",
    "throughput": "A whole training step of a model that computes, by each way that two cores offer: one "
    "process, data parallel, torch.distributed.pipelining, penstock.",
}


@dataclass(frozen=True)
class Result:
    """One file of benchmarks/results."""

    name: str
    title: str
    version: str
    commit: str
    command: str
    machine: dict[str, str]
    rows: Sequence[Row]
    notes: Sequence[str]

    @classmethod
    def read(cls, file: Path) -> Result:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        content["rows"] = [Row(**row) for row in content["rows"]]
        del content["raw"]
        return cls(**content)

    @property
    def bars(self) -> list[Row]:
        return [row for row in self.rows if row.met is not None]

    @property
    def missed(self) -> int:
        return sum(row.met is False for row in self.bars)


def page(folder: Path = RESULTS) -> str:
    """The whole page. Raises KeyError for a benchmark without a text in `ABOUT`."""
    results = [Result.read(file) for file in sorted(folder.glob("*.json"))]
    lines = [*_opening(results)]
    for result in results:
        lines += _section(result)
    return "\n".join(lines)


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def _opening(results: Sequence[Result]) -> Iterator[str]:
    bars = sum(len(result.bars) for result in results)
    missed = sum(result.missed for result in results)
    yield from (
        "# Benchmarks",
        "",
        "`make bench` measures penstock and, in the same run, `torch.distributed.pipelining` on the"
        " same work. It then writes this page. Ratios are of medians within one run, unless a note "
        "says otherwise. A bar is a limit that the project has set for itself: a missed one is "
        "printed in bold.",
        "",
        f"Bars: {bars}. Met: {bars - missed}. **Missed: {missed}.**",
        "",
    )
    versions = sorted({result.version for result in results})
    if len(versions) > 1:
        yield from (
            f'!!! warning "Results of {len(versions)} versions: {", ".join(versions)}"',
            "",
            "    Each benchmark was last run with the version in its row. Later versions may be faster or "
            "slower. The commit in its section is the one measured, or the one that added the result.",
            "",
        )
    yield "| benchmark | version | date | bars met | bars missed |"
    yield "| --- | --- | --- | ---: | ---: |"
    for result in results:
        met = len(result.bars) - result.missed
        bold = f"**{result.missed}**" if result.missed else str(result.missed)
        counts = f"{met} | {bold}" if result.bars else " | "
        date = result.machine["date"].replace("-", "&#8209;")  # hyphens where no line breaks
        yield f"| [{result.title}](#{result.name}) | {result.version} | {date} | {counts} |"
    yield ""


def _section(result: Result) -> Iterator[str]:
    machine = result.machine
    commit = f", commit {result.commit}" if result.commit else ""
    yield from (
        f"## {result.title} {{ #{result.name} }}",
        "",
        ABOUT[result.name],
        "",
        f"- Version: penstock {result.version}{commit}; torch {machine['torch']}; Python {machine['python']}",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory']} of memory",
        f"- Date: {machine['date']}",
        f"- Command: `{result.command}`",
        "",
    )
    if len(result.rows) <= MOST_ROWS:
        yield from _table(result.rows)
    else:
        shown = result.bars
        if len(shown) > MOST_ROWS:
            shown = [row for row in shown if not row.met]
            yield f"Met: {len(result.bars) - result.missed} of {len(result.bars)} bars. The missed ones:"
            yield ""
        if shown:
            yield from _table(shown)
        yield '<details markdown="1">'
        yield f"<summary>All {len(result.rows)} numbers</summary>"
        yield ""
        yield from _table(result.rows)
        yield "</details>"
        yield ""
    yield from (f"- {_escaped(note)}" for note in result.notes)
    yield ""


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """The columns that any of `rows` fills."""
    cells = [row.cells() for row in rows]
    used = [column for column in range(len(HEADER)) if any(row[column] for row in cells)]
    yield "| " + " | ".join(HEADER[column] for column in used) + " |"
    right = {"penstock", "torch", "penstock / torch"}
    yield "| " + " | ".join("---:" if HEADER[column] in right else "---" for column in used) + " |"
    for row in cells:
        values = [_escaped(row[column]) for column in used]
        values = [
            value.replace(" ", "&nbsp;") if HEADER[column] in right else value
            for column, value in zip(used, values, strict=True)
        ]
        yield "| " + " | ".join("**MISSED**" if value == "MISSED" else value for value in values) + " |"
    yield ""


def _escaped(text: str) -> str:
    """`text` with Markdown's signs escaped, except in code between backticks."""
    pieces = text.split("`")
    for place in range(0, len(pieces), 2):
        pieces[place] = re.sub(r"[|*_<]", r"\\\g<0>", pieces[place])
    return "`".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is stale")
    if not parser.parse_args().check:
        write()
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/benchmarks.md is not what benchmarks/results says: run python -m benchmarks.page")


if __name__ == "__main__":
    main()
