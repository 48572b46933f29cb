"""The section of docs/validation.md on published runs: rows measured and predicted, and the bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from benchmarks.validation.models import flops, gpt_flops
from benchmarks.validation.predict import Constants, Predicted, fitting
from benchmarks.validation.runs import FOLDER, Table

PAGE = FOLDER.parents[2] / "docs" / "validation.md"
TITLE = "## Published runs"
TIME_MEDIAN, TIME_WORST, MEMORY, ORDER = 0.10, 0.20, 0.07, 0.9  # the bars, for rows predicted blind
_GIB = 2**30

Results = Mapping[str, Sequence[Predicted]]


class Bar(NamedTuple):
    """A bar: what it is of, its limit, what came out, over how many figures, and whether it is met."""

    what: str
    limit: str
    result: str
    figures: int
    met: bool


def bars(tables: Mapping[str, Table], results: Results) -> list[Bar]:
    """Of rows that are predicted blind; of pairs in which at least one row is."""
    blind = [row for rows in results.values() for row in rows if row.run.half == "blind"]
    times = [abs(row.error) for row in blind]
    memory = [abs(row.memory_error) for row in blind if row.memory_error is not None]
    right = [agree for stem, rows in results.items() if tables[stem].one_model for agree in _order(rows)]
    share = sum(right) / len(right)
    middle, worst, most = median(times), max(times), max(memory)
    return [
        Bar(
            "step time, median error",
            f"{TIME_MEDIAN:.0%}",
            f"{middle:.1%}",
            len(times),
            middle <= TIME_MEDIAN,
        ),
        Bar("step time, largest error", f"{TIME_WORST:.0%}", f"{worst:.1%}", len(times), worst <= TIME_WORST),
        Bar("memory, largest error", f"{MEMORY:.0%}", f"{most:.1%}", len(memory), most <= MEMORY),
        Bar("pairs of one model in order", f"{ORDER:.0%}", f"{share:.0%}", len(right), share >= ORDER),
    ]


def _order(rows: Sequence[Predicted]) -> Iterator[bool]:
    """For each pair with a blind row, whether the faster one is predicted to be the faster one."""
    for one, other in combinations(rows, 2):
        if "blind" in {one.run.half, other.run.half}:
            (measured, predicted), (measured_other, predicted_other) = one.speed, other.speed
            yield (measured < measured_other) == (predicted < predicted_other)


def section(tables: Mapping[str, Table], results: Results, constants: Mapping[str, Constants]) -> str:
    """The text, with a table for each source."""
    lines = [TITLE, "", _ABOUT, *_bars(tables, results), "", *_constants(tables, constants), "", _MISSES]
    lines += ["### FLOPs", "", *_flops(results)]
    for stem, table in tables.items():
        lines += ["", f"### {table.source}: {table.table}", "", *_about(table), *_rows(results[stem])]
    return "\n".join([*lines, ""])


def write(text: str) -> None:
    """Put the section into the page, in place of the one there, or behind all others."""
    page = PAGE.read_text(encoding="utf-8")
    before, title, after = page.partition(f"{TITLE}\n")
    if not title:
        before = page.rstrip("\n") + "\n\n"
    _, heading, rest = after.partition("\n## ")
    PAGE.write_text(before + text + heading + rest, encoding="utf-8")


_ABOUT = """\
Each row is a run that others measured and published, and what `penstock plan` predicts for it on the cluster
where it ran. Half of the rows fit a few constants of the devices. The other half is predicted blind: of the
rows of a table, in the order of print, the first fits, the second is blind, and so on. The rows, their
sources, what these leave open and the half of each row are in `benchmarks/validation/tables/`.
`make validate` predicts them again; `python -m benchmarks.validate --fit --write` also fits, and writes
this section.

How a framework communicates, launches and splits is a fact of its run, with its source under the table.
These facts were looked up after the errors of all rows had been seen: no constant saw a blind row, but who
chose the facts did.
"""
_MISSES = """\
What misses, and why:

- Memory of torchtitan's FSDP rows is 11 to 16 % too high where the model is compiled, and 4 to 7 % where it
  is not: the planner does not know what compilation no longer holds. With a pipeline it is 11 to 19 % too
  low; what torchtitan holds there besides whole gradients in float32 is not known.
- Memory of BLOOM is what nvidia-smi counts, with what the allocator of PyTorch keeps and NCCL's buffers. One
  fitted constant stands for these: rows with TP 8 are within 7 %, those with TP 4 and 2 up to 13 % too high.
  The source has two figures for one of them (TP 4, PP 12, 2 rows: 44 and 38 GB), which differ by 14 %.
- BLOOM ran with CUDA_LAUNCH_BLOCKING=1, without which it hung: each op waits for the host. One fitted
  constant stands for such a launch. The source says that the machine was 1 to 5 % slower on the day of the
  first table, which is not counted.
- Qwen3 MoE 30B is 22 % too slow: its layers are narrow, so most of its step is ops between products, which
  Transformer Engine and DeepEP fuse. The planner counts them one by one.
- DeepSeek-V3 on 2,048 H800 is 18 % too fast: its second head and what it recomputes are not counted. On
  1,024 H100 it is 19 % too fast, on 256 it is 7 %: the planner knows no network that slows with its size.
- Llama 3 on 16,384 H100 is 15 to 19 % too slow, on 8,192 5 %: the paper does not say how its messages of TP
  are hidden, nor how many stages a rank has.
- No constant passes the library's: its products are the fastest that anybody measured, and ops one by one
  move most bytes. The H100's end at that limit in the six rows that fit them, and so does the A100's traffic.
"""


def _bars(tables: Mapping[str, Table], results: Results) -> Iterator[str]:
    yield "| of the blind half | bar | result | figures | |"
    yield "|---|---:|---:|---:|---|"
    for bar in bars(tables, results):
        verdict = "met" if bar.met else "**missed**"
        yield f"| {bar.what} | {bar.limit} | {bar.result} | {bar.figures} | {verdict} |"


def _constants(tables: Mapping[str, Table], constants: Mapping[str, Constants]) -> Iterator[str]:
    yield (
        "| constants of | `matmul` | of float8 | `attention` | traffic of fused ops | blocking launch, us "
        "| driver's memory over tensors | rows that fit them |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, of_device in constants.items():
        fitted = len(fitting(tables, name))
        shares = (of_device.matmul, of_device.float8, of_device.attention, of_device.traffic)
        launch, reserve = _fitted_in(tables, name, of_device)
        cells = [*(f"{share:.3f}" for share in shares), launch, reserve]
        yield f"| {name} | {' | '.join(cells)} | {fitted} |"


def _fitted_in(tables: Mapping[str, Table], name: str, constants: Constants) -> tuple[str, str]:
    """The launch and the reserve where rows of `name` fit them, else nothing."""
    rows = fitting(tables, name)
    launch = f"{constants.launch * 1e6:.0f}" if any(run.blocking for _, run in rows) else ""
    return launch, f"{constants.reserve:.2f}" if any(table.reserved for table, _ in rows) else ""


def _flops(results: Results) -> Iterator[str]:
    """The planner's FLOPs of each GPT model over those of the formula in arXiv 2104.04473."""
    yield "FLOPs of a step that the planner counts, over formula (3) of arXiv 2104.04473 without the"
    yield "recomputed forward. What the head computes on other processes is the formula's. The formula counts"
    yield "attention as if it had no mask; in the last column it has one."
    yield ""
    yield "| model | planner / formula | with the mask |"
    yield "|---|---:|---:|"
    seen = set()
    for rows in results.values():
        for row in rows:
            run = row.run
            if run.family == "gpt" and (shape := (run.layers, run.hidden, run.vocabulary)) not in seen:
                seen.add(shape)
                plain, masked = (
                    flops(run) / gpt_flops(run, recomputed=False, mask=mask) for mask in (False, True)
                )
                yield f"| {run.layers} layers of {run.hidden:,} | {plain:.4f} | {masked:.4f} |"


def _about(table: Table) -> Iterator[str]:
    yield f"- Published {table.date}. Checked: {table.checked.strip()}"
    yield f"- Assumed: {'; '.join(table.assumed)}."
    if table.memory_of:
        yield f"- Memory: {table.memory_of}."
    for run in table.runs:
        if run.unpredicted:
            yield f"- Not predicted: {run.name} ({run.half}): {run.unpredicted}"
    yield ""


def _rows(rows: Sequence[Predicted]) -> Iterator[str]:
    if not rows:
        return
    memory = any(row.run.memory is not None for row in rows)
    more = " memory, GiB | predicted | error |" if memory else ""
    yield f"| run | half | measured, s | predicted, s | error | bubble |{more}"
    yield f"|---|---|---:|---:|---:|---:|{'---:|' * 3 if memory else ''}"
    for row in rows:
        times = f"{row.measured:.2f} | {row.seconds:.2f} | {row.error:+.1%} | {row.bubble:.1%}"
        yield f"| {row.run.name} | {row.run.half} | {times} |{_memory(row) if memory else ''}"


def _memory(row: Predicted) -> str:
    if row.run.memory is None or row.memory is None or row.memory_error is None:
        return " | | |"
    return f" {row.run.memory / _GIB:.1f} | {row.memory / _GIB:.1f} | {row.memory_error:+.1%} |"
