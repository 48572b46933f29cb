"""What a run writes about itself besides its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.reading import read_json
from penstock.train.preflight import preflight
from penstock.train.records.record import TIMELINE
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


def test_what_each_rank_held_is_beside_the_timeline(tmp_path: Path) -> None:
    made = config(tmp_path, steps=2, keys={"pipeline.ranks": 1})
    run(preflight(made))
    content = read_json(made.output.path / TIMELINE)
    assert content["step"] == 2
    (held,) = content["held"]
    assert held > 2 * 16 * 16 * 4  # the hidden states of a microbatch
