"""Draw the documentation's pictures, and check the HTML page in a browser on the way: `make pictures`.

    python docs/draw.py docs/pictures --measured runs/measured.html --run runs/stdlib

Exits with 1 where the page does not do what it must, or where there is no browser.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from check_page import PHONE, WIDTH, Opened, failures, report_failures
from chromium import Browser, BrowserError, browser

from penstock.schedule import Costs, Op, Schedule, Timeline, build, render, simulate
from penstock.schedule.builders import BUILDERS
from penstock.train.report.page import report

RANKS, MICROBATCHES = 4, 8
MEASURED = ("gpipe", "1f1b")  # the examples draw these, with what really ran
SHOWN = ("dualpipe", "zb_v", "interleaved_1f1b", "1f1b")  # on the page: the first that there is a builder for
MOST_BYTES = 150 * 1024  # of a picture


def draw(folder: Path, measured: Path, run: Path) -> list[str]:
    """Draw everything into `folder`; what is wrong with the page."""
    for name in BUILDERS.keys() - set(MEASURED):
        render(schedule(name), folder / f"{name}.svg")
    shown = simulate(schedule(next(name for name in SHOWN if name in BUILDERS)))
    with browser() as opened:
        wrong = check(opened, measured.parent, shown)
        render(shown, measured.with_name("page.html"))
        pictures(opened, folder, measured.with_name("page.html"), measured, shown)
        wrong += report_pictures(opened, folder, report([run]))
        wrong += opened.complaints
    return wrong + [f"{file}: more than {MOST_BYTES} bytes" for file in too_large(folder)]


def schedule(name: str) -> Schedule:
    return build(name, ranks=RANKS, microbatches=MICROBATCHES)


def check(opened: Browser, folder: Path, shown: Timeline) -> list[str]:
    """The page with one timeline, with two, and with thousands of ops."""
    plan = build("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    predicted = simulate(plan, Costs(0.02, 0.02, 0.02))
    slower = simulate(plan, Costs([0.021, 0.024, 0.022, 0.025], 0.023, 0.021, communication=0.001))
    large = simulate(build("1f1b", ranks=8, microbatches=256))
    path = folder / "check.html"
    wrong = []
    for drawn, above in ((shown, None), (slower, predicted), (large, None)):
        render(drawn, path, predicted=above)
        wrong += failures(opened, path, *([above] if above else []), drawn)
    return wrong


def pictures(opened: Browser, folder: Path, page: Path, measured: Path, shown: Timeline) -> None:
    middle = shown.of_rank(1)[len(shown.of_rank(1)) // 2].op
    opened.complaints.clear()
    for name, dark in (("page", False), ("page-dark", True)):
        opened.show(page, WIDTH, 640, dark)
        opened.picture(folder / f"{name}.png")
    opened.show(page, WIDTH, 640, fragment=f"#{middle}")
    opened.press("+")
    opened.evaluate(f"find('{middle}')")
    opened.picture(folder / "page-zoomed.png")
    opened.show(page, WIDTH, 640)
    opened.press("c")
    opened.picture(folder / "page-critical.png")
    opened.show(measured, WIDTH, 740)
    opened.mouse("mouseMoved", *Opened(opened, measured, ()).middle(1, Op(1, "B", 3)))
    opened.picture(folder / "page-measured.png")


def report_pictures(opened: Browser, folder: Path, page: Path) -> list[str]:
    """The report of a run, checked first; wide, and on a phone in the dark."""
    wrong = report_failures(opened, page)
    opened.show(page, WIDTH, 790)
    opened.picture(folder / "report.png")
    opened.show(page, PHONE, 844, dark=True)
    opened.picture(folder / "report-phone.png")
    return wrong


def too_large(folder: Path) -> Iterator[Path]:
    yield from (file for file in sorted(folder.glob("*.png")) if file.stat().st_size > MOST_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measured", type=Path, required=True, help="the page that measure.py drew")
    parser.add_argument("--run", type=Path, required=True, help="the output folder of a run, to report")
    given = parser.parse_args()
    try:
        wrong = draw(given.folder, given.measured, given.run)
    except BrowserError as error:
        sys.exit(f"{parser.prog}: {error}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
