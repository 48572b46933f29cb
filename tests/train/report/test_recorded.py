"""Whatever lies in the folder of a run can be read and shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.train.records.metrics import MetricsRow
from schedule.render.test_page import Page
from support.recorded_runs import html, row, write

BROKEN: dict[str, tuple[MetricsRow | str, ...]] = {
    "no row": (),
    "one row": (row(1),),
    "only a held-out loss": ({"step": 0, "held_out_loss": 5.5},),
    "no number in it": ({"step": 1, "loss": "x", "seconds": None, "peak_resident": ["a", None]},),
    "other kinds": ("[]", "3", "null", '{"step": true}', '{"step": -1}', '{"loss": 1}', "\x00", row(2)),
    "numbers beyond all": tuple(row(1, loss=loss) for loss in (1e308, -1e308, 10**400, 5e-324)),
    "numbers next to each other": (row(1, loss=1.0), row(2, loss=1.0000000000000002)),
    "a huge step": ({**row(1), "step": 10**300}, row(1)),
    "mappings for lists": (row(1, peak_resident={"a": 1}, seconds_by_part=[1], learning_rates=3),),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_whatever_the_rows_hold_gives_a_page(tmp_path: Path, case: str) -> None:
    text = html(write(tmp_path, *BROKEN[case]))
    Page(text)
    assert "nan" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    "about", [{"config": 3, "starts": 4}, {"starts": [{"end": 3}, 5]}, {"config": {"pipeline": {}}}]
)
def test_whatever_run_json_holds_gives_a_page(tmp_path: Path, about: dict[str, Any]) -> None:
    Page(html(write(tmp_path, row(1), timeline=False, **about)))
    (tmp_path / "run.json").write_text("[1")
    (tmp_path / "timeline.json").write_text('{"step": 1, "measured": {"name": 3}}')
    assert "no schedule that could be drawn" in html(tmp_path)
