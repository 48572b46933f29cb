"""metrics.jsonl, whatever happened to the run before; lines in a log, a bar on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import RunError
from penstock.train.records.metrics import (
    Bar,
    Display,
    Lines,
    Metrics,
    make_display,
    seconds_of,
    without_replaced_rows,
)
from support.mutations import CASES, seeded
from support.refusals import refuses


def written(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_fresh_run_starts_the_file_anew_and_a_resumed_one_drops_what_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, "a")
    for step in range(5):
        metrics.write({"step": step, "loss": 1.0})
        assert written(path)[-1] == step  # there at once
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # a crash in the middle of a line
    resumed = Metrics(path, "a", resumed_at=2)
    resumed.write({"step": 3})
    assert written(path) == [0, 1, 2, 3]
    Metrics(path, "b")
    assert written(path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_knows_what_it_does_again_and_when_the_last_row_came(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert Metrics(path, "a", resumed_at=3).earlier is None  # there is no file
    rows = [{"step": step, "loss": 1.0, "seconds": 2.0**step, "run": "a"} for step in (1, 2, 3, 2, 3, 4)]
    rows += [
        {"step": 3, "held_out_loss": 1.0, "seconds": 0.5, "run": "a"},
        {"step": 9, "seconds": 1, "run": "b"},
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    os.utime(path, (100, 100))
    # steps 2 and 3 had come again before; now 3, its evaluation and 4 will
    assert Metrics(path, "a", resumed_at=2).earlier == (4 + 8 + 8 + 16 + 0.5, 100)
    assert written(path) == [1, 2]


def test_a_resumed_run_reads_the_last_rows_alone(tmp_path: Path) -> None:
    """Unreleased: it read them all: .04 s for 2,500 rows, at each restart."""
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "loss": 1.0, "run": "a"}) for step in range(9)]
    path.write_text("\n".join(["of earlier starts, whatever stands there", *rows, ""]))
    Metrics(path, "a", resumed_at=6)
    assert path.read_text().splitlines() == ["of earlier starts, whatever stands there", *rows[:7]]


@pytest.mark.parametrize("cases", CASES)
def test_what_a_resumed_run_keeps_is_what_a_reader_sees_up_to_its_step(tmp_path: Path, cases: range) -> None:
    """Whether it has gone back to checkpoints, and been resumed, before."""
    path = tmp_path / "metrics.jsonl"
    for number in cases:
        with seeded(number) as choices:
            rows, step = list[dict[str, Any]](), 0
            for _ in range(choices.randint(1, 30)):
                step = step + 1 if choices.random() < 0.8 else choices.randint(1, step + 1)
                for more in ({"loss": 1.0}, {"held_out_loss": 1.0})[: choices.randint(1, 2)]:
                    row = {"step": step, "seconds": choices.randint(1, 9), "run": "a", "at": len(rows)}
                    rows.append(row | more)
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            at = choices.randint(1, step + 1)
            seen = [row for row, _ in without_replaced_rows((row, None) for row in rows) if row["step"] <= at]
            earlier = Metrics(path, "a", resumed_at=at).earlier
            left = [json.loads(line) for line in path.read_text().splitlines()]
            assert [row for row, _ in without_replaced_rows((row, None) for row in left)] == seen
            assert earlier is not None
            assert earlier.again == seconds_of(rows) - seconds_of(left)


def test_two_rows_in_a_line_are_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1},{"step": 1}\n{"step": 2}\n')
    Metrics(path, "a", resumed_at=5)
    assert written(path) == [0, 2]


def test_a_resumed_run_drops_the_rows_of_others(tmp_path: Path) -> None:
    """0.5.0: after a fresh run in its folder, a run that was resumed kept that run's rows as its own."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "from": "0.5.0"}\n')
    Metrics(path, "old", resumed_at=1).write({"step": 1})
    Metrics(path, "new", resumed_at=1).write({"step": 1})
    assert [json.loads(line).get("run") for line in path.read_text().splitlines()] == [None, "new"]


@pytest.mark.parametrize(
    "bad", [b'{"step": 1, "x": "\xff"}', b"[" * 100_000, b"\x00\xff", b'{"step": "1"}', b"[1]"]
)
@pytest.mark.fault("a checkpoint's files change", "bad bytes in metrics.jsonl")
def test_a_bad_byte_costs_its_own_row(tmp_path: Path, bad: bytes) -> None:
    """0.5.0: `--resume` ended with UnicodeDecodeError, as the file was read as one text."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}')  # nor has the last line an end
    Metrics(path, "a", resumed_at=2).write({"step": 3})
    assert written(path) == [0, 2, 3]


def test_a_full_disk_is_a_typed_error(tmp_path: Path) -> None:
    """0.5.0: OSError with a traceback: nothing caught what a row of metrics raises."""
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, "a")
    path.unlink()
    path.symlink_to("/dev/full")
    with refuses(RunError, rule="space left on device)", remedy="Make room") as caught:
        metrics.write({"step": 1})
    assert caught.value.value == str(path)
    (tmp_path / "folder").mkdir()
    with refuses(RunError, rule="written (Is a directory"):
        Metrics(tmp_path / "folder", "a")


def test_a_pipe_in_place_of_the_file_is_a_typed_error(tmp_path: Path) -> None:
    """0.5.0: a resumed run waited for ever for who writes into it: the file was opened, whatever it was."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    with refuses(RunError, rule="pipe, and no regular file"):
        Metrics(tmp_path / "metrics.jsonl", "a", resumed_at=2)


def test_a_nan_is_no_metric(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Metrics(tmp_path / "metrics.jsonl", "a").write({"step": 1, "loss": float("nan")})


def row(step: int, padding: float = 0.0) -> dict[str, float]:
    numbers = {"loss": 2.5, "tokens_per_second": 1234.5, "bubble": 0.125, "learning_rate": 1e-3}
    return {"step": step, **numbers, "tflops_per_device": 0.0123, "padding": padding}


def test_a_log_has_a_line_every_so_often_and_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(True, 7, 0, 3) as display:
        assert isinstance(display, Lines)
        for step in range(1, 8):
            display.step(row(step))
        display.say("that is all [bold]")
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "step 3/7  loss 2.500  1,234 tokens/s  0.0123 TFLOP/s  bubble 12.5%  lr 1.00e-03"
    assert [line.split()[1] for line in said[:-1]] == ["1/7", "3/7", "6/7", "7/7"]
    assert said[-1] == "that is all [bold]"


def test_padding_is_shown_where_there_is_some(capsys: pytest.CaptureFixture[str]) -> None:
    make_display(True, 7, 0, 1).step(row(1, padding=0.0625))
    assert "bubble 12.5%  padding 6.2%  lr" in capsys.readouterr().out


def test_the_share_of_the_peak_and_memory_are_shown_where_they_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = {"tflops_per_device": 412.6, "mfu": 0.417, "peak_allocated": [2**30, 3 * 2**30]}
    make_display(True, 7, 0, 1).step({**row(1), **known})
    assert "tokens/s  413 TFLOP/s (MFU 41.7%)  3.0 GiB  bubble" in capsys.readouterr().out


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with make_display(True, 7, 2, 3) as display:
        assert isinstance(display, Bar)
        display.step(row(7))
        display.say("that is all [bold]")
    said = capsys.readouterr().out
    assert all(part in said for part in ("that is all [bold]", "loss 2.500", "7/7"))


def test_bar_and_time_left_stay_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: the numbers took the whole line, and the bar and the time were not seen."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    known = {"tflops_per_device": 412.6, "mfu": 0.417, "peak_allocated": [3 * 2**30], "host_share": 0.02}
    with make_display(True, 100_000, 0, 1) as display:
        display.step({**row(50_000, padding=0.0625), **known})
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    (line,) = {line for line in said.splitlines() if "50000/100000" in line}
    assert len(line) <= 80
    assert line.startswith("━" * 8)
    assert re.search(r"50000/100000 +(\d+:\d\d:\d\d|-:--:--) +loss 2\.500  1,234 tokens/s .*…$", line)


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(False, 7, 0, 1) as display:
        assert type(display) is Display
        display.step(row(1))
        display.say("text")
    assert capsys.readouterr().out == ""


def test_a_file_that_somebody_removed_is_not_made_anew(tmp_path: Path) -> None:
    """0.5.0: the run went on, and the rows before were missing without a word."""
    metrics = Metrics(tmp_path / "metrics.jsonl", "run")
    metrics.write({"step": 1, "loss": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    with refuses(RunError, "metrics.jsonl", "No such file or directory", "See that it exists"):
        metrics.write({"step": 2, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []
