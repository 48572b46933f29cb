"""docs/benchmarks.md from benchmarks/results/*.json: ``python -m benchmarks.page [--check]``.

Every number of the page comes from those files. One run is one version and one commit on one machine: results
of another run than the newest are marked, and count neither as bars nor as losses. ``--check`` writes nothing
and exits with 1 where the page is not what the files say. What `benchmarks.gpu` finds, gpu_*.json, is of
another machine and not on this page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import HEADER, RESULTS, Row, losses_first

PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
MOST_ROWS = 25  # of a table that stands open

# in the order of the page
ABOUT = {
    "throughput": "A whole training step of a model that computes, by each way that two cores offer: one "
    "process, data parallel, torch.distributed.pipelining, penstock. penstock sends through shared memory, "
    "its default on one host, and torch over gloo; one row has penstock over gloo, too. Beside DDP, FSDP2 "
    "and one process stands the schedule of ours that was fastest in that case.",
    "steptime": "Each op sleeps for 20 ms, and `simulate` predicts the step. This benchmark measures how "
    "much longer the step took, and where. Both libraries go over gloo. Four ranks share two cores, whose "
    "caches are cold after a sleep: an op takes longer than asked, and so does the time between two ops. "
    "Real compute keeps the cores awake.",
    "overhead": "Computing takes almost no time here, so that the numbers are the runtime's own time for an "
    "op. In process no message is sent. Two processes: torch over gloo, and penstock over gloo and over "
    "shared memory, its default on one host.",
    "host": "Layers are so narrow that the host is the limit, as it is on a GPU that waits for launches. All "
    "ranks are in one process: a step does the work of the plain loop and nothing else. The same stages "
    "called by hand, by torch alone and in the schedule's order, show what of it no library can save: each "
    "stage runs the model's own forward around its layers, and the schedule's activations are held.",
    "trainer": "A step of `penstock train`, beside the same step in a loop of one's own.",
    "memory": "Three comparisons: live activations, measured and proven; peak bytes of penstock and of "
    "torch; peak bytes, measured and predicted. The bytes that are counted from outside include what an op "
    "needs while it runs, which `simulate` does not know.",
    "networks": "Step time over `simulate` when each message takes a set time, for every schedule. All go "
    "over gloo.",
    "recording": "penstock records every step. This benchmark measures what that costs, and how long the "
    "ranks take to agree before a step.",
    "in_memory": "Each rank keeps its state in its host's memory, copied while the next step computes. This "
    "benchmark measures what a step pays for that, with a checkpoint after each.",
    "ragged": "Three ways to train on documents of different lengths: padded, ragged and packed. Over gloo.",
    "split": "A backward in two halves, the input gradient I and the weight gradient W, against one whole "
    "backward.",
    "scale": "Time to build, to prove and to simulate a schedule of 64 ranks and 1,024 microbatches.",
    "searched": "The bubble of searched schedules, and of the best published schedule that fits the same "
    "memory. The published order is formed for ops of equal length.",
    "loading": "Each rank reads only the tensors of its stages. This benchmark measures time and peak host "
    "memory. transformers maps the files: it copies no byte until an optimizer writes, and the benchmark "
    "touches one value in each page of its weights. penstock copies all bytes, so the two do not do the same "
    "work; the plain loop does. With `dp_shard=4` each of four ranks reads a quarter of each tensor.",
    "startup": "Time to build a pipeline of many layers and to run its first step, beside the whole model of "
    "transformers, which is not split: there all four ranks run one after the other in one process. And with "
    "a process for each rank, beside torch.distributed.pipelining with stages that are written by hand.",
    "hooks": "A stage of a Hugging Face model is the whole model with placeholders for the layers of other "
    "stages. This benchmark compares its step with the step of a stage that is written by hand.",
    "meshes": "Bytes and calls of one step when other parallel axes run beside the pipeline.",
    "default_split": "The split of layers over stages that a user gets without asking, by multiply-adds. Ten "
    "public configs are simulated with the same counts: no better split was overlooked. Two small models are "
    "run with every split: the counts predict real time.",
    "corpus": "All ranks map one cache of tokens. This benchmark measures what a rank's memory grows by with "
    "the size of its corpus, and how long the corpus takes to tokenise once.",
    "local_plans": "Eight plans of a model, by two ranks and by four: what the planner predicts for a step "
    "and for memory, beside what `penstock train` takes for it. The machine is calibrated in the same round.",
    "generation": "New tokens by `pipe.generate` over two ranks, beside transformers' `generate` of the "
    "whole model in one process. The tokens are the same.",
}

_CENTRE = "8 layers of 256, 2 x 128 tokens, m="
_FASTER = "times as fast: the median and its 95 % interval"
# benchmark, case and quantity of what stands at a glance
GLANCE = (
    ("throughput", f"{_CENTRE}8: penstock, 1f1b / torch, 1f1b", _FASTER),
    ("throughput", f"{_CENTRE}16: penstock, 1f1b / torch, 1f1b", _FASTER),
    ("throughput", f"{_CENTRE}32: penstock, 1f1b / torch, 1f1b", "times as fast"),
    ("throughput", f"{_CENTRE}8: penstock, 1f1b", "peak RSS, sum"),
    ("throughput", f"{_CENTRE}32: penstock, 1f1b", "peak RSS, sum"),
    ("memory", "curve: 1f1b, rank 0", "bytes at the peak"),
    ("memory", "layers: 1f1b, rank 0", "bytes at the peak"),
    ("overhead", "1f1b, 2 processes", "penstock over shared memory / torch over gloo: time per op"),
    ("overhead", "1f1b, 2 processes", "penstock over gloo / torch over gloo: time per op"),
    ("overhead", "1f1b, P=4, m=64, in process, no message", "cost per op"),
    ("steptime", "1f1b", "step / zero-latency ideal"),
    ("steptime", "zb_v", "step / zero-latency ideal"),
    (
        "startup",
        "200 layers, P=4, a process each, all imported",
        "first pipeline of a process: build and first step",
    ),
    ("loading", "4 ranks, a stage each", "load / the bytes' own time"),
    ("loading", "one process, the whole model", "save"),
)


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
    took: float = 0.0  # seconds; 0 in results of 0.5.0 and before

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

    @property
    def open(self) -> int:
        """Bars that are not resolved."""
        return sum(not row.resolved for row in self.rows)

    @property
    def lost(self) -> list[Row]:
        return [row for row in self.rows if row.lost]

    @property
    def run(self) -> tuple[str, ...]:
        """What the results of one run have in common."""
        where = (self.machine[name] for name in ("cpu", "cores", "memory", "python", "torch"))
        return self.version, self.commit, *where


def files(folder: Path = RESULTS) -> list[Path]:
    """The results that the page is made of."""
    return [file for file in sorted(folder.glob("*.json")) if not file.name.startswith("gpu_")]


def page(folder: Path = RESULTS) -> str:
    """The whole page. Raises ValueError for a benchmark without a text in `ABOUT`, whose order it keeps."""
    read = [Result.read(file) for file in files(folder)]
    results = sorted(read, key=lambda result: [*ABOUT].index(result.name))
    newest = max(results, key=lambda result: result.machine["date"])
    lines = [*_opening(results, newest)]
    for result in results:
        lines += _section(result, newest)
    return "\n".join(lines)


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def _opening(results: Sequence[Result], newest: Result) -> Iterator[str]:
    this = [result for result in results if result.run == newest.run]
    bars, missed, still_open, lost = (
        sum(counts)
        for counts in zip(*((len(r.bars), r.missed, r.open, len(r.lost)) for r in this), strict=True)
    )
    machine = newest.machine
    yield from (
        "# Benchmarks",
        "",
        "`make bench` measures penstock and others on the same work, in one run, and then writes this page. "
        "In brackets is a range: the quartiles, or the 95 % interval of the median where the row says so. A "
        "ratio is the median of the rounds' ratios, so that it may differ from that of the two medians "
        "beside it. A bar is a limit that the project has set for itself. Where the range includes it, it is "
        "not resolved. What is lost to another library stands first.",
        "",
        f"- Run: {_commit_of(newest)}; torch {machine['torch']}; Python {machine['python']}; "
        f"{len(this)} of {len(ABOUT)} benchmarks, which took {sum(r.took for r in this) / 60:.0f} minutes",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory']} of memory",
        f"- Bars: {bars + still_open}. Met: {bars - missed}. **Missed: {missed}.** Not resolved: "
        f"{still_open}. **Lost to another library: {lost}.**",
        "",
    )
    if len(this) < len(results):
        yield from (
            f'!!! danger "{len(results) - len(this)} results are of another run"',
            "",
            "    Another version or commit, or another machine, gave the numbers of the sections that say "
            "so. They do not compare with the others, and are in none of the counts.",
            "",
        )
    if "dirty" in newest.commit or not newest.commit:
        yield from ('!!! danger "The code that was measured is not a commit"', "")
    yield from _lost(this)
    yield from _glance(this)
    yield "| benchmark | run | lost | bars missed | not resolved | bars met |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for result in sorted(results, key=lambda result: (-len(result.lost), -result.missed, -result.open)):
        date = result.machine["date"].replace("-", "&#8209;")  # hyphens where no line breaks
        run = date if result in this else f"**another run**: {_commit_of(result)}, {date}"
        numbers = (len(result.lost), result.missed, result.open)
        counts = " | ".join(f"**{number}**" if number else "0" for number in numbers)
        yield f"| [{result.title}](#{result.name}) | {run} | {counts} | {len(result.bars) - result.missed} |"
    yield ""


def _lost(results: Sequence[Result]) -> Iterator[str]:
    """The table of what is lost, of all benchmarks of a run."""
    if not any(result.lost for result in results):
        return
    yield from ("## Lost to another library { #lost }", "")
    yield from _table([replace(row, case=f"{r.name}: {row.case}") for r in results for row in r.lost])


def _glance(results: Sequence[Result]) -> Iterator[str]:
    """What most readers ask for: beside torch.distributed.pipelining, and beside transformers."""
    rows = {(r.name, row.case, row.what): row for r in results for row in r.rows}
    found = [replace(rows[key], case=f"{key[0]}: {key[1]}") for key in GLANCE if key in rows]
    if found:
        yield from ("## At a glance { #glance }", "")
        yield from _table(found)


def _commit_of(result: Result) -> str:
    commit = f", commit {result.commit}" if result.commit else ""
    return f"penstock {result.version}{commit}"


def _section(result: Result, newest: Result) -> Iterator[str]:
    machine = result.machine
    yield from (f"## {result.title} {{ #{result.name} }}", "", ABOUT[result.name], "")
    if result.run != newest.run:
        yield from (
            '!!! danger "Of another run"',
            "",
            f"    {_commit_of(result)}; torch {machine['torch']}; Python {machine['python']}; "
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']} of memory",
            "",
        )
    yield from (f"- Measured: {machine['date']}, `{result.command}`", "")
    rows = losses_first(result.rows)
    if len(rows) <= MOST_ROWS:
        yield from _table(rows)
    else:
        shown = [row for row in rows if row.lost or row.met is not None or not row.resolved]
        if len(shown) > MOST_ROWS:
            shown = [row for row in shown if row.lost or not row.met]
            bars = len(result.bars)
            yield f"Met: {bars - result.missed} of {bars + result.open} bars. The rest:"
            yield ""
        if shown:
            yield from _table(shown)
        rest = [row for row in rows if not any(row is each for each in shown)]
        yield '<details markdown="1">'
        yield f"<summary>{'The other ' if shown else ''}{len(rest)} numbers</summary>"
        yield ""
        yield from _table(rest)
        yield "</details>"
        yield ""
    yield from (f"- {_escaped(note)}" for note in result.notes)
    yield ""


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """The columns that any of `rows` fills."""
    cells = [row.cells() for row in rows]
    used = [column for column in range(len(HEADER)) if any(row[column] for row in cells)]
    yield "| " + " | ".join(HEADER[column] for column in used) + " |"
    right = {"penstock", "other", "penstock / other"}
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
