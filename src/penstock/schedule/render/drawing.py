"""The parts that all formats of a drawing share: panels on one time scale, colours, names and numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.schedule.ops import Kind, Op
from penstock.schedule.simulation.timeline import Curve, Idle, Timeline

# ---- Colours: a hue for each kind of op, with shades from light to dark
#
# Any two kinds stay distinguishable for every kind of colour blindness, in all shades. They maximize the
# least distance in CIELAB with simulated blindness (Machado, Oliveira and Fernandes 2009): it is 16 without
# red or green and 14 without blue, which is rare; a distance of 2 is just visible.

INK, PAPER = "#1f2328", "#ffffff"
REDUCE = "#6d35d1"  # a stage's reduction, at least 24 from any kind and from the greys of waiting

_RANGES: dict[Kind, tuple[str, str]] = {
    "F": ("#a5cdf0", "#1c5a9c"),
    "B": ("#fbd9a0", "#d97b16"),
    "I": ("#d192b4", "#7a2559"),
    "W": ("#d2e3c8", "#417a2f"),
}
_ALTERNATING = (0.80, 0.62)  # shades of even and odd microbatches


class Shade(NamedTuple):
    """The hue of a kind, with a `darkness` from 0 to 1."""

    kind: Kind
    darkness: float

    @property
    def name(self) -> str:
        return f"{self.kind}{round(1000 * self.darkness)}"

    @property
    def fill(self) -> str:
        return f"#{bytes(self._channels).hex()}"

    @property
    def on_dark(self) -> bool:
        """Whether it needs light text."""
        red, green, blue = self._channels
        return 0.299 * red + 0.587 * green + 0.114 * blue < 140

    @property
    def _channels(self) -> tuple[int, int, int]:
        light, dark = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in _RANGES[self.kind])
        red, green, blue = (round(a + self.darkness * (b - a)) for a, b in zip(light, dark, strict=True))
        return red, green, blue


def shades(panel: Panel) -> tuple[Shade, ...]:
    """The shade of each span: by stage if a rank hosts several, else by microbatch."""
    most = max(map(len, panel.hosted))
    if most == 1:
        return tuple(Shade(s.op.kind, _ALTERNATING[s.op.microbatch % 2]) for s in panel.timeline.spans)
    places = [
        {stage: round(at / (most - 1), 3) for at, stage in enumerate(stages)} for stages in panel.hosted
    ]
    return tuple(Shade(s.op.kind, places[s.rank][s.op.stage]) for s in panel.timeline.spans)


def used_shades(panels: tuple[Panel, ...]) -> list[Shade]:
    """The shades of all panels: forward first, light to dark."""
    used = {shade for panel in panels for shade in shades(panel)}
    return sorted(used, key=lambda shade: (list(KINDS).index(shade.kind), shade.darkness))


def meaning(panels: tuple[Panel, ...]) -> str:
    """The legend of light and dark shades; empty if they only separate neighbours."""
    stages = max(len(hosted) for panel in panels for hosted in panel.hosted)
    if stages <= 1:
        return ""
    copies = max(panel.copies for panel in panels)
    shaded = "the copies of the model" if copies == stages else "the rank's stages in order"
    return f"light to dark: {shaded}"


KINDS: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

IDLE: dict[str, str] = {
    "peer": "waiting for another rank to compute",
    "wire": "waiting for what is on its way",
    "reduce": "reducing gradients across data-parallel ranks",
    "runtime": "the rest of the time between first and last op",
    "outside": "before the first op and after the last",
}

GAPS = ("peer", "wire", "reduce")  # those that are drawn
REDUCTION = "R"  # its letter, next to F, B, I and W

_NOTHING = "0.0%"
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Panel:
    """One timeline; `label` is "predicted" or "measured", or empty if it is the only one."""

    label: str
    raw: Timeline

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline, with times from the start of the step."""
        return self.raw.from_zero()

    @cached_property
    def several_stages(self) -> bool:
        """Whether an op needs its stage in its label."""
        return any(span.op.stage != span.rank for span in self.timeline.spans)

    @cached_property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """The stages that ran on each rank."""
        timeline = self.timeline
        return tuple(
            tuple(sorted({span.op.stage for span in timeline.of_rank(rank)}))
            for rank in range(timeline.ranks)
        )

    @cached_property
    def copies(self) -> int:
        """The number of copies of the model: sets of stages that share no microbatch."""
        stages_of: dict[int, set[int]] = defaultdict(set)  # by microbatch
        for span in self.timeline.spans:
            stages_of[span.op.microbatch].add(span.op.stage)
        distinct = {frozenset(stages) for stages in stages_of.values()}
        disjoint = sum(map(len, distinct)) == len(set().union(*distinct))
        return max(1, len(distinct)) if disjoint else 1

    @cached_property
    def place_of(self) -> dict[Op, int]:
        """The index of each op in the spans."""
        return {span.op: at for at, span in enumerate(self.timeline.spans)}

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The parts of each rank's bubble as shares of the step; empty if waits were not recorded."""
        timeline = self.timeline
        if not (timeline.waits or timeline.reductions) or not timeline.makespan:
            return ()
        return tuple(Idle(*(time / timeline.makespan for time in idle)) for idle in timeline.idle)

    @property
    def mean_idle(self) -> Idle | None:
        """The parts of the bubble over all ranks."""
        means = (sum(shares) / len(shares) for shares in zip(*self.idle, strict=True))
        return Idle(*means) if self.idle else None


@dataclass(frozen=True)
class Drawing:
    """Panels from top to bottom, on one time scale, in `unit`; seconds are shown as s, ms or µs.

    width: characters in a line of text
    """

    title: str
    panels: tuple[Panel, ...]
    unit: str
    width: int = 120

    @property
    def makespan(self) -> float:
        """The makespan of the longest panel."""
        return max(panel.timeline.makespan for panel in self.panels)

    @property
    def scale(self) -> tuple[float, str]:
        """The unit that is shown: its size in units of the timelines, and its name."""
        if self.unit != "s":
            return 1.0, self.unit
        return next((pair for pair in _SECONDS if self.makespan >= pair[0]), _SECONDS[-1])

    @property
    def knows_memory(self) -> bool:
        """Whether all panels have sizes, and not only counts, of what is held."""
        return all(panel.timeline.memory for panel in self.panels)

    @property
    def held(self) -> str:
        """The quantity of the curves; the same in all panels, so that they compare."""
        return "memory" if self.knows_memory else "live activations"

    def curves(self, panel: Panel) -> tuple[tuple[Curve, ...], tuple[float, ...]]:
        """The curve of each rank, and its peak."""
        timeline = panel.timeline
        if self.knows_memory:
            return timeline.memory, timeline.peak_memory
        return timeline.live, tuple(map(float, timeline.peak_live))

    def time(self, value: float) -> str:
        """`value` with its unit, e.g. ``18`` or ``12.5 ms``."""
        size, name = self.scale
        return f"{number(value / size)} {name}".rstrip()

    def summary(self, panel: Panel) -> str:
        timeline = panel.timeline
        bubble, inner = percent(timeline.bubble), percent(timeline.inner_bubble)
        summary = f"makespan {self.time(timeline.makespan)}, bubble {bubble}"
        return summary if inner == bubble else f"{summary}, {inner} between first and last op"

    def host_limit(self, panel: Panel) -> str:
        """How far the host is the limit, in words; empty if that is not known."""
        share = panel.timeline.host_share
        return "" if share is None else f"the host is the limit: {percent(share)}"

    def bubble_parts(self, panel: Panel) -> str:
        """The parts of the bubble, e.g. ``peer 12.0%, outside 4.1%``; empty if waits were not recorded."""
        idle = panel.mean_idle
        if idle is None:
            return ""
        shown = {name: percent(getattr(idle, name)) for name in IDLE}
        return ", ".join(f"{name} {share}" for name, share in shown.items() if share != _NOTHING)


def number(value: float) -> str:
    """At least four significant digits, without an exponent or trailing zeros."""
    if value == 0:
        return "0"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def is_shown(panels: Iterable[Panel], part: str) -> bool:
    """Whether that part of the bubble is visible on some rank."""
    return any(percent(getattr(idle, part)) != _NOTHING for panel in panels for idle in panel.idle)


def percent(share: float) -> str:
    return f"{100 * max(0.0, share):.1f}%"  # rounding may leave a full rank at -0.0


def nice(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
