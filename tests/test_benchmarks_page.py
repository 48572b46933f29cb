"""docs/benchmarks.md is what benchmarks/results says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import page
from benchmarks.report import RESULTS, measured
from benchmarks.rounds import Interval, Rounds, in_turn, median_interval

FILES = page.files()


def result(rows: list[dict[str, object]], version: str = "1.2.3", commit: str = "abc", **machine: str) -> str:
    where = dict.fromkeys(("cpu", "cores", "memory", "python", "torch"), "one") | {"date": "2030-01-02"}
    return json.dumps({
        "name": "overhead", "title": "A title", "version": version, "commit": commit, "command": "a command",
        "machine": where | machine, "rows": rows, "notes": ["a_note"], "raw": {},
    })  # fmt: skip


def row(**values: object) -> dict[str, object]:
    plain = {"case": "a|b", "what": "time", "ours": 2.0, "unit": "s", "torch": None, "bar": "", "met": None}
    return plain | values


def test_the_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: python -m benchmarks.page"


def test_a_stale_page_fails_the_check_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from benchmarks import page; sys.argv = ['page', '--check']; "
        f"page.PAGE = Path({str(tmp_path / 'stale.md')!r}); page.PAGE.write_text('stale')\n"
        "try: page.main()\nexcept SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    ran = subprocess.run(
        command, cwd=RESULTS.parents[1], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.startswith("docs/benchmarks.md is not what")
    assert ran.stdout.endswith("False\n")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_says_how_to_repeat_it(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["version"]
    assert content["command"].startswith(f"python -m benchmarks --only {file.stem}")
    assert {"cpu", "cores", "memory", "python", "torch", "date"} <= content["machine"].keys()


@pytest.mark.parametrize("other", [
    {"version": "1.2.2"}, {"commit": "abd"}, {"cpu": "two"}, {"torch": "two"},
], ids=str)  # fmt: skip
def test_results_of_another_run_are_marked_and_not_counted(other: dict[str, str], tmp_path: Path) -> None:
    lost = row(torch=1.0, met=False, bar="at most 1")
    (tmp_path / "a.json").write_text(result([row(met=True, bar="at most 3")], date="2030-01-03"))
    (tmp_path / "b.json").write_text(result([lost]))
    assert "another run" not in page.page(tmp_path)
    assert "Bars: 2. Met: 1. **Missed: 1.**" in page.page(tmp_path)
    (tmp_path / "b.json").write_text(result([lost], **other))
    text = page.page(tmp_path)
    assert '!!! danger "1 results are of another run"' in text
    assert "**another run**: penstock" in text
    assert text.count('!!! danger "Of another run"') == 1
    assert "Bars: 1. Met: 1. **Missed: 0.**" in text
    assert f"1 of {len(page.ABOUT)} benchmarks" in text
    assert "## Lost to another library" not in text


@pytest.mark.parametrize("commit", ["abc-dirty", ""])
def test_code_that_is_no_commit_is_marked(commit: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(result([row()], commit=commit))
    assert '!!! danger "The code that was measured is not a commit"' in page.page(tmp_path)


@pytest.mark.parametrize(("low", "high", "verdict"), [
    (0.90, 0.95, "MISSED"), (0.96, 0.98, "not resolved"), (0.98, 0.99, "met"),
])  # fmt: skip
def test_a_bar_within_the_quartiles_is_not_resolved(low: float, high: float, verdict: str) -> None:
    found = Interval(low, (low + high) / 2, high)
    assert measured("case", "speed", found, at_least=0.97).cells()[-2:] == ("at least 0.97", verdict)
    opposite = {"MISSED": "met", "met": "MISSED"}.get(verdict, verdict)
    assert measured("case", "time", found, at_most=0.97).cells()[-1] == opposite
    assert measured("case", "speed", found, at_least=0.97, quiet=False).verdict == "not resolved"
    assert measured("case", "speed", found).verdict == ""


def test_not_resolved_is_counted_as_neither(tmp_path: Path) -> None:
    open_row = vars(measured("case", "speed", Interval(0.9, 1.0, 1.1), at_least=0.97))
    (tmp_path / "overhead.json").write_text(result([open_row, row(met=True, bar="at most 3")]))
    text = page.page(tmp_path)
    assert "Bars: 2. Met: 1. **Missed: 0.** Not resolved: 1." in text
    assert "| case | speed | 1 [0.900, 1.100] | at least 0.97 | not resolved |" in text.replace("&nbsp;", " ")


@pytest.mark.parametrize(("values", "lost"), [
    ({"torch": 1.0, "low": 1.5, "high": 2.5}, True),  # takes longer than the other's
    ({"torch": 1.0, "low": 0.9, "high": 2.5}, False),
    ({"torch": 3.0}, False),
    ({"torch": 1.0}, True),
    ({"ours": 0.9, "rival": "DDP", "better": "high", "low": 0.8, "high": 0.95}, True),
    ({"ours": 0.9, "rival": "DDP", "better": "high", "low": 0.8, "high": 1.05}, False),
    ({"torch": 1.0, "resolved": False}, False),
])  # fmt: skip
def test_what_is_lost_stands_first(values: dict[str, object], lost: bool, tmp_path: Path) -> None:
    (tmp_path / "overhead.json").write_text(result([row(what="plain"), row(what="this", **values)]))
    text = page.page(tmp_path)
    assert ("## Lost to another library" in text) is lost
    assert f"Lost to another library: {int(lost)}." in text
    section = text[text.index("## A title") :]
    assert (section.index("| this |") < section.index("| plain |")) is (
        lost or values.get("resolved") is False
    )


def test_a_ratio_is_the_one_within_rounds() -> None:
    rounds = Rounds([{"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 9.0}, {"a": 30.0, "b": 10.0}], 3, True)
    cells = measured("case", "time", rounds.ratio("a", "b"), "s", ours=9.0, torch=9.0).cells()
    assert cells[4] == "1 [0.750, 2]"


@pytest.mark.parametrize(
    ("count", "low", "high"), [(5, 1, 5), (7, 1, 7), (10, 2, 9), (20, 6, 15), (35, 12, 24)]
)
def test_a_median_lies_between_the_order_statistics_of_the_sign_test(count: int, low: int, high: int) -> None:
    """Those that tables of the binomial distribution give for 95 %; of five the least and the most."""
    found = median_interval([*range(count, 0, -1)])
    assert (found.low, found.high) == (low, high)
    assert found.middle == (count + 1) / 2


def test_rounds_count_where_the_machine_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 9.0] * 2 + [0.0, 0.0] * 9)  # before and after each: two rounds with others
    monkeypatch.setattr("benchmarks.rounds._outside", lambda: next(busy))
    ways = iter(range(100))
    rounds = in_turn({"a": lambda: float(next(ways))}, 4, warm_up=1)
    assert [numbers["a"] for numbers in rounds.found] == [2, 3, 4, 5]
    assert (rounds.tried, rounds.quiet) == (5, True)


def test_a_machine_that_is_never_quiet_resolves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter(range(0, 900, 9))
    monkeypatch.setattr("benchmarks.rounds._outside", lambda: next(busy))
    rounds = in_turn({"a": lambda: 1.0, "b": lambda: 2.0}, 3)
    assert (len(rounds.found), rounds.quiet) == (6, False)
    assert "no bar is resolved" in str(rounds)


def test_what_stands_at_a_glance_are_rows_of_the_benchmarks() -> None:
    rows = [(each.name, row.case, row.what) for each in map(page.Result.read, FILES) for row in each.rows]
    assert not [key for key in page.GLANCE if key not in rows]


def test_a_difference_that_no_table_shows_is_no_loss() -> None:
    ratio = Interval(1.0004, 1.0004, 1.0004)
    assert not measured("a", "b", ratio, ours=1.0, torch=1.0).lost
    assert measured("a", "b", ratio.scaled(1.001), ours=1.0, torch=1.0).lost


def test_a_missed_bar_is_bold_and_counted(tmp_path: Path) -> None:
    rows = [row(met=False, bar="at most 1"), row(met=True, bar="at most 3")]
    (tmp_path / "overhead.json").write_text(result(rows))
    text = page.page(tmp_path)
    assert "Bars: 2. Met: 1. **Missed: 1.**" in text
    assert "| a\\|b | time | 2&nbsp;s | at most 1 | **MISSED** |" in text
    assert "- a\\_note" in text


def test_a_long_table_is_folded_below_its_bars(tmp_path: Path) -> None:
    rows = [row(met=True, bar="at most 3"), *[row() for _ in range(page.MOST_ROWS)]]
    (tmp_path / "overhead.json").write_text(result(rows))
    before, _, after = page.page(tmp_path).partition("<details")
    assert before.count("| time |") == 1
    assert after.count("| time |") == len(rows) - 1
