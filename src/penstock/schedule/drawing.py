"""What a drawing shows, whatever its format: panels on one time scale, and how numbers are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.schedule.timeline import Timeline

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Panel:
    """One timeline; `label` is "predicted", "measured", or empty where it stands alone."""

    label: str
    timeline: Timeline

    @property
    def several_stages(self) -> bool:
        """Whether a rank's row alone does not tell which stage an op belongs to."""
        return any(span.op.stage != span.rank for span in self.timeline.spans)


@dataclass(frozen=True)
class Drawing:
    """`panels` from top to bottom, on one time scale, in `unit`; seconds are shown as s, ms or µs."""

    title: str
    panels: tuple[Panel, ...]
    unit: str

    @property
    def makespan(self) -> float:
        """The longest of the panels."""
        return max(panel.timeline.makespan for panel in self.panels)

    @property
    def scale(self) -> tuple[float, str]:
        """One unit as shown, in units of the timelines, and its name."""
        if self.unit != "s":
            return 1.0, self.unit
        return next((pair for pair in _SECONDS if self.makespan >= pair[0]), _SECONDS[-1])

    def time(self, value: float) -> str:
        """`value` with its unit, e.g. ``18`` or ``12.5 ms``."""
        size, name = self.scale
        return f"{number(value / size)} {name}".rstrip()

    def summary(self, panel: Panel) -> str:
        timeline = panel.timeline
        return f"makespan {self.time(timeline.makespan)}, bubble {percent(timeline.bubble)}"


def number(value: float) -> str:
    """At least four significant digits, without an exponent or trailing zeros."""
    if value == 0:
        return "0"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    return f"{100 * max(0.0, share):.1f}%"  # rounding may leave a full rank at -0.0
