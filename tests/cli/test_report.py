"""`penstock report`: the page is written, or one error says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from support.command import Command


def test_the_command_writes_the_page_or_says_what_is_wrong(tmp_path: Path, penstock: Command) -> None:
    folder, out = tmp_path / "mine", tmp_path / "out.html"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.5}) + "\n")
    assert penstock("report", folder) == (0, f"wrote {folder / 'report.html'}\n", "")
    assert penstock("report", folder, "--out", out).code == 0
    assert out.read_text() == (folder / "report.html").read_text()
    assert "<b>Loss</b>" in out.read_text()
    code, _, err = penstock("report", tmp_path / "nowhere")
    assert code == 2
    assert (
        "it has no metrics.jsonl that can be read (No such file or directory). Give the output.folder" in err
    )
    assert "is listed twice" in penstock("report", folder, folder).err
    assert penstock("report", folder, "--out", tmp_path / "none" / "x.html").code == 2
