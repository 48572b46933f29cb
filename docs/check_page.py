"""What the HTML page must do in a real browser: each check yields what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chromium import Browser

from penstock.schedule import Op, Span, Timeline

WIDTH, HEIGHT = 1280, 900
PHONE = 390

_TOOLTIP_INSIDE = """(({left, right, top, bottom}) =>
  left >= 0 && right <= innerWidth && top >= 0 && bottom <= innerHeight)(tooltip.getBoundingClientRect())"""

# texts with less contrast to what is behind them than WCAG AA asks of small letters; not those of a picture,
# which lie on its shapes
_FAINT = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    const rgba = channels(getComputedStyle(node).backgroundColor);
    return rgba.length < 4 || rgba[3] > 0 || !node.parentElement ? rgba : behind(node.parentElement);
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!own || !node.getClientRects().length || node.disabled || node.closest("svg")) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([node.textContent.slice(0, 40), ratio]);
  }
  return found;
})()"""


class Opened(NamedTuple):
    """A page that shows the whole step, and what is in it from top to bottom."""

    browser: Browser
    path: Path
    timelines: tuple[Timeline, ...]

    @property
    def range(self) -> tuple[float, float]:
        """The stretch of time in view."""
        shown = self.browser.evaluate("({...document.getElementById('range').dataset})")
        return float(shown["from"]), float(shown["to"])

    def middle(self, panel: int, op: Op) -> tuple[int, int]:
        """Where an op is in the window, in whole pixels, as a mouse tells them."""
        x, y, width, height, left, top = self.browser.evaluate(
            f"(() => {{ const picture = pictures[{panel}];"
            f" const box = picture.boxOf(picture.places.get('{op}'));"
            " const edge = picture.canvas.getBoundingClientRect();"
            " return [box.x, box.y, box.width, box.height, edge.left, edge.top]; })()"
        )
        return round(left + x + width / 2), round(top + y + height / 2)

    def time_at(self, x: float) -> float:
        """The time under a point of the window."""
        place = f"{x} - pictures[0].canvas.getBoundingClientRect().left"
        return float(self.browser.evaluate(f"pictures[0].moment({place})"))

    def text(self, selector: str) -> list[str]:
        """What stands in each element that matches."""
        every = f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)"
        found: list[str] = self.browser.evaluate(every)
        return found

    @property
    def drawn(self) -> str:
        """All canvases' pixels."""
        return str(self.browser.evaluate("pictures.map(picture => picture.canvas.toDataURL()).join()"))


def failures(browser: Browser, path: Path, *timelines: Timeline) -> list[str]:
    """All that is wrong with the page at `path`, which shows `timelines`."""
    found = []
    for check in (shows_the_whole_step, table_is_right, wheel_zooms_about_the_pointer, drag_pans,
                  double_click_resets, keys_work, hover_tells, find_finds, critical_path_shows,
                  pinch_zooms, dark_is_dark):  # fmt: skip
        browser.complaints.clear()
        browser.requests.clear()
        browser.show(path, WIDTH, HEIGHT)
        opened = Opened(browser, path, timelines)
        found += [f"{path.name}: {check.__name__}: {wrong}" for wrong in _with_conduct(check, opened)]
    return found


def _with_conduct(check: Callable[[Opened], Iterator[str]], opened: Opened) -> Iterator[str]:
    """What the check finds, and whether the page complained or asked for anything meanwhile."""
    yield from check(opened)
    yield from (f"the console says {said!r}" for said in opened.browser.complaints)
    own = ("about:blank", opened.path.resolve().as_uri(), "data:,")
    yield from (f"it asks for {url}" for url in opened.browser.requests if url.split("#")[0] not in own)


def report_failures(browser: Browser, path: Path) -> list[str]:
    """All that is wrong with the report of runs at `path`."""
    return _in_each_window(browser, path, reads_well, charts_answer)


def still_failures(browser: Browser, path: Path) -> list[str]:
    """All that is wrong with a page at `path` that nothing can be done with but read, as that of a plan."""
    return _in_each_window(browser, path, reads_well)


def _in_each_window(browser: Browser, path: Path, *checks: Callable[[Opened], Iterator[str]]) -> list[str]:
    """What the checks find: wide and on a phone, light and dark."""
    wrong = []
    for width, dark in ((WIDTH, False), (WIDTH, True), (PHONE, False), (PHONE, True)):
        for check in checks:
            browser.complaints.clear()
            browser.requests.clear()
            browser.show(path, width, HEIGHT, dark)
            opened = Opened(browser, path, ())
            wrong += [f"{path.name}, {width} wide: {fault}" for fault in _with_conduct(check, opened)]
    return wrong


def reads_well(page: Opened) -> Iterator[str]:
    if page.browser.evaluate("document.documentElement.scrollWidth > innerWidth"):
        yield "it is wider than its window"
    yield from (
        f"{text!r} has a contrast of {ratio:.1f} only" for text, ratio in page.browser.evaluate(_FAINT)
    )


def charts_answer(page: Opened) -> Iterator[str]:
    count = page.browser.evaluate("document.querySelectorAll('.frame').length")
    if not count:
        yield "it has no chart"
    for at in range(count):
        x, y = page.browser.evaluate(
            "(frame => { frame.scrollIntoView({block: 'center'}); const box = frame.getBoundingClientRect();"
            " return [box.left + box.width / 2, box.top + box.height / 2]; })"
            f"(document.querySelectorAll('.frame')[{at}])"
        )
        page.browser.mouse("mouseMoved", x, y)
        if not "".join(page.text("#value")).startswith("step "):
            yield f"chart {at} does not show the values under the pointer"
        page.browser.mouse("mouseMoved", 0, 0)


def shows_the_whole_step(page: Opened) -> Iterator[str]:
    longest = max(timeline.makespan for timeline in page.timelines)
    if page.range != (0, longest):
        yield f"{page.range} is in view, not 0 to {longest}"
    if page.browser.evaluate("document.documentElement.scrollWidth > innerWidth"):
        yield "it is wider than its window"


def table_is_right(page: Opened) -> Iterator[str]:
    rows = [
        [cell.rstrip("%").split(" ")[0] for cell in row.split("|")]
        for row in page.browser.evaluate(
            "[...document.querySelectorAll('tbody tr, tfoot tr')]"
            ".map(row => [...row.querySelectorAll('td')].map(cell => cell.textContent).join('|'))"
        )
    ]
    count = len(page.timelines)
    for place, timeline in enumerate(page.timelines):
        bubbles = [*timeline.rank_bubble, timeline.bubble]
        inner = [*timeline.rank_inner_bubble, timeline.inner_bubble]
        peaks = [*timeline.peak_live, max(timeline.peak_live)]
        for row, wanted in zip(rows, zip(bubbles, inner, peaks, strict=True), strict=True):
            said = [float(row[column * count + place]) for column in (1, 2, 3)]
            for value, right in zip(said, (100 * wanted[0], 100 * wanted[1], wanted[2]), strict=True):
                if abs(value - right) > 0.051:
                    yield f"it says {value}, not {right:.2f}, in {row}"


def wheel_zooms_about_the_pointer(page: Opened) -> Iterator[str]:
    x, y = page.middle(0, _some_span(page).op)
    before, whole = page.time_at(x), page.range
    page.browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    if not _length(page.range) < 0.6 * _length(whole):
        yield f"{page.range} is in view after zooming in"
    if abs(page.time_at(x) - before) > 1e-6 * _length(whole):
        yield f"time {before} under the pointer became {page.time_at(x)}"
    page.browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=5000)
    if page.range != whole:
        yield f"{page.range} is in view after zooming out again"


def drag_pans(page: Opened) -> Iterator[str]:
    page.browser.press("+")
    x, y = page.middle(0, _some_span(page).op)
    under, length = page.time_at(x), _length(page.range)
    page.browser.drag(x, y, 40)
    if abs(page.time_at(x + 40) - under) > 1e-6 * length:
        yield f"time {under} did not move along, {page.time_at(x + 40)} is there"
    if abs(_length(page.range) - length) > 1e-9 * length:
        yield "it zoomed as well"


def double_click_resets(page: Opened) -> Iterator[str]:
    whole = page.range
    x, y = page.middle(0, _some_span(page).op)
    page.browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    page.browser.double_click(x, y)
    if page.range != whole:
        yield f"{page.range} is in view"


def keys_work(page: Opened) -> Iterator[str]:
    whole = page.range
    page.browser.press("+")
    closer = page.range
    page.browser.press("ArrowRight")
    right = page.range
    page.browser.press("-")
    wider = page.range
    page.browser.press("0")
    if not _length(closer) < _length(wider):
        yield f"+ shows {closer}, - then {wider}"
    if not right[0] > closer[0]:
        yield f"an arrow to the right leads from {closer} to {right}"
    if page.range != whole:
        yield f"0 shows {page.range}"


def hover_tells(page: Opened) -> Iterator[str]:
    before = page.drawn
    for panel, timeline in enumerate(page.timelines):
        span = _some_span(page)
        page.browser.mouse("mouseMoved", *page.middle(panel, span.op))
        said = " ".join(page.text("#tooltip"))
        if page.browser.evaluate("tooltip.hidden") or str(span.op) not in said:
            yield f"over {span.op} of panel {panel} the tooltip says {said!r}"
        if f"{span.op.stage} on rank {span.rank}" not in said:
            yield f"stage and rank of {span.op} are not in {said!r}"
        if not page.browser.evaluate(_TOOLTIP_INSIDE):
            yield f"the tooltip of {span.op} leaves the window"
        lit = page.browser.evaluate("state.microbatch")
        if lit != span.op.microbatch or page.drawn == before:
            yield f"microbatch {lit} stands out, not {span.op.microbatch} of {len(timeline.spans)} ops"
    page.browser.mouse("mouseMoved", 2, 2)
    if not page.browser.evaluate("tooltip.hidden") or page.drawn != before:
        yield "something stays when the pointer has left"


def find_finds(page: Opened) -> Iterator[str]:
    last = page.timelines[0].spans[-1]
    page.browser.show(page.path, WIDTH, HEIGHT, fragment=f"#{last.op}")
    if str(last.op) not in " ".join(page.text("#tooltip .op")):
        yield f"{last.op} in the address does not show it"
    page.browser.evaluate("field.value = '99F99'; field.dispatchEvent(new Event('change'))")
    if page.browser.evaluate("field.getAttribute('aria-invalid')") != "true":
        yield "an op that is not there is not refused"


def critical_path_shows(page: Opened) -> Iterator[str]:
    before = page.drawn
    page.browser.press("c")
    if page.drawn == before:
        yield "nothing changes"
    page.browser.press("c")
    if page.drawn != before:
        yield "it does not go again"


def pinch_zooms(page: Opened) -> Iterator[str]:
    whole = _length(page.range)
    x, y = page.middle(0, _some_span(page).op)

    def touch(kind: str, apart: float) -> None:
        points: list[dict[str, Any]] = [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
        page.browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points if apart else [])
        page.browser.settle()

    touch("touchStart", 30)
    for apart in (40, 60, 80, 90):
        touch("touchMove", apart)
    touch("touchEnd", 0)
    if not 0.2 < _length(page.range) / whole < 0.5:
        yield f"three times as far apart, the fingers show {_length(page.range) / whole:.2f} of the step"


def dark_is_dark(page: Opened) -> Iterator[str]:
    light = page.drawn
    page.browser.show(page.path, WIDTH, HEIGHT, dark=True)
    if page.drawn == light:
        yield "the timeline is drawn in the same colours"
    if page.browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)":
        yield "the page stays white"


def _some_span(page: Opened) -> Span:
    """One from the middle of the second rank."""
    spans = page.timelines[0].of_rank(1)
    return spans[len(spans) // 2]


def _length(shown: tuple[float, float]) -> float:
    return shown[1] - shown[0]
