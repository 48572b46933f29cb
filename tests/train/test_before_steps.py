"""What a run does between its build and its first step."""

from __future__ import annotations

import json
from pathlib import Path

# a config of an older version, with the keys that it lacks
from penstock.train.checkpoints import (
    _with_defaults,
    changes,
)
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.tiny import checkpoint, config


def test_a_resumed_run_says_what_has_changed_since(tmp_path: Path) -> None:
    run(preflight(config(tmp_path)))
    half = checkpoint(tmp_path, 4)
    resumed = preflight(config(tmp_path, steps=6), str(half))
    assert resumed.notes[1:] == ("changed since then: train.steps=6 (was 4)",)

    older = json.loads((half / "state.json").read_text())["config"]  # than two keys
    del older["data"]["packing"], older["pipeline"]["shapes"]
    now = config(tmp_path, steps=6).model_dump(mode="json")
    assert changes(_with_defaults(older), now) == ["train.steps=6 (was 4)"]
