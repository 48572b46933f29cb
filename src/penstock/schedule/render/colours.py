"""The colours of ops: a hue for each kind, light to dark within it.

Any two kinds stay apart for every kind of colour blindness, whatever their shades. They were chosen by a
search for the largest least distance in CIELAB, with blindness simulated (Machado, Oliveira and Fernandes
2009). It is 16 without red or green and 14 without blue, which is rare; 2 can just be told apart.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.ops import Kind
from penstock.schedule.render.drawing import KINDS, Panel

INK, PAPER = "#1f2328", "#ffffff"
REDUCE = "#6d35d1"  # a stage's reduction, at least 24 from any kind and from the greys of waiting

_RANGES: dict[Kind, tuple[str, str]] = {
    "F": ("#a5cdf0", "#1c5a9c"),
    "B": ("#fbd9a0", "#d97b16"),
    "I": ("#d192b4", "#7a2559"),
    "W": ("#d2e3c8", "#417a2f"),
}
_ALTERNATING = (0.80, 0.62)  # places in the ranges above, for even and odd microbatches


class Shade(NamedTuple):
    """The kind's hue at `place` from 0, the lightest, to 1."""

    kind: Kind
    place: float

    @property
    def name(self) -> str:
        return f"{self.kind}{round(1000 * self.place)}"

    @property
    def fill(self) -> str:
        return f"#{bytes(self._channels).hex()}"

    @property
    def on_dark(self) -> bool:
        """Whether light text reads better on it than dark text."""
        red, green, blue = self._channels
        return 0.299 * red + 0.587 * green + 0.114 * blue < 140

    @property
    def _channels(self) -> tuple[int, int, int]:
        light, dark = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in _RANGES[self.kind])
        red, green, blue = (round(a + self.place * (b - a)) for a, b in zip(light, dark, strict=True))
        return red, green, blue


def shades(panel: Panel) -> tuple[Shade, ...]:
    """Each span's: by stage where a rank hosts several, else by microbatch."""
    most = max(map(len, panel.hosted))
    if most == 1:
        return tuple(Shade(s.op.kind, _ALTERNATING[s.op.microbatch % 2]) for s in panel.timeline.spans)
    places = [
        {stage: round(at / (most - 1), 3) for at, stage in enumerate(stages)} for stages in panel.hosted
    ]
    return tuple(Shade(s.op.kind, places[s.rank][s.op.stage]) for s in panel.timeline.spans)


def in_order(used: set[Shade]) -> list[Shade]:
    """Forward first, light to dark."""
    return sorted(used, key=lambda shade: (list(KINDS).index(shade.kind), shade.place))


def meaning(panels: tuple[Panel, ...]) -> str:
    """What light and dark stand for; empty where they only tell neighbours apart."""
    stages = max(len(hosted) for panel in panels for hosted in panel.hosted)
    copies = max(panel.copies for panel in panels)
    if stages <= 1:
        return ""
    if copies == stages:
        return "light to dark: the copies of the model"
    return "light to dark: the rank's stages in order"
