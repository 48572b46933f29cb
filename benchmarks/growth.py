"""How a step's parts grow with the number of GPUs, as the planner predicts: ``python -m benchmarks.growth``.

One model and one batch; from each cluster the best run. --write puts the table and its picture into
docs/growth.md. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import LlamaConfig

from penstock.planner.hardware import read_cluster
from penstock.planner.search import plan
from penstock.planner.workers import processors
from penstock.planner.workload import Workload

PAGE = Path(__file__).parent.parent / "docs" / "growth.md"
PICTURE = PAGE.parent / "pictures" / "growth.svg"
HOST, DEVICES = "DGX H100", 8
HOSTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCH, LENGTH = 2048, 8192
BEGIN, END = "<!-- growth -->\n", "<!-- end of growth -->"
# of a step, from the bottom of the picture up; the axes of the mesh that are left are "other axes"
PARTS: Mapping[str, str] = {
    "compute": "#2b8a3e", "bubble": "#e9ecef", "pp": "#1971c2", "dp": "#e8590c", "tp": "#9c36b5",
    "other axes": "#868e96", "optimizer": "#f2b705",
}  # fmt: skip
_GIB = 2**30


class Point(NamedTuple):
    """The best run of a cluster.

    spent: shares of a step by part, which add up to 1
    gap: the share of the step by which a run that was not drafted may be faster
    """

    gpus: int
    run: str
    seconds: float
    mfu: float
    spent: Mapping[str, float]
    gib: float
    gap: float


def llama_8b() -> LlamaConfig:
    """Llama 3 8B, from its paper (arXiv 2407.21783, Table 3)."""
    return LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=LENGTH,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def point(config: LlamaConfig, hosts: int) -> Point:
    cluster = read_cluster(f"{hosts} x {HOST}")
    plans = plan(Workload(config), cluster, BATCH, LENGTH, processes=processors())
    best = plans.best[0]
    shares = dict.fromkeys(PARTS, 0.0)
    for name, seconds in best.spent.items():
        shares[name if name in PARTS else "other axes"] += seconds / best.seconds
    of = best.candidate
    run = f"`{of.mesh}`, `{of.label}`, {of.microbatches} x {of.rows}"
    return Point(hosts * DEVICES, run, best.seconds, best.mfu, shares, best.nbytes / _GIB, plans.gap_of_field)


def table(points: Iterable[Point]) -> Iterator[str]:
    of_run = "| GPUs | run: mesh, schedule, microbatches x rows | s/step | MFU | "
    yield of_run + " | ".join(PARTS) + " | GiB | gap |"
    yield "|---:|---|---:|---:|" + "---:|" * len(PARTS) + "---:|---:|"
    for of in points:
        shares = " | ".join(f"{of.spent[name]:.1%}" for name in PARTS)
        times = f"{of.seconds:,.2f} | {of.mfu:.1%}"
        yield f"| {of.gpus:,} | {of.run} | {times} | {shares} | {of.gib:.1f} | {of.gap:.0%} |"


def picture(points: Sequence[Point]) -> str:
    """Stacked bars as SVG, one a cluster; above each the seconds of a step and the fullest GPU's memory."""
    wide, high, left, top, legend = 64, 260, 44, 58, 150
    width, height = left + wide * len(points) + legend, top + high + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        "<title>What a step of Llama 3 8B goes to, on 8 to 16,384 H100</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="16" font-size="13" font-weight="bold">What a step goes to, predicted: '
        f"Llama 3 8B, {BATCH:,} rows of {LENGTH:,} tokens</text>",
    ]
    for share in (0, 25, 50, 75, 100):
        y = top + high * (1 - share / 100)
        lines.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#495057">{share} %</text>'
        )
        lines.append(
            f'<line x1="{left}" x2="{left + wide * len(points)}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dee2e6"/>'
        )
    for index, of in enumerate(points):
        lines += _bar(of, left + wide * index + 6, wide - 12, top, high)
    for index, (name, color) in enumerate(reversed(list(PARTS.items()))):
        x, y = left + wide * len(points) + 16, top + 22 * index
        lines.append(f'<rect x="{x}" y="{y}" width="13" height="13" fill="{color}" stroke="#adb5bd"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 11}">{name}</text>')
    middle = left + wide * len(points) / 2
    lines.append(f'<text x="{middle:.0f}" y="{height - 6}" text-anchor="middle">GPUs</text>')
    return "\n".join([*lines, "</svg>", ""])


def _bar(of: Point, x: float, wide: float, top: float, high: float) -> Iterator[str]:
    bottom, middle = top + high, x + wide / 2
    for name, color in PARTS.items():
        tall = of.spent[name] * high
        bottom -= tall
        if tall:
            yield (
                f'<rect x="{x:.1f}" y="{bottom:.1f}" width="{wide}" height="{tall:.1f}" fill="{color}">'
                f"<title>{of.gpus:,} GPUs: {name} {of.spent[name]:.1%}</title></rect>"
            )
    yield f'<text x="{middle}" y="{top - 18}" text-anchor="middle">{of.seconds:.3g} s</text>'
    yield f'<text x="{middle}" y="{top - 5}" text-anchor="middle" fill="#495057">{of.gib:.0f} GiB</text>'
    yield f'<text x="{middle}" y="{top + high + 15}" text-anchor="middle">{of.gpus:,}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/growth.md and its picture")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS, help=f"of {DEVICES} GPUs each")
    arguments = parser.parse_args()
    points = []
    for hosts in arguments.hosts:
        points.append(point(llama_8b(), hosts))
        print(list(table(points[-1:]))[-1], flush=True)
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(before + BEGIN + "\n".join(table(points)) + "\n" + END + after, encoding="utf-8")
        PICTURE.write_text(picture(points), encoding="utf-8")


if __name__ == "__main__":
    main()
