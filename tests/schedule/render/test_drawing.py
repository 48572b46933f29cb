"""The claim that colour blindness keeps the kinds apart, worked out."""

import re
from itertools import combinations
from math import dist

import pytest

from penstock.schedule import simulate
from penstock.schedule.render.drawing import KINDS, REDUCE, Drawing, Panel, Shade
from penstock.schedule.render.svg import svg
from support.drawn import SPLIT

# Machado, Oliveira and Fernandes (2009), complete lack of one of the three receptors, on linear RGB
SIGHT = {
    "common": (1, 0, 0, 0, 1, 0, 0, 0, 1),
    "no red": (0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998),
    "no green": (0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881),
    "no blue": (1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039),
}
PLACES = (0, 0.5, 0.62, 0.8, 1)


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """A colour in CIELAB as somebody sees it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    weights = SIGHT[sight]
    red, green, blue = (
        min(1.0, max(0.0, sum(weights[row + at] * c for at, c in enumerate(linear)))) for row in (0, 3, 6)
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize(
    ("sight", "least"), [("common", 25), ("no red", 16), ("no green", 16), ("no blue", 14)]
)
def test_kinds_stay_apart_in_any_shade(sight: str, least: float) -> None:
    colours = {kind: [seen(Shade(kind, place).fill, sight) for place in PLACES] for kind in KINDS}
    for one, other in combinations(KINDS, 2):
        apart = min(dist(a, b) for a in colours[one] for b in colours[other])
        assert apart >= least, f"{one} and {other}"


@pytest.mark.parametrize("sight", SIGHT)
def test_a_reduction_is_like_no_kind_and_no_wait(sight: str) -> None:
    style = svg(Drawing("", (Panel("", simulate(SPLIT)),), ""))
    greys = re.findall(r"\.(?:idle|peer|wire) \{ fill: (#\w+)", style)
    kinds = [Shade(kind, place).fill for kind in KINDS for place in PLACES]
    assert len(greys) == 2 * 3
    assert min(dist(seen(REDUCE, sight), seen(other, sight)) for other in (*greys, *kinds)) >= 24


def test_text_is_readable_on_every_shade() -> None:
    for kind in KINDS:
        for place in PLACES:
            shade = Shade(kind, place)
            ink = "#ffffff" if shade.on_dark else "#1f2328"
            assert abs(seen(shade.fill, "common")[0] - seen(ink, "common")[0]) > 35, shade
