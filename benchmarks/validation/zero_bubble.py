"""The bubble rates of the zero-bubble paper, and those of our schedules at its costs.

    python -m benchmarks.validation.zero_bubble          print the section of docs/validation.md
    python -m benchmarks.validation.zero_bubble --write  put it into the page

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): Table 5 with its inputs in Table 9, and
Table 8. The paper's rates are calculated, not measured: 1 - m (F + I + W) / cost, with the longest time of
a rank from its own first start to its own end as the cost. That is `Timeline.extent_bubble`.

The paper does not print the inputs of Table 8. Its columns 1F1B and ZB-H1 determine them: two numbers for
two unknowns, W / F and message / F, with I as long as F (0.98 to 1.00 of it in Table 9; the rates do not
depend on it). ZB-H2 and ZB-V of that table are then predicted blind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.schedule import Costs, build, simulate

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"
TITLE = "## Zero bubble (2401.10241)"
BAR = 0.002  # above the paper's rate; below it there is no bar


class LoopRow(NamedTuple):
    """A row of Table 5, with its inputs of Table 9 in milliseconds of a rank."""

    model: str
    ranks: int
    microbatches: int
    forward: float
    input_grad: float
    weight_grad: float
    message: float
    rates: dict[str, float]

    @property
    def costs(self) -> Costs:
        return Costs(self.forward, self.input_grad, self.weight_grad, self.message)


def _loop(model: str, ranks: int, microbatches: int, *numbers: float) -> LoopRow:
    forward, input_grad, weight_grad, message, *rates = numbers
    by_name = dict(zip(("1f1b", "zb_h1", "zb_h2"), rates, strict=True))
    return LoopRow(model, ranks, microbatches, forward, input_grad, weight_grad, message, by_name)


TABLE_5 = (
    _loop("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    _loop("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    _loop("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    _loop("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    _loop("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    _loop("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    _loop("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    _loop("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    _loop("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    _loop("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    _loop("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490),
    _loop("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
)


class VRow(NamedTuple):
    """A row of Table 8, with inputs that its first two rates determine, in times of F of a stage of the V.

    message: from one rank to the next, whatever it carries
    """

    model: str
    ranks: int
    microbatches: int
    weight_grad: float
    message: float
    rates: dict[str, float]

    @property
    def costs(self) -> Costs:
        """Of a stage of the V, two on a rank."""
        return Costs(1.0, 1.0, self.weight_grad, self.message)

    @property
    def loop_costs(self) -> Costs:
        """Of a rank with one stage of twice the size."""
        return Costs(2.0, 2.0, 2 * self.weight_grad, self.message)


def _v(model: str, ranks: int, microbatches: int, *numbers: float) -> VRow:
    weight_grad, message, *rates = numbers
    by_name = dict(zip(("1f1b", "zb_h1", "zb_h2", "zb_v"), rates, strict=True))
    return VRow(model, ranks, microbatches, weight_grad, message, by_name)


FITTED = ("1f1b", "zb_h1")  # of Table 8; its other columns are predicted blind
TABLE_8 = (
    _v("6.2B", 16, 48, 0.6718, 0.1117, 0.2668, 0.1536, 0.0823, 0.0697),
    _v("6.2B", 16, 64, 0.6728, 0.1125, 0.2206, 0.1198, 0.0630, 0.0533),
    _v("6.2B", 16, 128, 0.6738, 0.1130, 0.1390, 0.0637, 0.0325, 0.0274),
    _v("14.6B", 24, 72, 0.7649, 0.1099, 0.2699, 0.1439, 0.0628, 0.0638),
    _v("14.6B", 24, 96, 0.7636, 0.1100, 0.2229, 0.1121, 0.0480, 0.0483),
    _v("14.6B", 24, 192, 0.7639, 0.1118, 0.1403, 0.0595, 0.0247, 0.0250),
    _v("28.3B", 32, 96, 0.7586, 0.0914, 0.2676, 0.1429, 0.0629, 0.0593),
    _v("28.3B", 32, 128, 0.7611, 0.0930, 0.2204, 0.1111, 0.0478, 0.0451),
    _v("28.3B", 32, 256, 0.7525, 0.0927, 0.1362, 0.0593, 0.0251, 0.0236),
)


def predicted(row: LoopRow | VRow, name: str) -> float:
    """Our bubble rate by the paper's measure."""
    sizes = {"ranks": row.ranks, "microbatches": row.microbatches}
    if name == "zb_v":
        schedule = build(name, **sizes, costs=row.costs, objective="extent")
        return simulate(schedule, row.costs).extent_bubble
    costs = row.loop_costs if isinstance(row, VRow) else row.costs
    return simulate(build(name, **sizes), costs).extent_bubble


def section() -> str:
    """The section of docs/validation.md."""
    return "\n".join(
        [TITLE, "", _ABOUT.format(bar=BAR), *_table(TABLE_5), "", _ABOUT_8, *_table(TABLE_8), ""]
    )


_ABOUT = """\
The paper calculates its bubble rates from measured times of F, I, W and messages. Its cost of a step is the
longest time from a rank's own first start to its own end, `Timeline.extent`, and its rate is
`Timeline.extent_bubble`. A cell reads paper / predicted. The bar for ZB-V is {bar} above the paper. To write
this section again: `python -m benchmarks.validation.zero_bubble --write`.

Table 5, with the inputs of Table 9. Nothing is fitted.
"""
_ABOUT_8 = """\
Table 8. The paper does not print its inputs. The columns 1F1B and ZB-H1 determine W / F and message / F, with
I = F. The columns ZB-H2 and ZB-V are predicted blind. ZB-V is formed for these costs with
`objective="extent"`, within the memory of 1F1B. It is an order of our own, which may wait less than the
paper's. In the paper I frees a part of the activation; here W frees all of it.
"""


def _table(rows: tuple[LoopRow, ...] | tuple[VRow, ...]) -> Iterator[str]:
    names = tuple(rows[0].rates)
    yield f"| model | P | m | {' | '.join(f'`{name}`' for name in names)} |"
    yield f"|---|---:|---:|{'---:|' * len(names)}"
    for row in rows:
        cells = (f"{row.rates[name]:.4f} / {predicted(row, name):.4f}" for name in names)
        yield f"| {row.model} | {row.ranks} | {row.microbatches} | {' | '.join(cells)} |"


def write() -> None:
    """Put the section into the page, in place of the one there."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(f"{TITLE}\n")
    _, heading, rest = after.partition("\n## ")
    PAGE.write_text(before + section() + heading + rest, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(section())
