"""Every page that penstock writes, in a real browser, where this machine has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.planner.page import page as plan_page
from penstock.planner.search import plan
from penstock.train.report.page import report
from support.planning import LENGTH, cluster, workload
from support.recorded_runs import row, write

if TYPE_CHECKING:
    from chromium import Browser

DOCS = Path(__file__).resolve().parent.parent / "docs"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    """A browser. The path has docs only meanwhile: some of its scripts are called as folders of tests are."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.syspath_prepend(DOCS)
        from chromium import BrowserError, browser

        try:
            started = stack.enter_context(browser())
        except BrowserError as error:
            pytest.skip(f"no page can be seen here: {error}")
        yield started


def test_the_timeline_of_a_step(opened: Browser, tmp_path: Path) -> None:
    from draw import check, schedule

    from penstock.schedule import simulate

    assert check(opened, tmp_path, simulate(schedule("dualpipe"))) == []


def test_the_report_of_a_run_and_of_several(opened: Browser, tmp_path: Path) -> None:
    from check_page import report_failures

    for count in (1, 3):
        folders = [write(tmp_path / f"{name}{count}", *_rows(at)) for at, name in enumerate("abc"[:count])]
        assert report_failures(opened, report(folders)) == []


def test_the_page_of_a_plan(opened: Browser, tmp_path: Path) -> None:
    from check_page import still_failures

    host, path = cluster(1, 4), tmp_path / "plan.html"
    path.write_text(plan_page(plan(workload(), host, 16, LENGTH, keep=4), host, "Llama"))
    assert still_failures(opened, path) == []


def _rows(run: int) -> list[dict[str, object]]:
    steps = [row(step, loss=3.0 - step / 10 + run) for step in range(1, 21)]
    return [{"step": 0, "held_out_loss": 5.5, "seconds": 1.0, "tokens": 64}, *steps,
            {"step": 20, "held_out_loss": 1.25 + run, "seconds": 1.0, "tokens": 64}]  # fmt: skip
