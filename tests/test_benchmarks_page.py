"""docs/benchmarks.md is what benchmarks/results says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import page
from benchmarks.report import RESULTS

FILES = sorted(RESULTS.glob("*.json"))


def result(rows: list[dict[str, object]], version: str = "1.2.3") -> str:
    machine = dict.fromkeys(("cpu", "cores", "memory", "python", "torch"), "one") | {"date": "2030-01-02"}
    return json.dumps({
        "name": "overhead", "title": "A title", "version": version, "commit": "abc", "command": "a command",
        "machine": machine, "rows": rows, "notes": ["a_note"], "raw": {},
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


def test_a_missed_bar_is_bold_and_counted(tmp_path: Path) -> None:
    rows = [row(met=False, bar="at most 1"), row(met=True, bar="at most 3")]
    (tmp_path / "overhead.json").write_text(result(rows))
    text = page.page(tmp_path)
    assert "Bars: 2. Met: 1. **Missed: 1.**" in text
    assert "| a\\|b | time | 2&nbsp;s | at most 1 | **MISSED** |" in text
    assert "- a\\_note" in text


def test_results_of_several_versions_carry_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(result([row()]))
    assert "Results of" not in page.page(tmp_path)
    (tmp_path / "b.json").write_text(result([row()], version="1.3.0"))
    assert 'Results of 2 versions: 1.2.3, 1.3.0"' in page.page(tmp_path)


def test_a_long_table_is_folded_below_its_bars(tmp_path: Path) -> None:
    rows = [row(met=True, bar="at most 3"), *[row() for _ in range(page.MOST_ROWS)]]
    (tmp_path / "overhead.json").write_text(result(rows))
    before, _, after = page.page(tmp_path).partition("<details")
    assert before.count("| time |") == 1
    assert after.count("| time |") == len(rows)
