"""What a run writes about itself besides its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.train.preflight import preflight
from penstock.train.report.page import state
from penstock.train.report.recorded import read_run
from penstock.train.run import run
from support.tiny import config


def test_how_a_run_failed_is_in_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import Pipeline

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "step", fail)
    with pytest.raises(KeyboardInterrupt):
        run(preflight(config(tmp_path, steps=2)))
    assert state(read_run(tmp_path / "out"))[0] == "interrupted"
