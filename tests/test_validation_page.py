"""docs/validation.md is what benchmarks/validation computes."""

from pathlib import Path

import pytest
from benchmarks.validation import zero_bubble


@pytest.mark.sweep
def test_the_zero_bubble_section_is_what_is_computed() -> None:
    page = zero_bubble.PAGE.read_text(encoding="utf-8")
    assert zero_bubble.section() in page, "run: python -m benchmarks.validation.zero_bubble --write"


def test_the_section_has_every_row_of_the_paper() -> None:
    page = zero_bubble.PAGE.read_text(encoding="utf-8")
    for row in (*zero_bubble.TABLE_5, *zero_bubble.TABLE_8):
        assert f"| {row.model} | {row.ranks} | {row.microbatches} | {row.rates['1f1b']:.4f} / " in page


def test_writing_the_section_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{zero_bubble.TITLE}\n\nold\n\n## Another\n\ntext\n")
    monkeypatch.setattr(zero_bubble, "PAGE", page)
    monkeypatch.setattr(zero_bubble, "section", lambda: f"{zero_bubble.TITLE}\n\nnew\n")
    zero_bubble.write()
    assert page.read_text() == f"# Page\n\n{zero_bubble.TITLE}\n\nnew\n\n## Another\n\ntext\n"
