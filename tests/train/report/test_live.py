"""A run is looked at from outside while it goes on: what has come since, a torn line, its end, its death."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.launch.stop import Stop
from penstock.runtime.health.notes import this_process
from penstock.train.owner import OwnerWatch
from penstock.train.preflight import preflight
from penstock.train.report.live import LiveRun, watch
from penstock.train.report.recorded import GrowingRun
from penstock.train.run import run
from support.recorded_runs import on_terminal, row, write
from support.refusals import refuses
from support.tiny import config

START = {"at": "2026-01-02T03:04:05+0000", "step": 0, "ranks": 2, "processes": 2}


def own(folder: Path, ended: bool = False, **facts: Any) -> None:
    """Write the owner's file, of this process."""
    mine = {"run": "x", "host": socket.gethostname(), **this_process()._asdict(), "ended": ended}
    (folder / "owner.json").write_text(json.dumps(mine | facts))


def ended(live: LiveRun) -> bool:
    live.look()
    return live.ended


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_only_whole_lines_count_and_each_is_read_once(tmp_path: Path) -> None:
    growing = GrowingRun(write(tmp_path, row(1)))
    assert growing.read().done == 1
    line = json.dumps(row(2)) + "\n"
    append(tmp_path, line[:30])
    assert (growing.read().done, growing.read().unreadable) == (1, 0)
    append(tmp_path, line[30:] + "no row\n")
    assert (growing.read().done, growing.read().unreadable) == (2, 1)
    assert len(growing.read().rows) == 2
    append(tmp_path, json.dumps(row(1, loss=9.0)) + "\n")  # the run went back
    assert [entry["loss"] for entry in growing.read().steps] == [9.0]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    growing = GrowingRun(write(tmp_path, row(1), row(2)))
    assert growing.read().done == 2
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps(row(1)) + "\n")
    os.replace(fresh, tmp_path / "metrics.jsonl")  # as a run that is resumed does
    assert growing.read().done == 1


def test_it_runs_while_its_process_lives_and_was_killed_else(tmp_path: Path) -> None:
    own(write(tmp_path, row(1)))
    live = LiveRun(tmp_path)
    assert not ended(live)
    assert "running" in on_terminal(live)
    assert "rank 1" in on_terminal(live)  # the bubble, by timeline.json
    own(tmp_path, began=1)  # another process has that number now
    assert ended(live)
    assert "killed" in on_terminal(live)
    assert "step 1 of 4; it has recorded no end" in on_terminal(live)


def test_an_owner_elsewhere_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    own(tmp_path, machine="another")
    owner = OwnerWatch(tmp_path, patience=0.2)
    assert owner.goes_on()
    time.sleep(0.3)
    os.utime(tmp_path / "owner.json")
    assert owner.goes_on()
    time.sleep(0.3)
    assert not owner.goes_on()
    own(tmp_path, machine="another", ended=True)
    assert not owner.goes_on()


def test_the_view_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own(write(tmp_path, row(1)))
    watching = threading.Thread(target=watch, args=(tmp_path, 0.05), daemon=True)
    watching.start()
    append(tmp_path, json.dumps(row(2, loss=1.5)) + "\n")
    watching.join(0.3)
    assert watching.is_alive()
    end = {"at": "2026-01-02T04:00:00+0000", "how": "failed", "why": "no disk"}
    write_start(tmp_path, end)
    watching.join(20)
    assert not watching.is_alive()
    printed = capsys.readouterr().out
    assert "failed" in printed
    assert "ended 2026-01-02 04:00: no disk" in printed
    assert "1.5" in printed


def write_start(folder: Path, end: dict[str, str]) -> None:
    contents = json.loads((folder / "run.json").read_text())
    fresh = folder / ".run.json.new"
    fresh.write_text(json.dumps({**contents, "starts": [{**START, "end": end}]}))
    os.replace(fresh, folder / "run.json")


def test_a_run_of_the_trainer_is_seen_while_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By those who have nothing but its files; and by the command, once it has ended."""
    prepared = preflight(config(tmp_path, steps=10, evaluate_every=10))
    out, steps, live = tmp_path / "out", set[int](), None
    training = threading.Thread(target=run, args=(prepared, Stop()))
    watching = threading.Thread(target=watch, args=(out, 0.01), daemon=True)
    for thread in (training, watching):
        thread.start()
    while live is None:
        with suppress(ConfigError):
            live = LiveRun(out)
    while not live.ended:
        live.look()
        steps.add(live.step)
        time.sleep(0.01)
    for thread in (training, watching):
        thread.join(60)
    ended = "step 10 of 10, ended"  # the run itself says it in other words
    assert ended in capsys.readouterr().out
    assert "finished" in on_terminal(live)
    assert len(steps) > 3  # it was seen on its way
    assert live.step == 10
    with pytest.raises(SystemExit) as end:
        app(["watch", str(out)])
    assert end.value.code == 0
    assert ended in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "none", "it has no metrics.jsonl that can be read"):
        LiveRun(tmp_path / "none")


def test_watching_waits_for_a_run_that_is_about_to_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unreleased: until the first row it was refused, as a folder without a run."""
    folder = tmp_path / "later"
    watching = threading.Thread(target=watch, args=(folder, 0.05), daemon=True)
    watching.start()
    watching.join(0.3)
    folder.mkdir()
    own(folder)  # the run has taken the folder, and builds its model
    watching.join(0.3)
    assert watching.is_alive()
    write(folder, row(1))
    write_start(folder, {"at": "2026-01-02T04:00:00+0000", "how": "finished", "why": ""})
    watching.join(20)
    assert not watching.is_alive()
    printed = capsys.readouterr().out
    assert printed.count(f"waiting for a run to begin in {folder}") == 1
    assert "finished" in printed


def test_watching_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with refuses(ConfigError, str(folder.name), "it has no metrics.jsonl that can be read"):
            watch(folder)


def test_a_notebook_shows_it_in_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, live: Any) -> None:
            shown.append(live._repr_mimebundle_([], [])["text/html"])

    def display(live: Any, display_id: bool) -> Handle:
        assert display_id
        handle = Handle()
        handle.update(live)
        return handle

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    own(write(tmp_path, row(1)))
    end = {"at": "2026-01-02T04:00:00+0000", "how": "finished", "why": ""}
    threading.Timer(0.3, write_start, (tmp_path, end)).start()
    watch(tmp_path, 0.05)
    assert len(shown) > 2
    assert "running" in shown[0]
    assert "finished" in shown[-1]
